"""Verdicts: from the marked rows of `audit_checks` to violations by the names of `parti.core.invariants`.

Works on the few rows that are of interest, so it may join and sort as it likes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import pyspark.sql.functions as sf
from pyspark.sql import Window

from parti.core.invariants import Invariant
from parti.spark.audit_checks import FINISHED, NEVER_US, STORED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EXCUSED: Final = "Excused"
"""Stands where an invariant does: a message was started again, and the crash of a process is a good reason."""
_REPORT = ("invariant", "seq", "at_us", "other_process", "other_seq", "detail")
_ALWAYS_US = NEVER_US // 4


def microseconds(seconds: float) -> int:
    """A length of time; infinity becomes one that is longer than any other and still fits."""
    return _ALWAYS_US if math.isinf(seconds) else round(seconds * 1_000_000)


def judge(marked: DataFrame, end_us: int, unstored_s: float, *, skew_us: int = 0, carried: bool = False) -> DataFrame:
    """One row for each violation, and for each repeat that is excused.

    Columns: invariant, partition, seq, at_us, worker, process, fence, other_process, other_seq, consequence, detail,
    key, cause. A `consequence` follows from another violation that is listed as well: one message that many overtake
    is out of order once, and what starts after a lost one is told by the loss. `end_us` is when what is lost counts
    as lost. `marked` has a column `lost`; see `mark_lost`.
    """
    rows = _remember(marked, microseconds(unstored_s), skew_us)
    reports = [_lost(end_us), _stale(), _at_once(), _early(), _late(), _repeated()]
    found = rows.select(
        *("partition", "place", "worker", "process", "fence"),
        sf.explode(sf.array_compact(sf.array(*reports))).alias("report"),
    ).select("partition", "place", "worker", "process", "fence", "report.*")
    if carried:
        found = found.unionByName(_repeated_settled(marked))
    return _name(_find_consequences(found))


def mark_lost(marked: DataFrame, positions: DataFrame | None) -> DataFrame:
    """Add position and lost: stored, not finished and below the position. Without positions nothing may be left."""
    if positions is None:
        return marked.withColumns({"position": sf.lit(None).cast("bigint"), "lost": sf.col("kind") == STORED})
    known = positions.groupBy("partition").agg(sf.max("position").alias("position"))
    lost = (sf.col("kind") == STORED) & (sf.col("seq") < sf.coalesce("position", sf.lit(0)))
    return marked.join(known, "partition", "left").withColumn("lost", lost)


def leave_out_reported(found: DataFrame, reported: DataFrame) -> DataFrame:
    """What is new; what has a cause that was reported before is a consequence. `reported` has key and cause."""
    causes = reported.where("cause IS NOT NULL").select("cause", sf.lit(True).alias("seen")).distinct()
    found = found.join(reported.select("key"), "key", "left_anti").join(causes, "cause", "left")
    return found.withColumn("consequence", sf.col("consequence") | sf.coalesce("seen", sf.lit(False))).drop("seen")


# ── one report for each thing that may be wrong with a row ────────────────────────────────────────────────────────


def _report(
    when: Column,
    invariant: Column | Invariant,
    detail: Column,
    *,
    at_us: Column | None = None,
    other_process: Column | None = None,
    other_seq: Column | None = None,
) -> Column:
    name = sf.lit(invariant.value) if isinstance(invariant, Invariant) else invariant
    nothing = sf.lit(None)
    values = (
        name,
        sf.col("seq"),
        sf.col("started_us") if at_us is None else at_us,
        (nothing if other_process is None else other_process).cast("string"),
        (nothing if other_seq is None else other_seq).cast("bigint"),
        detail,
    )
    made = sf.struct(*(value.alias(key) for key, value in zip(_REPORT, values, strict=True)))
    return sf.when(when, made)


def _lost(end_us: int) -> Column:
    where = sf.concat(sf.lit("; the position is "), sf.col("position").cast("string"))
    detail = sf.concat(sf.lit("stored and never finished"), sf.coalesce(where, sf.lit("")))
    return _report(sf.col("lost"), Invariant.NO_LOSS, detail, at_us=sf.lit(end_us), other_seq=sf.col("seq"))


def _stale() -> Column:
    # One that was seen before is a stale owner that goes on; a new one was given a token that is none.
    name = sf.when(sf.col("known"), Invariant.ONE_OWNER.value).otherwise(Invariant.EPOCH_GROWS.value)
    newest = sf.col("newest.process")
    detail = sf.format_string(
        *("%s (%s) started with fence %d after %s had started with fence %d", "process", "worker", "fence"),
        *(newest, sf.col("newest.fence")),
    )
    return _report(sf.col("stale"), name, detail, other_process=newest)


def _at_once() -> Column:
    other, seq = sf.col("running.process"), sf.col("running.seq")
    detail = sf.format_string("started by %s while %s was still handling message %d", "process", other, seq)
    return _report(sf.col("at_once"), Invariant.ONE_OWNER, detail, other_process=other, other_seq=seq)


def _early() -> Column:
    overtaken = sf.col("overtaken")
    detail = sf.format_string("started by %s before message %d was finished", "process", overtaken)
    return _report(overtaken.isNotNull(), Invariant.ORDER, detail, other_seq=overtaken)


def _late() -> Column:
    detail = sf.format_string("started by %s after a later message of the same holding", "process")
    return _report(sf.col("went_back"), Invariant.ORDER, detail, other_seq=sf.col("seq"))


def _repeated() -> Column:
    return _repeat(sf.col("done").isNotNull(), sf.coalesce("told", "done"), sf.col("told").isNull())


def _repeat(when: Column, done: Column, excused: Column) -> Column:
    name = (
        sf.when(excused, EXCUSED)
        .when(done.in_trouble, Invariant.BOUNDED_REPEAT_ON_CRASH.value)
        .otherwise(Invariant.NO_REPEAT_ON_PLANNED_MOVE.value)
    )
    at = sf.date_format(sf.timestamp_micros(done.finished_us), "HH:mm:ss.SSS")
    detail = sf.format_string("started again by %s, although %s finished it at %s", "process", done.process, at)
    return _report(when, name, detail, other_process=done.process)


def _remember(marked: DataFrame, late_us: int, skew_us: int) -> DataFrame:
    """Add done, the last finish of the same message before each start, and told: the last one that is no excuse."""
    at_us, place = sf.col("started_us") + skew_us, sf.col("place")
    finish = sf.struct("finished_us", "place", "process", "died_us", "lapses")
    several = (sf.col("kind") == FINISHED) & (sf.col("copies") > 1)
    finishes = sf.collect_list(sf.when(several, finish)).over(Window.partitionBy("partition", "seq"))

    def before(other: Column) -> Column:
        return (other.place < place) & (other.finished_us <= at_us)

    def excused(other: Column) -> Column:
        died = (other.died_us <= at_us) & (other.finished_us >= other.died_us - late_us)
        lapsed = sf.exists(
            other.lapses,
            lambda lapse: (
                (lapse.from_us <= at_us)
                & (lapse.from_us - late_us <= other.finished_us)
                & (other.finished_us <= sf.least(lapse.until_us, sf.lit(_ALWAYS_US)) + late_us)
            ),
        )
        return sf.coalesce(died, sf.lit(False)) | sf.coalesce(lapsed, sf.lit(False))

    def last(found: Column) -> Column:
        return sf.array_max(
            sf.transform(
                found,
                lambda other: sf.struct(
                    other.finished_us.alias("finished_us"),
                    other.place.alias("place"),
                    other.process.alias("process"),
                    _in_trouble(other.died_us, other.lapses, at_us).alias("in_trouble"),
                ),
            )
        )

    rows = marked.withColumn("finishes", finishes).withColumn("finishes", sf.filter("finishes", before))
    untold = sf.filter("finishes", lambda other: ~excused(other))
    return rows.withColumns({"done": last(sf.col("finishes")), "told": last(untold)}).drop("finishes")


def _in_trouble(died_us: Column, lapses: Column, at_us: Column) -> Column:
    lapsed = sf.exists(lapses, lambda lapse: lapse.from_us <= at_us)
    return sf.coalesce(died_us <= at_us, sf.lit(False)) | sf.coalesce(lapsed, sf.lit(False))


def _repeated_settled(marked: DataFrame) -> DataFrame:
    """Starts of messages that were finished before the part of the history that this audit has in full."""
    settled = marked.where(sf.col("last_of_holding") & (sf.col("settled_messages") > 0)).selectExpr(
        *("partition", "process AS by", "settled_first_seq AS low", "settled_seq AS high"),
        *("settled_until_us AS done_us", "died_us AS by_died_us", "lapses AS by_lapses"),
    )
    rows = marked.where(
        (sf.col("kind") == FINISHED) & sf.col("unknown") & (sf.col("seq") <= sf.col("settled_before"))
    )
    rows = rows.join(settled, "partition").where("seq BETWEEN low AND high AND done_us <= started_us")
    newest = sf.row_number().over(Window.partitionBy("partition", "place").orderBy(sf.desc("done_us")))
    in_trouble = _in_trouble(sf.col("by_died_us"), sf.col("by_lapses"), sf.col("started_us"))
    done = {"finished_us": sf.col("done_us"), "process": sf.col("by"), "in_trouble": in_trouble}
    rows = rows.withColumn("done", sf.struct(*(value.alias(key) for key, value in done.items())))
    report = _repeat(sf.lit(True), sf.col("done"), sf.lit(False))
    return (
        rows.withColumn("nth", newest)
        .where("nth = 1")
        .select("partition", "place", "worker", "process", "fence", report.alias("report"))
        .select("partition", "place", "worker", "process", "fence", "report.*")
    )


# ── what belongs together ─────────────────────────────────────────────────────────────────────────────────────────


def _find_consequences(found: DataFrame) -> DataFrame:
    about = Window.partitionBy("partition", "other_seq")
    out_of_order = sf.col("invariant") == Invariant.ORDER.value
    lost = sf.max(sf.col("invariant") == Invariant.NO_LOSS.value).over(about)
    nth = sf.count(sf.when(out_of_order, 1)).over(
        about.orderBy("place", "seq").rowsBetween(Window.unboundedPreceding, 0)
    )
    return found.withColumn("consequence", out_of_order & (lost | (nth > 1)))


def _name(found: DataFrame) -> DataFrame:
    # What is lost has no process, and no moment of its own.
    moment = sf.when(sf.col("process").isNotNull(), sf.col("at_us"))
    cause = sf.concat_ws("|", "invariant", "partition", "other_seq")
    return found.withColumns(
        {
            "key": sf.concat_ws("|", "invariant", "partition", "seq", "process", moment),
            "cause": sf.when(sf.col("invariant") == Invariant.ORDER.value, cause),
        }
    ).drop("place")
