"""Workers that stand still: planted in real processes, noticed in time, told everywhere, and taken over.

One of two `parti worker` processes gets a fault. It is known from the journal when the fault began; from its log when
it was noticed; from the journal again when the other process had all partitions.
"""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import eventually
from tests.integration.processes import command, environment, whole_lines
from tests.pace import unhindered_s

from parti.cli.main import main
from parti.config import Settings
from parti.core.stall import gil_timeout_s
from parti.embedded import Server
from parti.errors import PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

pytestmark = pytest.mark.usefixtures("no_settings_of_this_machine")

PARTITIONS = [f"p{n}" for n in range(8)]
STALL_AFTER_S = 3.0
LEASE_S = 2.0
NOTICED_S = STALL_AFTER_S + 2.0
TAKEN_OVER_S = LEASE_S + 2.0
GIL_HELD_S = gil_timeout_s(STALL_AFTER_S, LEASE_S)
"""When a process ends whose threads cannot run."""

APP = """
import asyncio, os, time
import parti
from parti.jetstream.pull import PullEngine
from parti.jetstream.wire import Wire
from parti.telemetry import tasks
from parti.worker.runners import AsyncRunners

app = parti.App(stream="WORK", subject="work.{p}", partitions=%(partitions)r, stall_after_s=%(stall)r,
                lease_ttl_s=%(lease)r, leader_ttl_s=%(lease)r, scale_window_s=0.2, min_rebalance_interval_s=0.2,
                cold_start_window_s=0.5, metrics_port=0, event_loop=%(loop)r, handler_timeout_s=None,
                pull_heartbeat_s=%(heartbeat)r)
journal = os.open("journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(what, message):
    os.write(journal, f"{time.time()} {os.getpid()} {what} {message.partition.id} {message.seq}\\n".encode())

def first():
    try:
        os.close(os.open("planted", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

@app.handler
async def handle(message):
    note("begun", message)
    if message.data == b"fault" and first():
        note("fault", message)
        %(fault)s
    note("done", message)
"""

BLOCK = "time.sleep(30)"
HOLD_GIL_ASLEEP = "import ctypes; ctypes.PyDLL(None).sleep(90)"
HOLD_GIL_AT_WORK = "import re; re.match('(a+)+$', 'a' * 60 + 'b')"
DEAD_RUNNERS = "AsyncRunners._start_pump = lambda runners: None; AsyncRunners._run = None"
CANCELLED_PULLS = "[t.cancel() for t in asyncio.all_tasks() if t.get_name().startswith('parti-pull')]"
DEAD_PULLS = f"alive, tasks.retried = tasks.retried, lambda *_: asyncio.Event().wait(); {CANCELLED_PULLS}"
REVIVABLE = (
    "revive = PullEngine.revive; PullEngine.revive = lambda *a: setattr(tasks, 'retried', alive) or revive(*a)"
)
DEAD_FOR_GOOD = f"{DEAD_PULLS}; PullEngine.revive = lambda *_: None"
DEAD_UNTIL_REVIVED = f"{DEAD_PULLS}; {REVIVABLE}"

UNANSWERED_PULLS = "write = Wire.write; Wire.write = lambda wire, data: b'.MSG.NEXT.' in data or write(wire, data)"

CANCEL_ALL = "[t.cancel() for t in asyncio.all_tasks() - {asyncio.current_task()}]"
CANCEL_OURS = (
    "[t.cancel() for t in asyncio.all_tasks() - {asyncio.current_task()} if t.get_name().startswith('parti-')]"
)


@dataclass(frozen=True)
class Line:
    """One line of the journal."""

    at_s: float
    pid: int
    what: str
    partition: str
    seq: int


class Pair:
    """Two workers on one stream, and a publisher that never rests."""

    def __init__(self, directory: Path, server: Server, connection: Connection) -> None:
        self._directory = directory
        self.server = server
        self.api = JetStreamApi(connection)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with (self._directory / f"log{len(self.processes)}").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command("worker", "faulty:app", "--nats", self.server.url),
                    cwd=self._directory,
                    env=environment(PARTI_LOG_FORMAT="json"),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            )

    @property
    def journal(self) -> list[Line]:
        lines = whole_lines(self._directory / "journal")
        return [Line(float(at), int(pid), what, p, int(seq)) for at, pid, what, p, seq in (x.split() for x in lines)]

    def log_of(self, pid: int) -> list[dict[str, Any]]:
        number = next(n for n, process in enumerate(self.processes) if process.pid == pid)
        lines = whole_lines(self._directory / f"log{number}")
        return [json.loads(line) for line in lines if line.startswith("{")]

    def stderr_of(self, pid: int) -> str:
        number = next(n for n, process in enumerate(self.processes) if process.pid == pid)
        return (self._directory / f"log{number}").read_text()

    async def exit_code_of(self, pid: int) -> int:
        process = next(process for process in self.processes if process.pid == pid)
        return await asyncio.to_thread(process.wait, 40)

    async def publish(self, data: bytes = b"x", partitions: list[str] = PARTITIONS) -> None:
        await asyncio.gather(*(self.api.publish(f"work.{p}", data) for p in partitions))

    async def plant_fault(self) -> Line:
        """Have one of the workers handle the message that breaks it; the line that it writes just before."""
        await self.publish(b"fault", ["p0"])
        found: list[Line] = []

        def is_planted() -> bool:
            found.extend(line for line in self.journal if line.what == "fault")
            return bool(found)

        await eventually(is_planted)
        return found[0]

    async def keep_publishing(self) -> None:
        while True:
            with suppress(PartiError):  # the server is away
                await self.publish()
            await asyncio.sleep(0.05)

    def shared(self) -> bool:
        """Whether both have handled something of late."""
        lately = [line for line in self.journal if line.what == "done" and line.at_s > time.time() - 1]
        return len({line.pid for line in lately}) == 2

    def owned_by_others_at_s(self, pid: int, since_s: float) -> float | None:
        """When each partition had been handled by another process after that moment."""
        lately = [line for line in self.journal if line.what == "done" and line.at_s > since_s and line.pid != pid]
        first = {line.partition: line.at_s for line in reversed(lately)}
        return max(first.values()) if first.keys() == set(PARTITIONS) else None

    def noticed(self, pid: int) -> dict[str, Any] | None:
        return next((line for line in self.log_of(pid) if line["event"] == "this worker stands still"), None)

    async def notices(self, pid: int) -> dict[str, Any]:
        """The worker's log says that it stands still; the line of the log."""
        await eventually(lambda: self.noticed(pid) is not None)
        noticed = self.noticed(pid)
        assert noticed
        return noticed

    def noticed_at_s(self, pid: int) -> float:
        noticed = self.noticed(pid)
        assert noticed
        return datetime.fromisoformat(noticed["timestamp"]).timestamp()

    def cancelled(self, pid: int) -> set[str]:
        """Names of background tasks that were cancelled by others than their owners, and have begun again."""
        return {line["task"] for line in self.log_of(pid) if "was cancelled by other code" in line["event"]}

    def metrics_of(self, pid: int) -> str:
        said = next(line for line in self.log_of(pid) if line["event"] == "worker started")
        with urllib.request.urlopen(f"http://127.0.0.1:{said['metrics_port']}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    async def status(self) -> tuple[int, dict[str, Any]]:
        """In this process: a stall that is over is no problem any more, and to start another one may take as long."""
        with redirect_stdout(io.StringIO()) as printed:
            code = await asyncio.to_thread(main, ["status", "--json", "--nats", self.server.url])
        return code, json.loads(printed.getvalue())

    async def status_tells(self, words: str) -> bool:
        code, told = await self.status()
        return code == 1 and any(words in problem for problem in told["problems"])

    async def others_own_everything_at_s(self, pid: int, since_s: float) -> float:
        """Wait until other processes have handled every partition since that moment; when the last one was."""
        await eventually(lambda: self.owned_by_others_at_s(pid, since_s) is not None)
        owned_at_s = self.owned_by_others_at_s(pid, since_s)
        assert owned_at_s
        return owned_at_s

    async def is_taken_over(self, pid: int, since_s: float, watch: Watch) -> None:
        """The other process has all partitions in time, and this one ends with a code of its own."""
        owned_at_s = await self.others_own_everything_at_s(pid, since_s)
        watch.within(owned_at_s - self.noticed_at_s(pid), TAKEN_OVER_S)
        assert await self.exit_code_of(pid) == 70

    async def handles_everything(self) -> None:
        last = (await self.api.stream_info("WORK")).last_seq

        async def all_done() -> bool:
            return {line.seq for line in self.journal if line.what == "done"} >= set(range(1, last + 1))

        await eventually(all_done, 20)


@asynccontextmanager
async def pair_of_workers(
    directory: Path, fault: str, *, loop: str, lease_s: float = LEASE_S, heartbeat_s: float = 0.5
) -> AsyncIterator[Pair]:
    values = {"partitions": PARTITIONS, "stall": STALL_AFTER_S, "lease": lease_s, "loop": loop, "fault": fault}
    values["heartbeat"] = heartbeat_s
    (directory / "faulty.py").write_text(APP % values)
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,), reconnect_wait_s=0.05), name="test")
        pair = Pair(directory, server, connection)
        await pair.api.call("STREAM.CREATE.WORK", {"name": "WORK", "subjects": ["work.*"], "storage": "file"})
        try:
            pair.start()
            pair.start()

            publishing = asyncio.create_task(pair.keep_publishing())
            await eventually(pair.shared, 30)
            yield pair
            publishing.cancel()
        finally:
            for process in pair.processes:
                process.kill()
                process.wait()
            await connection.close()


class Watch:
    """Bounds on wall-clock times of other processes, without the time in which everybody waited for a processor."""

    def __init__(self) -> None:
        self._began = time.monotonic() - unhindered_s()

    def within(self, seconds: float, bound_s: float) -> None:
        hindered_s = time.monotonic() - unhindered_s() - self._began
        assert seconds < bound_s + hindered_s, f"{seconds:.1f} s, {hindered_s:.1f} s of them hindered"


@pytest.mark.parametrize("loop", ["auto", "asyncio"])
async def test_a_blocked_event_loop_is_noticed_told_and_taken_over(tmp_path: Path, loop: str) -> None:
    async with pair_of_workers(tmp_path, BLOCK, loop=loop) as pair:
        watch = Watch()
        fault = await pair.plant_fault()
        told = await pair.notices(fault.pid)
        watch.within(pair.noticed_at_s(fault.pid) - fault.at_s, NOTICED_S)
        assert told["kind"] == "loop"
        assert "faulty.py" in told["reason"]
        assert "parti_stalled" in (metrics := pair.metrics_of(fault.pid))
        assert 'parti_stalls_total{kind="loop"' in metrics
        await eventually(lambda: pair.status_tells("the event loop has not turned"), 10)
        await pair.is_taken_over(fault.pid, fault.at_s, watch)
        await pair.handles_everything()


@pytest.mark.parametrize(
    "fault_code",
    [
        pytest.param(HOLD_GIL_ASLEEP, id="asleep"),
        pytest.param(HOLD_GIL_AT_WORK, id="at-work", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_whose_handler_holds_the_gil_ends_with_its_stack_and_is_taken_over(
    tmp_path: Path, fault_code: str
) -> None:
    """No thread of Python runs in it any more, the watchdog included."""
    async with pair_of_workers(tmp_path, fault_code, loop="auto") as pair:
        watch = Watch()
        fault = await pair.plant_fault()
        assert await pair.exit_code_of(fault.pid) == 1
        watch.within(time.time() - fault.at_s, GIL_HELD_S + 1.0)
        assert "Timeout (0:00:18" in (stderr := pair.stderr_of(fault.pid))
        assert "faulty.py" in stderr
        watch.within(await pair.others_own_everything_at_s(fault.pid, fault.at_s) - fault.at_s, TAKEN_OVER_S)
        await pair.handles_everything()


async def test_a_worker_that_was_stopped_until_others_took_over_goes_on(tmp_path: Path) -> None:
    async with pair_of_workers(tmp_path, "pass", loop="auto") as pair:
        stopped, stopped_at_s = pair.processes[0], time.time()
        stopped.send_signal(signal.SIGSTOP)
        await eventually(lambda: pair.owned_by_others_at_s(stopped.pid, stopped_at_s) is not None)
        stopped.send_signal(signal.SIGCONT)
        await eventually(pair.shared)
        await pair.handles_everything()
        assert stopped.poll() is None


@pytest.mark.slow
async def test_a_worker_that_was_stopped_for_longer_than_its_threads_may_rest_ends(tmp_path: Path) -> None:
    """The clock of the timeout goes on while the process is stopped. It has lost its lease long before."""
    async with pair_of_workers(tmp_path, "pass", loop="auto") as pair:
        stopped, stopped_at_s = pair.processes[0], time.time()
        stopped.send_signal(signal.SIGSTOP)
        await eventually(lambda: time.time() - stopped_at_s > GIL_HELD_S, 60)
        stopped.send_signal(signal.SIGCONT)
        assert await pair.exit_code_of(stopped.pid) == 1
        assert pair.owned_by_others_at_s(stopped.pid, stopped_at_s)
        await pair.handles_everything()


async def test_dead_runners_are_noticed_told_and_taken_over(tmp_path: Path) -> None:
    """The fault that was seen in the field: who should start handlers is dead, and nobody looks for another."""
    async with pair_of_workers(tmp_path, DEAD_RUNNERS, loop="auto") as pair:
        watch = Watch()
        fault = await pair.plant_fault()
        # One that runs goes on until it has nothing to do; then nobody can take its place.
        await pair.notices(fault.pid)
        silent_s = max(line.at_s for line in pair.journal if line.pid == fault.pid)
        watch.within(pair.noticed_at_s(fault.pid) - silent_s, NOTICED_S)
        await eventually(lambda: pair.status_tells("wait and may be started"), 10)
        await pair.is_taken_over(fault.pid, silent_s, watch)
        await pair.handles_everything()


@pytest.mark.parametrize("fault_code", [DEAD_UNTIL_REVIVED, DEAD_FOR_GOOD], ids=["replaced", "for-good"])
async def test_dead_pull_tasks_are_noticed_told_and_replaced_or_taken_over(tmp_path: Path, fault_code: str) -> None:
    """Pulls that stand go on without their tasks; when the server restarts, no task would pull again.

    A restart of the reading side heals that, and the worker keeps its partitions. Where it does not help, others
    take over.
    """
    # A lease that outlasts the restart: a worker that loses it begins with new pulls anyway.
    async with pair_of_workers(tmp_path, fault_code, loop="auto", lease_s=20.0) as pair:
        watch = Watch()
        fault = await pair.plant_fault()
        await pair.server.kill()
        await pair.server.restart()
        restarted_s = time.time()
        told = await pair.notices(fault.pid)
        watch.within(pair.noticed_at_s(fault.pid) - restarted_s, NOTICED_S + 1.0)  # the connection comes back first
        assert told["kind"] == "pulls"
        assert 'parti_stalls_total{kind="pulls"' in pair.metrics_of(fault.pid)
        await eventually(lambda: pair.status_tells("neither answered nor refused"), 10)
        if fault_code == DEAD_FOR_GOOD:
            await pair.is_taken_over(fault.pid, restarted_s, watch)
        await pair.handles_everything()
        living = [process.pid for process in pair.processes if process.poll() is None]
        assert (fault.pid in living) == (fault_code == DEAD_UNTIL_REVIVED)
        assert len(living) == (2 if fault_code == DEAD_UNTIL_REVIVED else 1)


@pytest.mark.parametrize("heartbeat_s", [0.5, 2.0], ids=["frequent", "seldom"])
async def test_pulls_without_an_answer_are_noticed_told_and_taken_over(tmp_path: Path, heartbeat_s: float) -> None:
    """All else is answered: each time that two heartbeats are missed, a new session begins, in vain.

    The more seldom heartbeats are, the sooner a session is given up whose silence is not a stall yet.
    """
    faulty = pair_of_workers(tmp_path, UNANSWERED_PULLS, loop="auto", lease_s=20.0, heartbeat_s=heartbeat_s)
    async with faulty as pair:
        watch = Watch()
        fault = await pair.plant_fault()
        told = await pair.notices(fault.pid)
        silent_s = max(line.at_s for line in pair.journal if line.pid == fault.pid)
        watch.within(pair.noticed_at_s(fault.pid) - silent_s, NOTICED_S + 1.0)  # a pull that stands is served first
        assert told["kind"] == "pulls"
        await eventually(lambda: pair.status_tells("neither answered nor refused"), 10)
        await pair.is_taken_over(fault.pid, silent_s, watch)
        await pair.handles_everything()


@pytest.mark.parametrize("loop", ["auto", "asyncio"])
async def test_a_handler_that_cancels_the_tasks_of_parti_stops_nothing(tmp_path: Path, loop: str) -> None:
    async with pair_of_workers(tmp_path, CANCEL_OURS, loop=loop) as pair:
        fault = await pair.plant_fault()
        await eventually(
            lambda: pair.cancelled(fault.pid) >= {"progress", "keep-alive", "pull-supervisor", "manager"}
        )
        await pair.handles_everything()
        await pair.server.kill()
        await pair.server.restart()
        await pair.handles_everything()
        assert all(process.poll() is None for process in pair.processes)


async def test_a_worker_whose_handler_cancels_all_tasks_leaves_to_others(tmp_path: Path) -> None:
    async with pair_of_workers(tmp_path, CANCEL_ALL, loop="auto") as pair:
        fault = await pair.plant_fault()
        await eventually(lambda: pair.owned_by_others_at_s(fault.pid, time.time() - 1) is not None)
        await pair.handles_everything()
        assert await pair.exit_code_of(fault.pid) == 1
        assert any("has cancelled the main task" in line["event"] for line in pair.log_of(fault.pid))
