"""What the report of an audit shows, collected from its tables; `report_page` makes the page of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyspark.sql.functions as sf

from parti.spark.report_page import POINTS, Move, Picture, Traffic, rates_by_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from parti.spark.audit import AuditResult

PARTITIONS = 50
"""Partitions whose owners are drawn."""
_MOST_SPANS = 4000
_MOST_MOVES = 100_000


def measure_traffic(ledger: DataFrame, first_us: int | None, last_us: int | None) -> Traffic:
    """Messages a second by worker, and latencies, in about a hundred steps; takes `LEDGER_COLUMNS`."""
    if first_us is None or last_us is None or last_us <= first_us:
        return Traffic()
    step_us = max(1_000, -(-(last_us - first_us) // POINTS))
    bucket = sf.floor((sf.unix_micros("finished") - first_us) / step_us).cast("int").alias("bucket")
    took = (sf.unix_micros("finished") - sf.unix_micros("received")).alias("took_us")
    rows = ledger.select(bucket, "worker", took)
    # One pass for both: the shares of the workers, and (worker null) the latencies of all of them together.
    found = (
        rows.groupingSets([[sf.col("bucket"), sf.col("worker")], [sf.col("bucket")]], "bucket", "worker")
        .agg(sf.count("*").alias("messages"), sf.percentile_approx("took_us", [0.5, 0.95, 0.99], 1000).alias("took"))
        .orderBy("bucket")
        .collect()
    )
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    latencies: dict[str, list[tuple[float, float]]] = {"p50": [], "p95": [], "p99": []}
    for row in found:
        if row["worker"] is not None:
            counts[row["worker"]][row["bucket"]] = row["messages"]
            continue
        at_s = (first_us + (row["bucket"] + 0.5) * step_us) / 1e6
        for name, took_us in zip(latencies, row["took"], strict=True):
            latencies[name].append((at_s, max(took_us, 1) / 1e6))
    return Traffic(step_us / 1e6, rates_by_worker(counts, first_us, last_us, step_us), latencies)


def take_picture(title: str, facts: Mapping[str, str], result: AuditResult, traffic: Traffic) -> Picture:
    """Collect what the report shows: all moves with their pauses, the owners of the first partitions."""
    holdings, moves = result.tables["holdings"], result.tables["moves"]
    first = sorted(
        row["partition"]
        for row in holdings.select("partition").distinct().orderBy("partition").limit(PARTITIONS).collect()
    )
    owners: dict[str, list[tuple[float, float, str, int]]] = {partition: [] for partition in first}
    rows = (
        holdings.where(sf.col("partition").isin(first)).orderBy("partition", "started").limit(_MOST_SPANS).collect()
    )
    for row in rows:
        span = (row["started"].timestamp(), row["finished"].timestamp(), row["worker"], row["fence"])
        owners[row["partition"]].append(span)
    workers = {row["process"]: row["worker"] for row in holdings.select("process", "worker").distinct().collect()}
    changes = moves.select("partition", "at", "from_process", "worker", "reason", "pause_s").limit(_MOST_MOVES)
    dead = result.tables["dead_letters"].orderBy("at").limit(10).collect()
    return Picture(
        title=title,
        facts=facts,
        checks=result.checks,
        seen=result.seen,
        traffic=traffic,
        moves=[
            Move(
                row["partition"],
                row["at"].timestamp(),
                workers.get(row["from_process"], ""),
                row["worker"],
                row["reason"],
                row["pause_s"],
            )
            for row in changes.collect()
        ],
        owners=list(owners.items()),
        dead_letters=[row.asDict() for row in dead],
    )
