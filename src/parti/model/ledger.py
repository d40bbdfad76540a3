"""The ledger: one row for each finished message, in compact batches.

A ledger message is one batch of rows of one process. Batches of a process are numbered 0, 1, 2, ...: a hole means
that a batch was lost, and a chain without a last batch that is `closed` that the process crashed, or still runs.

Layout of a batch, all numbers little-endian (docs/ledger.md has it byte by byte):

    prefix    magic "PLG1", length of the header, number of partitions, number of rows, CRC-32 of all the rest:
              4 bytes each
    header    JSON: stream, created, worker, process, number, closed, partitions (one text, a line for each)
    columns   fences (a value for each partition), then partition_index, seq, attempt, outcome, received_us,
              started_us, finished_us (a value for each row); each is one byte `varies`, the constant bytes (as many
              as a value has), and the planes

A plane holds the n-th byte of every value of a column. One that is the same in all rows is left out: bit n of
`varies` is 0 then, and the n-th constant byte is its value. Sequences and times of a batch lie close together, so
most planes are left out, and taking a column apart costs a few slices rather than a step for each row.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from parti.errors import LedgerCorrupt

HANDLED: Final = 0
DEAD_LETTERED: Final = 1
OUTCOMES: Final = ("handled", "dead_lettered")
"""Names of the outcome codes."""

COLUMNS: Final = (
    ("partition_index", "I"),
    ("seq", "q"),
    ("attempt", "I"),
    ("outcome", "B"),
    ("received_us", "q"),
    ("started_us", "q"),
    ("finished_us", "q"),
)
"""Columns in the order of the layout, with the type codes of their arrays: I 4, q 8, B 1 bytes."""

MAGIC: Final = b"PLG1"
_PREFIX, _CHECKSUM = struct.Struct("<4sIII"), struct.Struct("<I")
_PREFIX_SIZE = _PREFIX.size + _CHECKSUM.size
_MAX_ROWS = 1 << 24
BATCHES_AT_ONCE = 4
"""How many batches of a chain may be on their way at the same time, and be stored in any order."""
_FENCES: Final = "q"
_SAMPLE_MODULUS: Final = 1 << 32
_SAMPLE_FACTOR: Final = 2_654_435_761


class LedgerRow(NamedTuple):
    """How one message was finished. Times are microseconds since 1970, UTC."""

    seq: int
    partition: str
    fence: int
    attempt: int
    outcome: str
    received_us: int
    started_us: int
    finished_us: int


@dataclass(frozen=True, slots=True)
class LedgerBatch:
    """Rows of one process, as columns; each is an array, so `numpy.frombuffer` takes it without a copy."""

    stream: str
    stream_created: str
    """Creation time of the stream: sequences of a recreated stream mean nothing."""
    worker: str
    process: str
    """Unique for each run of a process under a worker id."""
    number: int
    """Place in the chain of the process, from 0."""
    closed: bool = False
    """The last batch of a process that stopped in good order."""
    partitions: tuple[str, ...] = ()
    """Ids that `partition_index` points into; one that changed its fence within the batch is there twice."""
    fences: tuple[int, ...] = ()
    """Fence tokens, parallel to `partitions`."""
    partition_index: array[int] = field(default_factory=lambda: array("I"))
    seq: array[int] = field(default_factory=lambda: array("q"))
    attempt: array[int] = field(default_factory=lambda: array("I"))
    """Number of the attempt that finished the message."""
    outcome: array[int] = field(default_factory=lambda: array("B"))
    """Codes, see `OUTCOMES`."""
    received_us: array[int] = field(default_factory=lambda: array("q"))
    started_us: array[int] = field(default_factory=lambda: array("q"))
    """First start of the message in this holding of the partition."""
    finished_us: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def message_id(self) -> str:
        """By which the ledger stream recognises a batch that is published again."""
        return f"{self.process}:{self.number}"

    def rows(self) -> Iterator[LedgerRow]:
        """Row by row."""
        columns = zip(*(getattr(self, name) for name, _ in COLUMNS), strict=True)
        for index, seq, attempt, outcome, received, started, finished in columns:
            yield LedgerRow(
                seq,
                self.partitions[index],
                self.fences[index],
                attempt,
                OUTCOMES[outcome],
                received,
                started,
                finished,
            )


def ledger_stream(stream: str) -> str:
    """Name of a stream's ledger stream, unless the settings name another."""
    return f"{stream}-ledger"


def ledger_subject(prefix: str, stream: str, worker: str) -> str:
    """Where a worker publishes its batches; `*` as worker: what the ledger stream of the stream takes."""
    return f"{prefix}.ledger.{stream}.{worker}"


def sample_limit(every: int) -> int:
    """Messages whose `sample_hash` is below this are in a ledger that records one in `every`."""
    return -(-_SAMPLE_MODULUS // every)


def sample_hash(seq: int) -> int:
    """Spread sequences evenly over 32 bits; fits into signed 64-bit arithmetic, so that Spark can do the same."""
    return seq % (_SAMPLE_MODULUS >> 1) * _SAMPLE_FACTOR % _SAMPLE_MODULUS


def encode_batch(batch: LedgerBatch) -> bytes:
    """Serialise a batch; raises ValueError when its columns do not fit each other."""
    rows = len(batch)
    if any(len(getattr(batch, name)) != rows for name, _ in COLUMNS):
        raise ValueError("the columns of a ledger batch must have one length")
    if problem := _problem(batch):
        raise ValueError(f"a ledger batch {problem}")
    names = "\n".join(batch.partitions)
    if names.count("\n") > max(0, len(batch.partitions) - 1):
        raise ValueError("a ledger batch has a partition whose id contains a line break")
    header = {
        "stream": batch.stream,
        "created": batch.stream_created,
        "worker": batch.worker,
        "process": batch.process,
        "number": batch.number,
        "closed": batch.closed,
        # One text, because a list of thousands takes longer to write than all columns together.
        "partitions": names,
    }
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    columns = [_take_apart(getattr(batch, name), code) for name, code in COLUMNS]
    body = b"".join([head, _take_apart(array(_FENCES, batch.fences), _FENCES), *columns])
    prefix = _PREFIX.pack(MAGIC, len(head), len(batch.partitions), rows)
    return prefix + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(prefix))) + body


def decode_batch(data: bytes) -> LedgerBatch:
    """Read a batch; raises `LedgerCorrupt` for anything that `encode_batch` did not make."""
    if len(data) < _PREFIX_SIZE:
        raise LedgerCorrupt(f"a ledger batch has {len(data)} bytes; expected at least {_PREFIX_SIZE}: not a ledger")
    magic, head_size, partitions, rows = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise LedgerCorrupt(
            f"a ledger batch begins with {magic!r}; expected {MAGIC!r}: another format, or not a ledger"
        )
    body = memoryview(data)[_PREFIX_SIZE:]
    if zlib.crc32(body, zlib.crc32(data[: _PREFIX.size])) != _CHECKSUM.unpack_from(data, _PREFIX.size)[0]:
        raise LedgerCorrupt("a ledger batch is damaged: its checksum does not fit; it was cut off or changed")
    if max(rows, partitions) > _MAX_ROWS or head_size > len(body):
        raise LedgerCorrupt(f"a ledger batch claims {rows} rows and a header of {head_size} bytes in {len(data)}")
    fields = _read_header(bytes(body[:head_size]), partitions)
    fences, place = _put_together(body, head_size, partitions, _FENCES)
    fields["fences"] = tuple(fences)
    for name, code in COLUMNS:
        fields[name], place = _put_together(body, place, rows, code)
    if place != len(body):
        raise LedgerCorrupt(f"a ledger batch has {len(body) - place} bytes too many")
    batch = LedgerBatch(**fields)
    if problem := _problem(batch):
        raise LedgerCorrupt(f"a ledger batch {problem}")
    return batch


def _problem(batch: LedgerBatch) -> str:
    if len(batch.partitions) != len(batch.fences):
        return f"names {len(batch.partitions)} partitions but {len(batch.fences)} fences"
    if min(batch.number, *batch.fences, 0) < 0:
        return "has a negative number or fence"
    if len(batch) and max(batch.partition_index) >= len(batch.partitions):
        return f"has a row of partition {max(batch.partition_index)} but names {len(batch.partitions)}"
    if len(batch) and max(batch.outcome) >= len(OUTCOMES):
        return f"has the unknown outcome {max(batch.outcome)}"
    return ""


_KINDS: Final = {
    "stream": str,
    "created": str,
    "worker": str,
    "process": str,
    "number": int,
    "closed": bool,
    "partitions": str,
}


def _read_header(data: bytes, partitions: int) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LedgerCorrupt(f"the header of a ledger batch is not JSON: {error}") from None
    if not isinstance(header, dict) or any(type(header.get(name)) is not kind for name, kind in _KINDS.items()):
        raise LedgerCorrupt(f"the header of a ledger batch lacks one of {', '.join(_KINDS)}, or has it wrong")
    fields = {name: header[name] for name in _KINDS}
    names = tuple(fields["partitions"].split("\n")) if partitions or fields["partitions"] else ()
    if len(names) != partitions:
        raise LedgerCorrupt(f"the header of a ledger batch names {len(names)} partitions; expected {partitions}")
    fields["stream_created"], fields["partitions"] = fields.pop("created"), names
    return fields


def _take_apart(column: array[int], code: str) -> bytes:
    """A column as `varies`, constant bytes, planes."""
    if column.typecode != code:
        column = array(code, column)
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    data, size, rows = column.tobytes(), column.itemsize, len(column)
    varies, constant, planes = 0, bytearray(size), []
    for place in range(size if rows else 0):
        plane = data[place::size]
        if plane.count(plane[0]) == rows:
            constant[place] = plane[0]
        else:
            varies |= 1 << place
            planes.append(plane)
    return b"".join([bytes((varies,)), constant, *planes])


def _put_together(body: memoryview, place: int, rows: int, code: str) -> tuple[array[int], int]:
    """A column, and where the next one begins."""
    column = array(code)
    size = column.itemsize
    if place + 1 + size > len(body):
        raise LedgerCorrupt("a ledger batch ends within its columns")
    varies, constant = body[place], bytes(body[place + 1 : place + 1 + size])
    place += 1 + size
    if varies >> size or place + varies.bit_count() * rows > len(body):
        raise LedgerCorrupt("a ledger batch ends within its columns")
    values = bytearray(constant * rows)
    for byte in range(size):
        if varies >> byte & 1:
            values[byte::size] = body[place : place + rows]
            place += rows
    column.frombytes(values)
    if sys.byteorder == "big":
        column.byteswap()
    return column, place
