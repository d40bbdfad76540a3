"""Silver: what bronze holds, parsed by the declared schema, with keys, without what is broken, late or there twice.

Each commit of silver covers a range of bronze batches and names it in its meta; that is all there is to know where it
stopped. What is not fit for silver goes to the quarantine table with the reason, in a commit of the same range that
is written first: until silver's own commit is there, the range counts as not done and is done again.

Reasons: `malformed` (no JSON object), `type` (a value is not of the declared type), `missing` (a required column),
`subject` (does not fit the template), `future` (later than its arrival allows), `late` (older than the watermark).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parti.errors import ConfigError
from parti.spark.commits import Commit, plan_reading
from parti.spark.pipelines.progress import Report, Step, say_nothing
from parti.spark.pipelines.settings import CORRUPT, PipelineSettings
from parti.spark.pipelines.watermark import later, watermark, watermarks
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

REASONS = ("malformed", "type", "missing", "subject", "future", "late")
_WHITE = " \t\r\n"
_FEW = 20
"""Batches whose watermarks are written into the query; for more of them a join is cheaper."""
_OWN = ("stream", "seq", "subject", "timestamp", "event_time", "batch_id")


def run(spark: SparkSession, settings: PipelineSettings, report: Report = say_nothing) -> int:
    """Work on every commit of bronze that silver has not covered yet; returns the rows read.

    Raises ConfigError before anything is written if no schema is declared or it does not fit the table.
    """
    if not settings.columns:
        raise no_schema()
    bronze, silver, quarantine = (Table(spark, settings.lake, name) for name in ("bronze", "silver", "quarantine"))
    for table in (silver, quarantine):
        table.recover()
    done = consumed(silver, "bronze")
    quarantine.withdraw(after=done)
    groups = plan_reading(bronze.commits(), done, settings.silver_rows)
    waiting = sum(commit.rows for group in groups for commit in group)
    total = waiting
    for group in groups:
        started_s = time.monotonic()
        commit = _refine(bronze, silver, quarantine, group, settings)
        read = sum(c.rows for c in group)
        waiting -= read
        report(Step("silver", commit.last, read, time.monotonic() - started_s, waiting, commit.meta["counts"]))
    return total


def consumed(table: Table, source: str) -> int:
    """The last batch of another table that this one covers; -1 if none."""
    found = [c.meta["source"] for c in table.commits() if c.meta.get("source", {}).get("table") == source]
    return max((int(entry["last"]) for entry in found), default=-1)


def no_schema() -> ConfigError:
    """The error for silver without a schema."""
    return ConfigError(
        'silver needs the columns of the payload; add a table [pipeline.schema] with lines like lot = "string not '
        "null\" to parti.toml, or run 'parti pipeline run bronze' only"
    )


def _refine(
    bronze: Table, silver: Table, quarantine: Table, group: Sequence[Commit], settings: PipelineSettings
) -> Commit:
    from pyspark import StorageLevel  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    span = group[0].first, group[-1].last
    earlier = [commit for commit in silver.commits() if commit.last < span[0]]
    # Parsing is what costs; three passes follow.
    judged = judge(_new_rows(bronze.read(group), silver, earlier, group), settings).persist(
        StorageLevel.MEMORY_AND_DISK
    )
    try:
        ages = _ages(judged)
        before: int | None = None
        for commit in earlier:
            before = later(before, commit.meta.get("event_time_us_max"))
        marks = watermarks({batch: age.newest_us for batch, age in ages.items()}, before, settings.lateness_us)
        dated = _date(judged, marks)
        quarantined = None
        if any(age.has_bad_ones(marks[batch]) for batch, age in ages.items()):
            bad = dated.where(F.col("reason").isNotNull()).select(*_OWN, "payload", "reason", "detail")
            reasons = {name: F.count_if(F.col("reason") == name) for name in REASONS}
            quarantined = quarantine.commit(span, bad, stats=reasons)
        good = dated.where(F.col("reason").isNull())
        if settings.dedup:
            good = _first_ones(good, silver, earlier, marks, settings)
        newest_us: int | None = None
        for age in ages.values():
            newest_us = later(newest_us, age.newest_us)
        refused = {name: int(quarantined.meta[name] or 0) if quarantined else 0 for name in REASONS}
        meta = {
            "source": {"table": "bronze", "first": span[0], "last": span[1]},
            # Of all events, those that are dropped as repeats too: what is late must not depend on the grouping.
            "event_time_us_max": newest_us,
            "watermark_us": watermark(later(before, newest_us), settings.lateness_us),
            "counts": {"read": sum(commit.rows for commit in group), **refused},
        }
        wanted = [*_OWN, *settings.keys, *(column.name for column in settings.columns)]
        stats = {"seq_min": F.min("seq"), "seq_max": F.max("seq")}
        done = silver.commit(span, good.select(*(F.col(f"`{name}`") for name in wanted)), meta, stats=stats)
    finally:
        judged.unpersist()
    assert done is not None
    return done


@dataclass(frozen=True, slots=True)
class _Age:
    """The rows of a batch: how many are broken, and the oldest and newest event of the others."""

    broken: int
    oldest_us: int | None
    newest_us: int | None

    def has_bad_ones(self, watermark_us: int | None) -> bool:
        """Whether a row is broken or late."""
        late = watermark_us is not None and self.oldest_us is not None and self.oldest_us < watermark_us
        return self.broken > 0 or late


def _ages(judged: DataFrame) -> dict[int, _Age]:
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    event_us = F.when(F.col("reason").isNull(), F.col("event_us"))
    broken = F.count_if(F.col("reason").isNotNull())
    found = judged.groupBy("batch_id").agg(
        broken.alias("n"), F.min(event_us).alias("old"), F.max(event_us).alias("new")
    )
    return {row["batch_id"]: _Age(row["n"], row["old"], row["new"]) for row in found.collect()}


def _newest(commit: Commit) -> float:
    newest = commit.meta.get("event_time_us_max")
    return -math.inf if newest is None else float(newest)


def _new_rows(rows: DataFrame, silver: Table, earlier: Sequence[Commit], group: Sequence[Commit]) -> DataFrame:
    """The rows, each message once, as it came first, without those that silver has already."""
    from pyspark.sql import Window  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    key = ["stream", "subject", "seq"]
    # Not dropDuplicates: which of two rows it keeps is chance, and their batches decide what is late.
    number = F.row_number().over(Window.partitionBy(*key).orderBy("batch_id"))
    rows = rows.withColumn("_number", number).where("_number = 1").drop("_number")
    first = min((c.meta["seq_min"] for c in group if c.meta.get("seq_min") is not None), default=None)
    # Sequences grow, so in a lake that was filled from one stream there is nothing to compare with.
    close = [c for c in earlier if first is None or (c.meta.get("seq_max") or 0) >= first]
    return rows.join(silver.read(close).select(*key), key, "left_anti") if close else rows


# ── judging rows ──────────────────────────────────────────────────────────────────────────────────────────────────


def judge(rows: DataFrame, settings: PipelineSettings) -> DataFrame:
    """Parse each row and say what is wrong with it, if anything, apart from being late.

    Adds the declared columns, the keys, `event_time`, `event_us`, `reason` and `detail`. All of it is done by native
    expressions of Spark.
    """
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    schema = ", ".join([*(column.ddl for column in settings.columns), f"`{CORRUPT}` string"])
    options = {
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": CORRUPT,
        "timeZone": "UTC",
        "allowSingleQuotes": "false",
    }
    text = F.trim(F.col("payload").cast("string"), F.lit(_WHITE))
    parsed = rows.withColumn("_text", text).withColumn("_event", F.from_json("_text", schema, options))
    if settings.template:
        from parti.spark.keys import with_keys  # noqa: PLC0415 - needs pyspark

        parsed = with_keys(parsed, settings.template)
    event_time = F.col(f"_event.`{settings.event_time}`") if settings.event_time else F.col("timestamp")
    parsed = parsed.withColumn("_reason", _reason(settings)).withColumn(
        "_event_time", F.when(F.col("_reason").isNull() | (F.col("_reason.code") == "subject"), event_time)
    )
    event_us = F.unix_micros("_event_time")
    ahead = event_us > F.unix_micros("timestamp") + F.lit(settings.ahead_us)
    fields = [F.col(f"_event.`{column.name}`").alias(column.name) for column in settings.columns]
    return parsed.select(
        *("stream", "seq", "subject", "timestamp", "batch_id", "payload"),
        *settings.keys,
        *fields,
        F.col("_event_time").alias("event_time"),
        event_us.alias("event_us"),
        F.coalesce(F.col("_reason.code"), F.when(ahead, F.lit("future"))).alias("reason"),
        F.col("_reason.detail").alias("detail"),
    )


def _reason(settings: PipelineSettings) -> Column:
    """Why a row is not fit, as code and detail; null if it is."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    def because(code: str, detail: Column | None = None) -> Column:
        text = detail if detail is not None else F.lit(None).cast("string")
        return F.struct(F.lit(code).alias("code"), text.alias("detail"))

    text, corrupt = F.coalesce("_text", F.lit("")), F.col(f"_event.`{CORRUPT}`")
    whole = text.startswith("{") & text.endswith("}") & F.is_valid_utf8(text)
    # Spark says only that something did not fit. Whether it is JSON at all, and which value, is looked for in those.
    unreadable = corrupt.isNotNull() & F.try_parse_json(text).isNull()
    wrong, missing = [], []
    for column in settings.columns:
        absent = F.col(f"_event.`{column.name}`").isNull()
        given = F.get_json_object(text, f"$['{column.name}']").isNotNull()
        wrong.append(F.when(absent & given, F.lit(column.name)))
        if column.required:
            missing.append(F.when(absent, F.lit(column.name)))
    reason = F.when(~whole | unreadable, because("malformed"))
    reason = reason.when(corrupt.isNotNull(), because("type", F.concat_ws(", ", *wrong)))
    if missing:
        names = F.concat_ws(", ", *missing)
        reason = reason.when(names != "", because("missing", names))
    if settings.keys:
        unknown = F.lit(False)
        for key in settings.keys:
            unknown = unknown | F.col(key).isNull()
        reason = reason.when(unknown, because("subject"))
    return reason


def _date(judged: DataFrame, marks: dict[int, int | None]) -> DataFrame:
    """Add the watermark of each row's batch, and the reason `late` where the row is older."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    late = F.when(F.col("event_us") < F.col("watermark_us"), F.lit("late"))
    if len(marks) <= _FEW:
        mark = F.lit(None).cast("bigint")
        for batch, us in marks.items():
            mark = F.when(F.col("batch_id") == batch, F.lit(us).cast("bigint")).otherwise(mark)
        dated = judged.withColumn("watermark_us", mark)
    else:
        table = judged.sparkSession.createDataFrame(list(marks.items()), "batch_id bigint, watermark_us bigint")
        dated = judged.join(F.broadcast(table), "batch_id", "left")
    return dated.withColumn("reason", F.coalesce("reason", late))


def _first_ones(
    good: DataFrame,
    silver: Table,
    earlier: Sequence[Commit],
    marks: dict[int, int | None],
    settings: PipelineSettings,
) -> DataFrame:
    """The rows whose business key was not seen before in an event that is not older than the watermark."""
    from pyspark.sql import Window  # noqa: PLC0415
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    key = list(settings.dedup)
    before = Window.partitionBy(*key).orderBy("seq", "stream", "subject").rowsBetween(Window.unboundedPreceding, -1)
    seen = F.max("event_us").over(before)
    oldest = min((us for us in marks.values() if us is not None), default=None)
    rows = good.withColumn("_seen", seen)
    near = [c for c in earlier if oldest is not None and _newest(c) >= oldest]
    if oldest is not None and near:
        past = silver.read(near).withColumn("_us", F.unix_micros("event_time")).where(F.col("_us") >= oldest)
        past = past.groupBy(*key).agg(F.max("_us").alias("_past"))
        rows = rows.join(past, key, "left").withColumn("_seen", F.greatest("_seen", "_past"))
    repeated = F.col("_seen").isNotNull() & (
        F.col("watermark_us").isNull() | (F.col("_seen") >= F.col("watermark_us"))
    )
    return rows.where(~repeated)
