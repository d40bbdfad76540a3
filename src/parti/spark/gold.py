"""The gold tables: what the fleet did, window by window, how that stands to the objectives, and what to change.

    gold_stream, gold_partition, gold_key, gold_worker    one row for each window and stream, partition, ...
    gold_slo                                              one row for each period and objective
    gold_advice                                           advice from the newest period; replaced by every run

Made from the tables `ledger` and `bronze`. A run looks at their new commits only, finds the windows that these touch,
computes those anew and replaces them; lag is carried on from there. Invariant guarded here: what runs leave is what
one run over everything would leave, also when some were killed. The commit of `gold_advice` comes last and says how
far both tables were read, and whatever comes before it can be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyspark.sql.functions as sf

from parti.core.slo import LATENCY
from parti.errors import ConfigError
from parti.spark import gold_windows as windows
from parti.spark.gold_periods import Judged, advise, judge_periods, no_advice, slo_rows, sum_periods
from parti.spark.gold_settings import GoldSettings
from parti.spark.gold_tables import TABLES, GoldTables
from parti.spark.ledger import LEDGER_COLUMNS
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from parti.spark.commits import Commit
    from parti.spark.pipelines.settings import PipelineSettings

_BRONZE_COLUMNS = "stream string, seq bigint, subject string, timestamp timestamp"
_NOTHING_READ = -1
_BUCKETS = "handler_buckets"

__all__ = ["TABLES", "Summary", "run"]

Touched = Sequence[tuple[int, int]]
"""Ranges of window numbers, first and last."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did."""

    windows: int = 0
    """Windows that were computed anew."""
    ledger_rows: int = 0
    """New rows of the ledger."""
    messages: int = 0
    """New messages of bronze."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of each gold table afterwards."""
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """Verdict of each objective in the newest period."""
    advice: int = 0
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        if not self.windows:
            return f"nothing new ({self.elapsed_s:.1f} s)"
        told = ", ".join(f"{name} {verdict}" for name, verdict in self.verdicts.items())
        return (
            f"{self.windows:,} windows from {self.ledger_rows:,} new ledger rows and {self.messages:,} new messages; "
            f"{told}; {self.advice} pieces of advice ({self.elapsed_s:.1f} s)"
        )


def run(
    spark: SparkSession,
    settings: PipelineSettings,
    *,
    rebuild: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> Summary:
    """Bring the gold tables up to date; with `rebuild`, from nothing.

    `on_step` hears what is being done. Raises `ConfigError` for settings that do not fit, also those that differ from
    the ones that the tables were made with.
    """
    began_s = time.perf_counter()
    step = _Run(spark, GoldSettings.of(settings))
    if rebuild:
        step.gold.forget()
    news = step.look_for_news()
    if news is None:
        return Summary(elapsed_s=time.perf_counter() - began_s)
    on_step("finding the windows that changed")
    touched = step.find_touched(news)
    judged: Sequence[Judged] = ()
    count = sum(last - first + 1 for first, last in touched)
    if touched:
        on_step(f"computing {count:,} windows")
        step.write_windows(news, touched)
        on_step("judging objectives")
        judged = step.judge(touched)
    advice = step.finish(news, touched, judged)
    return Summary(
        windows=count,
        ledger_rows=sum(commit.rows for commit in news.new_ledger),
        messages=sum(commit.rows for commit in news.new_bronze),
        rows=step.gold.rows(),
        verdicts=_newest_verdicts(judged),
        advice=advice,
        elapsed_s=time.perf_counter() - began_s,
    )


def _newest_verdicts(judged: Sequence[Judged]) -> dict[str, str]:
    newest = max((each.over.period for each in judged), default=0)
    return {each.found.objective.name: str(each.found.verdict) for each in judged if each.over.period == newest}


@dataclass(frozen=True, slots=True)
class _News:
    """The commits of both tables as a run found them."""

    ledger: Sequence[Commit]
    bronze: Sequence[Commit]
    new_ledger: Sequence[Commit]
    new_bronze: Sequence[Commit]


@dataclass(frozen=True, slots=True)
class _Span:
    """The windows that a run writes: the touched ones, and those behind them, whose lag may differ."""

    first: int
    touched_last: int
    last: int


def _as_wide_as(rows: DataFrame) -> Column:
    """Condition that `seq` lies between the lowest and the highest of the rows: lets Parquet skip all other files."""
    low, high = rows.agg(sf.min("seq"), sf.max("seq")).collect()[0]
    return sf.lit(False) if low is None else sf.col("seq").between(low, high)


def _as_wide_as_noted(commits: Sequence[Commit]) -> Column | None:
    """The same from the notes of commits, without reading a row; None if one has none."""
    bounds = [commit.meta.get(name) for commit in commits for name in ("seq_min", "seq_max")]
    known = [bound for bound in bounds if bound is not None]
    return sf.col("seq").between(min(known), max(known)) if known and len(known) == len(bounds) else None


def _last(commits: Sequence[Commit]) -> int:
    return max((commit.last for commit in commits), default=_NOTHING_READ)


class _Run:
    def __init__(self, spark: SparkSession, options: GoldSettings) -> None:
        self.options = options
        self.gold = GoldTables(spark, options)
        self._spark = spark
        self._ledger = Table(spark, options.lake, "ledger")
        self._bronze = Table(spark, options.lake, "bronze")

    # ── what is new ───────────────────────────────────────────────────────────────────────────────────────────

    def look_for_news(self) -> _News | None:
        """The commits that no run has read yet; None if there are none."""
        notes = self.gold.notes
        if notes and (other := {k: notes[k] for k, v in self.options.meaning.items() if notes[k] != v}):
            said = ", ".join(f"{name} = {value}" for name, value in other.items())
            raise ConfigError(f"the gold tables were made with {said}; set that again, or rebuild them")
        read = notes.get("read", {})
        ledger, bronze = self._ledger.commits(), self._bronze.commits()
        news = _News(
            ledger,
            bronze,
            [c for c in ledger if c.last > read.get("ledger", _NOTHING_READ)],
            [c for c in bronze if c.last > read.get("bronze", _NOTHING_READ)],
        )
        return news if news.new_ledger or news.new_bronze else None

    def find_touched(self, news: _News) -> Touched:
        """The windows that the new commits change."""
        fresh, messages = self._ledger_of(news.new_ledger), self._messages_of(news.new_bronze)
        known = [commit for commit in news.ledger if commit not in news.new_ledger]
        near = None
        if known:
            between = _as_wide_as_noted([*news.new_ledger, *news.new_bronze])
            if between is None:
                between = _as_wide_as(fresh.select("seq").unionByName(messages.select("seq")))
            near = self._ledger_of(known).where(between)
        touched = windows.touched_windows(near, fresh, messages, self.options.window_us)
        return windows.ranges_of(row["w"] for row in touched.collect())

    def _ledger_of(self, commits: Sequence[Commit]) -> DataFrame:
        return self._read(self._ledger, commits, LEDGER_COLUMNS)

    def _messages_of(self, commits: Sequence[Commit]) -> DataFrame:
        bronze = self._read(self._bronze, commits, _BRONZE_COLUMNS)
        return windows.messages_of(bronze, self.options.template, self.options.window_us, sample=self.options.sample)

    def _read(self, table: Table, commits: Sequence[Commit], columns: str) -> DataFrame:
        return table.read(commits) if commits else self._spark.createDataFrame([], columns)

    # ── windows ───────────────────────────────────────────────────────────────────────────────────────────────

    def write_windows(self, news: _News, touched: Touched) -> None:
        """Compute the touched windows, carry the lag on, and replace what stood there."""
        options = self.options
        span = self._span(touched)
        marked = windows.within(touched)
        handled, messages = self._handled(news, span, marked)
        state = self._state(windows.flows(handled, messages, marked), span, marked)
        fresh = windows.measures(windows.placed(handled, options.keys), options.window_us, sample=options.sample)
        fresh = fresh.join(_buckets(handled), ["stream", "w", "table"], "left")
        for name in windows.ABOUT:
            if (kept := self._kept(name, span, marked, "finished > 0")) is not None:
                fresh = fresh.unionByName(
                    windows.from_table(kept.drop(*windows.STATE), name), allowMissingColumns=True
                )
        whole = windows.join_state(fresh, windows.placed(state, options.keys)).persist()
        for name in windows.ABOUT:
            rows = windows.to_table(whole, name)
            self.gold.replace(name, rows if name == "gold_stream" else rows.drop(_BUCKETS), span.first, span.last)
        whole.unpersist()
        handled.unpersist()

    def _span(self, touched: Touched) -> _Span:
        first, last = touched[0][0], touched[-1][1]
        return _Span(first, last, max(last, self.gold.notes.get("last_window", last)))

    def _handled(self, news: _News, span: _Span, marked: Column) -> tuple[DataFrame, DataFrame]:
        """The handled rows of the touched windows, and the messages stored in that time."""
        window_us = self.options.window_us
        ledger, messages = self._ledger_of(news.ledger), self._messages_of(news.bronze)
        first, end = (sf.timestamp_micros(sf.lit(w * window_us)) for w in (span.first, span.touched_last + 1))
        within = ledger.where((sf.col("finished") >= first) & (sf.col("finished") < end))
        between = _as_wide_as(within)
        handled = windows.handled_rows(ledger.where(between), messages.where(between), marked, window_us)
        return handled.persist(), messages.where((sf.col("timestamp") >= first) & (sf.col("timestamp") < end))

    def _state(self, flow: DataFrame, span: _Span, marked: Column) -> DataFrame:
        """Published, settled and lag of each partition, from the earliest touched window on."""
        if (kept := self._kept("gold_partition", span, marked, "published + settled > 0")) is not None:
            flow = flow.unionByName(kept.select(*flow.columns))
        stood = self.gold.stood("gold_partition", span.first - 1, span.first - 1)
        before = stood.select("stream", "w", "partition", "lag") if stood else None
        return windows.lags(flow, before, span.last, sample=self.options.sample)

    def _kept(self, name: str, span: _Span, marked: Column, condition: str) -> DataFrame | None:
        """Rows of a table whose windows come after the earliest touched one, but are not touched themselves."""
        stood = self.gold.stood(name, span.first, span.last)
        return None if stood is None else stood.where(condition).where(~marked)

    # ── periods ───────────────────────────────────────────────────────────────────────────────────────────────

    def judge(self, touched: Touched) -> Sequence[Judged]:
        """Judge every period from the earliest touched one on, and write that down."""
        per_period = self.options.windows_per_period
        span = self._span(touched)
        rows = self.gold.stood("gold_stream", span.first // per_period * per_period, span.last)
        assert rows is not None
        judged = judge_periods(sum_periods(rows, span.last, self.options), self.options)
        first, last = span.first // per_period, span.last // per_period
        self.gold.replace("gold_slo", slo_rows(self._spark, judged), first, last, "period")
        return judged

    def finish(self, news: _News, touched: Touched, judged: Sequence[Judged]) -> int:
        """Write the advice, and with it how far the run has read; returns how many pieces there are."""
        notes = {
            **self.options.meaning,
            "read": {"ledger": _last(news.ledger), "bronze": _last(news.bronze)},
            "last_window": self._span(touched).last if touched else self.gold.notes.get("last_window", 0),
        }
        return self.gold.write_advice(self._advice(judged), notes)

    def _advice(self, judged: Sequence[Judged]) -> DataFrame:
        if not judged:
            stood = self.gold.advice()
            return no_advice(self._spark) if stood is None else stood
        per_period = self.options.windows_per_period
        newest = max(each.over.period for each in judged)
        over = [each.over for each in judged if each.over.period == newest and each.found.objective is LATENCY]
        first, last = newest * per_period, (newest + 1) * per_period - 1
        partitions, workers = (self.gold.stood(name, first, last) for name in ("gold_partition", "gold_worker"))
        assert partitions is not None
        assert workers is not None
        return advise(self._spark, over, partitions, workers)


def _buckets(handled: DataFrame) -> DataFrame:
    return windows.latency_buckets(handled).withColumn("table", sf.lit("gold_stream"))
