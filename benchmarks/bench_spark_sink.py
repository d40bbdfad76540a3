"""How fast does Spark publish to a stream, and how far is that from what the publisher itself can do?

    python -m benchmarks.bench_spark_sink --rows 300000 --rounds 3

Rows of 256 bytes on 2,000 subjects, each with a message id, are published to a file stream in turn by

- `plain`: one Python process with parti's windowed publisher, from the same Arrow batches that a task would get;
- `plain x2`: two such processes, half of the rows each;
- `spark 1`, `spark 2`: `format("jetstream")` with one and two tasks;
- `publish_async`: a Python data source on nats-py's `publish_async`, two tasks, with fewer rows, because it is slow.

All wait for every acknowledgement. Rounds are interleaved and ratios taken within a round. Exit code 1 if the stream
did not get all rows from somebody, or a required ratio is not reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from benchmarks.report import RESULTS, machine, write_result
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from rich.console import Console
from rich.table import Table

from parti.embedded import Server
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.publishing import WindowedPublisher
from parti.jetstream.target import Target
from parti.spark.session import local_session
from parti.spark.sink import Shape, messages_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

STREAM = "OUT"
SIZE = 256
SUBJECTS = 2000
TIMES_ASYNC = 4.0
_AT_ONCE = 10_000
_ASYNC_WINDOW = 4096
console = Console()


# ── the writers ───────────────────────────────────────────────────────────────────────────────────────────────────


def publish_plain(url: str, begin: int, end: int, prefix: str, ready: Any, go: Any) -> None:
    """Publish rows from Arrow batches, without Spark; waits for the start signal with everything imported."""
    batches = [_arrow(first, min(first + _AT_ONCE, end)) for first in range(begin, end, _AT_ONCE)]
    ready.release()
    go.wait()
    with WindowedPublisher(Target(servers=(url,)), stream=STREAM) as publisher:
        for batch in batches:
            publisher.publish(messages_of(batch, Shape(0, 1, -1, -1), None, publisher.published, prefix))
        publisher.flush()


def _arrow(begin: int, end: int) -> Any:
    subjects = [f"out.t{n % 50}.c{n // 50 % 40}.completion" for n in range(begin, end)]
    return pa.RecordBatch.from_pydict({"subject": subjects, "payload": [b"x" * SIZE] * (end - begin)})


def plain(url: str, rows: int, processes: int) -> float:
    """Seconds that so many processes take."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    share = rows // processes
    workers = [
        context.Process(target=publish_plain, args=(url, n * share, (n + 1) * share, _prefix(), ready, go))
        for n in range(processes)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    began_s = time.perf_counter()
    go.set()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began_s


def _rows(spark: SparkSession, rows: int, tasks: int) -> DataFrame:
    return spark.range(0, rows, numPartitions=tasks).selectExpr(
        "concat('out.t', id % 50, '.c', cast(id / 50 AS bigint) % 40, '.completion') AS subject",
        f"repeat('x', {SIZE}) AS payload",
    )


def spark_sink(spark: SparkSession, url: str, rows: int, tasks: int) -> float:
    """Seconds that the sink takes."""
    writer = _rows(spark, rows, tasks).write.format("jetstream").mode("append")
    began_s = time.perf_counter()
    writer.options(servers=url, stream=STREAM, idPrefix=_prefix()).save()
    return time.perf_counter() - began_s


def async_sink(spark: SparkSession, url: str, rows: int) -> float:
    """Seconds that nats-py's `publish_async` takes in two tasks."""
    spark.dataSource.register(AsyncDataSource)
    writer = _rows(spark, rows, 2).write.format("publish_async").mode("append")
    began_s = time.perf_counter()
    writer.options(servers=url, prefix=_prefix()).save()
    return time.perf_counter() - began_s


class AsyncDataSource(DataSource):
    """The sink that one writes with nats-py."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "publish_async"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Publishes through nats-py."""
        return AsyncWriter(self.options["servers"], self.options["prefix"])


class AsyncWriter(DataSourceArrowWriter):
    """Publishes with `publish_async`, as many unacknowledged at a time as the other writers."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Publish the rows of one task."""
        asyncio.run(publish_async(self.url, f"{self.prefix}.{os.getpid()}", iterator))
        return WriterCommitMessage()


async def publish_async(url: str, prefix: str, batches: Iterator[Any]) -> None:
    """Publish Arrow batches by nats-py, and wait for every acknowledgement."""
    import nats  # noqa: PLC0415

    client = await nats.connect(url)
    jetstream = client.jetstream(publish_async_max_pending=_ASYNC_WINDOW)
    number, answers = 0, []
    for batch in batches:
        for subject, payload in zip(batch["subject"].to_pylist(), batch["payload"].to_pylist(), strict=True):
            headers = {"Nats-Msg-Id": f"{prefix}.{number}"}
            answers.append(await jetstream.publish_async(subject, payload.encode(), headers=headers))
            number += 1
        await asyncio.gather(*answers)
        answers.clear()
    await client.close()


def _prefix() -> str:
    return os.urandom(6).hex()


# ── rounds ────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(spark: SparkSession, url: str, rows: int, async_rows: int, rounds: int) -> dict[str, list[float]]:
    """Rows per second of each writer, round by round."""
    writers: dict[str, tuple[int, Callable[[], float]]] = {
        "plain": (rows, lambda: plain(url, rows, 1)),
        "plain x2": (rows, lambda: plain(url, rows, 2)),
        "spark 1": (rows, lambda: spark_sink(spark, url, rows, 1)),
        "spark 2": (rows, lambda: spark_sink(spark, url, rows, 2)),
        "publish_async": (async_rows, lambda: async_sink(spark, url, async_rows)),
    }
    found: dict[str, list[float]] = {name: [] for name in writers}
    with BlockingClient.open(Target(servers=(url,)), name="bench") as client:
        client.api(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["out.>"], "storage": "file"})
        # The first job of a session starts workers and loads classes.
        spark_sink(spark, url, 1000, 2)
        for number in range(1, rounds + 1):
            for name, (count, write) in writers.items():
                client.api(f"STREAM.PURGE.{STREAM}", timeout_s=60)
                took_s = write()
                stored = int(client.stream_info(STREAM)["state"]["messages"])
                if stored != count:
                    raise SystemExit(f"{name}: {stored:,} messages stored, expected {count:,}")
                found[name].append(count / took_s)
                console.log(f"round {number}: {name:<14}{count / took_s:>10,.0f} rows/s")
    return found


def ratios(found: dict[str, list[float]], name: str, base: str) -> list[float]:
    """How many times as fast, within each round."""
    return [one / other for one, other in zip(found[name], found[base], strict=True)]


def show(found: dict[str, list[float]]) -> bool:
    """Print the table; False when the sink is not enough faster than nats-py."""
    table = Table(title=f"publishing rows of {SIZE} B with message ids")
    for column in ("writer", "rows/s (median)", "min", "max", "against plain", "against publish_async"):
        table.add_column(column, justify="left" if column == "writer" else "right")
    for name, rates in found.items():
        table.add_row(
            name,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{statistics.median(ratios(found, name, 'plain')):.2f}",
            f"{statistics.median(ratios(found, name, 'publish_async')):.1f}",
        )
    console.print(table)
    good = statistics.median(ratios(found, "spark 2", "publish_async")) >= TIMES_ASYNC
    console.print("passed" if good else f"FAILED: less than {TIMES_ASYNC:g} x publish_async")
    return good


def main() -> int:
    """Parse, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--async-rows", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    options = parser.parse_args()
    rows = options.rows // 2 * 2
    started = machine()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server())
        spark = stack.enter_context(local_session("bench-sink"))
        found = measure(spark, server.url, rows, options.async_rows // 2 * 2, options.rounds)
    good = show(found)
    rates = {name: [round(rate) for rate in each] for name, each in found.items()}
    result = {"machine": started, "rows": rows, "bytes": SIZE, "rows_per_s": rates, "passed": good}
    write_result("bench_spark_sink", result, options.results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
