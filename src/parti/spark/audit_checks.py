"""The invariants of `parti.core.invariants` as window functions over the stored messages and the ledger.

One shuffle by partition; then three orders within each partition, each a sort of rows that are nearly sorted already:

    by sequence       which stored messages are not finished; what was finished twice; who overtook whom (Order)
    within a holding  who went back within a holding (Order); whether a holding was seen before
    by time of start  stale owners (OneOwner), fences that do not grow (EpochGrows), handlers at once (OneOwner),
                      changes of owner and their pauses

What is of no interest is dropped at the end of that one pass; the verdicts are made from the few rows that are left.
A row's handler started at `started_us` and was over at `finished_us`. A finish counts before a start of the same
microsecond; starts of the same microsecond count in the order of their sequences.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import pyspark.sql.functions as sf
from pyspark.sql import Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

STORED, FINISHED, SETTLED = 0, 1, 2
"""Kinds of rows: a stored message, a row of the ledger, and what is left of a holding that an earlier audit saw."""
ROWS = (
    "partition string, seq bigint, kind int, stored_us bigint, worker string, process string, fence bigint, "
    "attempt int, dead boolean, received_us bigint, started_us bigint, finished_us bigint, first_us bigint, "
    "carried boolean, kept boolean, first_seq bigint, until_us bigint, messages bigint"
)
"""Columns of what is checked. `first_us`: when the message was finished first. `carried` rows come from the audit
before, `kept` ones go to the next; the columns behind are of holdings."""
NEVER_US = 9_000_000_000_000_000_000
"""Later than everything."""


def lay_out(rows: DataFrame, width: int | None = None) -> DataFrame:
    """Bring all rows of a partition together: the one shuffle."""
    return rows.repartition("partition") if width is None else rows.repartition(width, "partition")


def mark(
    rows: DataFrame, troubles: DataFrame, *, since_seq: int = 0, skew_us: int = 0, every: bool = False
) -> DataFrame:
    """All rows of interest, with what was found; takes rows laid out by partition.

    The ledger has to speak for messages from `since_seq` on, and for those behind the first one of their partition
    that it speaks for. Clocks of processes may differ by `skew_us`. `troubles` has process, died_us (null: it did
    not) and lapses (array of from_us, until_us; null: none). Without `every`, of starts that follow each other and
    skip one and the same message only the first is given.
    """
    marked = _by_start(_by_holding(_by_sequence(rows, since_seq, skew_us), troubles), skew_us)
    if not every:
        new = ~sf.col("overtaken_before").eqNullSafe(sf.col("overtaken"))
        marked = marked.withColumn("overtaken", sf.when(new, sf.col("overtaken")))
    finished = sf.col("kind") == FINISHED
    wanted = [
        sf.col("kind") == STORED,
        sf.col("last_of_holding"),
        sf.col("changed"),
        finished & (sf.col("copies") > 1),
        finished & sf.col("dead"),
        finished & sf.col("kept"),
        finished & (sf.col("stale") | sf.col("at_once") | sf.col("went_back")),
        finished & sf.col("overtaken").isNotNull(),
        finished & sf.col("unknown") & (sf.col("seq") <= sf.col("settled_before")),
    ]
    return marked.where(reduce(lambda one, other: one | other, wanted))


def _by_sequence(rows: DataFrame, since_seq: int, skew_us: int) -> DataFrame:
    """Add stored_us, copies, unknown, overtaken; leave out stored messages that are finished."""
    same = Window.partitionBy("partition", "seq").orderBy("kind", "started_us", "process", "fence", "finished_us")
    # A batch that was stored twice in the ledger is still one batch.
    again = reduce(
        lambda one, other: one & other,
        (
            sf.lag(name).over(same).eqNullSafe(sf.col(name))
            for name in ("kind", "started_us", "finished_us", "process")
        ),
    )
    rows = rows.withColumn("again", again).where(~sf.col("again")).drop("again")

    if since_seq > 0:
        behind = Window.partitionBy("partition").orderBy("seq").rangeBetween(Window.unboundedPreceding, 0)
        spoken_for = sf.max(sf.col("kind") != STORED).over(behind)
        asked = (sf.col("kind") != STORED) | (sf.col("seq") >= since_seq) | sf.coalesce(spoken_for, sf.lit(False))
        rows = rows.withColumn("asked", asked).where("asked").drop("asked")

    message = Window.partitionBy("partition", "seq")
    stored, finished = sf.col("kind") == STORED, sf.col("kind") == FINISHED
    rows = rows.withColumns(
        {
            "at_us": sf.max(sf.when(stored, sf.col("stored_us"))).over(message),
            "is_stored": sf.max(stored).over(message),
            "copies": sf.count(sf.when(finished, 1)).over(message),
            "first_us": sf.min("first_us").over(message),
        }
    )
    older = Window.partitionBy("partition").orderBy("seq").rangeBetween(Window.unboundedPreceding, -1)
    latest = sf.when(
        stored,
        sf.struct(sf.coalesce("first_us", sf.lit(NEVER_US)).alias("at_us"), (-sf.col("seq")).alias("less")),
    )
    rows = rows.withColumn("latest", sf.max(latest).over(older)).where(
        (sf.col("kind") != STORED) | (sf.col("copies") == 0)
    )
    skipped = finished & (sf.col("latest.at_us") > sf.col("started_us") + skew_us)
    return rows.withColumns(
        {
            "stored_us": sf.col("at_us"),
            "unknown": ~sf.col("is_stored"),
            "overtaken": sf.when(skipped, -sf.col("latest.less")),
        }
    ).drop("at_us", "is_stored", "latest")


def _by_holding(rows: DataFrame, troubles: DataFrame) -> DataFrame:
    """Add went_back, known, end_us, and on the last row of each holding what it was."""
    holding = Window.partitionBy("partition", "fence", "process").orderBy("started_us", "seq", "finished_us")
    before = holding.rowsBetween(Window.unboundedPreceding, -1)
    so_far = holding.rowsBetween(Window.unboundedPreceding, 0)
    settled = (sf.col("kind") == SETTLED) | ((sf.col("kind") == FINISHED) & ~sf.col("kept"))

    def of_settled(name: str) -> Column:
        return sf.when(settled, sf.col(name))

    rows = rows.withColumns(
        {
            "highest_before": sf.max("seq").over(before),
            "known": sf.row_number().over(holding) > 1,
            "next_us": sf.lead("started_us").over(holding),
            "last_of_holding": (sf.col("kind") != STORED) & sf.lead("kind").over(holding).isNull(),
            "holding_messages": sf.sum("messages").over(so_far),
            "settled_messages": sf.sum(of_settled("messages")).over(so_far),
            "settled_first_seq": sf.min(of_settled("first_seq")).over(so_far),
            "settled_seq": sf.max(of_settled("seq")).over(so_far),
            "settled_from_us": sf.min(of_settled("started_us")).over(so_far),
            "settled_until_us": sf.max(of_settled("until_us")).over(so_far),
            "holding_from_us": sf.min("started_us").over(so_far),
            "holding_until_us": sf.max("until_us").over(so_far),
        }
    )
    rows = rows.join(sf.broadcast(troubles), "process", "left")
    # From then on a handler that still runs is excused: its worker had lost its lease.
    excused = sf.array_min(
        sf.transform(
            sf.filter("lapses", lambda lapse: lapse.until_us >= sf.col("started_us")), lambda lapse: lapse.from_us
        )
    )
    finished = sf.col("kind") == FINISHED
    return rows.withColumns(
        {
            "went_back": finished & (sf.col("seq") < sf.coalesce("highest_before", sf.lit(0))),
            "end_us": sf.when(finished, sf.least("finished_us", "next_us", "died_us", excused)),
        }
    ).drop("highest_before", "next_us")


def _by_start(rows: DataFrame, skew_us: int) -> DataFrame:
    """Add stale, newest, at_once, running, changed, before_us and whatever else is seen in the order of starts."""
    # Stored messages that nobody has started come first; they have no part in any of this.
    starts = Window.partitionBy("partition").orderBy("started_us", "seq", "process", "fence", "finished_us")
    before = starts.rowsBetween(Window.unboundedPreceding, -1)
    rows = rows.withColumn("place", sf.row_number().over(starts))
    fenced = sf.struct("fence", (-sf.col("place")).alias("less"), "process")
    rows = rows.withColumns(
        {
            "newest": sf.max(sf.when(sf.col("fence") > 0, fenced)).over(before),
            "running": sf.max(sf.when(sf.col("end_us").isNotNull(), sf.struct("end_us", "seq", "process"))).over(
                before
            ),
            "before_us": sf.max("until_us").over(before),
            "settled_before": sf.max(sf.when(sf.col("kind") == SETTLED, sf.col("seq"))).over(before),
            "process_before": sf.lag("process").over(starts),
            "fence_before": sf.lag("fence").over(starts),
            "died_before_us": sf.lag("died_us").over(starts),
            "overtaken_before": sf.lag("overtaken").over(starts),
        }
    )
    fence, newest, finished = sf.col("fence"), sf.col("newest.fence"), sf.col("kind") == FINISHED
    other = (fence < newest) | ((fence == newest) & (sf.col("process") != sf.col("newest.process")))
    same = sf.col("process").eqNullSafe(sf.col("process_before")) & fence.eqNullSafe(sf.col("fence_before"))
    return rows.withColumns(
        {
            "stale": sf.coalesce(finished & (fence > 0) & other, sf.lit(False)),
            "at_once": sf.coalesce(
                finished & (sf.col("running.end_us") > sf.col("started_us") + skew_us), sf.lit(False)
            ),
            "changed": finished & ~same,
        }
    )
