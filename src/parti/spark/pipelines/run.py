"""A run of the pipeline: everything is checked first, then Spark is started, then each table takes in what is new."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from parti.config import Settings
from parti.errors import ConfigError, PartiError
from parti.jetstream.target import Target
from parti.model.ledger import ledger_stream
from parti.spark.gold_settings import GoldSettings
from parti.spark.interruption import UntilAsked, interrupted_by
from parti.spark.pipelines import bronze, silver
from parti.spark.pipelines.bronze import Ingest
from parti.spark.pipelines.compaction import compact_lake
from parti.spark.pipelines.locks import LakeLock, compacting, writing
from parti.spark.pipelines.progress import Report, Step, say_nothing
from parti.spark.pipelines.settings import PipelineSettings
from parti.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from parti.spark.pipelines.compaction import Compacted

Stage: TypeAlias = Literal["bronze", "ledger", "silver", "gold"]
STAGES: tuple[Stage, ...] = ("bronze", "ledger", "silver", "gold")
Say: TypeAlias = Callable[[str], None]
_LOCAL = re.compile(r"local(?:\[(\d+|\*)\])?")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do; it exists only if the settings, the server and the streams are all right."""

    settings: PipelineSettings
    stages: tuple[Stage, ...]
    ingests: tuple[Ingest, ...]


def make_plan(settings: PipelineSettings, own: Settings, stages: Sequence[Stage]) -> Plan:
    """Check everything that can be checked before Spark is started.

    Raises ConfigError, StreamNotFound, ConnectionFailed and the like, in one line.
    """
    wanted = list(stages)
    if "silver" in wanted and not settings.columns:
        raise silver.no_schema()
    if "gold" in wanted:
        GoldSettings.of(settings)
    ingests = []
    if "bronze" in wanted or "ledger" in wanted:
        target = Target.of(own)
        target.check()
        if "bronze" in wanted:
            ingests.append(Ingest(settings, target, bronze.look_at(target, settings.stream, settings)))
        if "ledger" in wanted:
            ingests.append(Ingest(settings, target, bronze.look_at(target, ledger_of(settings, own)), "ledger"))
    return Plan(settings, tuple(stage for stage in STAGES if stage in wanted), tuple(ingests))


def all_stages(settings: PipelineSettings, own: Settings) -> tuple[Stage, ...]:
    """What `all` means: silver if there is a schema, the ledger and gold, which needs it, if there is a ledger."""
    with_ledger = settings.ledger if settings.ledger is not None else getattr(own, "ledger", "off") != "off"
    wanted: dict[Stage, bool] = {
        "bronze": True,
        "ledger": with_ledger,
        "silver": bool(settings.columns),
        "gold": with_ledger,
    }
    return tuple(stage for stage in STAGES if wanted[stage])


def ledger_of(settings: PipelineSettings, own: Settings) -> str:
    """The name of the ledger stream."""
    return settings.ledger_stream or getattr(own, "ledger_stream", None) or ledger_stream(settings.stream)


def run(
    plan: Plan,
    *,
    master: str | None = None,
    every_s: float | None = None,
    stop: threading.Event | None = None,
    report: Report = say_nothing,
    say: Say = lambda text: None,
) -> bool:
    """Run the stages of a plan once, or, with `every_s`, again and again until `stop` is set.

    `stop` ends either, in the middle of a batch: what is not committed is done by the next run. Returns whether it
    came to its end before that. Raises ConfigError if the lake does not fit or somebody else writes to it,
    PipelineFailed if a step fails later.
    """
    asked = stop or threading.Event()
    with UntilAsked(asked), writing(plan.settings.lake, plan.stages) as lock:
        say("starting Spark")
        with open_session("parti-pipeline", master) as spark, interrupted_by(asked, spark) as silent:
            for ingest in plan.ingests:
                ingest.prepare(spark)
            runner = _Runner(spark, plan, lock, silent, report, say)
            if every_s is None:
                runner.once()
            else:
                runner.for_ever(every_s)
            return not silent.is_set()
    return False


def compact(
    settings: PipelineSettings,
    *,
    master: str | None = None,
    stop: threading.Event | None = None,
    say: Say = lambda text: None,
) -> list[Compacted]:
    """Compact the lake of the settings; raises ConfigError if somebody is at work on it.

    When `stop` is set, it raises InterruptedError before the next table, or what Spark raises in the middle of one.
    """
    asked = stop or threading.Event()
    with compacting(settings.lake):
        say("starting Spark")
        with open_session("parti-pipeline", master) as spark, interrupted_by(asked, spark):
            return compact_lake(spark, settings.lake, settings.target_bytes, stop=asked)


class _Runner:
    """The stages of one run, in a session."""

    def __init__(
        self, spark: SparkSession, plan: Plan, lock: LakeLock, stop: threading.Event, report: Report, say: Say
    ) -> None:
        self._spark = spark
        self._plan = plan
        self._lock = lock
        self._stop = stop
        self._report = report
        self._say = say

    def once(self) -> None:
        for ingest in self._plan.ingests:
            if self._stop.is_set():
                return
            self._say(f"{ingest.table}: reading stream {ingest.state.name}")
            bronze.follow(ingest.start(self._spark), self._stop, self._report)
        self._refine()

    def for_ever(self, every_s: float) -> None:
        """Queries take in what comes; the stages behind them follow at the same pace."""
        queries = [ingest.start(self._spark, every_s=every_s) for ingest in self._plan.ingests]
        try:
            watched = [bronze.Watched(query, self._report) for query in queries]
            while not self._stop.is_set():
                began_s = time.monotonic()
                for query, one in zip(queries, watched, strict=True):
                    one.look()
                    _check(query)
                self._refine()
                self._compact()
                self._wait(queries, watched, began_s + every_s)
        finally:
            for query in queries:
                query.stop()

    def _wait(self, queries: Sequence[StreamingQuery], watched: Sequence[bronze.Watched], until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0 and not self._stop.wait(min(1.0, left_s)):
            for query, one in zip(queries, watched, strict=True):
                one.look()
                _check(query)

    def _refine(self) -> None:
        steps: dict[Stage, Callable[[], object]] = {"silver": self._silver, "gold": self._gold}
        for stage, step in steps.items():
            if stage not in self._plan.stages or self._stop.is_set():
                continue
            try:
                step()
            except PartiError:
                raise
            except Exception as error:
                raise bronze.failure(stage, error) from error

    def _silver(self) -> None:
        silver.run(self._spark, self._plan.settings, self._report)

    def _gold(self) -> None:
        from parti.spark import gold  # noqa: PLC0415 - imports pyspark

        done = gold.run(self._spark, self._plan.settings, on_step=lambda text: self._say(f"gold: {text}"))
        if done.windows:
            counts = {"windows": done.windows, "advice": done.advice}
            self._report(Step("gold", done.windows, done.ledger_rows + done.messages, done.elapsed_s, 0, counts))

    def _compact(self) -> None:
        settings = self._plan.settings
        if not settings.compact_after:
            return
        with self._lock.alone() as alone:
            if alone:
                after, target = settings.compact_after, settings.target_bytes
                for done in compact_lake(self._spark, settings.lake, target, after=after, recover=False):
                    self._say(f"{done.table}: {done.before} commits became {done.after}")


def _check(query: StreamingQuery) -> None:
    """Raise what ended a query."""
    if (error := query.exception()) is not None:
        raise bronze.failure(query.name or "query", error)
    if not query.isActive:
        raise ConfigError(f"{query.name} was stopped from outside; start the pipeline again")
