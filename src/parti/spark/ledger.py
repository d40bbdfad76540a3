"""The ledger in Spark: messages of the ledger stream become rows, and the chains of batches tell of processes.

Batches are decoded by `parti.model.ledger` inside the tasks, a few thousand rows at a time, and handed over as Arrow
columns. Guards what the audit rests on: a batch that cannot be read, or that is missing, is never passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyspark.sql.functions as sf
from pyspark.sql import Window

from parti.errors import LedgerCorrupt
from parti.model.ledger import BATCHES_AT_ONCE, OUTCOMES, LedgerBatch, decode_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEDGER_COLUMNS = (
    "stream string, seq bigint, partition string, worker string, process string, fence bigint, attempt int, "
    "outcome string, received timestamp, started timestamp, finished timestamp"
)
"""One row for each finished message."""
BATCH_COLUMNS = (
    "stream string, stream_created string, worker string, process string, number bigint, closed boolean, "
    "rows bigint, first_at timestamp, last_at timestamp, ledger_seq bigint, damage string"
)
"""One row for each ledger message; `damage` says why it cannot be read."""

_ROWS_AT_ONCE = 65_536
"""Rows in an Arrow batch: enough that its fixed cost does not show."""
_UTC_US = pa.timestamp("us", tz="UTC")
_ROW_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("seq", pa.int64()),
        ("partition", pa.string()),
        ("worker", pa.string()),
        ("process", pa.string()),
        ("fence", pa.int64()),
        ("attempt", pa.int32()),
        ("outcome", pa.string()),
        ("received", _UTC_US),
        ("started", _UTC_US),
        ("finished", _UTC_US),
    ]
)
_BATCH_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("stream_created", pa.string()),
        ("worker", pa.string()),
        ("process", pa.string()),
        ("number", pa.int64()),
        ("closed", pa.bool_()),
        ("rows", pa.int64()),
        ("first_at", _UTC_US),
        ("last_at", _UTC_US),
        ("ledger_seq", pa.int64()),
        ("damage", pa.string()),
    ]
)


def ledger_rows(messages: DataFrame, *, stream: str = "", stream_created: str = "") -> DataFrame:
    """The rows of ledger messages (columns `payload` and `seq` of the ledger stream), as `LEDGER_COLUMNS`.

    Only those of the stream, and of the stream made at that time, if they are named. A batch that was stored twice
    gives its rows twice. Batches that cannot be read give none: `ledger_batches` has them.
    """

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _row_batches(_messages(batches), stream, stream_created)

    return messages.select("seq", "payload").mapInArrow(decode, LEDGER_COLUMNS)


def ledger_batches(messages: DataFrame) -> DataFrame:
    """What each ledger message is (columns `payload` and `seq` of the ledger stream), as `BATCH_COLUMNS`."""

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _describe(_messages(batches))

    return messages.select("seq", "payload").mapInArrow(decode, BATCH_COLUMNS)


def ledger_processes(batches: DataFrame) -> DataFrame:
    """The chains: process, worker, batches, first_number, last_number, missing, closed, first_at, last_at, rows,
    ledger_seq (of its first batch).

    `missing` counts the holes in the numbers. A chain that is not `closed` belongs to a process that crashed, or that
    still runs. Takes what `ledger_batches` gives; a batch that was stored twice counts once.
    """
    readable = batches.where("damage IS NULL").dropDuplicates(["process", "number"])
    return readable.groupBy("process").agg(
        sf.max("worker").alias("worker"),
        sf.count("*").alias("batches"),
        sf.min("number").alias("first_number"),
        sf.max("number").alias("last_number"),
        (sf.max("number") - sf.min("number") + 1 - sf.count("*")).alias("missing"),
        sf.max("closed").alias("closed"),
        sf.min("first_at").alias("first_at"),
        sf.max("last_at").alias("last_at"),
        sf.sum("rows").alias("rows"),
        sf.min("ledger_seq").alias("ledger_seq"),
    )


def missing_batches(batches: DataFrame) -> DataFrame:
    """The holes in the chains: process, worker, and the numbers from `first` to `last` that are not there.

    At the end of a chain that is not closed the last few batches were on their way together, so that one may be there
    and the one before it not: nothing was acknowledged behind it, and it is no hole.
    """
    readable = batches.where("damage IS NULL").dropDuplicates(["process", "number"])
    whole = Window.partitionBy("process")
    before = sf.lag("number").over(whole.orderBy("number"))
    found = readable.withColumns(
        {
            "before": sf.coalesce(before, sf.col("number") - 1),
            "newest": sf.max("number").over(whole),
            "ended": sf.max("closed").over(whole),
        }
    ).withColumn("until", sf.expr(f"if(ended, number - 1, least(number - 1, newest - {BATCHES_AT_ONCE}))"))
    return found.where("number > before + 1 AND until > before").selectExpr(
        "process", "worker", "before + 1 AS first", "until AS last", "first_at AS next_at"
    )


# ── inside the tasks ──────────────────────────────────────────────────────────────────────────────────────────────


def _messages(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, bytes]]:
    for batch in batches:
        for seq, payload in zip(batch["seq"].to_pylist(), batch["payload"], strict=True):
            yield seq, payload.as_py()


def _row_batches(messages: Iterator[tuple[int, bytes]], stream: str, stream_created: str) -> Iterator[pa.RecordBatch]:
    waiting: list[LedgerBatch] = []
    rows = 0
    for _, payload in messages:
        try:
            batch = decode_batch(payload)
        except LedgerCorrupt:
            continue
        if stream not in ("", batch.stream) or stream_created not in ("", batch.stream_created):
            continue
        waiting.append(batch)
        rows += len(batch)
        if rows >= _ROWS_AT_ONCE:
            yield _rows(waiting)
            waiting, rows = [], 0
    if rows:
        yield _rows(waiting)


def _rows(batches: Sequence[LedgerBatch]) -> pa.RecordBatch:
    """Many ledger batches as one batch of Arrow columns."""
    sizes = np.array([len(batch) for batch in batches])
    place = np.repeat(np.arange(len(batches)), sizes)
    offsets = np.repeat(np.cumsum([0, *(len(batch.partitions) for batch in batches[:-1])]), sizes)
    partition = _column(batches, "partition_index").astype(np.int64) + offsets
    names = [name for batch in batches for name in batch.partitions]
    fences = np.array([fence for batch in batches for fence in batch.fences], dtype=np.int64)
    return pa.RecordBatch.from_arrays(
        [
            _named([batch.stream for batch in batches], place),
            pa.array(_column(batches, "seq")),
            _named(names, partition),
            _named([batch.worker for batch in batches], place),
            _named([batch.process for batch in batches], place),
            pa.array(fences[partition]),
            pa.array(_column(batches, "attempt").astype(np.int32)),
            _named(OUTCOMES, _column(batches, "outcome")),
            *(_moments(_column(batches, name)) for name in ("received_us", "started_us", "finished_us")),
        ],
        schema=_ROW_SCHEMA,
    )


def _describe(messages: Iterator[tuple[int, bytes]]) -> Iterator[pa.RecordBatch]:
    found: list[dict[str, object]] = []
    for seq, payload in messages:
        try:
            batch = decode_batch(payload)
        except LedgerCorrupt as error:
            found.append({"ledger_seq": seq, "damage": str(error)})
        else:
            found.append(_description(seq, batch))
        if len(found) == _ROWS_AT_ONCE // 64:
            yield pa.RecordBatch.from_pylist(found, schema=_BATCH_SCHEMA)
            found = []
    if found:
        yield pa.RecordBatch.from_pylist(found, schema=_BATCH_SCHEMA)


def _description(seq: int, batch: LedgerBatch) -> dict[str, object]:
    return {
        "stream": batch.stream,
        "stream_created": batch.stream_created,
        "worker": batch.worker,
        "process": batch.process,
        "number": batch.number,
        "closed": batch.closed,
        "rows": len(batch),
        "first_at": int(np.frombuffer(batch.started_us, np.int64).min()) if len(batch) else None,
        "last_at": int(np.frombuffer(batch.finished_us, np.int64).max()) if len(batch) else None,
        "ledger_seq": seq,
        "damage": None,
    }


def _column(batches: Sequence[LedgerBatch], name: str) -> np.ndarray:
    kept = [getattr(batch, name) for batch in batches if len(batch)]
    return np.concatenate([np.frombuffer(column, column.typecode) for column in kept])


def _named(names: Sequence[str], index: np.ndarray) -> pa.Array:
    return pa.DictionaryArray.from_arrays(
        pa.array(index.astype(np.int32)), pa.array(names, pa.string())
    ).dictionary_decode()


def _moments(microseconds: np.ndarray) -> pa.Array:
    return pa.array(microseconds).cast(_UTC_US)
