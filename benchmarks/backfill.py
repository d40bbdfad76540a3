"""Which reader brings a partition's backlog fastest?

    python -m benchmarks.backfill --repeats 5

A stream holds messages on 20, 200 or 2,000 subjects in turn, on file and on memory storage. The last messages of 1, 8
or 40 partitions are read at the same time, up to the end of the stream, by each reader:

- `leader`: one `STREAM.MSG.GET` after the other;
- `direct N`: `BacklogReader`, batched direct gets of N messages, with the leader's word at the end;
- `consumer`: an ephemeral pull consumer for each partition (memory, ack none), created for this and deleted after;
- `reset`: RESET of a durable that has 80 filters (or all subjects, when there are fewer), which delivers the messages
  of all 80 again; each is acknowledged, only the wanted ones count.

All readers of a round run right after one another, and ratios are taken within a round, because absolute rates drift
with whatever else the machine does. Latency is the time until the caller has the first message: a page is handed over
whole. Exit code 1 if a reader brought anything but the expected messages in order.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, LiveLine, machine, write_result
from rich.console import Console
from rich.table import Table

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.backlog import BacklogReader
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire, pub
from parti.model.headers import parse_reply
from parti.telemetry.logs import configure_logging

STREAM = "BACKFILL"
DURABLE = "durable"
FILTERS = 80
PAYLOAD = bytes(128)
BATCHES = (64, 256, 1000)
REFERENCE = "direct 256"
MOST_PER_PARTITION = 1000
MOST_IN_ALL = 4000
_WRITE_AT_ONCE = 2000
_LIMIT_S = 120.0
console = Console()

Seqs = dict[str, list[int]]
Read = Callable[["Cell"], Awaitable["Reading"]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of one reader's work."""

    found: Seqs
    first_ms: float
    """Until the first partition had its first message."""
    last_first_ms: float
    """Until the last partition had its first message."""
    total_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One setup: the stream, the wanted partitions and where their backlogs begin."""

    api: JetStreamApi
    wire: Wire
    connection: Connection
    stream: StreamInfo
    wanted: tuple[str, ...]
    start: int
    each: int


class Stopwatch:
    """Collects the messages of several partitions and the times at which they came."""

    def __init__(self, cell: Cell) -> None:
        self._want = cell.each
        self._missing = len(cell.wanted)
        self.found: Seqs = {partition: [] for partition in cell.wanted}
        self.firsts: list[float] = []
        self.started_s = time.perf_counter()
        self.ended_s = 0.0
        self.done = asyncio.Event()

    def note(self, partition: str, seqs: list[int]) -> None:
        """The caller has these messages now."""
        found = self.found[partition]
        if seqs and not found:
            self.firsts.append(time.perf_counter() - self.started_s)
        found += seqs
        if len(found) == self._want:
            self._missing -= 1
            if not self._missing:
                self.ended_s = time.perf_counter()
                self.done.set()

    async def reading(self) -> Reading:
        """Wait until everything has come."""
        async with asyncio.timeout(_LIMIT_S):
            await self.done.wait()
        return Reading(self.found, min(self.firsts) * 1e3, max(self.firsts) * 1e3, self.ended_s - self.started_s)


# ── the readers ───────────────────────────────────────────────────────────────────────────────────────────────


async def read_pages(cell: Cell, *, batch: int, direct: bool) -> Reading:
    """By `BacklogReader`, with direct gets or the leader's."""
    stream = dataclasses.replace(cell.stream, allow_direct=direct)
    reader = BacklogReader(cell.api, cell.wire, stream, connection=cell.connection)
    watch = Stopwatch(cell)

    async def read(partition: str) -> None:
        seq, exhausted = cell.start, False
        while not exhausted:
            page = await reader.read(partition, seq, up_to=cell.stream.last_seq, batch=batch)
            watch.note(partition, [stored.seq for stored in page.messages])
            seq, exhausted = page.messages[-1].seq + 1 if page.messages else seq, page.exhausted

    await asyncio.gather(*(read(partition) for partition in cell.wanted))
    watch.ended_s = time.perf_counter()  # the leader's word at the end belongs to it
    return await watch.reading()


async def read_by_leader(cell: Cell) -> Reading:
    """One message at a time, as many partitions at once as are wanted."""
    return await read_pages(cell, batch=1, direct=False)


def read_directly(batch: int) -> Read:
    """Batched direct gets of that size."""

    async def read(cell: Cell) -> Reading:
        return await read_pages(cell, batch=batch, direct=True)

    return read


async def read_by_consumers(cell: Cell) -> Reading:
    """An ephemeral consumer for each partition."""
    watch = Stopwatch(cell)
    sids: list[bytes] = []
    config: dict[str, Any] = {
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": cell.start,
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": int(60e9),
    }

    async def read(partition: str) -> None:
        name = "backfill-" + partition.replace(".", "-")
        await cell.api.put_consumer(STREAM, {**config, "name": name, "filter_subject": partition}, action="create")
        inbox = cell.wire.new_inbox()

        def sink(_subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
            watch.note(partition, [parse_reply(reply).stream_seq] if reply else [])

        sids.append(cell.wire.subscribe(inbox, sink))
        pull(cell.wire, name, cell.each, inbox)

    await asyncio.gather(*(read(partition) for partition in cell.wanted))
    reading = await watch.reading()
    for sid in sids:
        cell.wire.unsubscribe(sid)
    for partition in cell.wanted:
        await cell.api.delete_consumer(STREAM, "backfill-" + partition.replace(".", "-"))
    return reading


async def read_by_reset(cell: Cell) -> Reading:
    """The durable goes back to where the backlog begins, and delivers all its subjects again."""
    watch = Stopwatch(cell)
    wanted = {partition.encode(): partition for partition in cell.wanted}

    def sink(subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
        if not reply:
            return
        cell.wire.write(pub(reply, b"+ACK"))
        if (partition := wanted.get(subject)) is not None:
            watch.note(partition, [parse_reply(reply).stream_seq])

    inbox = cell.wire.new_inbox()
    sid = cell.wire.subscribe(inbox, sink)
    await cell.api.reset_consumer(STREAM, DURABLE, cell.start)
    pull(cell.wire, DURABLE, 1_000_000, inbox)
    try:
        return await watch.reading()
    finally:
        cell.wire.unsubscribe(sid)


def pull(wire: Wire, consumer: str, batch: int, inbox: str) -> None:
    """Send one pull."""
    body = json.dumps({"batch": batch, "expires": int(60e9)}).encode()
    wire.write(pub(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{consumer}".encode(), body, inbox.encode()))


READERS: dict[str, Read] = {
    "leader": read_by_leader,
    **{f"direct {batch}": read_directly(batch) for batch in BATCHES},
    "consumer": read_by_consumers,
    "reset": read_by_reset,
}


# ── one setup after the other ─────────────────────────────────────────────────────────────────────────────────


async def fill(
    api: JetStreamApi, wire: Wire, connection: Connection, *, storage: str, subjects: int, count: int
) -> None:
    """A stream with `count` messages on its subjects in turn."""
    config = {"subjects": ["b.>"], "storage": storage, "allow_direct": True}
    await api.call(f"STREAM.CREATE.{STREAM}", {"name": STREAM, **config})
    for begin in range(0, count, _WRITE_AT_ONCE):
        numbers = range(begin, min(count, begin + _WRITE_AT_ONCE))
        wire.write(b"".join(pub(b"b.%d" % (number % subjects), PAYLOAD) for number in numbers))
        await connection.flush(30.0)
    while (await api.stream_info(STREAM)).messages < count:  # noqa: ASYNC110 - the server stores after it has read
        await asyncio.sleep(0.05)


async def measure(cell: Cell, subjects: int, repeats: int, pid: int, live: LiveLine, label: str) -> dict[str, Any]:
    """All readers in each round; medians over the rounds."""
    filters = [f"b.{number}" for number in range(min(subjects, FILTERS))]
    durable = {"name": DURABLE, "durable_name": DURABLE, "filter_subjects": filters, "ack_policy": "explicit"}
    await cell.api.put_consumer(STREAM, {**durable, "max_ack_pending": -1, "ack_wait": int(600e9)}, action="create")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
    expected = {
        partition: [cell.start + round_ * subjects + int(partition[2:]) for round_ in range(cell.each)]
        for partition in cell.wanted
    }
    names = list(READERS)
    for number in range(repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            live.show(f"{label}: round {number + 1} of {repeats}, {name}")
            cpu_s = cpu_of(pid)
            reading = await READERS[name](cell)
            cpu_s = cpu_of(pid) - cpu_s
            if reading.found != expected:
                raise SystemExit(f"{name} brought other messages than expected ({label})")
            messages = cell.each * len(cell.wanted)
            rows[name].append(
                {
                    "first_ms": reading.first_ms,
                    "last_first_ms": reading.last_first_ms,
                    "msgs_per_s": messages / reading.total_s,
                    "server_cpu_us_per_msg": cpu_s * 1e6 / messages,
                }
            )
    await cell.api.delete_consumer(STREAM, DURABLE)
    return {name: summary(rows[name], rows[REFERENCE]) for name in READERS}


def summary(rows: list[dict[str, float]], reference: list[dict[str, float]]) -> dict[str, float]:
    """Medians, and the median of the ratios to the reference reader in the same round."""
    medians = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
    ratios = [row["msgs_per_s"] / other["msgs_per_s"] for row, other in zip(rows, reference, strict=True)]
    rates = [row["msgs_per_s"] for row in rows]
    spread = {"msgs_per_s_min": round(min(rates), 1), "msgs_per_s_max": round(max(rates), 1)}
    return {**medians, **spread, "times_reference": round(statistics.median(ratios), 3)}


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination, each stream on a server of its own."""
    live, results = LiveLine(), []
    for storage in args.storage:
        for subjects in args.subjects:
            with Server() as server:
                connection = await Connection.open(Settings(nats=(server.url,)), name="backfill")
                api, wire = JetStreamApi(connection, timeout_s=30.0), Wire(connection.client)
                live.show(f"{storage}, {subjects} subjects: filling")
                await fill(api, wire, connection, storage=storage, subjects=subjects, count=args.messages)
                stream = await api.stream_info(STREAM)
                for partitions in (number for number in args.partitions if number <= min(subjects, FILTERS)):
                    rounds = args.messages // subjects
                    each = min(rounds, MOST_PER_PARTITION, MOST_IN_ALL // partitions)
                    start = (rounds - each) * subjects + 1
                    wanted = tuple(f"b.{number}" for number in spread_out(partitions, min(subjects, FILTERS)))
                    cell = Cell(api, wire, connection, stream, wanted, start, each)
                    label = f"{storage}, {subjects} subjects, {partitions} partitions"
                    found = await measure(cell, subjects, args.repeats, server.pid, live, label)
                    setup = {"storage": storage, "subjects": subjects, "partitions": partitions, "each": each}
                    results.append({**setup, "readers": found})
                    live.end()
                    show(results[-1])
                await connection.close()
    return results


def spread_out(count: int, among: int) -> list[int]:
    """Numbers of partitions at even distances."""
    return [number * among // count for number in range(count)]


def show(result: dict[str, Any]) -> None:
    """One setup as a table."""
    title = "{storage}, {subjects} subjects, {partitions} x {each} messages".format(**result)
    table = Table(title=title, title_justify="left")
    for column in ("reader", "first ms", "last first ms", "msgs/s", f"x {REFERENCE}", "server us/msg"):
        table.add_column(column, justify="left" if column == "reader" else "right")
    for name, row in result["readers"].items():
        table.add_row(
            name,
            f"{row['first_ms']:.1f}",
            f"{row['last_first_ms']:.1f}",
            f"{row['msgs_per_s']:,.0f}",
            f"{row['times_reference']:.2f}",
            f"{row['server_cpu_us_per_msg']:.0f}",
        )
    console.print(table)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=300_000, help="messages in the stream")
    parser.add_argument("--subjects", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 8, 40], help="read at the same time")
    parser.add_argument("--storage", nargs="+", default=["file", "memory"], choices=["file", "memory"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="backfill", help="name of the result file")
    args = parser.parse_args()
    configure_logging(level="error")
    described = machine()
    results = asyncio.run(run(args))
    settings = {"messages": args.messages, "payload_bytes": len(PAYLOAD), "repeats": args.repeats}
    console.print(
        f"written to {write_result(args.name, {'machine': described, **settings, 'results': results}, RESULTS)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
