"""The audit at scale: millions of synthetic ledger rows, clean and with five planted faults, which it must find.

    python -m benchmarks.bench_audit --rows 5000000 --master local[2]

Prints seconds for each million rows and what was found; exit code 1 if that is anything but what was planted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import write_result
from benchmarks.spark_cluster import standalone

from parti.model.ledger import LedgerBatch, encode_batch
from parti.spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PLANTED = {"NoLoss": 1, "NoRepeatOnPlannedMove": 1, "Order": 1, "OneOwner": 1, "EpochGrows": 1}
BASE_US = 1_780_000_000_000_000
SEGMENTS = 3
"""Owners that each partition has, one after the other."""
STEP_US, TOOK_US = 10, 6


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--partitions", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=25)
    parser.add_argument("--master", default=None, help="where Spark runs; this machine if left out")
    parser.add_argument("--cluster", action="store_true", help="on a standalone cluster that is started here")
    parser.add_argument("--result", default="bench_audit", metavar="NAME", help="file in benchmarks/results/")
    options = parser.parse_args()
    if options.cluster and options.master:
        parser.error("--cluster starts a cluster of its own; leave out --master")
    if not options.cluster:
        return measure(options, options.master)
    with tempfile.TemporaryDirectory() as directory, standalone(Path(directory)) as master:
        return measure(options, master)


def measure(options: argparse.Namespace, master: str | None) -> int:
    """Audit both histories; the exit code."""
    good = True
    results: dict[str, float] = {}
    with open_session("bench-audit", master) as spark:
        cores = spark.sparkContext.defaultParallelism
        print(
            f"{options.rows:,} ledger rows, {options.partitions:,} partitions, {cores} cores, Spark {spark.version}",
            flush=True,
        )
        results["decoded_rows_per_s"] = round(_decode(spark, options.rows))
        run_audit(spark, min(options.rows, 20_000), options.partitions, options.workers)  # the JVM warms up
        for planted in (False, True):
            found, took_s = run_audit(spark, options.rows, options.partitions, options.workers, planted=planted)
            right = found == (PLANTED if planted else {})
            good &= right
            name = "five planted faults" if planted else "clean"
            rate = took_s / options.rows * 1e6
            results[f"s_per_million_{'planted' if planted else 'clean'}"] = round(rate, 3)
            print(
                f"{name}: {took_s:.1f} s, {rate:.2f} s a million rows; found {found or 'nothing'}, right: {right}",
                flush=True,
            )
        setting = {
            "rows": options.rows,
            "partitions": options.partitions,
            "cores": cores,
            "master": "standalone cluster" if options.cluster else spark.sparkContext.master,
        }
    path = write_result(options.result, {**setting, "exact": good, **results})
    print(f"written to {path}")
    return 0 if good else 1


def _decode(spark: SparkSession, rows: int) -> float:
    """How fast ledger messages become rows; batches of 500 rows, as workers write them."""
    import pyspark.sql.functions as sf  # noqa: PLC0415 - only once there is a session

    from parti.spark.ledger import ledger_rows  # noqa: PLC0415

    size = 500
    batch = LedgerBatch(
        stream="BENCH",
        stream_created="2026-11-16T00:00:00Z",
        worker="w-1",
        process="0" * 32,
        number=1,
        partitions=tuple(f"tool{n}.c{n % 4}" for n in range(80)),
        fences=tuple(range(1, 81)),
        partition_index=array("I", (n * 7 % 80 for n in range(size))),
        seq=array("q", (1_000_000 + 3 * n for n in range(size))),
        attempt=array("I", [1] * size),
        outcome=array("B", [0] * size),
        received_us=array("q", (BASE_US + 37 * n for n in range(size))),
        started_us=array("q", (BASE_US + 37 * n + 5 for n in range(size))),
        finished_us=array("q", (BASE_US + 37 * n + 25 for n in range(size))),
    )
    payload = encode_batch(batch)
    messages = spark.range(rows // size).select(sf.col("id").alias("seq"), sf.lit(payload).alias("payload"))
    ledger_rows(messages.limit(100)).agg(sf.max("seq")).collect()
    began_s = time.perf_counter()
    ledger_rows(messages).agg(sf.max("seq"), sf.max("partition"), sf.max("finished")).collect()
    took_s = time.perf_counter() - began_s
    print(f"decoding: {rows / took_s:,.0f} rows/s, {len(payload) / size:.1f} bytes a row", flush=True)
    return rows / took_s


def run_audit(
    spark: SparkSession, rows: int, partitions: int, workers: int, *, planted: bool = False
) -> tuple[dict[str, int], float]:
    """Audit a synthetic history; returns what was found, by name, and how long it took."""
    from parti.spark.audit import audit  # noqa: PLC0415

    stored = spark.range(1, rows + 1).selectExpr(
        f"concat('p', (id - 1) % {partitions}) AS partition",
        "id AS seq",
        f"timestamp_micros({BASE_US} + id * {STEP_US} - 1000) AS timestamp",
    )
    ledger = history(spark, rows, partitions, workers)
    if planted:
        ledger = plant(ledger, rows, partitions)
    positions = stored.groupBy("partition").agg({"seq": "max"}).selectExpr("partition", "`max(seq)` + 1 AS position")
    began_s = time.perf_counter()
    result = audit(stored, ledger, positions, unstored_s=1.0, end_seq=rows + 1)
    took_s = time.perf_counter() - began_s
    assert result.seen["messages"] == rows, result.seen
    return {check.name: check.count for check in result.checks if check.count}, took_s


def history(spark: SparkSession, rows: int, partitions: int, workers: int) -> DataFrame:
    """A fleet that does everything right: each partition in order, by one owner after the other."""
    segment = f"(id - 1) * {SEGMENTS} div {rows}"
    return (
        spark.range(1, rows + 1)
        .selectExpr("id", f"(id - 1) % {partitions} AS p", f"CAST({segment} AS bigint) AS segment")
        .selectExpr(
            "'BENCH' AS stream",
            "id AS seq",
            "concat('p', p) AS partition",
            f"concat('w-', (p + segment) % {workers}) AS worker",
            f"concat('process-', (p + segment) % {workers}) AS process",
            "segment + 1 AS fence",
            "1 AS attempt",
            "'handled' AS outcome",
            f"timestamp_micros({BASE_US} + id * {STEP_US} - 500) AS received",
            f"timestamp_micros({BASE_US} + id * {STEP_US}) AS started",
            f"timestamp_micros({BASE_US} + id * {STEP_US} + {TOOK_US}) AS finished",
        )
    )


def plant(ledger: DataFrame, rows: int, partitions: int) -> DataFrame:
    """Five faults, each in a partition of its own."""
    turns = rows // partitions
    assert turns >= 4 * SEGMENTS, "too few rows for so many partitions"

    def seq(partition: int, turn: int) -> int:
        return turn * partitions + partition + 1

    def last_turn(partition: int, segment: int) -> int:
        return (-(-(segment + 1) * rows // SEGMENTS) - 1 - partition) // partitions

    middle, first_end = turns // 2 + 1, last_turn(3, 0)
    lost, again = seq(0, middle), seq(1, middle)
    swap, with_ = seq(2, middle), seq(2, middle + 1)
    shared, back = seq(3, first_end), seq(4, last_turn(4, 1) + 1)
    changed = ledger.where(f"seq != {lost}").selectExpr(
        "stream",
        f"CASE seq WHEN {swap} THEN {with_} WHEN {with_} THEN {swap} ELSE seq END AS seq",
        "partition",
        "worker",
        f"if(seq = {back}, 'process-stale', process) AS process",
        f"if(seq = {back}, 1, fence) AS fence",
        *("attempt", "outcome", "received", "started", "finished"),
    )
    repeated = ledger.where(f"seq = {again}").selectExpr(
        *("stream", "seq", "partition", "worker", "process", "fence", "attempt", "outcome", "received"),
        "finished + INTERVAL 1 MICROSECOND AS started",
        "finished + INTERVAL 2 MICROSECOND AS finished",
    )
    heir = ledger.where(f"seq = {seq(3, first_end + 1)}").select("partition", "worker", "process", "fence")
    overlapping = (
        ledger.where(f"seq = {shared}")
        .drop("worker", "process", "fence")
        .join(heir, "partition")
        .selectExpr(
            *("stream", "seq", "partition", "worker", "process", "fence", "attempt", "outcome", "received"),
            "started + INTERVAL 2 MICROSECOND AS started",
            "finished + INTERVAL 2 MICROSECOND AS finished",
        )
    )
    return changed.unionByName(repeated).unionByName(overlapping)


if __name__ == "__main__":
    sys.exit(main())
