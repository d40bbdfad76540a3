"""The supervisor with real processes: identities, restarts with backoff, draining, and no orphans.

The children are a small script that writes down its starts and signals, and that obeys an order file of its slot.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.conftest import eventually
from tests.integration.processes import environment

from parti.app.supervisor import OwnSlot, own_slot, slot_environment, supervise
from parti.errors import ConfigError

EXIT_S = 20.0
QUICK = {"first_delay_s": 0.05, "longest_delay_s": 0.2}

CHILD = """
import json, os, signal, sys, time
from pathlib import Path

here, identity = Path(sys.argv[1]), os.environ["PARTI_IDENTITY"]
notes = os.open(here / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
heard = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}

def note(event, **more):
    line = {"identity": identity, "pid": os.getpid(), "event": event, "at_s": time.monotonic(), **more}
    os.write(notes, (json.dumps(line) + "\\n").encode())

file = here / f"{identity}.order"
order, _, value = (file.read_text() if file.exists() else "drain 0").partition(" ")
if order != "deaf":
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
if order == "bound":
    from parti.app.supervisor import die_with_parent
    die_with_parent()
note("start", order=order, env={k: v for k, v in os.environ.items() if k.startswith("PARTI_")}, parent=os.getppid())
if order == "exit":
    sys.exit(int(value))
if order == "deaf":
    signal.pause()
while True:
    number = signal.sigwait(heard)
    note(signal.Signals(number).name)
    if order != "hold":
        sys.exit(int(value or 0))
    if number == signal.SIGUSR1:
        sys.exit(0)
"""

SUPERVISOR = """
import json, sys
from parti.app.supervisor import supervise
from parti.core.restarts import RestartPolicy
from parti.telemetry.logs import configure_logging

configure_logging("info", "json")
arguments = json.loads(sys.argv[1])
sys.exit(supervise(**{**arguments, "policy": RestartPolicy(**arguments["policy"])}))
"""


class Supervised:
    """A supervisor process and what its children wrote down."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def order(self, identity: str, text: str) -> None:
        """Tell the next processes of a slot what to do; they drain with exit code 0 when not told."""
        new = self._directory / "order"
        new.write_text(text)
        new.replace(self._directory / f"{identity}.order")

    def start(
        self, processes: int, *, command: list[str] | None = None, env: dict[str, str] | None = None, **how: Any
    ) -> None:
        script = self._directory / "child.py"
        script.write_text(CHILD)
        arguments = {
            "command": command or [sys.executable, str(script), str(self._directory)],
            "processes": processes,
            "identity": "host",
            "drain_timeout_s": 30.0,
            "policy": QUICK,
            **how,
        }
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, json.dumps(arguments)],
                cwd=self._directory,
                env=environment(**(env or {})),
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process
        return self._process

    def _read(self, name: str) -> list[str]:
        file = self._directory / name
        written = file.read_text() if file.exists() else ""
        return written[: written.rfind("\n") + 1].splitlines()  # the last line may be on its way

    @property
    def lines(self) -> list[str]:
        return self._read("log")

    def log(self, event: str) -> list[dict[str, Any]]:
        """The supervisor's log lines whose event begins like this."""
        written = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [line for line in written if line["event"].startswith(event)]

    def notes(self, *events: str, of: str | None = None) -> list[dict[str, Any]]:
        """What children wrote down, in order; by event and identity."""
        written = [json.loads(line) for line in self._read("notes")]
        return [note for note in written if note["event"] in events and of in {None, note["identity"]}]

    def starts(self, of: str | None = None) -> list[dict[str, Any]]:
        return self.notes("start", of=of)

    async def reaches(self, starts: int, of: str | None = None) -> list[dict[str, Any]]:
        """Wait until so many processes have started."""
        await eventually(lambda: len(self.starts(of)) >= starts or self.process.poll() is not None)
        assert len(self.starts(of)) == starts
        return self.starts(of)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(EXIT_S)

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait(EXIT_S)
        for process in psutil.process_iter(["cmdline"]):
            if str(self._directory) in (process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        print(*self.lines, sep="\n")


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.end()


# ── slots ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_process_has_an_identity_a_token_and_a_metrics_port_of_its_own(supervised: Supervised) -> None:
    supervised.start(3, env={"PARTI_METRICS_PORT": "9100", "PARTI_NATS": "nats://10.0.0.5"})
    starts = await supervised.reaches(3)
    by_identity = {start["identity"]: start["env"] for start in starts}
    assert sorted(by_identity) == ["host-0", "host-1", "host-2"]
    assert len({env["PARTI_OWNER_TOKEN"] for env in by_identity.values()}) == 3
    assert [by_identity[f"host-{slot}"]["PARTI_METRICS_PORT"] for slot in range(3)] == ["9100", "9101", "9102"]
    for start in starts:
        assert start["parent"] == supervised.process.pid
        assert start["env"]["PARTI_SUPERVISED"] == "1"
        assert start["env"]["PARTI_NATS"] == "nats://10.0.0.5"


@pytest.mark.parametrize(("given", "slots"), [("9100", ["9100", "9101"]), ("0", ["0", "0"]), ("x", ["x", "x"])])
def test_a_fixed_metrics_port_is_counted_up(given: str, slots: list[str]) -> None:
    made = [slot_environment({"PARTI_METRICS_PORT": given}, slot, "host") for slot in range(2)]
    assert [env["PARTI_METRICS_PORT"] for env in made] == slots


def test_no_metrics_port_stays_none() -> None:
    assert "PARTI_METRICS_PORT" not in slot_environment({}, 1, "host")


def test_a_process_knows_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARTI_SUPERVISED", raising=False)
    assert own_slot() is None
    made = slot_environment({"PARTI_METRICS_PORT": "9100", "PARTI_IDENTITY": "other"}, 4, "host")
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    assert own_slot() == OwnSlot("host-4", made["PARTI_OWNER_TOKEN"], 9104)


def test_fewer_than_one_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="processes=0: expected 1 or more"):
        supervise(["true"], processes=0, identity="host", drain_timeout_s=1)


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_killed_process_is_followed_by_one_with_the_same_identity_and_token(supervised: Supervised) -> None:
    supervised.start(3)
    before = {start["identity"]: start for start in await supervised.reaches(3)}
    os.kill(before["host-1"]["pid"], signal.SIGKILL)
    await supervised.reaches(4)
    first, second = supervised.starts("host-1")
    assert second["env"] == first["env"]
    assert second["pid"] != first["pid"]
    (line,) = supervised.log("worker process ended")
    assert (line["level"], line["slot"], line["pid"], line["signal"]) == ("warning", 1, first["pid"], "SIGKILL")
    assert line["restart_delay_s"] == 0.05
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0
    assert {note["pid"] for note in supervised.notes("SIGTERM")} == {
        before["host-0"]["pid"],
        second["pid"],
        before["host-2"]["pid"],
    }


async def test_a_crash_loop_backs_off_and_leaves_the_others_alone(supervised: Supervised) -> None:
    supervised.order("host-0", "exit 3")
    supervised.start(2, policy={"first_delay_s": 0.1, "longest_delay_s": 0.4})
    await eventually(lambda: len(supervised.starts("host-0")) >= 5)
    promised = [line["restart_delay_s"] for line in supervised.log("worker process ended")][:4]
    assert promised == [0.1, 0.2, 0.4, 0.4]
    at_s = [start["at_s"] for start in supervised.starts("host-0")][:5]
    waited = [later - earlier for earlier, later in pairwise(at_s)]
    assert all(actual_s >= delay_s for actual_s, delay_s in zip(waited, promised, strict=True))
    assert {line["exit_code"] for line in supervised.log("worker process ended")} == {3}
    assert len(supervised.starts("host-1")) == 1


async def test_a_process_that_left_by_itself_is_restarted_too(supervised: Supervised) -> None:
    supervised.start(1)
    (first,) = await supervised.reaches(1)
    os.kill(first["pid"], signal.SIGTERM)
    await supervised.reaches(2)
    (line,) = supervised.log("worker process ended")
    assert (line["level"], line["exit_code"]) == ("info", 0)


async def test_a_restart_that_cannot_start_is_tried_until_it_can(supervised: Supervised) -> None:
    supervised.start(1)
    (first,) = await supervised.reaches(1)
    supervised.order("host-0", "exit 2")
    os.kill(first["pid"], signal.SIGKILL)
    await eventually(lambda: len(supervised.log("worker process ended")) >= 3)
    supervised.order("host-0", "drain 0")
    await eventually(lambda: supervised.starts()[-1]["order"] == "drain")
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0
    assert {line.get("exit_code") for line in supervised.log("worker process ended")} == {None, 2}


# ── the first start ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_first_process_that_could_not_start_ends_all_with_2(supervised: Supervised) -> None:
    supervised.order("host-1", "drain 2")
    supervised.start(3)
    pids = {start["identity"]: start["pid"] for start in await supervised.reaches(3)}
    os.kill(pids["host-1"], signal.SIGUSR1)
    assert supervised.wait() == 2
    assert len(supervised.starts()) == 3
    assert {note["identity"] for note in supervised.notes("SIGTERM")} == {"host-0", "host-2"}
    (line,) = supervised.log("worker process could not start")
    assert (line["slot"], line["pid"], line["exit_code"]) == (1, pids["host-1"], 2)


def test_the_one_line_of_a_worker_that_could_not_start_is_seen(supervised: Supervised) -> None:
    supervised.start(1, command=[sys.executable, "-m", "parti", "worker", "nowhere:app"])
    assert supervised.wait() == 2
    said = [line for line in supervised.lines if not line.startswith("{")]
    assert len(said) == 1
    assert said[0].startswith("parti: ")
    assert "'nowhere'" in said[0]


def test_a_command_that_does_not_exist_ends_with_2_and_is_named(supervised: Supervised) -> None:
    supervised.start(2, command=["/nowhere/python"])
    assert supervised.wait() == 2
    assert supervised.log("worker process cannot be started")[0]["command"] == "/nowhere/python"


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
async def test_a_signal_drains_all_and_ends_with_0(supervised: Supervised, number: signal.Signals) -> None:
    supervised.start(3)
    pids = {start["pid"] for start in await supervised.reaches(3)}
    supervised.signal(number)
    assert supervised.wait() == 0
    assert sorted(note["pid"] for note in supervised.notes("SIGTERM")) == sorted(pids)
    assert len(supervised.starts()) == 3
    assert {line["pid"] for line in supervised.log("worker process left")} == pids


async def test_ctrl_c_in_a_terminal_reaches_each_process_once(supervised: Supervised) -> None:
    for identity in ("host-0", "host-1"):
        supervised.order(identity, "hold")
    supervised.start(2)
    pids = [start["pid"] for start in await supervised.reaches(2)]
    os.killpg(supervised.process.pid, signal.SIGINT)
    await eventually(lambda: len(supervised.notes("SIGTERM")) == 2)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert supervised.wait() == 0
    assert supervised.notes("SIGINT") == []


async def test_something_left_unfinished_ends_with_1(supervised: Supervised) -> None:
    supervised.order("host-1", "drain 1")
    supervised.start(2)
    await supervised.reaches(2)
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 1
    assert len(supervised.notes("SIGTERM")) == 2


async def test_a_process_that_does_not_drain_in_time_is_killed_and_ends_with_1(supervised: Supervised) -> None:
    supervised.order("host-0", "hold")
    supervised.start(2, drain_timeout_s=0.25, grace_s=0.5)
    await supervised.reaches(2)
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 1
    (line,) = supervised.log("worker process has not drained in time")
    assert (line["slot"], line["pid"]) == (0, supervised.starts("host-0")[0]["pid"])
    assert [left.get("signal") for left in supervised.log("worker process left")] == [None, "SIGKILL"]


async def test_a_process_that_was_not_up_yet_leaves_nothing_unfinished(supervised: Supervised) -> None:
    supervised.order("host-0", "deaf")
    supervised.start(1)
    await supervised.reaches(1)
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0
    assert supervised.log("worker process left")[0]["signal"] == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_a_second_signal_kills_all_at_once(supervised: Supervised, number: signal.Signals) -> None:
    for identity in ("host-0", "host-1"):
        supervised.order(identity, "hold")
    supervised.start(2)
    pids = [start["pid"] for start in await supervised.reaches(2)]
    supervised.signal(signal.SIGTERM)
    await eventually(lambda: len(supervised.notes("SIGTERM")) == 2)
    supervised.signal(number)
    assert supervised.wait() == 128 + number
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_second_hangup_is_no_order_to_kill(supervised: Supervised) -> None:
    for identity in ("host-0", "host-1"):
        supervised.order(identity, "hold")
    supervised.start(2)
    pids = [start["pid"] for start in await supervised.reaches(2)]
    supervised.signal(signal.SIGHUP)
    await eventually(lambda: len(supervised.notes("SIGTERM")) == 2)
    supervised.signal(signal.SIGHUP)
    for left, pid in enumerate(pids, start=1):
        os.kill(pid, signal.SIGUSR1)
        # Signals are handled in the order of their coming: with this line the hangup has been dealt with.
        await eventually(lambda left=left: len(supervised.log("worker process left")) == left)  # type: ignore[misc]
    assert supervised.wait() == 0


async def test_who_waits_to_be_restarted_is_not_waited_for(supervised: Supervised) -> None:
    supervised.order("host-0", "exit 3")
    supervised.start(2, policy={"first_delay_s": 600.0, "longest_delay_s": 600.0})
    await supervised.reaches(2)
    await eventually(lambda: bool(supervised.log("worker process ended")))
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 1
    assert len(supervised.starts()) == 2


# ── no orphans ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
async def test_when_the_supervisor_is_killed_its_processes_are_told_to_drain(supervised: Supervised) -> None:
    for identity in ("host-0", "host-1"):
        supervised.order(identity, "bound")
    supervised.start(2)
    await supervised.reaches(2)
    supervised.signal(signal.SIGKILL)
    await eventually(lambda: len(supervised.notes("SIGTERM")) == 2)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
@pytest.mark.parametrize(("alive", "code"), [(True, 7), (False, -signal.SIGTERM)], ids=["alive", "gone"])
def test_a_process_whose_supervisor_was_gone_before_it_asked_ends_too(alive: bool, code: int) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    supervisor = str(os.getpid()) if alive else gone.stdout.decode().strip()
    script = "from parti.app.supervisor import die_with_parent; die_with_parent(); raise SystemExit(7)"
    env = environment(PARTI_SUPERVISED="1", PARTI_SUPERVISOR_PID=supervisor)
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == code


def test_without_a_supervisor_nothing_is_asked_for() -> None:
    script = "from parti.app.supervisor import die_with_parent; die_with_parent(); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", script], env=environment(), check=False).returncode == 7
