"""The worker processes of the demo: started as a user starts them, killed as a crash ends them, asked to leave."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parti.cli.demo import app
from parti.embedded import child
from parti.errors import PartiError

SETTINGS: Mapping[str, Any] = {
    "ledger": "full",
    "lease_ttl_s": 2.0,
    "leader_ttl_s": 2.0,
    "cold_start_window_s": 1.0,
    "scale_window_s": 1.0,
    "min_rebalance_interval_s": 1.0,
}
"""What differs from the defaults: the ledger is kept for the audit, and waiting is short, to fit into a minute."""
_LEAVE_S = 20.0


@dataclass(slots=True)
class WorkerProcess:
    """One `parti worker` process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    state: Literal["running", "killed", "leaving", "left"] = "running"
    killed_ns: int = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def lines(self) -> list[str]:
        """What it has logged."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        return next(reversed(self.lines), "it said nothing")


class Fleet:
    """All workers of a run, those that are gone included."""

    def __init__(self, directory: Path, url: str, partitions: int, seed: int) -> None:
        self.workers: list[WorkerProcess] = []
        self._directory = directory
        self._arguments = (str(partitions), str(seed))
        self._url = url
        # Of what settings are made of, JSON and TOML write the same.
        settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
        (directory / "parti.toml").write_text(settings)

    def start(self) -> WorkerProcess:
        """Start one more."""
        name = f"process-{len(self.workers) + 1:02}"
        log = self._directory / f"{name}.log"
        command = [sys.executable, "-P", "-m", app.__name__, str(self._directory), self._url, name, *self._arguments]
        worker = WorkerProcess(name, child.spawn(command, log), log)
        self.workers.append(worker)
        return worker

    @property
    def running(self) -> list[WorkerProcess]:
        """Those that have been neither killed nor told to leave."""
        return [worker for worker in self.workers if worker.state == "running"]

    @property
    def died_ns(self) -> dict[str, int]:
        """Those that were killed, and when."""
        return {worker.name: worker.killed_ns for worker in self.workers if worker.state == "killed"}

    def check(self) -> None:
        """Raise `PartiError` when one has ended by itself."""
        for worker in self.running:
            if (code := worker.process.poll()) is not None:
                raise PartiError(f"worker process {worker.pid} ended by itself, code {code}: {worker.last_words}")

    async def kill(self, worker: WorkerProcess) -> None:
        """SIGKILL: it gets no chance to store or to say anything."""
        worker.state = "killed"
        worker.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(worker.process.wait)
        worker.killed_ns = time.time_ns()

    async def leave(self, *workers: WorkerProcess) -> None:
        """Ask workers to leave (SIGTERM) and wait until they are gone; raises `PartiError` when one does so badly."""
        for worker in workers:
            worker.state = "leaving"
        await asyncio.gather(*(asyncio.to_thread(child.end, worker.process, _LEAVE_S) for worker in workers))
        for worker in workers:
            worker.state = "left"
            if code := worker.process.returncode:
                raise PartiError(f"worker process {worker.pid} left with code {code}: {worker.last_words}")

    def end(self) -> int:
        """Kill what still runs; returns how many that were."""
        alive = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in alive:
            worker.process.kill()
        for worker in alive:
            worker.process.wait()
        return len(alive)
