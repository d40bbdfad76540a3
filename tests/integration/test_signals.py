"""SIGTERM and SIGINT sent to a real process: the first is a request, a second one an order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.integration.processes import environment

from parti.app.signals import run_interruptibly

EXIT_S = 20.0
SIGTERM, SIGINT = signal.SIGTERM, signal.SIGINT

LISTENER = """
import asyncio

from parti.app.process import run_on_loop
from parti.app.signals import exit_at_once, on_leave_signals


async def main():
    asked = asyncio.Event()

    def leave(number):
        print("leave", number.name, flush=True)
        asked.set()

    def leave_now(number):
        print("now", number.name, flush=True)
        if {stubborn}:
            return
        exit_at_once(number)

    on_leave_signals(leave, leave_now)
    print("ready", flush=True)
    await asked.wait()
    try:
        await asyncio.Event().wait()
    finally:
        print("tidied up", flush=True)


run_on_loop(main(), {loop!r})
"""

BLOCK = """
import signal
import sys

from parti.app.signals import LEAVE, leave_event


def leave_now(number):
    print("now", number.name, flush=True)
    if not {stubborn}:
        raise KeyboardInterrupt


before = [signal.getsignal(number) for number in LEAVE]
try:
    with leave_event(leave_now) as asked:
        print("ready", flush=True)
        asked.wait()
        print("leave", asked.number.name, flush=True)
        sys.stdin.readline()
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("as before" if [signal.getsignal(number) for number in LEAVE] == before else "changed", flush=True)
"""

SERVED = """
import asyncio
import sys

from parti.app.process import run_on_loop, serve
from parti.telemetry.logs import configure_logging

configure_logging("error", "json")


class Servant:
    finished = 0

    async def start(self):
        if {slow}:
            print("ready", flush=True)
            await asyncio.Event().wait()

    def announce(self):
        print("ready", flush=True)

    async def stop(self):
        print("draining", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("drained", flush=True)
        return True


sys.exit(run_on_loop(serve(Servant(), lambda: {slow} and print("speaks", flush=True)), {loop!r}))
"""


COMMAND = """
import asyncio
import signal
import sys

from parti.app.signals import run_interruptibly


def set_unless_cancelled(future):
    # What a timer of asyncio does; the signal comes at its worst.
    if not future.cancelled():
        signal.raise_signal(signal.SIGINT)
        future.set_result(None)


async def main():
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    if {worst}:
        future = loop.create_future()
        loop.call_soon(set_unless_cancelled, future)
        await future
    try:
        await asyncio.Event().wait()
    finally:
        print("tidying up", flush=True)
        if {stubborn}:
            await asyncio.Event().wait()


try:
    run_interruptibly(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("as before" if signal.getsignal(signal.SIGINT) is signal.default_int_handler else "changed", flush=True)
"""


class Child:
    """A process that writes down what it hears."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def reads(self) -> str:
        """The next line that it wrote."""
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def gets(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def told(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ends(self) -> int:
        return self._process.wait(EXIT_S)


@contextmanager
def child(code: str, **extra: str) -> Iterator[Child]:
    """Run a piece of Python in a process of its own; gone with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(**extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            it = Child(process)
            assert it.reads() == "ready"
            yield it
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(params=["auto", "asyncio"])
def whose(request: pytest.FixtureRequest) -> str:
    """On whose event loop the process runs."""
    return str(request.param)


@pytest.mark.parametrize(
    ("first", "second"), [(SIGTERM, SIGTERM), (SIGINT, SIGTERM), (SIGTERM, SIGINT)], ids=lambda each: each.name
)
def test_the_first_signal_asks_and_the_second_ends_the_process_without_tidying_up(
    first: signal.Signals, second: signal.Signals, whose: str
) -> None:
    with child(LISTENER.format(stubborn=False, loop=whose)) as process:
        process.gets(first)
        assert process.reads() == f"leave {first.name}"
        process.gets(second)
        assert process.reads() == f"now {second.name}"
        assert process.reads() == ""
        assert process.ends() == 128 + second


def test_each_signal_after_the_first_is_an_order(whose: str) -> None:
    with child(LISTENER.format(stubborn=True, loop=whose)) as process:
        process.gets(SIGTERM)
        assert process.reads() == "leave SIGTERM"
        for number in (SIGINT, SIGTERM, SIGINT):
            process.gets(number)
            assert process.reads() == f"now {number.name}"


@pytest.mark.parametrize("number", [SIGTERM, SIGINT], ids=["SIGTERM", "SIGINT"])
def test_without_an_event_loop_an_order_interrupts_what_runs(number: signal.Signals) -> None:
    with child(BLOCK.format(stubborn=False)) as process:
        process.gets(number)
        assert process.reads() == f"leave {number.name}"
        process.gets(number)
        assert [process.reads() for _ in range(3)] == [f"now {number.name}", "interrupted", "as before"]
        assert process.ends() == 0


def test_without_an_event_loop_an_order_may_be_of_no_effect() -> None:
    with child(BLOCK.format(stubborn=True)) as process:
        process.gets(SIGTERM)
        assert process.reads() == "leave SIGTERM"
        process.gets(SIGINT)
        assert process.reads() == "now SIGINT"
        process.told("go on")
        assert process.reads() == "as before"
        assert process.ends() == 0


@pytest.mark.parametrize("number", [SIGTERM, SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_worker_that_is_asked_drains_and_exits_with_0(number: signal.Signals, whose: str) -> None:
    with child(SERVED.format(loop=whose, slow=False)) as process:
        process.gets(number)
        assert process.reads() == "draining"
        process.told("go on")
        assert process.reads() == "drained"
        assert process.ends() == 0


def test_a_worker_that_is_asked_while_it_starts_speaks_and_drains(whose: str) -> None:
    with child(SERVED.format(loop=whose, slow=True)) as process:
        process.gets(SIGTERM)
        assert process.reads() == "speaks"
        assert process.reads() == "draining"
        process.told("go on")
        assert process.reads() == "drained"
        assert process.ends() == 0


def test_a_worker_that_is_ordered_ends_in_the_middle_of_draining(whose: str) -> None:
    with child(SERVED.format(loop=whose, slow=False)) as process:
        process.gets(SIGTERM)
        assert process.reads() == "draining"
        process.gets(SIGTERM)
        assert process.ends() == 128 + SIGTERM


def test_a_supervised_worker_goes_on_draining_whatever_comes(whose: str) -> None:
    slot = {"PARTI_SUPERVISED": "1", "PARTI_IDENTITY": "host-0", "PARTI_OWNER_TOKEN": "token"}
    with child(SERVED.format(loop=whose, slow=False), **slot) as process:
        process.gets(SIGTERM)
        assert process.reads() == "draining"
        process.gets(SIGTERM)
        process.gets(SIGINT)
        process.told("go on")
        assert process.reads() == "drained"
        assert process.ends() == 0


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("worst", [False, True], ids=["a pause", "a timer"])
def test_ctrl_c_lets_a_command_tidy_up_and_says_nothing_of_its_own(worst: bool) -> None:
    with child(COMMAND.format(worst=worst, stubborn=False)) as process:
        if not worst:
            process.gets(SIGINT)
        assert [process.reads() for _ in range(4)] == ["tidying up", "interrupted", "as before", ""]
        assert process.ends() == 0


def test_a_second_ctrl_c_does_not_wait_for_the_tidying_up() -> None:
    with child(COMMAND.format(worst=False, stubborn=True)) as process:
        process.gets(SIGINT)
        assert process.reads() == "tidying up"
        process.gets(SIGINT)
        assert [process.reads() for _ in range(3)] == ["interrupted", "as before", ""]
        assert process.ends() == 0


def test_a_command_runs_in_a_thread_that_hears_no_signals() -> None:
    async def answer() -> int:
        return 7

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: run_interruptibly(answer())).result() == 7
