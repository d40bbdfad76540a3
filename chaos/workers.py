"""`parti worker` processes and publishers, started as a user starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.fleet import Place

from chaos.handler_options import ENV_OPTIONS, ENV_PROCESS, HandlerOptions
from chaos.notes import PUBLISHED
from chaos.odd_messages import PLAIN
from parti.embedded import launcher

ROOT = Path(__file__).parents[1]
_EXIT_S = 45.0


def spawn(
    command: Sequence[str], directory: Path, log: str, *, told: bool = False, extra: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, whatever ends it; call it from the main thread only.

    `told`: it is told what to do through its standard input.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PARTI_", "CHAOS_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    tie = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())] if sys.platform == "linux" else []
    with (directory / log).open("ab") as file:
        return subprocess.Popen(
            [*tie, *command],
            cwd=directory,
            env=environment | {"PYTHONPATH": path, **(extra or {})},
            stdin=subprocess.PIPE if told else subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class WorkerProcess:
    """One life of a worker."""

    def __init__(self, name: str, slot: int, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.slot = slot
        self.process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, and -9 if it had to be killed."""
        try:
            return await asyncio.to_thread(self.process.wait, _EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return await asyncio.to_thread(self.process.wait)


class Workers:
    """All `parti worker` processes of a run; a slot is a place for one of them after the other."""

    def __init__(
        self, directory: Path, place: Place, urls: str, options: HandlerOptions, settings: Mapping[str, Any]
    ) -> None:
        self.running: dict[int, WorkerProcess] = {}
        """By slot."""
        self.started = 0
        self._directory = directory
        self._urls = urls
        self._options = msgspec.json.encode(options).decode()
        self._lives: Counter[int] = Counter()
        lines = {**settings, "bucket": place.bucket, "prefix": place.prefix}.items()
        # Of what settings are made of, JSON and TOML write the same.
        (directory / "parti.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines))

    def start(
        self, slot: int, *, url: str | None = None, identity: str | None = None, arguments: Sequence[str] = ()
    ) -> WorkerProcess:
        """Start a worker in a slot; handlers are async in even slots and plain functions in odd ones."""
        self._lives[slot] += 1
        self.started += 1
        name = f"w{slot}-{self._lives[slot]}"
        target = f"chaos.handler:{'plain' if slot % 2 else 'app'}"
        command = [sys.executable, "-m", "parti", "worker", target, "--nats", url or self._urls]
        command += ["--log-format", "json", *(["--identity", identity] if identity else []), *arguments]
        extra = {ENV_OPTIONS: self._options, ENV_PROCESS: name}
        process = WorkerProcess(name, slot, spawn(command, self._directory, f"{name}.log", extra=extra))
        self.running[slot] = process
        return process

    def free_slot(self) -> int:
        """The lowest slot in which nothing runs."""
        return next(slot for slot in range(len(self.running) + 1) if slot not in self.running)

    def by_pid(self, pid: int) -> WorkerProcess | None:
        """The running worker with that process id."""
        return next((worker for worker in self.running.values() if worker.pid == pid), None)

    async def end(self, worker: WorkerProcess, number: signal.Signals) -> int:
        """Signal a worker to end and wait for that; returns its exit code.

        One that had not yet begun, and had said nothing, ends by the signal itself: that is as good as 0.
        """
        self.running.pop(worker.slot, None)
        worker.signal(number)
        code = await worker.wait()
        unborn = code == -signal.SIGTERM and not (self._directory / f"{worker.name}.log").stat().st_size
        return 0 if unborn else code

    async def end_all(self) -> list[int]:
        """SIGTERM to all; returns the exit codes."""
        workers = list(self.running.values())
        return list(await asyncio.gather(*(self.end(worker, signal.SIGTERM) for worker in workers)))

    def crashed(self) -> list[str]:
        """Workers that ended although nobody told them to, with their last line."""
        gone = [worker for worker in self.running.values() if worker.process.poll() is not None]
        return [f"{worker.name} ended with {worker.process.poll()}: {self._last_line(worker)}" for worker in gone]

    def _last_line(self, worker: WorkerProcess) -> str:
        lines = (self._directory / f"{worker.name}.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def complaints(self) -> Counter[str]:
        """What the workers have logged as warning or error, with how often."""
        found: Counter[str] = Counter()
        for path in sorted(self._directory.glob("w*.log")):
            for line in path.read_text(errors="replace").splitlines():
                entry: Any = None
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                if not isinstance(entry, dict):
                    found[line] += 1
                elif entry.get("level") not in {"info", "debug"}:
                    text = str(entry.get("event", line))
                    found[f"{text}: {why}" if (why := entry.get("error") or entry.get("reason")) else text] += 1
        return found

    def close(self) -> None:
        """Kill what is left, also what is stopped."""
        for worker in self.running.values():
            worker.process.kill()
        for worker in self.running.values():
            worker.process.wait()
        self.running.clear()


class Publisher:
    """A publisher process."""

    def __init__(self, name: str, directory: Path, place: Place, urls: str) -> None:
        command = [sys.executable, "-m", "chaos.publisher", "--name", name, "--servers", urls]
        subject = place.template.replace("{p}", "{}").replace("{kind}", PLAIN)
        command += ["--subject", subject, "--file", f"{name}{PUBLISHED}"]
        self._process = spawn(command, directory, f"{name}.log", told=True)

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Messages a second to each partition; what is not named gets none."""
        self._tell({"rates": dict(rates)})

    async def stop(self) -> bool:
        """End it when all is acknowledged; False when that did not happen in time."""
        self._tell({"stop": True})
        try:
            return await asyncio.to_thread(self._process.wait, _EXIT_S) == 0
        except subprocess.TimeoutExpired:
            return False

    def _tell(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()
