"""Rounds of a replay on Spark: everything below a bound is read, sorted by partition, and handled in tasks.

The range is read without a filter and thinned out here: on a file stream with many subjects, filters cost more than
what they leave out. Nothing is written and nothing decided here; who may handle what is the driver's business.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.model.subjects import has_wildcard
from parti.spark.options import Offset, target_options
from parti.spark.planning import bounds, resolve
from parti.spark.replay_task import RESULT, Work, run_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

_ROWS_WORTH_A_TASK = 20_000
_MAX_TEXT = 300
_TOLD = re.compile(r"[\w.]+(?:Error|Exception|Lost|Timeout|Failed|Denied|Exit|NoResponders)\b.*")


class SparkRounds:
    """Runs rounds in a session, one at a time."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._tag = f"parti-replay-{uuid.uuid4().hex}"

    def run(self, work: Work, start: int) -> int:
        """Handle `[start, work.end)` of the stream; returns how many messages tasks have finished.

        Blocks. Raises what Spark raises when a task failed or `cancel` was called.
        """
        self._spark.addTag(self._tag)
        try:
            rows = self._handled(work, start).collect()
        finally:
            self._spark.removeTag(self._tag)
        return sum(row["handled"] + row["dead_lettered"] for row in rows)

    def cancel(self) -> None:
        """End the round that runs, from another thread."""
        self._spark.interruptTag(self._tag)

    def _handled(self, work: Work, start: int) -> DataFrame:
        slots = max(1, int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1))
        readers = min(slots, max(1, (work.end - start) // _ROWS_WORTH_A_TASK))
        messages = (
            self._spark.read.format("jetstream")
            .options(**target_options(work.target))
            .option("stream", work.stream)
            .option("startingOffsets", start)
            .option("endingOffsets", work.end)
            .option("includeHeaders", "raw")
            .option("minPartitions", readers)
            # What is gone, is gone: workers skip it as well.
            .option("failOnDataLoss", "false")
            .load()
        )
        return (
            self._chosen(messages, work)
            .repartition(min(slots, len(work.lots)), "partition")
            .sortWithinPartitions("partition", "seq")
            .mapInArrow(partial(_run, work), RESULT)
        )

    def _chosen(self, messages: DataFrame, work: Work) -> DataFrame:
        """The messages of the round's partitions, from their positions on."""
        from pyspark.sql import functions as sql  # noqa: PLC0415 - importing this module imports no pyspark

        lots = [(lot.subject, pattern_of(lot.subject), lot.partition, lot.position) for lot in work.lots.values()]
        places = self._spark.createDataFrame(lots, "of string, pattern string, partition string, position bigint")
        spans = any(has_wildcard(lot.subject) for lot in work.lots.values())
        literal: Column = sql.col("subject") == sql.col("of")
        matches = sql.rlike(sql.col("subject"), sql.col("pattern")) if spans else literal
        return (
            messages.join(sql.broadcast(places), matches)
            .where(sql.col("seq") >= sql.col("position"))
            .select("partition", "seq", "subject", "timestamp", "headers", "payload")
        )


def find_end(target: Target, stream: str, until: Offset) -> int:
    """The sequence that a replay goes up to; blocks. Raises `ConfigError` when nothing lies there."""
    with BlockingClient.open(target, name="parti-replay") as client:
        info = client.stream_info(stream)
        return min(resolve(client, stream, info, until), bounds(info)[1] + 1)


def why_failed(error: BaseException) -> str:
    """What went wrong in a round, in one line: of a traceback from a task its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if _TOLD.match(line) and not line.startswith("org.apache.")]
    return (told or lines or [type(error).__name__])[-1][:_MAX_TEXT]


def pattern_of(subject: str) -> str:
    """A regular expression for the subjects that a partition spans."""
    tokens = {"*": "[^.]+", ">": ".+"}
    return "^" + r"\.".join(tokens.get(token, re.escape(token)) for token in subject.split(".")) + "$"


def _run(work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task."""
    from pyspark import TaskContext  # noqa: PLC0415

    context = TaskContext.get()
    place = f"{context.partitionId()}-{context.attemptNumber()}" if context else "0"
    return run_task(work, f"{work.number}-{place}-{uuid.uuid4().hex[:8]}", batches)
