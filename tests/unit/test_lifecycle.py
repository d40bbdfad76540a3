"""What a worker holds is let go in order, once, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from parti.jetstream.lifecycle import Lifecycle
from parti.jetstream.vitals import Vitals


@pytest.fixture
def vitals() -> Vitals:
    return Vitals("worker-0")


@pytest.fixture
def life(vitals: Vitals) -> Lifecycle:
    return Lifecycle(vitals)


class Notes(list[str]):
    """What happened, in order."""

    def taking(self, what: str, answer: bool = True) -> Callable[[], Awaitable[bool]]:
        async def note() -> bool:
            self.append(what)
            return answer

        return note

    def doing(self, what: str, error: BaseException | None = None) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            self.append(what)
            if error:
                raise error

        return note


async def test_parts_are_let_go_in_reverse_after_the_worker_has_left(life: Lifecycle) -> None:
    notes = Notes()

    async def start() -> None:
        life.hold(notes.doing("first"))
        life.call(lambda: notes.append("second"))
        life.hold(notes.doing("third"))

    await life.begin(start)
    assert notes == []
    assert await life.end(notes.taking("left"))
    assert notes == ["left", "third", "second", "first"]


@pytest.mark.parametrize("clean", [True, False])
async def test_the_end_says_whether_the_worker_left_cleanly(life: Lifecycle, clean: bool) -> None:
    assert await life.end(Notes().taking("left", clean)) is clean


async def test_a_worker_ends_once(life: Lifecycle) -> None:
    notes = Notes()
    life.hold(notes.doing("part"))
    assert not await life.end(notes.taking("left", answer=False))
    assert await life.end(notes.taking("left again", answer=False))
    assert notes == ["left", "part"]


@pytest.mark.parametrize("error", [RuntimeError("no stream"), asyncio.CancelledError()], ids=["error", "cancelled"])
async def test_a_start_that_fails_leaves_nothing_behind(life: Lifecycle, error: BaseException) -> None:
    notes = Notes()

    async def start() -> None:
        life.hold(notes.doing("part"))
        raise error

    with pytest.raises(type(error)) as raised:
        await life.begin(start, notes.doing("abandoned"))
    assert raised.value is error
    assert notes == ["abandoned", "part"]
    assert await life.end(notes.taking("left"))
    assert notes == ["abandoned", "part", "left"]


async def test_what_was_begun_is_not_abandoned_when_the_start_succeeds(life: Lifecycle) -> None:
    notes = Notes()
    await life.begin(notes.doing("started"), notes.doing("abandoned"))
    assert notes == ["started"]


@pytest.mark.parametrize("where", ["part", "leave", "abandon"])
async def test_an_error_on_the_way_out_keeps_no_other_part_from_being_let_go(life: Lifecycle, where: str) -> None:
    notes = Notes()
    error = RuntimeError(f"{where} failed")
    life.hold(notes.doing("first"))
    life.hold(notes.doing("second", error if where == "part" else None))
    life.hold(notes.doing("third"))

    async def leave() -> bool:
        if where == "leave":
            raise error
        return True

    way_out: Awaitable[object]
    if where == "abandon":
        way_out = life.begin(notes.doing("start", ValueError("start failed")), notes.doing("abandoned", error))
    else:
        way_out = life.end(leave)
    with pytest.raises(RuntimeError, match=f"{where} failed"):
        await way_out
    assert notes[-3:] == ["third", "second", "first"]


async def test_what_runs_beside_the_worker_is_cancelled_at_the_end_and_waited_for(life: Lifecycle) -> None:
    notes = Notes()
    running = asyncio.Event()

    async def beside() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            notes.append("ended")

    life.hold(notes.doing("part"))
    life.run(beside, "beside")
    await running.wait()
    await life.end(notes.taking("left"))
    assert notes == ["left", "ended", "part"]


async def test_what_runs_beside_the_worker_does_not_die_unnoticed(life: Lifecycle, vitals: Vitals) -> None:
    async def beside() -> None:
        raise ValueError("a mistake")

    told = asyncio.Event()
    vitals.health.on_change(lambda *_: told.set())
    life.run(beside, "beside")
    await told.wait()
    assert "a mistake" in vitals.health.reasons["task-beside"]
    assert await life.end(Notes().taking("left"))
