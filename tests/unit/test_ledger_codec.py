"""The batches of a ledger: what goes in comes out, what is damaged is refused."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from array import array

import numpy as np
import pytest

from parti.errors import LedgerCorrupt, PartiError
from parti.model.ledger import (
    COLUMNS,
    LedgerBatch,
    LedgerRow,
    decode_batch,
    encode_batch,
    ledger_stream,
    ledger_subject,
    sample_hash,
    sample_limit,
)

START_US = 1_790_000_000_000_000


def batch_of(rows: int) -> LedgerBatch:
    """Messages 50 us apart over three partitions, the third attempt of each fifth one."""
    count = range(rows)
    return LedgerBatch(
        "DC",
        "2026-11-01T00:00:00Z",
        "worker-0",
        "p1",
        7,
        partitions=("etch1.c1", "etch1.c2", "lithö.*"),
        fences=(3, 4, 0),
        partition_index=array("I", (i % 3 for i in count)),
        seq=array("q", (1_000_000 + i for i in count)),
        attempt=array("I", (3 if i % 5 == 0 else 1 for i in count)),
        outcome=array("B", (int(i % 5 == 0) for i in count)),
        received_us=array("q", (START_US + 50 * i for i in count)),
        started_us=array("q", (START_US + 50 * i + 20 for i in count)),
        finished_us=array("q", (START_US + 50 * i + 40 for i in count)),
    )


def sealed(header: object, rows: int = 0, columns: bytes | None = None, partitions: int = 1) -> bytes:
    """A batch with a checksum that fits, whatever is in it."""
    head = json.dumps(header).encode()
    if columns is None:
        columns = bytes(9) + b"".join(bytes(1 + array(code).itemsize) for _, code in COLUMNS)
    body = head + columns
    prefix = struct.pack("<4sIII", b"PLG1", len(head), partitions, rows)
    return prefix + struct.pack("<I", zlib.crc32(prefix + body)) + body


HEADER: dict[str, object] = {
    "stream": "DC",
    "created": "t0",
    "worker": "w",
    "process": "p",
    "number": 0,
    "closed": True,
    "partitions": "a",
}


def test_a_batch_comes_back_as_it_was() -> None:
    batch = batch_of(500)
    assert decode_batch(encode_batch(batch)) == batch


def test_an_empty_batch_keeps_its_place_in_the_chain() -> None:
    batch = LedgerBatch("DC", "t0", "worker-0", "p1", 0, closed=True)
    found = decode_batch(encode_batch(batch))
    assert (found.number, found.closed, len(found), list(found.rows())) == (0, True, 0, [])
    assert found.message_id == "p1:0"


def test_rows_name_partition_fence_and_outcome() -> None:
    rows = list(decode_batch(encode_batch(batch_of(2))).rows())
    assert rows == [
        LedgerRow(1_000_000, "etch1.c1", 3, 3, "dead_lettered", START_US, START_US + 20, START_US + 40),
        LedgerRow(1_000_001, "etch1.c2", 4, 1, "handled", START_US + 50, START_US + 70, START_US + 90),
    ]


def test_a_row_takes_a_third_of_the_room_of_its_numbers() -> None:
    plain = 500 * sum(array(code).itemsize for _, code in COLUMNS)
    assert len(encode_batch(batch_of(500))) < plain / 3 + 500


def test_the_layout_is_the_documented_one() -> None:
    batch = dataclasses.replace(batch_of(2), partitions=("a", "b", "c"))
    data = encode_batch(batch)
    magic, head_size, partitions, rows, checksum = struct.unpack_from("<4sIIII", data)
    assert (magic, partitions, rows, checksum) == (b"PLG1", 3, 2, zlib.crc32(data[:16] + data[20:]))
    assert json.loads(data[20 : 20 + head_size]) == {
        "stream": "DC",
        "created": "2026-11-01T00:00:00Z",
        "worker": "worker-0",
        "process": "p1",
        "number": 7,
        "closed": False,
        "partitions": "a\nb\nc",
    }
    columns = data[20 + head_size :]
    # fences 3, 4, 0 and partition_index 0, 1: only the lowest byte varies. seq 0xF4240, 0xF4241: likewise.
    assert columns[:12] == bytes([0b1, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4, 0])
    assert columns[12:19] == bytes([0b1, 0, 0, 0, 0, 0, 1])
    assert columns[19:30] == bytes([0b1, 0, 0x42, 0x0F, 0, 0, 0, 0, 0, 0x40, 0x41])


def test_columns_are_buffers() -> None:
    found = decode_batch(encode_batch(batch_of(300)))
    assert np.frombuffer(found.seq, "<i8").sum() == sum(found.seq)
    assert np.frombuffer(found.partition_index, "<u4").max() == 2
    assert np.frombuffer(found.outcome, "u1").sum() == 60


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seq": array("q", [1])}, "one length"),
        ({"fences": (1,)}, "3 partitions but 1 fences"),
        ({"fences": (1, -1, 2)}, "negative number or fence"),
        ({"partitions": ("a", "b\nc", "d")}, "line break"),
        ({"partition_index": array("I", [0, 3])}, "partition 3 but names 3"),
        ({"outcome": array("B", [0, 2])}, "unknown outcome 2"),
    ],
)
def test_columns_that_do_not_fit_are_not_written(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        encode_batch(dataclasses.replace(batch_of(2), **changes))  # type: ignore[arg-type]


def test_damage_is_a_clear_error() -> None:
    data = encode_batch(batch_of(100))
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    assert issubclass(LedgerCorrupt, PartiError)
    for bad, text in (
        (b"", "has 0 bytes"),
        (b'{"seq": 1, "and": "more"}', "not a ledger"),
        (data[:-1], "damaged"),
        (data + b"x", "damaged"),
        (bytes(changed), "damaged"),
    ):
        with pytest.raises(LedgerCorrupt, match=text):
            decode_batch(bad)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (sealed([1, 2]), "lacks one of stream"),
        (sealed({}), "lacks one of stream"),
        (sealed({**HEADER, "number": "0"}), "has it wrong"),
        (sealed({**HEADER, "closed": 1}), "has it wrong"),
        (sealed({**HEADER, "number": -1}), "negative"),
        (sealed({**HEADER, "partitions": ["a"]}), "has it wrong"),
        (sealed({**HEADER, "partitions": "a\nb"}), "names 2 partitions; expected 1"),
        (sealed(HEADER, partitions=0), "names 1 partitions; expected 0"),
        (sealed(HEADER, columns=b""), "ends within"),
        (sealed(HEADER, rows=5, columns=b"\xff" * 40), "ends within"),
        (sealed(HEADER, columns=bytes(100)), "too many"),
        (sealed({**HEADER, "partitions": ""}, rows=3, partitions=0), "partition 0 but names 0"),
        (sealed(HEADER, rows=1 << 30), "claims 1073741824 rows"),
    ],
)
def test_a_batch_that_nobody_here_wrote_is_a_clear_error(data: bytes, text: str) -> None:
    with pytest.raises(LedgerCorrupt, match=text):
        decode_batch(data)


def test_a_sample_is_even_over_sequences_and_over_partitions() -> None:
    limit = sample_limit(100)
    for step in (1, 7, 200, 2000, 4096):
        chosen = sum(sample_hash(seq) < limit for seq in range(5, 100_000 * step, step))
        assert 900 < chosen < 1100, step
    assert all(sample_hash(seq) < sample_limit(1) for seq in range(1000))


def test_names() -> None:
    assert ledger_stream("DC") == "DC-ledger"
    assert ledger_subject("parti", "DC", "worker-3") == "parti.ledger.DC.worker-3"
