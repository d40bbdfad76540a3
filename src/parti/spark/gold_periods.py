"""Objectives and advice over periods, from the gold tables: sums in Spark, judgement in `parti.core.slo`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyspark.sql.functions as sf

from parti.core.slo import (
    REDELIVERY,
    UPDATES,
    Evaluation,
    advise_ack_wait,
    advise_max_ack_pending,
    advise_partitions,
    advise_workers,
    evaluate,
    evaluate_latency,
    quantile_bucket,
    upper_bound_s,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from parti.spark.gold_settings import GoldSettings

_SLO_COLUMNS = (
    "stream string, period bigint, slo string, objective string, target double, total bigint, bad bigint, "
    "value double, verdict string, limit_s double, budget_allowed double, budget_remaining double, "
    "burn_rate double, recent_burn_rate double"
)
_ADVICE_COLUMNS = (
    "stream string, period bigint, topic string, about string, setting string, value double, reason string"
)

_FINISHED, _REDELIVERED = -1, -2
"""Counted along with the buckets of latency, which begin at 0: one pass over the rows is enough."""


@dataclass(frozen=True, slots=True)
class PeriodSums:
    """What was counted over a period, and over its newest part; latencies in buckets, see `parti.core.slo`."""

    stream: str
    period: int
    finished: int
    redelivered: int
    latency: Mapping[int, int]
    recent: int
    recent_redelivered: int
    recent_latency: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Judged:
    """An objective over a period."""

    over: PeriodSums
    found: Evaluation
    limit_s: float | None = None
    """Handler latency above which a message counted as slow."""


def sum_periods(rows: DataFrame, last: int, options: GoldSettings) -> list[PeriodSums]:
    """Add up rows of `gold_stream`, with window numbers, by period; `last` is the newest window of all.

    The newest part of a period ends with it, or with `last`. Periods in which nothing was finished are left out.
    """
    per_period = options.windows_per_period
    newest = sf.least((sf.col("period") + 1) * per_period - 1, sf.lit(last))
    recent_windows = max(1, round(options.recent_s * 1e6) // options.window_us)
    counted = sf.create_map(sf.lit(_FINISHED), "finished", sf.lit(_REDELIVERED), "redelivered")
    placed = (
        rows.where("finished > 0")
        .withColumn("period", sf.expr(f"w div {per_period}"))
        .withColumn("recent", sf.col("w") > newest - recent_windows)
        .select("stream", "period", "recent", sf.explode(sf.map_concat("handler_buckets", counted)))
    )
    found: dict[tuple[str, int], dict[bool, Counter[int]]] = defaultdict(lambda: {True: Counter(), False: Counter()})
    for row in placed.groupBy("stream", "period", "recent", "key").agg(sf.sum("value")).collect():
        found[row[0], row[1]][row[2]][row[3]] = row[4]
    return [_period_sums(*place, found[place][True], found[place][False]) for place in sorted(found)]


def _period_sums(stream: str, period: int, recent: Counter[int], older: Counter[int]) -> PeriodSums:
    whole = recent + older
    latency, recent_latency = ({b: n for b, n in counts.items() if b >= 0} for counts in (whole, recent))
    return PeriodSums(
        stream,
        period,
        whole[_FINISHED],
        whole[_REDELIVERED],
        latency,
        recent[_FINISHED],
        recent[_REDELIVERED],
        recent_latency,
    )


def judge_periods(sums: Sequence[PeriodSums], options: GoldSettings) -> list[Judged]:
    """Judge every objective over these periods.

    Whether updates of consumers succeed stands in no table: that objective is there, and its verdict is unknown.
    """
    found = []
    for each in sums:
        slow, limit_s = evaluate_latency(each.latency, each.recent_latency, reference_p95_s=options.handler_p95_s)
        again = evaluate(REDELIVERY, each.finished, each.redelivered, recent=(each.recent, each.recent_redelivered))
        found += [Judged(each, slow, limit_s), Judged(each, again), Judged(each, evaluate(UPDATES, 0, 0))]
    return found


def slo_rows(spark: SparkSession, judged: Sequence[Judged]) -> DataFrame:
    """The judgements as rows of `gold_slo`."""
    return spark.createDataFrame([_slo_row(each.over, each.found, each.limit_s) for each in judged], _SLO_COLUMNS)


def _slo_row(over: PeriodSums, found: Evaluation, limit_s: float | None) -> tuple[Any, ...]:
    what = found.objective
    return (
        over.stream,
        over.period,
        what.name,
        what.sentence,
        what.target,
        found.total,
        found.bad,
        found.value,
        str(found.verdict),
        limit_s,
        found.allowed,
        found.remaining,
        found.burn_rate,
        found.recent_burn_rate,
    )


def advise(spark: SparkSession, over: Sequence[PeriodSums], partitions: DataFrame, workers: DataFrame) -> DataFrame:
    """Advice for one period, from its sums and the rows of `gold_partition` and `gold_worker` that lie in it."""
    busy_partitions, _ = _work(partitions, "partition")
    busy_workers, peaks = _work(workers, "worker")
    found = []
    for each in over:
        bucket = quantile_bucket(each.latency, 0.95)
        assert bucket is not None
        peak = peaks[each.stream]
        busiest = max(peak, key=lambda worker: (peak[worker], worker))
        p95_s = upper_bound_s(bucket)
        for piece in (
            advise_ack_wait(p95_s),
            advise_max_ack_pending(busiest, peak[busiest], p95_s),
            *advise_partitions(busy_partitions[each.stream]),
            *advise_workers(busy_workers[each.stream]),
        ):
            told = (piece.topic, piece.about, piece.setting, float(piece.value), piece.reason)
            found.append((each.stream, each.period, *told))
    return spark.createDataFrame(found, _ADVICE_COLUMNS)


def _work(rows: DataFrame, about: str) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Seconds in handlers, and the rate of the busiest window, by stream and partition or worker."""
    busy: dict[str, dict[str, float]] = defaultdict(dict)
    peaks: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows.where("finished > 0").groupBy("stream", about).agg(sf.sum("busy_s"), sf.max("rate")).collect():
        busy[row[0]][row[1]], peaks[row[0]][row[1]] = row[2], row[3]
    return busy, peaks


def no_advice(spark: SparkSession) -> DataFrame:
    """What `advise` gives where nothing was finished yet."""
    return spark.createDataFrame([], _ADVICE_COLUMNS)
