"""The fixtures for users' tests: an app inside a test, and interruptions at each await of its handler."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import parti
import parti.testing
from parti.testing import END, START, EveryAwait, Fault, Point, Run, Runner
from parti.testing.run import Action

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ONE, TWO = "numbers.one", "numbers.two"
MAPPING = parti.SubjectMapping("n.*", "n.{{wildcard(1)}}.{{partition(2,1)}}")


class Notes:
    """What handlers did, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []


def make_app(notes: Notes) -> parti.App:
    """An app whose handler waits twice and notes each of its lines."""
    app = parti.App(stream="NUMBERS", subject="numbers.{name}")

    @app.handler
    async def handle(message: parti.Message) -> None:
        try:
            notes.lines.append(f"{message.seq} begins")
            await asyncio.sleep(0)
            notes.lines.append(f"{message.seq} goes on")
            await asyncio.sleep(0)
            notes.lines.append(f"{message.seq} returns")
        finally:
            notes.lines.append(f"{message.seq} cleans up")

    return app


ALL_OF_IT = ["1 begins", "1 goes on", "1 returns", "1 cleans up"]


@pytest.fixture
def notes() -> Notes:
    return Notes()


# ── an app inside a test ──────────────────────────────────────────────────────────────────────────────────────────


async def test_an_app_runs_moves_and_survives_inside_a_test(parti_run: Runner, notes: Notes) -> None:
    async with parti_run(make_app(notes), stream={"retention": "limits"}) as run:
        assert [await run.publish(ONE), await run.publish(TWO)] == [1, 2]
        await run.handled()
        assert run.positions["one"] == 2
        assert run.positions["two"] == 3
        before = run.owners["one"]
        await run.move("one")
        assert run.owners["one"] != before
        before = run.owners["one"]
        await run.kill("one")
        assert before not in run.owners.values()
        before = run.owners["one"]
        wake_up = await run.pause("one")
        assert run.owners["one"] != before
        await run.publish(ONE)
        await run.handled()
        wake_up()
        assert sorted(call.seq for call in run.calls) == [1, 2, 3], "nothing was handled again"
        assert {call.outcome for call in run.calls} == {"returned"}
        assert await run.dead_letters() == []


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_streams_that_delete_what_is_handled(parti_run: Runner, notes: Notes, retention: str) -> None:
    app = parti.App(stream="NUMBERS", subject="numbers.{name}", partitions=["one"])
    app.handler(make_app(notes)._handler)  # type: ignore[type-var]
    fault = Fault("kill", Point(1, 2))
    async with parti_run(app, stream={"retention": retention}, fault=fault, ack_wait_s=1) as run:
        await run.publish(ONE)
        await run.handled()
        assert run.happened
        assert [call.outcome for call in run.calls] == ["killed", "returned"]


@pytest.mark.parametrize(
    ("subject", "partitions", "published", "positions"),
    [
        ("n.{a}.{b}", ["x.*", "y.1"], ["n.x.1", "n.x.2", "n.y.1", "n.other.1"], {"x.*": 3, "y.1": 4}),
        ("n.{w1}.{slot}", MAPPING, ["n.a", "n.b"], {"*.0": 2, "*.1": 3}),
    ],
    ids=["families", "slots"],
)
async def test_partitions_of_several_subjects(
    parti_run: Runner, subject: str, partitions: Any, published: list[str], positions: dict[str, int]
) -> None:
    app = parti.App(stream="NUMBERS", subject=subject, partitions=partitions)

    @app.handler
    async def handle(message: parti.Message) -> None:
        pass

    stream = {"subjects": ["n.>"]} if isinstance(partitions, list) else None
    async with parti_run(app, stream=stream, fault=Fault("kill", Point(2, END))) as run:
        for each in published:
            await run.publish(each)
        await run.handled()
        assert run.happened
        assert {partition: at for partition, at in run.positions.items() if partition in positions} == positions


async def test_what_never_ends_is_named(parti_run: Runner) -> None:
    app = parti.App(stream="NUMBERS", subject="numbers.{name}")

    @app.handler
    async def handle(message: parti.Message) -> None:
        raise ValueError("not today")

    async with parti_run(app, workers=1, attempts=100, backoff_s=(30.0,)) as run:
        await run.publish(ONE)
        with pytest.raises(AssertionError, match=r"not finished: numbers.one up to 1; last error .*not today"):
            await run.handled(timeout_s=1.0)
        with pytest.raises(AssertionError, match="there is no partition 'three'; there are: one"):
            await run.move("three")


async def test_what_cannot_start_says_why(parti_run: Runner, notes: Notes) -> None:
    with pytest.raises(parti.PartiError, match="the app has no handler"):
        async with parti_run(parti.App(stream="NUMBERS", subject="numbers.{name}")):
            pass
    with pytest.raises(parti.PartiError, match=r"template 'numbers.\{name\}' is outside stream"):
        async with parti_run(make_app(notes), stream={"subjects": ["others.*"]}):
            pass
    before = asyncio.all_tasks()
    async with parti_run(make_app(notes)) as run:
        await run.publish(ONE)  # and does not wait for it
    assert asyncio.all_tasks() == before, "nothing is left running"


async def test_variables_for_another_server_are_not_for_tests(
    parti_run: Runner, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NATS": "nats://127.0.0.1:1", "TOKEN": "t", "WORKER_ID": "one", "IDENTITY": "host"}.items():
        monkeypatch.setenv(f"PARTI_{name}", value)
    async with parti_run(make_app(notes)) as run:
        await run.publish(ONE)
        await run.handled()
    assert notes.lines == ALL_OF_IT


# ── interruptions ─────────────────────────────────────────────────────────────────────────────────────────────────


async def interrupt(runner: Runner, notes: Notes, action: Action, number: int) -> Run:
    async with runner(lambda: make_app(notes), fault=Fault(action, Point(1, number))) as run:
        await run.publish(ONE)
        await run.handled()
    assert run.happened
    return run


@pytest.mark.parametrize(
    ("number", "before"), [(START, []), (1, ALL_OF_IT[:1]), (2, ALL_OF_IT[:2]), (END, ALL_OF_IT)], ids=str
)
async def test_a_kill_leaves_what_was_done_and_runs_nothing_more(
    parti_run: Runner, notes: Notes, number: int, before: list[str]
) -> None:
    run = await interrupt(parti_run, notes, "kill", number)
    assert notes.lines == before + ALL_OF_IT, "no finally block of a killed handler runs"
    workers = [call.worker for call in run.calls]
    assert len(set(workers)) == len(workers), "another worker took over"


async def test_a_killed_workers_hooks_are_silent(parti_run: Runner) -> None:
    told: list[str] = []

    def make() -> parti.App:
        app = make_app(Notes())

        @app.on_error
        def on_error(error: Exception) -> None:
            told.append(str(error))

        @app.on_state_changed
        def on_state_changed(before: parti.FleetState, after: parti.FleetState) -> None:
            if after is parti.FleetState.STOPPED:
                told.append(parti.current_worker_id.get())

        return app

    async with parti_run(make, fault=Fault("kill", Point(1, 1))) as run:
        await run.publish(ONE)
        await run.handled()
        assert told == []
    killed, survivor = (call.worker for call in run.calls)
    assert killed not in told
    assert survivor in told


async def test_a_paused_handler_goes_on_after_its_successor_has_finished(parti_run: Runner, notes: Notes) -> None:
    run = await interrupt(parti_run, notes, "pause", 1)
    assert notes.lines == [*ALL_OF_IT[:1], *ALL_OF_IT, *ALL_OF_IT[1:]]
    paused, successor = run.calls
    assert paused.fence < successor.fence
    assert {paused.outcome, successor.outcome} == {"returned"}


async def test_a_move_waits_for_the_handler_and_repeats_nothing(parti_run: Runner, notes: Notes) -> None:
    async with parti_run(lambda: make_app(notes), fault=Fault("move", Point(1, 2))) as run:
        await run.publish(ONE)
        await run.handled()
        await run.publish(ONE)
        await run.handled()
    first, second = run.calls
    assert first.worker != second.worker
    assert first.fence < second.fence
    assert notes.lines[:4] == ALL_OF_IT


async def test_a_plain_function_is_interrupted_at_its_end(parti_run: Runner) -> None:
    handled: list[int] = []
    app = parti.App(stream="NUMBERS", subject="numbers.{name}")

    @app.handler
    def handle(message: parti.Message) -> None:
        handled.append(message.seq)

    async with parti_run(app, fault=Fault("kill", Point(1, END))) as run:
        await run.publish(ONE)
        await run.handled()
    assert handled == [1, 1]


@pytest.mark.parametrize("point", [START, END], ids=["start", "end"])
async def test_a_plain_function_is_paused_until_its_successor_has_finished(parti_run: Runner, point: int) -> None:
    done: list[str] = []
    app = parti.App(stream="NUMBERS", subject="numbers.{name}")

    @app.handler
    def handle(message: parti.Message) -> None:
        done.append(message.worker_id)

    async with parti_run(app, fault=Fault("pause", Point(1, point))) as run:
        await run.publish(ONE)
        await run.handled()
        assert run.happened
        successor = run.owners["one"]
    assert len(done) == 2
    assert done[0 if point == START else 1] == successor


class Counter:
    """A handler with state, in the memory of its own worker."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen
        self._count = 0

    async def __call__(self, message: parti.Message) -> None:
        self._count += 1
        await asyncio.sleep(0)
        self._seen.append(self._count)

    def snapshot(self, partition: parti.Partition) -> bytes:
        return str(self._count).encode()

    def restore(self, partition: parti.Partition, state: Iterable[bytes] | None) -> None:
        self._count = int(b"".join(state)) if state else 0


async def test_state_is_exact_whatever_happens_at_an_await(parti_every_await: EveryAwait) -> None:
    async def scenario(run: Runner) -> None:
        seen: list[int] = []

        def make() -> parti.App:
            app = parti.App(stream="NUMBERS", subject="numbers.{name}")
            app.handler(Counter(seen))
            return app

        async with run(make) as running:
            await running.publish(ONE)
            await running.handled()
        assert set(seen) == {1}

    explored = await parti_every_await(scenario, actions=("kill",))
    assert len(explored.tried) == 3
    assert explored.missed == []


async def test_timeouts_and_cancellations_reach_the_handler(parti_run: Runner) -> None:
    app = parti.App(stream="NUMBERS", subject="numbers.{name}")
    told: list[str] = []

    @app.handler
    async def handle(message: parti.Message) -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            told.append("own timeout")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async with parti_run(app, workers=1, attempts=1, handler_timeout_s=0.2) as run:
        await run.publish(ONE)
        await run.handled()
        (letter,) = await run.dead_letters()
    assert told == ["own timeout", "cancelled"]
    assert "HandlerTimeout" in letter.error


# ── every await ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_scenario_must_hold_when_nothing_happens(parti_every_await: EveryAwait) -> None:
    async def scenario(run: Runner) -> None:
        raise LookupError("wrong without any interruption")

    with pytest.raises(LookupError, match="wrong without"):
        await parti_every_await(scenario)


async def test_what_cannot_be_explored_is_refused(parti_every_await: EveryAwait, notes: Notes) -> None:
    async def nothing(run: Runner) -> None:
        pass

    async def one_message(run: Runner) -> None:
        async with run(make_app(notes)) as running:
            await running.publish(ONE)
            await running.handled()

    with pytest.raises(ValueError, match="handled no message"):
        await parti_every_await(nothing)
    with pytest.raises(ValueError, match=r"4 points and 3 actions are 12 runs, more than most_runs=11"):
        await parti_every_await(one_message, most_runs=11)
    with pytest.raises(ValueError, match="actions are move, pause, kill, got explode"):
        await parti_every_await(nothing, actions=["explode"])  # type: ignore[list-item]


async def test_a_way_that_the_handler_does_not_take_again_is_reported(parti_every_await: EveryAwait) -> None:
    runs = 0

    async def scenario(run: Runner) -> None:
        nonlocal runs
        runs += 1
        app = parti.App(stream="NUMBERS", subject="numbers.{name}")

        @app.handler
        async def handle(message: parti.Message) -> None:
            if runs == 1:
                await asyncio.sleep(0)

        async with run(app) as running:
            await running.publish(ONE)
            await running.handled()

    explored = await parti_every_await(scenario, actions=("kill",))
    assert [fault.at.number for fault in explored.missed] == [1]
    assert [point.number for point in explored.points] == [START, 1, END]


# ── as users have it ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(120)
def test_the_page_is_true(pytester: pytest.Pytester) -> None:
    found = FENCE.findall(PAGE.read_text())
    plain, naive, mended, alone = (code for language, code in found if language == "python")
    (promised,) = (text for language, text in found if language == "text")
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(test_orders=plain, test_payments=naive, test_mended=mended + alone)
    done = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "--tb=short")
    done.assert_outcomes(passed=3, failed=1)
    said = {line.removeprefix("E").strip() for line in done.outlines}
    assert not any("exploration.py" in line for line in said), "parti's own lines are hidden"
    assert {line.strip() for line in promised.splitlines()} <= said
    assert "The above exception was the direct cause of the following exception:" in said


def test_the_public_names_are_locked() -> None:
    names = "BrokenError Call DeadLetter END EveryAwait Exploration Failure Fault Point Run Runner START"
    assert sorted(parti.testing.__all__) == names.split()
    for name in set(names.split()) - {"END", "START"}:
        assert getattr(parti.testing, name).__doc__, f"{name} says nothing of itself"
    with pytest.raises(AttributeError, match="no attribute 'Brocken'"):
        parti.testing.Brocken  # noqa: B018


def test_loading_the_plugin_loads_nothing_else() -> None:
    code = (
        "import sys, parti.testing.plugin, parti.testing\n"
        "sys.exit(str([n for n in sys.modules if n.startswith(('parti.', 'nats', 'asyncio')) "
        "and n not in ('parti.version', 'parti.testing', 'parti.testing.plugin')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"
