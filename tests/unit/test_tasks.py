"""Tasks have an owner that notices their end: what dies is told by log, metric and health, and begins again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from parti.errors import LeaseLost
from parti.jetstream.vitals import Vitals
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import beside, owned, retried, supervise

BOUND_S = 5.0


@pytest.fixture
def vitals() -> Vitals:
    return Vitals("w0")


@pytest.fixture
def health(vitals: Vitals) -> Health:
    return vitals.health


@pytest.fixture
def metrics(vitals: Vitals) -> Metrics:
    return vitals.metrics


@pytest.fixture
def lines() -> Iterator[list[EventDict]]:
    with capture_logs() as lines:
        yield lines


def deaths(lines: list[EventDict]) -> list[EventDict]:
    return [line for line in lines if line["log_level"] == "error"]


async def test_a_loop_that_dies_is_told_of_and_begins_again(
    health: Health, metrics: Metrics, lines: list[EventDict]
) -> None:
    begun = 0
    lasting = asyncio.Event()
    seen: list[str] = []
    health.on_change(lambda h: seen.append(h.reasons.get("task-sweeping", "")))

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError("an oddity")
        lasting.set()
        await asyncio.Event().wait()

    task = supervise(loop, "sweeping", health)
    async with asyncio.timeout(BOUND_S):
        await lasting.wait()
    assert metrics.task_deaths.child("sweeping").value == 2
    assert len(deaths(lines)) == 2
    assert "an oddity" in str(deaths(lines)[0]["exc_info"])
    assert "is started again" in health.reasons["task-sweeping"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert health.healthy, "what is over ails nobody"
    assert "an oddity" in seen[0]


async def test_a_loop_whose_awaited_thing_is_cancelled_begins_again(health: Health, metrics: Metrics) -> None:
    """An inner future that somebody cancels ends the loop as if it had been told to end; it had not."""
    begun = 0
    done = asyncio.Event()

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            answer = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(answer.cancel)
            await answer
        done.set()

    task = supervise(loop, "asking", health)
    async with asyncio.timeout(BOUND_S):
        await done.wait()
        await task
    assert metrics.task_deaths.child("asking").value == 1
    assert health.healthy


async def test_a_loop_that_is_told_to_end_ends(health: Health, metrics: Metrics, lines: list[EventDict]) -> None:
    running = asyncio.Event()

    async def loop() -> None:
        running.set()
        await asyncio.Event().wait()

    task = supervise(loop, "idling", health)
    await running.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert metrics.task_deaths.total == 0
    assert not deaths(lines)


async def test_a_loop_that_other_code_cancels_is_told_of_and_begins_again(
    health: Health, metrics: Metrics, lines: list[EventDict]
) -> None:
    """A handler may cancel all tasks that it finds: only the owner ends a loop."""
    begun = asyncio.Queue[None]()

    async def loop() -> None:
        begun.put_nowait(None)
        await asyncio.Event().wait()

    supervised = supervise(loop, "idling", health)
    async with asyncio.timeout(BOUND_S):
        for times in range(1, 4):
            await begun.get()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            while metrics.task_deaths.child("idling").value < times:  # noqa: ASYNC110 - a metric has no event
                await asyncio.sleep(0)
        await begun.get()
    assert not supervised.done()
    assert len(deaths(lines)) == 3
    assert "cancelled by other code" in health.reasons["task-idling"]
    supervised.cancel()
    await asyncio.gather(supervised, return_exceptions=True)
    assert supervised.cancelled()
    assert health.healthy


async def test_the_owner_can_end_what_is_about_to_begin_again(health: Health, metrics: Metrics) -> None:
    begun = 0

    async def loop() -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    supervised = supervise(loop, "idling", health)
    while not begun:  # noqa: ASYNC110 - the first turn of the loop
        await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    supervised.cancel()
    await asyncio.gather(supervised, return_exceptions=True)
    assert supervised.cancelled()
    assert begun == 1
    assert metrics.task_deaths.total == 0


def test_an_event_loop_that_ends_takes_what_is_supervised_with_it(lines: list[EventDict]) -> None:
    """`asyncio.run` cancels all tasks and waits for them; none of them may begin again for that, or be told of."""

    async def main() -> None:
        supervise(asyncio.Event().wait, "idling")  # type: ignore[arg-type]
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not deaths(lines)


async def test_an_action_is_repeated_until_it_returns(health: Health) -> None:
    tries = 0

    async def attempt() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        return "stored"

    async with asyncio.timeout(BOUND_S):
        assert await retried(attempt, "storing", health) == "stored"
    assert tries == 3
    assert health.healthy


async def test_what_is_retried_within_a_time_ends_with_it(health: Health) -> None:
    async def attempt() -> None:
        raise RuntimeError("never")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await retried(attempt, "storing", health)
    assert health.healthy


async def test_an_owned_task_that_dies_is_told_of(health: Health, metrics: Metrics, lines: list[EventDict]) -> None:
    async def once() -> None:
        raise KeyError("gone")

    kept: set[object] = set()
    task = owned(once(), "errand", health, keep=kept)
    assert kept == {task}
    await asyncio.wait([task])
    assert not kept
    assert metrics.task_deaths.child("errand").value == 1
    assert "KeyError" in health.reasons["task-errand"]
    assert len(deaths(lines)) == 1


async def test_an_owned_task_is_not_collected_as_garbage() -> None:
    """A task that waits for something that only it refers to is an island: nothing but its owner keeps it."""
    begun, ended = asyncio.Event(), asyncio.Event()
    gates: list[weakref.ref[asyncio.Future[None]]] = []

    async def once() -> None:
        gate = asyncio.get_running_loop().create_future()
        gates.append(weakref.ref(gate))
        begun.set()
        await gate
        ended.set()

    kept: set[object] = set()
    owned(once(), "errand", keep=kept)
    await begun.wait()
    gc.collect()
    gate = gates[0]()
    assert gate is not None, "collected while it ran"
    gate.set_result(None)
    async with asyncio.timeout(BOUND_S):
        await ended.wait()


async def test_what_cannot_be_begun_again_is_signalled(health: Health, metrics: Metrics) -> None:
    async def loop() -> None:
        raise ValueError("an oddity")

    await asyncio.wait([owned(loop(), "pull", health)])
    assert "restart the worker" in health.reasons["task-pull"]
    assert metrics.task_deaths.child("pull").value == 1


async def test_what_runs_beside_a_block_ends_with_it(lines: list[EventDict]) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def loop() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with beside(loop(), name="pumping") as (task,):
        await begun.wait()
    assert ended.is_set()
    assert task.cancelled()
    assert not deaths(lines)


@pytest.mark.parametrize("error", [LeaseLost("gone"), RuntimeError("an oddity")])
async def test_what_a_block_has_not_seen_is_told_of_unless_it_was_foreseen(
    error: Exception, lines: list[EventDict]
) -> None:
    async def loop() -> None:
        raise error

    async with beside(loop(), name="pumping") as tasks:
        await asyncio.wait(tasks)
    assert len(deaths(lines)) == isinstance(error, RuntimeError)


async def test_what_a_block_raises_itself_is_not_told_twice(lines: list[EventDict]) -> None:
    async def loop() -> None:
        raise RuntimeError("an oddity")

    with pytest.raises(RuntimeError, match="an oddity"):
        async with beside(loop(), name="pumping") as (task,):
            await task
    assert not deaths(lines)


async def test_a_log_that_cannot_be_written_does_not_end_what_is_supervised(health: Health) -> None:
    begun = 0
    done = asyncio.Event()

    async def loop() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise ValueError("an oddity")
        done.set()
        await asyncio.Event().wait()

    def refuse(*_: object) -> EventDict:
        raise BrokenPipeError

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[refuse])
    try:
        task = supervise(loop, "sweeping", health)
        async with asyncio.timeout(BOUND_S):
            await done.wait()
    finally:
        structlog.configure(processors=before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
