"""Bronze: the messages of a stream as they are, each exactly once; and the ledger, decoded, by the same query.

Spark's checkpoint says which sequences a batch has; the table's commit of that batch says that they are there. A
query that is killed between the two runs the batch again, with the same sequences, and the table takes it once.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parti.errors import ConfigError, PipelineFailed, SubjectMismatch
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.model.partition import Template
from parti.model.subjects import overlap
from parti.spark.lake import LakeFiles, files_of
from parti.spark.options import target_options
from parti.spark.pipelines.progress import Report, Step, say_nothing
from parti.spark.pipelines.settings import PipelineSettings
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHECKPOINTS = "_checkpoints"
_POLL_S = 1
_OURS = re.compile(r"parti\.errors\.\w+: (.+)")
_CUT_OFF = re.compile(r"\w*Interrupt\w*Exception|SPARK_JOB_CANCELLED|Job \d+ cancelled")
_LAST = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\w*: (.+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the server says of a stream before anything is read."""

    name: str
    created: str
    first_seq: int
    last_seq: int


def look_at(target: Target, stream: str, settings: PipelineSettings | None = None) -> StreamState:
    """Ask the server for a stream.

    Raises StreamNotFound, ConnectionFailed and the like, and SubjectMismatch when the template of the settings fits
    no subject of the stream.
    """
    with BlockingClient.open(target, name="parti-pipeline") as client:
        info = client.stream_info(stream)
    subjects = info["config"].get("subjects") or []
    if settings is not None and settings.template and subjects:
        pattern = Template(settings.template).pattern
        if not any(overlap(pattern, subject) for subject in subjects):
            raise SubjectMismatch(
                f"template {settings.template!r} fits no subject of stream {stream!r} ({', '.join(subjects[:5])}); "
                f"change template in [pipeline]"
            )
    state = info["state"]
    return StreamState(stream, info["created"], int(state["first_seq"]), int(state["last_seq"]))


def check_table(table: Table, checkpoint: str, files: LakeFiles, state: StreamState) -> None:
    """Refuse to add to a table that another stream, or a lost checkpoint, has filled."""
    commits = table.commits()
    if not commits:
        return
    stream, created = commits[-1].meta.get("stream"), commits[-1].meta.get("stream_created")
    if stream not in (None, state.name):
        raise ConfigError(
            f"table {table.name} in {table.root} holds stream {stream!r}, not {state.name!r}; choose another lake"
        )
    if created not in (None, state.created):
        raise ConfigError(
            f"stream {state.name!r} was deleted and made anew since table {table.name} in {table.root} was filled; "
            f"choose another lake, or move this one away"
        )
    if not files.names(f"{checkpoint}/offsets"):
        raise ConfigError(
            f"the checkpoint {checkpoint} is gone, but table {table.name} has commits, and would get every message "
            f"again; restore it, or move the table away too"
        )


@dataclass(frozen=True, slots=True)
class Ingest:
    """One query from a stream into a table."""

    settings: PipelineSettings
    target: Target
    state: StreamState
    table: str = "bronze"

    @property
    def checkpoint(self) -> str:
        """Where Spark keeps how far the query is."""
        return f"{self.settings.lake}/{CHECKPOINTS}/{self.table}"

    def options(self) -> dict[str, str]:
        """The options of the source; no secret is among them."""
        settings, bronze = self.settings, self.table == "bronze"
        options = {
            **target_options(self.target),
            "stream": self.state.name,
            "startingOffsets": settings.start if bronze else "earliest",
            "maxOffsetsPerTrigger": str(settings.max_offsets_per_trigger),
            "failOnDataLoss": str(settings.fail_on_data_loss).lower(),
            "includeHeaders": settings.headers if bronze else "none",
        }
        if settings.subjects and bronze:
            options["subject"] = ",".join(settings.subjects)
        if settings.min_partitions is not None:
            options["minPartitions"] = str(settings.min_partitions)
        return options

    def prepare(self, spark: SparkSession) -> None:
        """Clear away what a killed run left, and refuse a table that does not belong to this stream."""
        files = files_of(spark, self.settings.lake)
        for name in _TABLES[self.table]:
            table = Table(spark, self.settings.lake, name)
            table.recover()
            check_table(table, self.checkpoint, files, self.state)

    def start(self, spark: SparkSession, *, every_s: float | None = None) -> StreamingQuery:
        """Start the query: over what is there now, or, with `every_s`, for ever."""
        messages = spark.readStream.format("jetstream").options(**self.options()).load()
        return start_query(messages, self.sink(), self.checkpoint, self.table, every_s=every_s)

    def sink(self) -> Sink:
        """What writes the batches."""
        return Sink(self.settings.lake, self.table, self.checkpoint, self.state.name, self.state.created)


@dataclass(frozen=True, slots=True)
class Sink:
    """Writes the batches of a query into a table; may be pickled, as Spark Connect does."""

    lake: str
    table: str
    checkpoint: str
    stream: str
    stream_created: str

    def __call__(self, messages: DataFrame, batch: int) -> None:
        """Commit one batch."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        spark = messages.sparkSession
        offsets = offsets_of(files_of(spark, self.lake), self.checkpoint, batch)
        meta = {"stream": self.stream, "stream_created": self.stream_created, "offsets": offsets}
        tables = [Table(spark, self.lake, name) for name in _TABLES[self.table]]
        missing = [table for table in tables if not _is_there(table, batch, offsets)]
        if len(missing) > 1:
            messages = messages.persist()
        for table in missing:
            rows = _DECODERS[table.name](messages).withColumn("batch_id", F.lit(batch).cast("bigint"))
            stats = {"seq_min": F.min("seq"), "seq_max": F.max("seq")} if "seq" in rows.columns else {}
            table.commit(batch, rows, meta, stats=stats, keep_empty=False)
        if len(missing) > 1:
            messages.unpersist()


def _rows_of_the_ledger(messages: DataFrame) -> DataFrame:
    from parti.spark.ledger import ledger_rows  # noqa: PLC0415 - needs pyspark

    return ledger_rows(messages)


def _batches_of_the_ledger(messages: DataFrame) -> DataFrame:
    from parti.spark.ledger import ledger_batches  # noqa: PLC0415 - needs pyspark

    return ledger_batches(messages)


_TABLES: Mapping[str, tuple[str, ...]] = {"bronze": ("bronze",), "ledger": ("ledger_batches", "ledger")}
"""The tables that each query fills; the last one is the one that it is named after."""
_DECODERS: Mapping[str, Callable[[DataFrame], DataFrame]] = {
    "bronze": lambda messages: messages,
    "ledger": _rows_of_the_ledger,
    "ledger_batches": _batches_of_the_ledger,
}


def _is_there(table: Table, batch: int, offsets: Mapping[str, Any] | None) -> bool:
    """Whether a batch that is run again is in the table already, with the very same sequences.

    It is then kept: messages that were deleted from the stream meanwhile would be missing in a new one.
    """
    for commit in table.commits():
        if commit.first <= batch <= commit.last:
            return offsets is not None and (commit.first < commit.last or commit.meta.get("offsets") == offsets)
    return False


def offsets_of(files: LakeFiles, checkpoint: str, batch: int) -> dict[str, Any] | None:
    """From where to where a batch reads, by Spark's own log of it; None if it has another form than expected."""
    ends: list[Any] = []
    for number in (batch - 1, batch):
        try:
            lines = files.read(f"{checkpoint}/offsets/{number}").splitlines()
            ends.append(json.loads(lines[2]))
        except FileNotFoundError:
            ends.append(None)
        except (ValueError, IndexError):
            return None
    start, end = ends
    return None if end is None else {"start": start, "end": end}


# ── any query ─────────────────────────────────────────────────────────────────────────────────────────────────────


def start_query(
    messages: DataFrame,
    write: Callable[[DataFrame, int], None],
    checkpoint: str,
    name: str,
    *,
    every_s: float | None = None,
) -> StreamingQuery:
    """Start a query that hands each batch to a function."""
    writer = messages.writeStream.foreachBatch(partial(_write, write)).queryName(name)
    writer = writer.option("checkpointLocation", checkpoint)
    if every_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds").start()


def _write(write: Callable[[DataFrame, int], None], rows: DataFrame, batch: int) -> None:
    """Write a batch; one that is cut off, because its query is stopped, tells so in a few words.

    Spark 4.3 searches what a batch raises for signs of that, with a regular expression that runs out of stack over
    the traceback of Java in there; the thread of the query then dies with a thousand lines on stderr.
    """
    try:
        write(rows, batch)
    except Exception as error:
        if found := _CUT_OFF.search(str(error)):
            raise InterruptedError(f"batch {batch} was cut off: {found[0]}") from None
        raise


def follow(query: StreamingQuery, stop: threading.Event, report: Report = say_nothing) -> int:
    """Wait until a query ends, and tell of each batch; returns the rows that it took in.

    It is stopped in the middle of a batch when `stop` is set: what is not committed is done by the next run. Raises
    PipelineFailed, in one line, if the query fails.
    """
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415

    watched = Watched(query, report)
    try:
        while not query.awaitTermination(_POLL_S):
            watched.look()
            if stop.is_set():
                query.stop()
                break
        watched.look()
    except StreamingQueryException as error:
        raise failure(query.name or "query", error) from None
    return watched.rows


class Watched:
    """A query whose progress is told on."""

    def __init__(self, query: StreamingQuery, report: Report) -> None:
        self.rows = 0
        self._query = query
        self._report = report
        self._told = -1

    def look(self) -> None:
        """Tell of the batches that have ended since the last time."""
        from parti.spark.source import lag_of  # noqa: PLC0415 - needs pyspark

        newest = self._query.lastProgress
        if newest is None or newest.batchId <= self._told:
            return
        for progress in self._query.recentProgress:
            found = json.loads(progress.json)
            if found["batchId"] <= self._told:
                continue
            self._told = found["batchId"]
            rows = int(found["numInputRows"])
            self.rows += rows
            if rows:
                step = Step(self._query.name or "", self._told, rows, found["batchDuration"] / 1000, lag_of(found))
                self._report(step)


def failure(table: str, error: Exception) -> PipelineFailed:
    """What went wrong in a query, in one line: our own words if there are any, else the last that Spark says."""
    text = str(error)
    found = _OURS.findall(text) or _LAST.findall(text)
    why = found[-1].strip() if found else text.strip().splitlines()[0]
    return PipelineFailed(f"{table}: {why}")
