"""What happened in each window: ledger rows become counts, rates, latencies and lag, by native expressions only.

Windows tumble and are numbered from 1970 on (column `w`). A message counts as finished in the window in which it was,
and as published in the one in which the stream stored it. Percentiles are Spark's `percentile_approx` with accuracy
10,000: exact (nearest rank) for groups of up to some thousand rows, beyond that off by at most 0.01 % of the ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import TYPE_CHECKING

import pyspark.sql.functions as sf
from pyspark.sql import Window

from parti.core.slo import BUCKETS_PER_DOUBLING
from parti.model.ledger import sample_hash, sample_limit
from parti.spark.keys import with_keys

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MICROSECONDS = 1_000_000
PERCENTILES = (50, 95, 99)
ACCURACY = 10_000
STATE = ("published", "settled", "lag")
"""Columns that tell of messages in the stream, whether finished or not."""
MOST_RANGES = 50
"""Ranges of windows in one condition; a window that is computed once more for nothing does no harm."""
PLACE = ("table", "key", "about")
"""What a row is about: its table, the name of the key, and the partition, the worker or the value of the key."""
ABOUT = {"gold_stream": "", "gold_partition": "partition", "gold_key": "value", "gold_worker": "worker"}
"""Tables of windows, and how each calls what its rows are about."""
_COUNTS = ("finished", "rate", "dead_lettered", "repeated", "redelivered", "partitions", "workers", "busy_s")
_DURATIONS = ("handler", "wait", "end_to_end")


def window_number(moment: str, window_us: int) -> Column:
    """Number of the window that the moment in a column lies in."""
    return sf.expr(f"unix_micros({moment}) div {window_us}")


def timed(rows: DataFrame, unit: str, unit_us: int) -> DataFrame:
    """Start and end in place of the number of the window (`unit` is w) or period."""
    start, end = (sf.timestamp_micros((sf.col(unit) + shift) * unit_us) for shift in (0, 1))
    name = "window" if unit == "w" else unit
    others = [column for column in rows.columns if column not in {"stream", unit}]
    return rows.select("stream", start.alias(f"{name}_start"), end.alias(f"{name}_end"), *others)


def numbered(rows: DataFrame, unit: str, unit_us: int) -> DataFrame:
    """The number of the window or period in place of its start and end."""
    name = "window" if unit == "w" else unit
    return rows.withColumn(unit, window_number(f"{name}_start", unit_us)).drop(f"{name}_start", f"{name}_end")


def messages_of(bronze: DataFrame, template: str, window_us: int, *, sample: int = 1) -> DataFrame:
    """What gold needs of stored messages: stream, seq, timestamp, partition (null if no key fits), window.

    Only those that a ledger which records one message in `sample` would have.
    """
    chosen = bronze if sample == 1 else bronze.where(_hash("seq") < sample_limit(sample))
    named = with_keys(chosen.select("stream", "seq", "subject", "timestamp"), template, partition="partition")
    return named.select("stream", "seq", "timestamp", "partition", window_number("timestamp", window_us).alias("w"))


def _hash(column: str) -> Column:
    """`parti.model.ledger.sample_hash` as an expression."""
    modulus, factor = sample_limit(1), sample_hash(1)
    return sf.expr(f"{column} % {modulus // 2} * {factor} % {modulus}")


def ranges_of(numbers: Iterable[int], most: int = MOST_RANGES) -> list[tuple[int, int]]:
    """Numbers as ranges, first and last, in order; beyond `most` of them the smallest gaps are closed."""
    ordered = sorted(set(numbers))
    gaps = sorted((after - before, after) for before, after in pairwise(ordered) if after > before + 1)
    starts = [*ordered[:1], *sorted(after for _, after in gaps[max(0, len(gaps) - most + 1) :])]
    ends = [ordered[bisect_left(ordered, start) - 1] for start in starts[1:]] + ordered[-1:]
    return list(zip(starts, ends, strict=True))


def within(ranges: Iterable[tuple[int, int]]) -> Column:
    """Condition that the number of the window lies in one of the ranges."""
    return reduce(or_, (sf.col("w").between(first, last) for first, last in ranges))


def touched_windows(
    ledger: DataFrame | None, new_ledger: DataFrame, new_messages: DataFrame, window_us: int
) -> DataFrame:
    """Every window (w) whose rows are not what they were before these ledger rows and messages came.

    Those in which one of them was finished or stored; those in which a message that is stored only now was finished;
    and those of a later finish of the same message, which has become a repeat. `ledger` are the rows that were there.
    """
    finished = window_number("finished", window_us).alias("w")
    direct = new_ledger.select(finished).unionByName(new_messages.select("w"))
    if ledger is None:
        return direct.distinct()
    nothing = sf.lit(None)
    known = ledger.select(
        "stream", "seq", finished, "finished", nothing.cast("timestamp").alias("since"), sf.lit(False).alias("stored")
    )
    told = new_ledger.select(
        "stream",
        "seq",
        nothing.cast("bigint").alias("w"),
        nothing.cast("timestamp").alias("finished"),
        sf.col("finished").alias("since"),
        sf.lit(False).alias("stored"),
    )
    stored = new_messages.select(
        "stream",
        "seq",
        nothing.cast("bigint").alias("w"),
        nothing.cast("timestamp").alias("finished"),
        nothing.cast("timestamp").alias("since"),
        sf.lit(True).alias("stored"),
    )
    related = (
        known.unionByName(told)
        .unionByName(stored)
        .groupBy("stream", "seq")
        .agg(
            sf.min("since").alias("since"),
            sf.max("stored").alias("stored"),
            sf.collect_set(sf.when(sf.col("w").isNotNull(), sf.struct("w", "finished"))).alias("rows"),
        )
        .select("since", "stored", sf.inline("rows"))
        .where("stored OR finished >= since")
    )
    return direct.unionByName(related.select("w")).distinct()


def handled_rows(ledger: DataFrame, messages: DataFrame, touched: Column, window_us: int) -> DataFrame:
    """The ledger rows of the touched windows, each with its durations and what is special about it.

    `ledger` must hold every row of these messages, also of other windows: the first finish of a message counts, the
    others are repeats. The same row twice, from a batch that was stored twice, counts once.
    """
    order = Window.partitionBy("stream", "seq").orderBy("finished", "process", "attempt")
    again = sf.struct("finished", "process", "attempt")
    numbered = (
        ledger.withColumn("w", window_number("finished", window_us))
        .withColumn("same", sf.coalesce(sf.lag(again).over(order) == again, sf.lit(False)))
        .where("NOT same")
        .withColumn("repeated", sf.row_number().over(order) > 1)
        .where(touched)
    )
    stored = messages.select("stream", "seq", "timestamp")
    return numbered.join(stored, ["stream", "seq"], "left").select(
        "stream",
        "w",
        "seq",
        "partition",
        "worker",
        "repeated",
        (sf.col("repeated") | (sf.col("attempt") > 1)).alias("redelivered"),
        (sf.col("outcome") == "dead_lettered").alias("dead"),
        (sf.col("timestamp").isNotNull() & ~sf.col("repeated")).alias("settles"),
        _micros("started", "finished").alias("handler_us"),
        _micros("received", "started").alias("wait_us"),
        _micros("timestamp", "finished").alias("end_to_end_us"),
    )


def _micros(start: str, end: str) -> Column:
    return sf.unix_micros(end) - sf.unix_micros(start)


def measures(handled: DataFrame, window_us: int, *, sample: int = 1) -> DataFrame:
    """Counts, rates and percentiles of placed rows for each window and place.

    With a ledger that records one message in `sample`, `rate` is that of all messages, and counts are of the sample.
    """
    shares = sf.array(*(sf.lit(percent / 100) for percent in PERCENTILES))
    columns = [
        sf.count("*").alias("finished"),
        _count("dead").alias("dead_lettered"),
        _count("repeated").alias("repeated"),
        _count("redelivered").alias("redelivered"),
        # Sets, because each count of distinct values would multiply the rows.
        sf.size(sf.collect_set("partition")).alias("partitions"),
        sf.size(sf.collect_set("worker")).alias("workers"),
        (sf.sum("handler_us") / MICROSECONDS).alias("busy_s"),
        *(sf.percentile_approx(f"{name}_us", shares, ACCURACY).alias(name) for name in _DURATIONS),
    ]
    found = handled.groupBy("stream", "w", *PLACE).agg(*columns)
    return found.select(
        "stream",
        "w",
        *PLACE,
        "finished",
        (sf.col("finished") * sample * MICROSECONDS / window_us).alias("rate"),
        "dead_lettered",
        "repeated",
        "redelivered",
        (sf.col("redelivered") / sf.col("finished")).alias("redelivery_ratio"),
        "partitions",
        "workers",
        "busy_s",
        *(
            (sf.col(name)[place] / MICROSECONDS).alias(f"{name}_p{percent}_s")
            for name in _DURATIONS
            for place, percent in enumerate(PERCENTILES)
        ),
    )


def _count(flag: str) -> Column:
    return sf.count_if(sf.col(flag))


def placed(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Each row once for everything that it counts for: the columns `PLACE` say what.

    That is the stream, its partition, each of its keys and, if the rows have a worker, that.
    """
    values = sf.split("partition", r"\.")
    found = [_place("gold_stream"), _place("gold_partition", sf.col("partition"))]
    found += [
        _place("gold_key", sf.coalesce(sf.get(values, sf.lit(place)), sf.lit("")), key)
        for place, key in enumerate(keys)
    ]
    if "worker" in rows.columns:
        found.append(_place("gold_worker", sf.col("worker")))
    return rows.select("*", sf.inline(sf.array(*found)))


def _place(table: str, about: Column | None = None, key: str = "") -> Column:
    return sf.struct(
        sf.lit(table).alias("table"),
        sf.lit(key).alias("key"),
        (sf.lit("") if about is None else about).alias("about"),
    )


def to_table(rows: DataFrame, table: str) -> DataFrame:
    """The rows of one table, with its own columns."""
    chosen = rows.where(sf.col("table") == table).drop("table")
    about = ABOUT[table]
    if table == "gold_key":
        return chosen.withColumnRenamed("about", about)
    chosen = chosen.drop("key").withColumnRenamed("about", about) if about else chosen.drop("key", "about")
    return chosen.drop("workers", *STATE) if table == "gold_worker" else chosen


def from_table(rows: DataFrame, table: str) -> DataFrame:
    """What `to_table` made, as it was before."""
    about = sf.col(ABOUT[table]) if ABOUT[table] else sf.lit("")
    back = rows.withColumns({"table": sf.lit(table), "about": about})
    return (back if table == "gold_key" else back.withColumn("key", sf.lit(""))).drop(*filter(None, [ABOUT[table]]))


def latency_buckets(handled: DataFrame) -> DataFrame:
    """How many messages of each window fell into each bucket of handler latency: a map, see `parti.core.slo`."""
    micros = sf.col("handler_us")
    bucket = sf.when(micros > 1, sf.ceil(sf.log2(micros) * BUCKETS_PER_DOUBLING)).otherwise(0).cast("int")
    counted = handled.groupBy("stream", "w", bucket.alias("bucket")).count()
    entries = sf.array_sort(sf.collect_list(sf.struct("bucket", "count")))
    return counted.groupBy("stream", "w").agg(sf.map_from_entries(entries).alias("handler_buckets"))


# ── lag ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def flows(handled: DataFrame, messages: DataFrame, touched: Column) -> DataFrame:
    """What came into and went out of each partition in the touched windows: `published`, `settled`.

    `settled` counts stored messages when they are finished for the first time.
    """
    inward = messages.where(touched & sf.col("partition").isNotNull())
    each = inward.select("stream", "w", "partition", sf.lit(1).alias("published"), sf.lit(0).alias("settled"))
    outward = handled.where("settles").select(
        "stream", "w", "partition", sf.lit(0).alias("published"), sf.lit(1).alias("settled")
    )
    return (
        each.unionByName(outward)
        .groupBy("stream", "w", "partition")
        .agg(sf.sum("published").alias("published"), sf.sum("settled").alias("settled"))
    )


def lags(flow: DataFrame, before: DataFrame | None, last: int, *, sample: int = 1) -> DataFrame:
    """Lag of each partition at the end of each window: stored, but not finished.

    `flow` is what `flows` gives, of all windows from some window on; `before` (stream, partition, w, lag) the lag at
    the end of the window before that. A partition has a row where something flowed, and in every window up to `last`
    at whose end it had a lag.
    """
    each = Window.partitionBy("stream", "partition").orderBy("w")
    changes = flow.select("*", ((sf.col("published") - sf.col("settled")) * sample).alias("delta"))
    if before is not None:
        nothing = sf.lit(None).cast("bigint")
        changes = changes.unionByName(
            before.select(
                "stream",
                "w",
                "partition",
                nothing.alias("published"),
                nothing.alias("settled"),
                sf.col("lag").alias("delta"),
            )
        )
    until = sf.coalesce(sf.lead("w").over(each), sf.lit(last + 1))
    reached = changes.withColumn("lag", sf.sum("delta").over(each)).withColumn("until", until)
    quiet = reached.where("lag != 0 AND until > w + 1").select(
        "stream",
        sf.explode(sf.expr("sequence(w + 1, until - 1)")).alias("w"),
        "partition",
        sf.lit(0).cast("bigint").alias("published"),
        sf.lit(0).cast("bigint").alias("settled"),
        "lag",
    )
    # What stood before is null: it belongs to a window that is not recomputed.
    flowing = reached.where("published IS NOT NULL").select("stream", "w", "partition", *STATE)
    return flowing.unionByName(quiet)


def join_state(measured: DataFrame, state: DataFrame) -> DataFrame:
    """Measures and lag in one row, for each window and place; where nothing was finished there are no percentiles."""
    placed_state = state.groupBy("stream", "w", *PLACE).agg(*(sf.sum(name).alias(name) for name in STATE))
    joined = measured.join(placed_state, ["stream", "w", *PLACE], "full_outer")
    others = [column for column in measured.columns if column not in {"stream", "w", *PLACE}]
    return joined.fillna(0, [*_COUNTS, *STATE]).select("stream", "w", *PLACE, *STATE, *others)
