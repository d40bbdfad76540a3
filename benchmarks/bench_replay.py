"""A backlog handed to Spark and back while workers go on with the rest, against the workers doing it.

    python -m benchmarks.bench_replay --messages 1000000

Twice the same: a backlog over 200 partitions gathers while they are paused, traffic flows on 50 others, and two
worker processes are there. Then the 200 are let go: once to a replay on Spark, once to the workers. Everything that
handlers noted is checked against what the stream holds: lost, repeated, out of order. Exit code 1 when one of them is
not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.replay_app import STREAM
from benchmarks.report import LiveLine, write_result
from rich.console import Console
from rich.table import Table

from parti.app.replay import Replay, Request, Standing
from parti.config import Settings
from parti.coordination.orders import change_orders
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.spark.replay import SparkRounds
from parti.spark.session import open_session
from parti.telemetry.logs import configure_logging

PAYLOAD = b"x" * 256
_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What the notes say about the chosen partitions and the others."""

    messages: int
    by_replay: int
    lost: int
    repeated: int
    out_of_order: int

    @property
    def clean(self) -> bool:
        """Every message once, in order."""
        return not (self.lost or self.repeated or self.out_of_order)


@dataclass(frozen=True, slots=True)
class Run:
    """One way to do it."""

    way: str
    took_s: float
    """From letting the partitions go to the last message of the backlog."""
    rate: float
    live_p99_ms: float
    """From storing to handling of messages on the other partitions, meanwhile."""
    findings: Findings


class Notes:
    """What handlers noted, read as it grows."""

    def __init__(self, directory: Path, backlog: int) -> None:
        """The first `backlog` sequences of the stream are the backlog."""
        self.of_backlog = 0
        """How many of the backlog were handled; a repeated one counts again."""
        self._backlog = backlog
        self._directory = directory
        self._at: dict[Path, int] = defaultdict(int)
        self.rows: list[tuple[str, int, int, str, int]] = []

    def read(self) -> int:
        """Take in what is new; returns how many there are."""
        for path in self._directory.glob("*.notes"):
            with path.open("rb") as file:
                file.seek(self._at[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at[path] += len(whole)
            for line in whole.decode().splitlines():
                partition, seq, fence, worker, stamp = line.split()
                self.rows.append((partition, int(seq), int(fence), worker, int(stamp)))
                self.of_backlog += int(seq) <= self._backlog
        return len(self.rows)

    def judge(self, stored: int) -> Findings:
        """Against a stream that holds the sequences from 1 to `stored`."""
        seqs = [row[1] for row in self.rows]
        by_partition: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for partition, seq, _, _, stamp in self.rows:
            by_partition[partition].append((stamp, seq))
        swapped = sum(
            later[1] < earlier[1]
            for calls in by_partition.values()
            for earlier, later in itertools.pairwise(sorted(calls))
        )
        by_replay = sum(row[3].startswith("replay-") for row in self.rows)
        unique = len(set(seqs))
        return Findings(stored, by_replay, stored - unique, len(seqs) - unique, swapped)


class Scene:
    """A server, a stream, worker processes and the orders that they obey."""

    def __init__(self, url: str, notes: Path, api: JetStreamApi, arguments: argparse.Namespace) -> None:
        self.url = url
        self.notes = Notes(notes, arguments.messages)
        self.api = api
        self.chosen = [f"c{n}" for n in range(arguments.chosen)]
        self.others = [f"o{n}" for n in range(arguments.others)]
        self.backlog = arguments.messages
        self.published_s: dict[int, float] = {}
        self._bucket = Bucket(api, "parti")

    async def fill(self) -> None:
        """The backlog, spread over the chosen partitions."""
        await self.api.call(
            f"STREAM.CREATE.{STREAM}",
            {"name": STREAM, "subjects": ["replay.*"], "storage": "file", "allow_direct": True},
        )
        for begin in range(0, self.backlog, 2_000):
            numbers = range(begin, min(begin + 2_000, self.backlog))
            await asyncio.gather(
                *(self.api.publish(f"replay.{self.chosen[n % len(self.chosen)]}", PAYLOAD) for n in numbers)
            )

    async def publish_live(self, rate: float) -> None:
        """Traffic on the other partitions until cancelled."""
        for partition in itertools.cycle(self.others):
            sent_s = time.time()
            seq = await self.api.publish(f"replay.{partition}", PAYLOAD)
            self.published_s[seq] = sent_s
            await asyncio.sleep(max(0.0, 1 / rate - (time.time() - sent_s)))

    async def order(self, **changes: Any) -> None:
        """Operators want something else."""
        await Bucket.open(self.api, "parti", replicas=1)
        await change_orders(self._bucket, lambda orders: msgspec.structs.replace(orders, **changes))

    async def handled(self, count: int, line: LiveLine) -> None:
        """Return when so many messages of the backlog have been handled."""
        deadline_s = time.monotonic() + _WAIT_S
        while (done := self.notes.of_backlog) < count:
            self.notes.read()
            line.show(f"handled {done:,} of {count:,}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"only {done} of {count} messages were handled")
            await asyncio.sleep(0.5)


@contextmanager
def worker_processes(count: int, environment: dict[str, str]) -> Iterator[None]:
    """So many `parti worker` processes; they drain at the end."""
    command = [sys.executable, "-m", "parti", "worker", "benchmarks.replay_app:app", "--log-level", "error"]
    started = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


async def measure(way: str, arguments: argparse.Namespace, line: LiveLine) -> Run:
    """One run, on a server of its own."""
    with ExitStack() as stack:
        notes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parti-replay-")))
        server = stack.enter_context(Server())
        told = {
            "BENCH_CHOSEN": str(arguments.chosen),
            "BENCH_OTHERS": str(arguments.others),
            "BENCH_NOTES": str(notes),
            "PARTI_NATS": server.url,
        }
        environment = {**os.environ, **told, "PYTHONPATH": str(Path.cwd())}
        os.environ.update(told | {"PYTHONPATH": str(Path.cwd())})
        connection = await Connection.open(Settings(nats=(server.url,)), name="bench")
        try:
            scene = Scene(server.url, notes, JetStreamApi(connection), arguments)
            line.show(f"{way}: publishing {arguments.messages:,} messages")
            await scene.fill()
            await scene.order(paused=tuple(scene.chosen))
            stack.enter_context(worker_processes(arguments.workers, environment))
            live = asyncio.create_task(scene.publish_live(arguments.rate))
            while not scene.notes.read():  # noqa: ASYNC110 - a file that grows
                await asyncio.sleep(0.2)
            do = _by_replay if way == "replay" else _by_workers
            took_s = await do(scene, arguments, stack, line)
            live.cancel()
            await asyncio.gather(live, return_exceptions=True)
            stored = (await scene.api.stream_info(STREAM)).last_seq
            await _settle(scene, stored)
        finally:
            await connection.close()
        line.end()
        findings = scene.notes.judge(stored)
        return Run(way, took_s, arguments.messages / took_s, _p99_ms(scene), findings)


async def _by_workers(scene: Scene, arguments: argparse.Namespace, stack: ExitStack, line: LiveLine) -> float:
    began_s = time.monotonic()
    await scene.order(paused=())
    await scene.handled(arguments.messages, line)
    return time.monotonic() - began_s


async def _by_replay(scene: Scene, arguments: argparse.Namespace, stack: ExitStack, line: LiveLine) -> float:
    spark = await asyncio.to_thread(stack.enter_context, open_session("bench-replay", arguments.master))
    found = _app()
    settings, job = found.job(fleet=True, nats=scene.url)
    request = Request(
        name="replay-bench",
        choose=lambda known: scene.chosen,
        until=arguments.messages + 1,
        messages_per_round=arguments.round,
        claim_within_s=120.0,
    )
    began_s = time.monotonic()
    await scene.order(paused=())

    def show(standing: Standing) -> None:
        line.show(f"replay: {standing.doing}: {standing.handled:,} messages, {standing.at_bound} partitions done")

    await Replay(settings, job, request, show).run(lambda: SparkRounds(spark))
    await scene.handled(arguments.messages, line)
    return time.monotonic() - began_s


def _app() -> Any:
    from benchmarks import replay_app  # noqa: PLC0415 - reads the environment, which is set now

    replay_app.NOTES = os.environ["BENCH_NOTES"]
    return replay_app.app


async def _settle(scene: Scene, stored: int) -> None:
    """Until everything has been handled, or nothing happens any more."""
    before, quiet, count = -1, 0, scene.notes.read()
    while (count < stored or len({row[1] for row in scene.notes.rows}) < stored) and quiet < 40:
        count = scene.notes.read()
        quiet, before = (0, count) if count != before else (quiet + 1, before)
        await asyncio.sleep(0.25)


def _p99_ms(scene: Scene) -> float:
    handled = {row[1]: row[4] / 1e9 for row in scene.notes.rows}
    delays = sorted(handled[seq] - at_s for seq, at_s in scene.published_s.items() if seq in handled)
    return 1000 * delays[int(0.99 * (len(delays) - 1))] if delays else 0.0


def main() -> int:
    """Measure both ways and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--chosen", type=int, default=200, help="partitions with a backlog")
    parser.add_argument("--others", type=int, default=50, help="partitions with traffic")
    parser.add_argument("--rate", type=float, default=200.0, help="messages a second on the others")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--round", type=int, default=200_000, help="messages in one round of the replay")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--only", choices=("replay", "workers"), default=None)
    parser.add_argument("--no-result", action="store_true", help="write no file")
    arguments = parser.parse_args()
    configure_logging("error", "console")
    line = LiveLine()
    ways = [arguments.only] if arguments.only else ["replay", "workers"]
    runs = [asyncio.run(measure(way, arguments, line)) for way in ways]
    _print(runs, arguments)
    if not arguments.no_result:
        given = {k: v for k, v in vars(arguments).items() if k not in {"only", "no_result"}}
        write_result("replay", {"arguments": given, "runs": [asdict(run) for run in runs]})
    return 0 if all(run.findings.clean for run in runs) else 1


def _print(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    table = Table(title=f"{arguments.messages:,} messages over {arguments.chosen} partitions")
    columns: list[tuple[str, Callable[[Run], str]]] = [
        ("way", lambda run: run.way),
        ("seconds", lambda run: f"{run.took_s:.1f}"),
        ("msg/s", lambda run: f"{run.rate:,.0f}"),
        ("by Spark", lambda run: f"{run.findings.by_replay:,}"),
        ("lost", lambda run: str(run.findings.lost)),
        ("repeated", lambda run: str(run.findings.repeated)),
        ("out of order", lambda run: str(run.findings.out_of_order)),
        ("p99 of the others", lambda run: f"{run.live_p99_ms:.0f} ms"),
    ]
    for name, _ in columns:
        table.add_column(name)
    for run in runs:
        table.add_row(*(tell(run) for _, tell in columns))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
