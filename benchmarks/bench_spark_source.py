"""How fast does Spark read a stream, and how far is that from what the reader itself can do?

    python -m benchmarks.bench_spark_source --rows 10000000 --seconds 180

Batch: a file stream of 256-byte messages on 2,000 subjects is read in turn by

- `plain`: one Python process with parti's range reader, making the same Arrow batches;
- `plain x2`: two such processes, half of the range each;
- `spark 1`, `spark 2`: `format("jetstream")` with one and two tasks;
- `fetch`: a Python data source on nats-py's `fetch`, two tasks, over fewer rows, because it is slow;
- `parquet`: Spark reads the same rows from Parquet, which the `spark 2` read has written once.

Every reader counts the rows and adds up the lengths of the payloads, so that all bytes arrive. Rounds are interleaved
and ratios taken within a round; then each reads all rows once.

Streaming: messages are published at a steady rate for some minutes while a query writes them to Parquet. The latency
of a message is the time from its storing in the stream to the end of the batch that wrote it.

Exit code 1 if a reader brought anything but all rows, or a required ratio is not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import RESULTS, machine, write_result
from benchmarks.spark_traffic import SIZE, Filler, fill
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from rich.console import Console
from rich.table import Table

from parti.embedded import Server
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import RangeReader, Wanted
from parti.jetstream.target import Target
from parti.spark.rows import BatchMaker, Layout
from parti.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAM = "DC"
LIVE = "LIVE"
SHARE_OF_PLAIN = 0.6
ROWS_PER_S = 250_000
TIMES_FETCH = 4.0
console = Console()


# ── batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_plainly(url: str, start: int, end: int) -> tuple[int, int]:
    """Read a range in this process: rows and bytes."""
    target = Target(servers=(url,))
    with BlockingClient.open(target, name="bench") as client:
        created = client.stream_info(STREAM)["created"]
    reader = RangeReader(target, Wanted(stream=STREAM, created=created, start=start, end=end))
    maker = BatchMaker(Layout(STREAM))
    rows = size = 0
    for chunk in reader.chunks():
        batch = maker.make(chunk)
        rows += batch.num_rows
        size += sum(map(len, chunk.payloads))
    return rows, size


def plain(url: str, rows: int, processes: int) -> tuple[int, int]:
    """Read `rows` messages in so many processes of their own."""
    cuts = [1 + rows * i // processes for i in range(processes + 1)]
    pool = multiprocessing.get_context("spawn")
    with pool.Pool(processes) as workers:
        workers.map(len, [[]] * processes)  # start them before the clock runs
        begin_s = time.perf_counter()
        parts = workers.starmap(read_plainly, [(url, a, b) for a, b in itertools.pairwise(cuts)])
        console.log(f"plain x{processes}: {rows / (time.perf_counter() - begin_s):,.0f} rows/s without the start")
    return sum(p[0] for p in parts), sum(p[1] for p in parts)


def total(frame: DataFrame) -> tuple[int, int]:
    """Count rows and bytes, in Spark."""
    row = frame.selectExpr("count(*) AS n", "coalesce(sum(length(payload)), 0) AS size").collect()[0]
    return int(row["n"]), int(row["size"])


def stream_frame(spark: SparkSession, url: str, rows: int, tasks: int) -> DataFrame:
    """The stream as a table."""
    reader = spark.read.format("jetstream").option("servers", url).option("stream", STREAM)
    reader = reader.option("endingOffsets", str(rows + 1)).option("minPartitions", str(tasks))
    return reader.option("maxRecordsPerPartition", str(rows)).load()


class FetchSource(DataSource):
    """What a source on nats-py's `fetch` would look like."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "fetch"

    def schema(self) -> str:
        """The same columns."""
        return Layout(STREAM).ddl

    def reader(self, schema: Any) -> DataSourceReader:
        """A reader over two halves."""
        return FetchReader(self.options["url"], int(self.options["rows"]))


class FetchReader(DataSourceReader):
    """Reads halves of a range through nats-py."""

    def __init__(self, url: str, rows: int) -> None:
        self.url, self.rows = url, rows

    def partitions(self) -> Sequence[InputPartition]:
        """Two tasks."""
        return [InputPartition((1, self.rows // 2 + 1)), InputPartition((self.rows // 2 + 1, self.rows + 1))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Fetch, and make Arrow batches."""
        import pyarrow as pa  # noqa: PLC0415

        start, end = partition.value
        names = ["stream", "seq", "subject", "timestamp", "payload"]
        times = pa.timestamp("us", tz="UTC")
        for found in asyncio.run(fetch(self.url, start, end)):
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([STREAM] * len(found)),
                    pa.array([m.metadata.sequence.stream for m in found], pa.int64()),
                    pa.array([m.subject for m in found]),
                    pa.array([m.metadata.timestamp for m in found], times),
                    pa.array([m.data for m in found], pa.binary()),
                ],
                names=names,
            )


async def fetch(url: str, start: int, end: int) -> list[list[Any]]:
    """All messages of a range, by nats-py."""
    import nats  # noqa: PLC0415
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy  # noqa: PLC0415

    client = await nats.connect(url)
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start,
        ack_policy=AckPolicy.NONE,
        mem_storage=True,
    )
    consumer = await client.jetstream().pull_subscribe("dc.>", stream=STREAM, config=config)
    batches, left = [], end - start
    while left:
        batches.append(await consumer.fetch(min(2000, left), timeout=10))
        left -= len(batches[-1])
    await client.close()
    return batches


def timed(name: str, rows: int, read: Callable[[], tuple[int, int]]) -> float:
    """Rows a second of one read, which must bring everything."""
    begin_s = time.perf_counter()
    found = read()
    rate = rows / (time.perf_counter() - begin_s)
    if found != (rows, rows * SIZE):
        sys.exit(f"{name} brought {found[0]:,} rows with {found[1]:,} bytes; expected {rows:,} rows")
    console.log(f"{name}: {rate:,.0f} rows/s over {rows:,} rows")
    return rate


def bench_batch(spark: SparkSession, url: str, rows: int, round_rows: int, rounds: int, lake: Path) -> dict[str, Any]:
    """All readers, in rounds over some rows and once over all of them."""
    spark.dataSource.register(FetchSource)
    fetch_rows = min(200_000, round_rows)

    def readers(n: int) -> dict[str, tuple[int, Callable[[], tuple[int, int]]]]:
        parquet = lake / f"{n}.parquet"
        if not parquet.exists():
            stream_frame(spark, url, n, 2).write.parquet(str(parquet))
        fetched = spark.read.format("fetch").option("url", url).option("rows", str(fetch_rows))
        return {
            "plain": (n, lambda: plain(url, n, 1)),
            "plain x2": (n, lambda: plain(url, n, 2)),
            "spark 1": (n, lambda: total(stream_frame(spark, url, n, 1))),
            "spark 2": (n, lambda: total(stream_frame(spark, url, n, 2))),
            "fetch": (fetch_rows, lambda: total(fetched.load())),
            "parquet": (n, lambda: total(spark.read.parquet(str(parquet)))),
        }

    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (n, read) in readers(round_rows).items():
            rates.setdefault(name, []).append(timed(name, n, read))
    whole = {name: timed(name, n, read) for name, (n, read) in readers(rows).items() if name != "fetch"}
    spark_rates = rates["spark 2"]
    return {
        "rows": rows,
        "round_rows": round_rows,
        "rates": {name: round(statistics.median(found)) for name, found in rates.items()},
        "rates_all": {name: [round(rate) for rate in found] for name, found in rates.items()},
        "whole": {name: round(rate) for name, rate in whole.items()},
        "of_plain": round(_ratio(spark_rates, rates["plain"]), 3),
        "of_plain_whole": round(whole["spark 2"] / whole["plain"], 3),
        "times_fetch": round(_ratio(spark_rates, rates["fetch"]), 2),
        "of_parquet": round(_ratio(spark_rates, rates["parquet"]), 3),
    }


def _ratio(left: list[float], right: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(left, right, strict=True))


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────


def reached(progress: Any) -> int:
    """The first sequence behind a batch."""
    end = progress["sources"][0]["endOffset"]
    return int((json.loads(end) if isinstance(end, str) else end or {"next": 0})["next"])


def bench_streaming(spark: SparkSession, url: str, rate: int, seconds: int, lake: Path) -> dict[str, Any]:
    """Publish at a steady rate and follow with a query."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    target, written_at = lake / "live", {}

    def write(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(target / f"batch={number}"))
        written_at[number] = time.time()

    fill(url, LIVE, 0, subjects=("live.>",))
    reader = spark.readStream.format("jetstream").option("servers", url).option("stream", LIVE)
    frame = reader.option("startingOffsets", "earliest").load()
    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(lake / "checkpoint"))
        .trigger(processingTime="1 second")
        .start()
    )
    progresses: dict[int, Any] = {}
    expected = rate * seconds
    with Filler(url, rate=rate, seconds=seconds) as filler:
        while True:
            for one in query.recentProgress:
                progresses[one["batchId"]] = json.loads(one.json) if hasattr(one, "json") else one
            done = (
                max((p["sources"][0]["endOffset"] or {"next": 1})["next"] for p in progresses.values())
                if progresses
                else 0
            )
            if filler.finished and done > expected:
                break
            if query.exception() is not None:
                sys.exit(f"the query failed: {query.exception()}")
            time.sleep(1.0)
    query.stop()
    written = spark.read.option("basePath", str(target)).parquet(str(target))
    ends = spark.createDataFrame(list(written_at.items()), "batch int, written double")
    found = (
        written.join(f.broadcast(ends), "batch")
        .where("seq > 20000")  # the first batch starts everything that it needs
        .withColumn("latency", f.col("written") - f.col("timestamp").cast("double"))
        .selectExpr("count(*) n", "count(distinct seq) seqs", "percentile(latency, array(0.5, 0.95, 0.99, 1.0)) q")
        .collect()[0]
    )
    durations = [p["durationMs"]["triggerExecution"] for p in progresses.values() if p["numInputRows"]]
    rows = written.selectExpr("count(*) n", "count(distinct seq) s").collect()[0]
    if (rows["n"], rows["s"]) != (expected, expected):
        sys.exit(f"the query wrote {rows['n']:,} rows with {rows['s']:,} sequences; expected {expected:,}")
    p50, p95, p99, worst = found["q"]
    return {
        "rate": rate,
        "seconds": seconds,
        "rows": expected,
        "batches": len(durations),
        "latency_s": {"p50": round(p50, 3), "p95": round(p95, 3), "p99": round(p99, 3), "max": round(worst, 3)},
        "batch_ms": {"p50": statistics.median(durations), "max": max(durations)},
        "rows_per_batch": round(expected / max(1, len(durations))),
    }


# ── command line ──────────────────────────────────────────────────────────────────────────────────────────────────


def show(result: dict[str, Any]) -> bool:
    """Print the result; whether the required ratios were reached."""
    batch = result["batch"]
    table = Table("reader", "rows/s (median)", f"rows/s over {batch['rows']:,}")
    for name, rate in batch["rates"].items():
        whole = batch["whole"].get(name)
        table.add_row(name, f"{rate:,}", f"{whole:,}" if whole else "-")
    console.print(table)
    good = batch["rates"]["spark 2"] >= ROWS_PER_S or batch["of_plain"] >= SHARE_OF_PLAIN
    fast = batch["times_fetch"] >= TIMES_FETCH
    console.print(
        f"spark 2 / plain {batch['of_plain']} (required {SHARE_OF_PLAIN}, or {ROWS_PER_S:,} rows/s): {good}"
    )
    console.print(f"spark 2 / fetch {batch['times_fetch']} (required {TIMES_FETCH}): {fast}")
    console.print(f"spark 2 / parquet {batch['of_parquet']}")
    if "streaming" in result:
        console.print(f"streaming: {result['streaming']}")
    return bool(good and fast)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--round-rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=180, help="0: no streaming part")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows, round_rows = options.rows, min(options.rows, options.round_rows)
    with contextlib.ExitStack() as stack:
        lake = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parti-bench-")))
        server = stack.enter_context(Server())
        begin_s = time.perf_counter()
        fill(server.url, STREAM, rows)
        console.log(f"{rows:,} messages of {SIZE} B stored in {time.perf_counter() - begin_s:.0f} s")
        conf = {"spark.driver.memory": "4g"}
        spark = stack.enter_context(local_session("bench", conf=conf))
        result: dict[str, Any] = {"machine": machine()}
        result["batch"] = bench_batch(spark, server.url, rows, round_rows, options.rounds, lake)
        if options.seconds:
            result["streaming"] = bench_streaming(spark, server.url, options.rate, options.seconds, lake)
    good = show(result)
    write_result("bench_spark_source", result, options.results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
