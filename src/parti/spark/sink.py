"""`format("jetstream")` as a sink: rows become messages, acknowledged by the stream before a task ends.

Columns: subject, payload, and where wanted headers and msg_id. What Spark runs twice (a task, a micro-batch after a
restart) is published twice; message ids make the stream drop the second one, as long as it remembers the first: its
duplicate window. Ids come from the column msg_id or, in streaming queries, from query, batch, partition, row number
and a digest of the row. The digest decides what happens when a batch is run again in another order: a row whose place
has changed is stored again; it is never taken for the row that had its place before.

Invariant guarded here: a task that has ended well has every one of its messages stored.
"""

from __future__ import annotations

import sys
import time
from binascii import hexlify
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType

from parti.errors import ConfigError, ConnectionFailed, PermissionDenied, RequestTimeout, SubjectMismatch
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.publishing import DEFAULT_WINDOW, Outgoing, WindowedPublisher, check_subject
from parti.jetstream.target import Target
from parti.model.subjects import within
from parti.spark.options import CONNECTION_OPTIONS, check_known, read_target
from parti.spark.refusals import plainly

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SINK_OPTIONS = (*CONNECTION_OPTIONS, "stream", "subject", "window", "msgId", "idPrefix")
SINK_COLUMNS = ("subject", "payload", "headers", "msg_id")

_SPARKS_OWN = ("checkpointLocation", "queryName", "path")
_LARGEST_WINDOW = 100_000
_SHORT_WINDOW_S = 60.0
_QUICK_S = 3.0
_BLOCK_START = b"NATS/1.0\r\n"
_STEERING = ("nats-msg-id", "nats-rollup", "nats-expected-", "nats-batch-")
"""Headers that make the server refuse, replace or drop messages. They were meant for another stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """What `write.format("jetstream")` was asked for."""

    target: Target
    stream: str | None = None
    subject: str | None = None
    window: int = DEFAULT_WINDOW
    ids: bool = True
    id_prefix: str | None = None


@dataclass
class Published(WriterCommitMessage):
    """What one task has published, all of it acknowledged."""

    stored: int
    duplicates: int
    """Messages that the stream had already."""
    elapsed_s: float


def read_sink_options(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check the options of a sink."""
    values = {name.lower(): value.strip() for name, value in given.items() if value.strip()}
    target = read_target(given)
    if "path" in values:
        raise ConfigError("path: a stream has no path; use the option stream, and save() or start() without one")
    check_known(given, (*SINK_OPTIONS, *_SPARKS_OWN))
    window, ids = values.get("window", str(DEFAULT_WINDOW)), values.get("msgid", "auto").lower()
    if not window.isdecimal() or not 1 <= int(window) <= _LARGEST_WINDOW:
        raise ConfigError(f"window: {window!r}; expected a number from 1 to {_LARGEST_WINDOW:,}")
    if ids not in {"auto", "none"}:
        raise ConfigError(f"msgId: {values['msgid']!r}; expected auto or none")
    stream, subject, prefix = values.get("stream"), values.get("subject"), values.get("idprefix")
    if stream is not None and any(c in stream for c in " .*>/\\\t\r\n"):
        raise ConfigError(f"stream: {stream!r} is no stream name; expected no dots, spaces or wildcards")
    if subject is not None:
        check_subject(subject.encode(), "subject")
    if prefix is not None:
        if streaming:
            raise ConfigError("idPrefix: a streaming query has ids of its own; leave it out, or add a column msg_id")
        if ids == "none":
            raise ConfigError("idPrefix: msgId=none asks for messages without ids; leave one of them out")
        if not prefix.isprintable() or " " in prefix:
            raise ConfigError("idPrefix: expected printable characters without spaces")
    return SinkOptions(
        target=target, stream=stream, subject=subject, window=int(window), ids=ids != "none", id_prefix=prefix
    )


# ── the shape of the rows ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the columns are; -1: there is none."""

    subject: int
    payload: int
    headers: int
    msg_id: int

    @classmethod
    def of(cls, schema: StructType, options: SinkOptions) -> Shape:
        """Find the columns; raises ConfigError for whatever the sink cannot take."""
        places = {name.lower(): place for place, name in enumerate(schema.fieldNames())}
        types = {name: schema.fields[place].dataType for name, place in places.items()}
        for name in schema.fieldNames():
            if name.lower() not in SINK_COLUMNS:
                raise ConfigError(
                    f"column {name!r}: format jetstream takes {', '.join(SINK_COLUMNS)}; select those and no others"
                )
        if "payload" not in places:
            raise ConfigError("column 'payload' is missing; expected one of type binary or string")
        if "subject" not in places and options.subject is None:
            raise ConfigError("column 'subject' is missing; add it, or set .option('subject', ...) for all rows")
        if "subject" in places and options.subject is not None:
            raise ConfigError("subject: given as an option and as a column; leave one of them out")
        if "msg_id" in places and not options.ids:
            raise ConfigError("msgId: none, but there is a column 'msg_id'; leave one of them out")
        if "msg_id" in places and options.id_prefix is not None:
            raise ConfigError("idPrefix: there is a column 'msg_id' already; leave one of them out")
        for name, kind in types.items():
            _check_type(name, kind)
        return cls(*(places.get(name, -1) for name in SINK_COLUMNS))


def _check_type(name: str, kind: DataType) -> None:
    text = isinstance(kind, StringType)
    if name in {"subject", "msg_id"}:
        good, expected = text, "string"
    elif name == "payload":
        good, expected = text or isinstance(kind, BinaryType), "binary or string; use to_json for structures"
    else:
        expected = "map<string,string>, map<string,array<string>> or binary (a raw block)"
        good = isinstance(kind, BinaryType)
        if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
            value = kind.valueType.elementType if isinstance(kind.valueType, ArrayType) else kind.valueType
            good = isinstance(value, StringType)
    if not good:
        raise ConfigError(f"column {name!r} has type {kind.simpleString()}; expected {expected}")


# ── before anything is published ──────────────────────────────────────────────────────────────────────────────────


def check_stream(options: SinkOptions, *, connect_s: float | None = None) -> float | None:
    """Make sure that the stream is there and takes the subject; returns its duplicate window in seconds, if known.

    Raises StreamNotFound, SubjectMismatch or ConfigError for what cannot work, and ConnectionFailed.
    """
    target = options.target
    target.check()
    if connect_s is not None:
        target = replace(target, connect_timeout_s=min(connect_s, target.connect_timeout_s))
    with BlockingClient.open(target, name="parti-spark-driver") as client:
        try:
            return _check_stream(client, options)
        except PermissionDenied:
            return None  # Whoever may publish may still not be allowed to ask.


def _check_stream(client: BlockingClient, options: SinkOptions) -> float | None:
    stream = options.stream or _stream_of(client, options.subject)
    if stream is None:
        client.api("INFO")
        return None
    config = client.stream_info(stream)["config"]
    if config.get("mirror"):
        raise ConfigError(f"stream {stream!r} is a mirror and takes no messages; publish to its origin")
    if config.get("sealed"):
        raise ConfigError(f"stream {stream!r} is sealed and takes no messages; choose another")
    subjects = config.get("subjects") or [stream]
    if options.subject and not within(options.subject, subjects):
        raise SubjectMismatch(
            f"subject: stream {stream!r} takes {', '.join(subjects)}, not {options.subject!r}; "
            f"add it to the stream, or correct it"
        )
    return float(config.get("duplicate_window", 0)) / 1e9


def _stream_of(client: BlockingClient, subject: str | None) -> str | None:
    if subject is None:
        return None
    names = client.api("STREAM.NAMES", {"subject": subject}).get("streams") or []
    if not names:
        raise SubjectMismatch(f"subject: no stream takes {subject!r}; create one that does, or correct it")
    return str(names[0])


def _tell(text: str) -> None:
    """A line on standard error, which is where Spark puts what Python workers have to say."""
    print(f"parti: {text}", file=sys.stderr, flush=True)


# ── writers ───────────────────────────────────────────────────────────────────────────────────────────────────────


class JetStreamWriter(DataSourceArrowWriter):
    """Publishes a batch. Messages have ids only with a column msg_id or the option idPrefix."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self._options = read_sink_options(given, streaming=False)
        self._shape = Shape.of(schema, self._options)
        window_s = check_stream(self._options)
        has_ids = self._shape.msg_id >= 0 or self._options.id_prefix is not None
        if has_ids and window_s is not None and window_s < _SHORT_WINDOW_S:
            _tell(_short_window(window_s))

    @plainly()
    def write(self, iterator: Iterator[Any]) -> Published:
        """Publish the rows of one task; ends when all are acknowledged."""
        context = TaskContext.get()
        assert context is not None
        prefix = self._options.id_prefix
        return _publish(
            self._options, self._shape, iterator, f"{prefix}.{context.partitionId()}" if prefix is not None else None
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing is left to do: everything was acknowledged before."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What is published stays: a stream cannot take messages back."""
        _tell(
            "the write failed; messages of finished tasks, and some of failed ones, are in the stream and stay there"
        )


class JetStreamStreamWriter(DataSourceStreamArrowWriter):
    """Publishes micro-batches. Messages have ids unless msgId=none."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self._options = read_sink_options(given, streaming=True)
        self._shape = Shape.of(schema, self._options)
        self._window_s: float | None = None
        # Spark makes a writer before each batch and another one to commit it. An outage at that moment is left to
        # the tasks, which wait for the server.
        try:
            self._window_s = check_stream(self._options, connect_s=_QUICK_S)
        except (ConnectionFailed, RequestTimeout) as error:
            if error.fatal:
                raise

    @plainly()
    def write(self, iterator: Iterator[Any]) -> Published:
        """Publish the rows of one task of a micro-batch; ends when all are acknowledged."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if batch in {None, "0"}:
            # A new query: a server that does not answer is a wrong address rather than an outage.
            BlockingClient.open(self._options.target, name="parti-spark-task").close()
        prefix = None
        if self._options.ids and self._shape.msg_id < 0:
            if query is None or batch is None:
                raise ConfigError(
                    "msgId: Spark tells neither query nor batch here, so no ids can be made; "
                    "add a column msg_id, or set msgId=none"
                )
            prefix = f"{query}.{batch}.{context.partitionId()}"
        return _publish(self._options, self._shape, iterator, prefix)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Say when a batch took longer than the stream remembers ids; everything was acknowledged before."""
        window_s = self._window_s
        if window_s is None or not self._options.ids:
            return
        took_s = max((message.elapsed_s for message in messages if isinstance(message, Published)), default=0.0)
        if took_s > window_s:
            _tell(f"batch {batchId} took {took_s:.0f} s; {_short_window(window_s)}")
        elif batchId == 0 and window_s < _SHORT_WINDOW_S:
            _tell(_short_window(window_s))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """What is published stays; the batch is run again after a restart, and what is stored is not stored twice."""


def _short_window(window_s: float) -> str:
    return (
        f"the stream remembers message ids for {window_s:g} s only, and what is published again later than that is "
        f"stored twice; raise its duplicate_window above the time that a batch and a restart take"
    )


# ── inside the tasks ──────────────────────────────────────────────────────────────────────────────────────────────


def _publish(options: SinkOptions, shape: Shape, batches: Iterator[Any], prefix: str | None) -> Published:
    started_s = time.monotonic()
    with WindowedPublisher(
        options.target, name="parti-spark-task", stream=options.stream, window=options.window
    ) as publisher:
        for batch in batches:
            if batch.num_rows:
                publisher.publish(messages_of(batch, shape, options.subject, publisher.published, prefix))
        publisher.flush()
    return Published(publisher.stored, publisher.duplicates, time.monotonic() - started_s)


def messages_of(batch: Any, shape: Shape, subject: str | None, first: int, prefix: str | None) -> Iterable[Outgoing]:
    """The messages of an Arrow batch whose first row has the number `first`; a prefix gives them ids."""
    payloads = _column(batch, shape.payload, "payload", first)
    subjects: Iterable[bytes] = (
        repeat(subject.encode()) if subject is not None else _column(batch, shape.subject, "subject", first)
    )
    lines: Iterable[bytes] = repeat(b"")
    if shape.headers >= 0:
        lines = _header_lines(batch.column(shape.headers), first)
    if shape.msg_id >= 0:
        ids = batch.column(shape.msg_id)
        return zip(subjects, payloads, lines, values_of(ids.fill_null("") if ids.null_count else ids), strict=False)
    if prefix is None:
        return zip(subjects, payloads, lines, repeat(b""), strict=False)
    return _with_ids(zip(subjects, payloads, lines, strict=False), prefix.encode(), first)


def _with_ids(rows: Iterable[tuple[bytes, bytes, bytes]], prefix: bytes, first: int) -> Iterator[Outgoing]:
    for number, (subject, payload, lines) in enumerate(rows, first):
        digest = hexlify(blake2b(b"%b\0%b\0%b" % (subject, lines, payload), digest_size=8).digest())
        yield subject, payload, lines, b"%b.%d.%b" % (prefix, number, digest)


def _column(batch: Any, place: int, name: str, first: int) -> Sequence[bytes]:
    column = batch.column(place)
    if column.null_count:
        row = first + column.is_null().to_pylist().index(True) + 1
        raise ConfigError(f"row {row} of the task: {name} is null; leave such rows out, or fill them in")
    return values_of(column)


def values_of(array: Any) -> list[bytes]:
    """The values of a string or binary array without nulls, as bytes; four times as fast as `to_pylist`."""
    if not len(array):
        return []
    kind = array.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not wide and not pa.types.is_string(kind) and not pa.types.is_binary(kind):
        array, wide = array.cast(pa.large_binary()), True
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)[
        array.offset : array.offset + len(array) + 1
    ]
    begin, end = int(offsets[0]), int(offsets[-1])
    data = data_buffer.slice(begin, end - begin).to_pybytes() if end > begin else b""
    return [data[start:stop] for start, stop in pairwise((offsets - begin).tolist())]


# ── headers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _header_lines(column: Any, first: int) -> Iterator[bytes]:
    """The header lines of each row, without those that steer the server."""
    raw = not pa.types.is_map(column.type)
    for row, value in enumerate(column.to_pylist(), first + 1):
        if not value:
            yield b""
            continue
        try:
            yield _lines_of_block(value) if raw else _lines_of_map(value)
        except ValueError as error:
            raise ConfigError(f"row {row} of the task: headers: {error}") from None


def _lines_of_block(block: bytes) -> bytes:
    if not block.startswith(_BLOCK_START) or not block.endswith(b"\r\n\r\n"):
        raise ValueError("not a raw block; expected NATS/1.0, lines of name and value, and an empty line")
    lines = block[len(_BLOCK_START) : -2]
    if b"\r\n\r\n" in lines:
        raise ValueError("an empty line within a raw block; remove it")
    if b"nats-" not in lines.lower():
        return lines
    return b"".join(line + b"\r\n" for line in lines.split(b"\r\n") if line and not _steers(line))


def _lines_of_map(pairs: Sequence[tuple[str, Any]]) -> bytes:
    lines = []
    for name, given in pairs:
        values = given if isinstance(given, list) else [given]
        if not name or not name.isascii() or not name.isprintable() or " " in name or ":" in name:
            raise ValueError(f"{name!r} is no name of a header; expected printable ASCII without spaces and colons")
        for value in values:
            if value is None or _steers(name.encode()):
                continue
            if "\r" in value or "\n" in value:
                raise ValueError(f"the value of {name!r} holds a line break; remove it")
            lines.append(f"{name}: {value}\r\n".encode())
    return b"".join(lines)


def _steers(line: bytes) -> bool:
    return line.lower().decode("utf-8", "replace").startswith(_STEERING)
