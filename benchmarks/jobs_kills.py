"""Kill job workers at random and count what became of their jobs.

    python -m benchmarks.jobs_kills --jobs 1000 --kills 20

Real processes (`parti jobs run`) work off short jobs, and now and then one of them gets SIGKILL and is replaced. Each
writes down what it starts and ends. After a kill the records tell which jobs it was running. In the end: every job is
done, none was lost or dead-lettered, and only jobs that ran in a process when it was killed were started again. Exit
code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, LiveLine, write_result
from rich.console import Console

from parti.config import Settings
from parti.embedded import Server
from parti.errors import NotFound
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jobs.desk import JobDesk
from parti.model.job import decode_job, record_key
from parti.telemetry.logs import configure_logging

STREAM, SUBJECT, DURABLE = "SHORT", "short", "parti-jobs"
_STALL_S = 120.0
console = Console()

APP = """
import asyncio
import os

import parti

jobs = parti.jobs.JobApp(stream={stream!r}, subject={subject!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@jobs.handler
async def handle(job):
    os.write(journal, f"start {{job.seq}} {{os.getpid()}}\\n".encode())
    async with job.slots(job.json["cost"]):
        await asyncio.sleep(job.json["seconds"])
    os.write(journal, f"done {{job.seq}} {{os.getpid()}}\\n".encode())
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the jobs."""

    jobs: int
    kills: int
    seconds: float
    completed: int
    lost: int
    dead_letters: int
    running_when_killed: int
    """Jobs that a process had when it was killed, over all kills."""
    started_again: int
    started_again_without_reason: int
    """Jobs that were started more than once though they ran in no process when it was killed."""
    states: dict[str, int]

    @property
    def passed(self) -> bool:
        """Whether the promises were kept."""
        return not (self.lost or self.dead_letters or self.started_again_without_reason)


class Run:
    """One server, its workers, and their journal."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options = options
        self._chance = random.Random(options.seed)
        self._directory = directory
        self._workers: list[subprocess.Popen[bytes]] = []
        self._line = LiveLine()

    async def measure(self) -> Outcome:
        """Start, kill, wait, count."""
        options = self._options
        async with Server() as server:
            self._write_app()
            connection = await Connection.open(Settings(nats=(server.url,)), name="bench")
            self._api, self._desk = JetStreamApi(connection), JobDesk(connection, "parti")
            sent = await self._publish()
            began_s = time.monotonic()
            try:
                for _ in range(options.workers):
                    self._start(server.url)
                running: set[int] = set()
                for number in range(options.kills):
                    goal = options.jobs * (number + 1) // (options.kills + 2)
                    await self._until(lambda goal=goal: self._reached(goal), f"{number} kills")  # type: ignore[misc]
                    await asyncio.sleep(self._chance.uniform(0, 0.3))
                    running |= await self._kill(server.url)
                await self._until(self._settled, f"{options.kills} kills")
            finally:
                for worker in self._workers:
                    worker.terminate()
                for worker in self._workers:
                    await asyncio.to_thread(worker.wait, 30)
            outcome = await self._judge(sent, running, time.monotonic() - began_s)
            await connection.close()
        self._line.end()
        return outcome

    def _write_app(self) -> None:
        settings = {
            "ack_wait_minutes": self._options.ack_wait / 60,
            "heartbeat_interval_s": self._options.ack_wait / 10,
            "fetch_timeout_s": 0.5,
            "workers": self._options.workers,
            "drain_timeout_s": 10,
        }
        text = APP.format(stream=STREAM, subject=SUBJECT, settings=settings, journal=str(self._directory / "journal"))
        (self._directory / "short_jobs.py").write_text(text)

    async def _publish(self) -> list[int]:
        await self._api.call(
            f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": [SUBJECT], "retention": "workqueue"}
        )
        chance, options = self._chance, self._options
        documents = [
            {"cost": chance.choice([1, 1, 2, 4, 8, 16]), "seconds": round(chance.uniform(0, 2 * options.seconds), 4)}
            for _ in range(options.jobs)
        ]
        sent: list[int] = []
        for begin in range(0, len(documents), 100):
            chunk = documents[begin : begin + 100]
            sent += await asyncio.gather(*(self._api.publish(SUBJECT, json.dumps(d).encode()) for d in chunk))
        return sent

    def _start(self, url: str) -> None:
        command = [sys.executable, "-m", "parti", "jobs", "run", "short_jobs:jobs", "--nats", url]
        with (self._directory / "workers.log").open("ab") as log:
            self._workers.append(
                subprocess.Popen([*command, "--log-level", "error"], cwd=self._directory, stdout=log, stderr=log)
            )

    async def _kill(self, url: str) -> set[int]:
        """Kill one worker and start another; returns the jobs that it had not finished by their records."""
        victim = self._workers.pop(self._chance.randrange(len(self._workers)))
        victim.kill()
        victim.wait()
        self._start(url)
        mine = {seq for word, seq, pid in self._journal() if word == "start" and pid == victim.pid}
        return {seq for seq in mine if not await self._is_final(seq)}

    async def _is_final(self, seq: int) -> bool:
        entry = await self._desk.bucket.get(record_key(DURABLE, seq))
        record = decode_job(entry.value) if entry else None
        return record is not None and record.state.final

    def _journal(self) -> list[tuple[str, int, int]]:
        path = self._directory / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(word, int(seq), int(pid)) for word, seq, pid in map(str.split, lines)]

    async def _reached(self, goal: int) -> bool:
        return len({seq for word, seq, _ in self._journal() if word == "done"}) >= goal

    async def _settled(self) -> bool:
        try:
            info = await self._api.consumer_info(STREAM, DURABLE)
        except NotFound:
            return False
        return not info.pending and not info.ack_pending

    async def _until(self, reached: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline_s = time.monotonic() + _STALL_S
        while not await reached():
            if any(worker.poll() is not None for worker in self._workers) or time.monotonic() > deadline_s:
                log = (self._directory / "workers.log").read_text()[-2000:]
                raise RuntimeError(f"nothing moves any more after {what}: {log}")
            done = len({seq for word, seq, _ in self._journal() if word == "done"})
            self._line.show(f"{what}, {done:,} jobs done")
            await asyncio.sleep(0.05)

    async def _judge(self, sent: list[int], running: set[int], seconds: float) -> Outcome:
        journal = self._journal()
        starts = Counter(seq for word, seq, _ in journal if word == "start")
        done = {seq for word, seq, _ in journal if word == "done"}
        again = {seq for seq, number in starts.items() if number > 1}
        picture = await self._desk.picture(await self._desk.entries())
        return Outcome(
            jobs=len(sent),
            kills=self._options.kills,
            seconds=round(seconds, 1),
            completed=len(done & set(sent)),
            lost=len(set(sent) - done),
            dead_letters=picture.counts["failed"],
            running_when_killed=len(running),
            started_again=len(again),
            started_again_without_reason=len(again - running),
            states={state: number for state, number in picture.counts.items() if number},
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=0.1, help="mean length of a job")
    parser.add_argument("--ack-wait", type=float, default=2.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="jobs_kills", help="name of the JSON result")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(Run(options, Path(directory)).measure())
    for name, value in asdict(outcome).items():
        console.print(f"{name.replace('_', ' '):32}{value}")
    settings: dict[str, Any] = {k: v for k, v in vars(options).items() if k not in {"name", "results"}}
    data = {"options": settings, **asdict(outcome), "passed": outcome.passed}
    path = write_result(options.name, data, options.results)
    console.print("passed" if outcome.passed else "FAILED", style="green" if outcome.passed else "red")
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
