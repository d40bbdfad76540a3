"""The audit: did the fleet keep its promises? Told from stored messages and ledger, by the names of the core.

Takes DataFrames, so it does not care where they come from (`audit_sources` reads them from a server):

    stored      partition, seq, timestamp               what the stream has
    ledger      `parti.spark.ledger.LEDGER_COLUMNS`     what was finished, by whom and when
    positions   partition, position                     how far each partition says it is
    troubles    `TROUBLES`                              which processes crashed or were cut off, and when
    batches     `parti.spark.ledger.BATCH_COLUMNS`      the chains of the ledger

The definitions are those of `parti.core.invariants`, and a test holds the two together. What an audit has seen can be
carried on to the next (`Carried`), so that a live system is audited piece by piece with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pyspark.sql.functions as sf
from pyspark.sql import Observation, Window

from parti.core.invariants import Invariant
from parti.model.ledger import DEAD_LETTERED, OUTCOMES
from parti.spark.audit_checks import FINISHED, ROWS, SETTLED, STORED, lay_out, mark
from parti.spark.audit_verdicts import EXCUSED, judge, leave_out_reported, mark_lost, microseconds
from parti.spark.ledger import missing_batches
from parti.spark.promises import LEDGER_WHOLE, POSITIONS_WITHIN_DATA, Check

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TROUBLES: Final = "process string, died_us bigint, lapses array<struct<from_us: bigint, until_us: bigint>>"
KEPT_ROWS: Final = (
    "partition string, seq bigint, worker string, process string, fence bigint, attempt int, dead boolean, "
    "received_us bigint, started_us bigint, finished_us bigint, first_us bigint, stored boolean, "
    "stored_us bigint"
)
HOLDINGS: Final = (
    "partition string, worker string, process string, fence bigint, messages bigint, first_seq bigint, seq bigint, "
    "started_us bigint, until_us bigint"
)
EXAMPLES: Final = 10


@dataclass(frozen=True, slots=True)
class Carried:
    """What one audit leaves to the next, as DataFrames."""

    unfinished: DataFrame
    """partition, seq, stored_us: stored messages that are not finished yet."""
    rows: DataFrame
    """`KEPT_ROWS`: ledger rows that later ones may still have to be compared with."""
    holdings: DataFrame
    """`HOLDINGS`: what is left of everything older."""
    reported: DataFrame
    """key, cause: what was reported."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Which ledger rows the next audit will need in full; everything else becomes a line for each holding."""

    from_us: int
    """Those finished from here on: their neighbours may not be in the ledger yet."""
    from_seq: int
    """Those of messages from here on: whether they are stored is not known yet."""
    processes: DataFrame | None = None
    """process, from_us: those finished from here on by processes that may crash, or that did."""


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What an audit found."""

    checks: tuple[Check, ...]
    seen: Mapping[str, int]
    """How much was looked at: messages, rows, partitions, holdings, moves, dead_letters, excused, unfinished."""
    tables: Mapping[str, DataFrame]
    """violations, excused, holdings, moves, dead_letters, unfinished, and where there is something to tell them from,
    positions_ahead, missing_batches and damaged_batches."""
    next: Carried
    """For the audit that goes on from here; what must be kept was said by `Keep`."""

    @property
    def held(self) -> bool:
        """Whether every promise was kept."""
        return all(check.held for check in self.checks)

    def check(self, name: str) -> Check:
        """The check of this name."""
        return next(check for check in self.checks if check.name == name)


def audit(
    stored: DataFrame,
    ledger: DataFrame,
    positions: DataFrame | None = None,
    troubles: DataFrame | None = None,
    *,
    batches: DataFrame | None = None,
    unstored_s: float = float("inf"),
    skew_s: float = 0.0,
    since_seq: int = 0,
    end_seq: int | None = None,
    carried: Carried | None = None,
    keep: Keep | None = None,
    every: bool = False,
) -> AuditResult:
    """Check every promise; runs the Spark jobs and returns when the counts are known.

    Without `positions` everything stored must be finished. `unstored_s` is how far behind a stored position may be: a
    process that crashes may cause the repetition of what it finished in that time before. `skew_s` is how much the
    clocks of processes may differ. The ledger has to speak for messages from `since_seq` on, and for those behind the
    first one of their partition that it speaks for. `end_seq` is the first sequence that the stream does not have.
    `every` lists also each start that only follows from a message that was
    skipped before.
    """
    spark = stored.sparkSession
    troubles = spark.createDataFrame([], TROUBLES) if troubles is None else troubles
    counted = Observation()
    rows = _collect(spark, stored, ledger, carried, keep)
    rows = rows.observe(
        counted,
        sf.count(sf.when(sf.col("kind") == STORED, 1)).alias("messages"),
        sf.count(sf.when((sf.col("kind") == FINISHED) & ~sf.col("carried"), 1)).alias("rows"),
    )
    # Cut off from their long plans: what follows is small, and planning it again and again would take longest.
    marked = mark_lost(
        mark(lay_out(rows), troubles, since_seq=since_seq, skew_us=microseconds(skew_s), every=every), positions
    ).localCheckpoint()
    now_us = int(datetime.now(UTC).timestamp() * 1_000_000)
    found = judge(marked, now_us, unstored_s, skew_us=microseconds(skew_s), carried=carried is not None)
    if carried is not None:
        found = leave_out_reported(found, carried.reported)
    found = found.localCheckpoint()
    tables = _tables(marked, found, positions, end_seq)
    if batches is not None:
        tables["missing_batches"] = missing_batches(batches)
        tables["damaged_batches"] = batches.where("damage IS NOT NULL").select("ledger_seq", "damage")
    checks, excused = _checks(found, tables)
    seen = counted.get | _count(marked) | {"excused": excused}
    return AuditResult(checks, seen, tables, _next(marked, found, carried))


# ── what is checked ───────────────────────────────────────────────────────────────────────────────────────────────


def _collect(
    spark: SparkSession, stored: DataFrame, ledger: DataFrame, carried: Carried | None, keep: Keep | None
) -> DataFrame:
    """Everything that takes part, as `ROWS`."""
    finished = ledger.select(
        "partition",
        "seq",
        "worker",
        "process",
        "fence",
        "attempt",
        (sf.col("outcome") == OUTCOMES[DEAD_LETTERED]).alias("dead"),
        *(sf.unix_micros(name).alias(f"{name}_us") for name in ("received", "started", "finished")),
        sf.unix_micros("finished").alias("first_us"),
        sf.lit(False).alias("carried"),
    )
    messages = stored.select("partition", "seq", sf.unix_micros("timestamp").alias("stored_us"))
    parts = []
    if carried is not None:
        kept = carried.rows.withColumn("carried", sf.lit(True))
        again = kept.where("stored").select("partition", "seq", "stored_us")
        finished = finished.unionByName(kept.drop("stored", "stored_us"))
        messages = messages.unionByName(carried.unfinished).unionByName(again)
        parts.append(carried.holdings.withColumns({"kind": sf.lit(SETTLED), "kept": sf.lit(False)}))
    finished = finished.withColumns(
        {
            "kind": sf.lit(FINISHED),
            "first_seq": sf.col("seq"),
            "until_us": sf.col("finished_us"),
            "messages": sf.lit(1).cast("bigint"),
        }
    )
    parts += [_to_keep(finished, keep), messages.withColumn("kind", sf.lit(STORED))]
    whole = spark.createDataFrame([], ROWS)
    for part in parts:
        whole = whole.unionByName(part, allowMissingColumns=True)
    return whole.withColumns({"carried": _or_false("carried"), "kept": _or_false("kept")})


def _or_false(name: str) -> Any:
    return sf.coalesce(name, sf.lit(False))


def _to_keep(finished: DataFrame, keep: Keep | None) -> DataFrame:
    if keep is None:
        return finished.withColumn("kept", sf.lit(False))
    recent = (sf.col("finished_us") >= keep.from_us) | (sf.col("seq") >= keep.from_seq)
    if keep.processes is None:
        return finished.withColumn("kept", recent)
    open_ = keep.processes.selectExpr("process", "from_us AS keep_from_us")
    joined = finished.join(sf.broadcast(open_), "process", "left")
    last = sf.coalesce(sf.col("finished_us") >= sf.col("keep_from_us"), sf.lit(False))
    return joined.withColumn("kept", recent | last).drop("keep_from_us")


# ── what comes out ────────────────────────────────────────────────────────────────────────────────────────────────


def _tables(
    marked: DataFrame, found: DataFrame, positions: DataFrame | None, end_seq: int | None
) -> dict[str, DataFrame]:
    finished, fresh = sf.col("kind") == FINISHED, ~sf.col("carried")
    told = found.withColumn("at", sf.timestamp_micros("at_us")).drop("key", "cause")
    holdings = marked.where("last_of_holding").select(
        "partition",
        "worker",
        "process",
        "fence",
        sf.col("holding_messages").alias("messages"),
        sf.timestamp_micros("holding_from_us").alias("started"),
        sf.timestamp_micros("holding_until_us").alias("finished"),
    )
    there = sf.greatest("before_us", sf.coalesce("stored_us", "received_us"))
    moves = marked.where(finished & fresh & sf.col("changed") & sf.col("before_us").isNotNull())
    moves = moves.select(
        "partition",
        "seq",
        sf.col("process_before").alias("from_process"),
        "fence_before",
        "worker",
        "process",
        "fence",
        sf.timestamp_micros("started_us").alias("at"),
        (sf.greatest(sf.col("started_us") - there, sf.lit(0)) / 1e6).alias("pause_s"),
        # What it had handed over before it died was no consequence of that.
        sf.when(sf.col("started_us") > sf.col("died_before_us"), "crash").otherwise("planned").alias("reason"),
    )
    dead = marked.where(finished & fresh & sf.col("dead")).select(
        "partition", "seq", "worker", "process", "fence", "attempt", sf.timestamp_micros("finished_us").alias("at")
    )
    waiting = marked.where(sf.col("kind") == STORED).select(
        "partition", "seq", sf.timestamp_micros("stored_us").alias("timestamp"), "position", "lost"
    )
    tables = {
        "violations": told.where(sf.col("invariant") != EXCUSED),
        "excused": told.where(sf.col("invariant") == EXCUSED).drop("invariant", "consequence"),
        "holdings": holdings,
        "moves": moves,
        "dead_letters": dead,
        "unfinished": waiting,
    }
    if positions is not None and end_seq is not None:
        tables["positions_ahead"] = positions.where(sf.col("position") > end_seq).withColumn(
            "end_seq", sf.lit(end_seq).cast("bigint")
        )
    return tables


def _checks(found: DataFrame, tables: Mapping[str, DataFrame]) -> tuple[tuple[Check, ...], int]:
    """One check for each promise, and the number of repeats that are excused."""
    alike = Window.partitionBy("invariant", "consequence")
    ranked = found.withColumns(
        {
            "nth": sf.row_number().over(alike.orderBy("partition", "seq", "at_us")),
            "number": sf.count("*").over(alike),
        }
    )
    numbers: dict[tuple[str, bool], int] = {}
    examples: dict[str, list[Mapping[str, Any]]] = {}
    for row in ranked.where(sf.col("nth") <= EXAMPLES).orderBy("nth").drop("key", "cause").collect():
        example = row.asDict()
        numbers[row["invariant"], row["consequence"]] = example.pop("number")
        del example["nth"]
        if not example.pop("consequence"):
            examples.setdefault(row["invariant"], []).append(example)
    checks = [
        Check(name, numbers.get((name, False), 0), numbers.get((name, True), 0), tuple(examples.get(name, ())))
        for name in (invariant.value for invariant in Invariant)
    ]
    if "positions_ahead" in tables:
        checks.append(_count_rows(POSITIONS_WITHIN_DATA, tables["positions_ahead"]))
    if "missing_batches" in tables:
        missing = tables["missing_batches"].collect()
        damaged = _count_rows(LEDGER_WHOLE, tables["damaged_batches"])
        number = damaged.count + sum(row["last"] - row["first"] + 1 for row in missing)
        some = (*(row.asDict() for row in missing[:EXAMPLES]), *damaged.examples)[:EXAMPLES]
        checks.append(Check(LEDGER_WHOLE, number, 0, some))
    return tuple(checks), numbers.get((EXCUSED, False), 0)


def _count_rows(name: str, rows: DataFrame) -> Check:
    number = rows.count()
    some = rows.limit(EXAMPLES).collect() if number else []
    return Check(name, number, 0, tuple(row.asDict() for row in some))


def _count(marked: DataFrame) -> dict[str, int]:
    finished, fresh = sf.col("kind") == FINISHED, ~sf.col("carried")
    moved = finished & fresh & sf.col("changed") & sf.col("before_us").isNotNull()
    row = marked.agg(
        sf.count_distinct("partition").alias("partitions"),
        sf.count(sf.when(sf.col("last_of_holding"), 1)).alias("holdings"),
        sf.count(sf.when(moved, 1)).alias("moves"),
        sf.count(sf.when(finished & fresh & sf.col("dead"), 1)).alias("dead_letters"),
        sf.count(sf.when(sf.col("kind") == STORED, 1)).alias("unfinished"),
    ).first()
    assert row is not None
    return dict(row.asDict())


def _next(marked: DataFrame, found: DataFrame, carried: Carried | None) -> Carried:
    kept = marked.where((sf.col("kind") == FINISHED) & sf.col("kept"))
    settled = marked.where(sf.col("last_of_holding") & (sf.col("settled_messages") > 0))
    reported = found.select("key", "cause")
    return Carried(
        unfinished=marked.where(sf.col("kind") == STORED).select("partition", "seq", "stored_us"),
        rows=kept.withColumn("stored", ~sf.col("unknown")).select(*_names(KEPT_ROWS)),
        holdings=settled.select(
            "partition",
            "worker",
            "process",
            "fence",
            sf.col("settled_messages").alias("messages"),
            sf.col("settled_first_seq").alias("first_seq"),
            sf.col("settled_seq").alias("seq"),
            sf.col("settled_from_us").alias("started_us"),
            sf.col("settled_until_us").alias("until_us"),
        ),
        reported=reported if carried is None else reported.unionByName(carried.reported),
    )


def _names(columns: str) -> list[str]:
    return [column.split()[0] for column in columns.split(", ")]
