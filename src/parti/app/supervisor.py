"""N worker processes of one command, each in a slot with an identity that outlives the process.

The supervisor runs on one thread and reaps its children itself, woken by SIGCHLD: an end is noticed at once, and a
process id is signalled only while it is surely still the child's. Children are commands of their own, not forks.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
from asyncio import Future
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from parti.app.signals import on_leave_signals
from parti.core.restarts import (
    COULD_NOT_START,
    DEFAULT_POLICY,
    GiveUp,
    RestartPolicy,
    Slot,
    after_exit,
    after_start,
    fleet_exit_code,
    signal_name,
)
from parti.errors import ConfigError

_log = structlog.get_logger("parti.supervisor")

_PR_SET_PDEATHSIG = 1


def supervise(
    command: Sequence[str],
    *,
    processes: int,
    identity: str,
    drain_timeout_s: float,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
    policy: RestartPolicy = DEFAULT_POLICY,
) -> int:
    """Keep `processes` children of `command` running until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    A child that dies is followed by another one in the same slot, after a delay that grows while the slot keeps
    failing. Children inherit stdout and stderr, and `environment` (this process' own by default) with what
    `slot_environment` adds.

    The first signal is passed on to all children as SIGTERM: 0 when all of them left in order, else 1. Children that
    have not left `grace_s` after they should have drained are killed. A second SIGTERM or SIGINT kills all children:
    128 + its number. When the first process of a slot ends with 2, having said why, the others are told to leave: 2.

    Must be called in the main thread, outside of any event loop. Raises `ConfigError` if `processes` is below 1.
    """
    if processes < 1:
        raise ConfigError(f"processes={processes}: expected 1 or more")
    given = os.environ if environment is None else environment
    environments = [slot_environment(given, slot, identity) for slot in range(processes)]
    # A worker waits that long for its handlers, and once more for the dead letters that they left.
    kill_after_s = 2 * drain_timeout_s + grace_s
    return asyncio.run(_Supervisor(command, environments, kill_after_s, policy).run())


def slot_environment(environment: Mapping[str, str], slot: int, identity: str) -> dict[str, str]:
    """The environment of one slot, the same for all its processes: identity, owner token, metrics port.

    The token lets a restarted process take over the lease of its predecessor at once, which is safe because the
    supervisor has seen that one dead. A fixed metrics port is counted up by the slot's number.
    """
    mine = {
        "PARTI_SUPERVISED": "1",
        "PARTI_SUPERVISOR_PID": str(os.getpid()),
        "PARTI_IDENTITY": f"{identity}-{slot}",
        "PARTI_OWNER_TOKEN": secrets.token_hex(16),
    }
    port = environment.get("PARTI_METRICS_PORT", "")
    if port.isdecimal() and int(port):
        mine["PARTI_METRICS_PORT"] = str(int(port) + slot)
    return {**environment, **mine}


@dataclass(frozen=True, slots=True)
class OwnSlot:
    """What a supervisor chose for this process; it must beat the app's own arguments, which all slots share."""

    identity: str
    owner_token: str
    metrics_port: int | None


def own_slot() -> OwnSlot | None:
    """The slot that this process runs in, `None` without a supervisor."""
    if not os.environ.get("PARTI_SUPERVISED"):
        return None
    port = os.environ.get("PARTI_METRICS_PORT", "")
    return OwnSlot(
        os.environ["PARTI_IDENTITY"], os.environ["PARTI_OWNER_TOKEN"], int(port) if port.isdecimal() else None
    )


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its supervisor is gone, so that it drains.

    To be called by a supervised process as soon as it can. Does nothing without a supervisor, and nothing outside of
    Linux, where a child lives on if its supervisor is killed with SIGKILL.
    """
    supervisor = os.environ.get("PARTI_SUPERVISOR_PID")
    if not supervisor or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # A parent that was gone before the request sends no signal any more.
    if os.getppid() != int(supervisor):
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    exit: Future[int]


class _Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        kill_after_s: float,
        policy: RestartPolicy,
    ) -> None:
        self._command = list(command)
        self._environments = environments
        self._kill_after_s = kill_after_s
        self._policy = policy
        self._leaving = asyncio.Event()
        self._children: dict[int, _Child] = {}
        self._last_exits: dict[int, int] = {}
        self._exit_code: int | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        on_leave_signals(self._drain, self._kill_all)
        # Ignored on purpose when started with nohup.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            async with asyncio.TaskGroup() as slots:
                for slot in range(len(self._environments)):
                    slots.create_task(self._keep(slot))
        finally:
            # Nobody is left here unless something broke.
            for child in self._children.values():
                child.process.kill()
                child.process.wait()
        code = fleet_exit_code(self._last_exits.values()) if self._exit_code is None else self._exit_code
        _log.info("supervisor leaves", exit_code=code)
        return code

    async def _keep(self, number: int) -> None:
        """Fill a slot until everybody leaves."""
        loop = asyncio.get_running_loop()
        slot = Slot()
        while not self._leaving.is_set():
            slot = after_start(slot, now_s=loop.time())
            pid, code = await self._run_once(number)
            self._last_exits[number] = code
            ending = {"exit_code": code} if code >= 0 else {"signal": signal_name(code)}
            about = {"slot": number, "pid": pid, **ending}
            if self._leaving.is_set():
                _log.info("worker process left", **about)
                return
            slot, decision = after_exit(self._policy, slot, code, now_s=loop.time())
            if isinstance(decision, GiveUp):
                _log.warning("worker process could not start: all leave", **about)
                self._exit_code = decision.exit_code
                self._leave()
                return
            tell = _log.warning if code else _log.info
            lived_s = round(loop.time() - slot.started_at_s, 1)
            tell("worker process ended: it is restarted", **about, lived_s=lived_s, restart_delay_s=decision.delay_s)
            await self._pause(decision.delay_s)

    async def _run_once(self, slot: int) -> tuple[int | None, int]:
        """Start a process in a slot and wait for its end; returns its id and exit code (negative for a signal)."""
        process = self._start(slot)
        if process is None:
            return None, COULD_NOT_START
        child = self._children[slot] = _Child(process, asyncio.get_running_loop().create_future())
        code = await child.exit
        del self._children[slot]
        return process.pid, code

    def _start(self, slot: int) -> subprocess.Popen[bytes] | None:
        try:
            process = subprocess.Popen(
                self._command,
                env=self._environments[slot],
                stdin=subprocess.DEVNULL,
                # Ctrl-C in a terminal goes to a whole group: the children would get SIGINT, then SIGTERM from here,
                # and take the second one as the order to leave at once.
                process_group=0,
            )
        except OSError as error:
            _log.error("worker process cannot be started", slot=slot, command=self._command[0], error=str(error))
            return None
        _log.info("worker process started", slot=slot, pid=process.pid)
        return process

    async def _pause(self, delay_s: float) -> None:
        try:
            await asyncio.wait_for(self._leaving.wait(), delay_s)
        except TimeoutError:
            pass

    def _reap(self) -> None:
        # Several ends may share one SIGCHLD.
        for child in self._children.values():
            code = child.process.poll()
            if code is not None and not child.exit.done():
                child.exit.set_result(code)

    def _kill_all(self, number: signal.Signals) -> None:
        _log.warning("second signal: killing all worker processes", signal=number.name)
        self._exit_code = 128 + number
        self._kill()

    def _on_hangup(self) -> None:
        # A closing terminal may send it twice, from the shell and from the kernel: never the order to kill.
        self._drain(signal.SIGHUP)

    def _drain(self, number: signal.Signals) -> None:
        if not self._leaving.is_set():
            _log.info("draining: all worker processes get SIGTERM", signal=number.name, processes=len(self._children))
            self._leave()

    def _leave(self) -> None:
        self._leaving.set()
        for child in self._children.values():
            child.process.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(self._kill_after_s, self._kill_late)

    def _kill_late(self) -> None:
        for slot, child in self._children.items():
            _log.warning(
                "worker process has not drained in time: killing it",
                slot=slot,
                pid=child.process.pid,
                waited_s=self._kill_after_s,
            )
        self._kill()

    def _kill(self) -> None:
        for child in self._children.values():
            child.process.kill()
