"""Caution on a real event loop: what is noted before which start, and what is not started at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.lanes_bench import Bench

from parti.model.fleet import Grant
from parti.model.message import Message
from parti.worker.caution import Caution


class Crash:
    """A bench whose partitions belonged to a process that died; `notes` is what the progress record said in turn."""

    def __init__(self, limit: int) -> None:
        self.bench = Bench()
        self.notes: list[dict[str, int]] = []
        self.stored = asyncio.Event()
        self.stored.set()
        self.fails = 0
        self.running: dict[int, asyncio.Future[None]] = {}
        self.waits: set[int] = set()
        self.caution = Caution(self.bench.lanes, self._store, limit=limit)
        self.bench.run_async(self._handle)

    async def _store(self) -> bool:
        self.notes.append(dict(self.bench.lanes.trying))
        self.bench.signal.fire()
        await self.stored.wait()
        if self.fails:
            self.fails -= 1
            return False
        return True

    async def _handle(self, message: Message) -> None:
        assert self.notes, "started before anything was noted"
        if message.seq in self.waits:
            self.running[message.seq] = asyncio.get_running_loop().create_future()
            await self.running[message.seq]

    def own(self, **grants: Grant) -> None:
        self.caution.take(grants)
        self.bench.own(*grants, at={p: grant.position for p, grant in grants.items()})

    async def started(self, *seqs: int) -> None:
        await self.bench.until(lambda: set(seqs) <= set(self.bench.started()))

    async def acked(self, *seqs: int) -> None:
        await self.bench.acked(*seqs)

    def end(self, seq: int) -> None:
        self.running[seq].set_result(None)


@pytest.fixture
async def crash(request: pytest.FixtureRequest) -> AsyncIterator[Crash]:
    crash = Crash(getattr(request, "param", 2))
    try:
        yield crash
    finally:
        await crash.caution.stop()
        assert crash.bench.runners
        await crash.bench.runners.stop()


def careful(position: int = 1, to: int = 10, suspect: int = 0, deaths: int = 0) -> Grant:
    return Grant(1, position, to, suspect, deaths)


async def test_each_message_is_noted_before_it_starts(crash: Crash) -> None:
    crash.own(a=careful())
    crash.bench.send("a", 1, 2, 3)
    await crash.acked(1, 2, 3)
    assert crash.notes == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert crash.bench.lanes.trying == {}


async def test_a_note_that_is_not_stored_starts_nothing(crash: Crash) -> None:
    crash.stored.clear()
    crash.own(a=careful())
    crash.bench.send("a", 1)
    await crash.bench.until(lambda: crash.notes)
    assert not crash.bench.started()
    crash.stored.set()
    await crash.acked(1)


async def test_a_note_that_fails_is_tried_again(crash: Crash) -> None:
    crash.fails = 1
    crash.own(a=careful())
    crash.bench.send("a", 1)
    await crash.acked(1)
    assert crash.notes == [{"a": 1}, {"a": 1}]


async def test_lanes_share_a_note(crash: Crash) -> None:
    crash.own(a=careful(), b=careful(), c=careful())
    for seq, partition in enumerate("abc", start=1):
        crash.bench.send(partition, seq)
    await crash.acked(1, 2, 3)
    assert crash.notes == [{"a": 1, "b": 2, "c": 3}]


async def test_what_came_after_the_crash_is_started_without_a_note(crash: Crash) -> None:
    crash.own(a=careful(to=2))
    crash.bench.send("a", 1, 2, 3, 4)
    await crash.acked(1, 2, 3, 4)
    assert crash.notes == [{"a": 1}, {"a": 2}]
    assert crash.bench.lane("a").careful_to == 0


async def test_partitions_of_owners_that_did_not_die_are_left_alone(crash: Crash) -> None:
    crash.stored.clear()
    crash.own(a=careful(), b=Grant(1, 1))
    crash.bench.send("a", 1)
    await crash.bench.until(lambda: crash.notes)
    crash.bench.send("b", 2, 3)
    await crash.acked(2, 3)
    assert crash.notes == [{"a": 1}]


async def test_what_has_killed_often_enough_is_dead_lettered_and_the_partition_goes_on(crash: Crash) -> None:
    crash.own(a=careful(suspect=2, deaths=2))
    crash.bench.send("a", 1, 2, 3)
    await crash.acked(1, 2, 3)
    assert crash.bench.started() == [1, 3]
    ((seq, reason, _),) = crash.bench.letters.sent
    assert (seq, reason) == (2, "2 processes died while handling it")
    assert crash.bench.positions() == {"a": 4}


async def test_a_message_on_its_last_chance_is_tried_alone(crash: Crash) -> None:
    """One write accuses all that were noted, and only one of them has killed: the next death must tell which."""
    crash.waits = {1, 2, 3}
    crash.own(
        a=careful(suspect=1, deaths=1),
        b=careful(suspect=2, deaths=1),
        c=careful(suspect=3, deaths=1),
        d=careful(),
    )
    for seq, partition in enumerate("abcd", start=1):
        crash.bench.send(partition, seq)
    for seq in (1, 2, 3):
        await crash.started(seq)
        assert crash.bench.started() == list(range(1, seq + 1))
        assert crash.notes[-1] == {"abc"[seq - 1]: seq}
        crash.end(seq)
    await crash.acked(1, 2, 3, 4)
    assert crash.notes == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]


async def test_a_last_chance_waits_for_what_has_been_noted_before(crash: Crash) -> None:
    crash.waits = {1}
    crash.own(a=careful(), b=careful(suspect=2, deaths=1))
    crash.bench.send("a", 1)
    await crash.started(1)
    crash.bench.send("b", 2)
    crash.bench.send("a", 3)
    assert crash.bench.started() == [1]
    crash.end(1)
    await crash.acked(1, 2, 3)
    assert crash.notes == [{"a": 1}, {"b": 2}, {"a": 3}]


async def test_what_is_condemned_holds_up_no_last_chance(crash: Crash) -> None:
    crash.bench.letters.open.clear()
    crash.own(a=careful(suspect=1, deaths=2), b=careful(suspect=2, deaths=1))
    crash.bench.send("a", 1)
    await crash.bench.until(lambda: crash.bench.letters.asked)
    crash.bench.send("b", 2)
    await crash.acked(2)
    crash.bench.letters.open.set()
    await crash.acked(1)


@pytest.mark.parametrize("crash", [1], indirect=True)
async def test_with_a_limit_of_one_every_message_has_its_last_chance(crash: Crash) -> None:
    crash.own(a=careful(), b=careful())
    crash.bench.send("a", 1)
    crash.bench.send("b", 2)
    await crash.acked(1, 2)
    assert crash.notes == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("crash", [3], indirect=True)
async def test_with_a_higher_limit_suspects_still_share_a_note(crash: Crash) -> None:
    crash.own(a=careful(suspect=1, deaths=1), b=careful(suspect=2, deaths=1))
    crash.bench.send("a", 1)
    crash.bench.send("b", 2)
    await crash.acked(1, 2)
    assert crash.notes == [{"a": 1, "b": 2}]


async def test_a_failing_message_keeps_its_note_until_it_is_finished(crash: Crash) -> None:
    attempts: list[dict[str, int]] = []

    async def fail(message: Message) -> None:
        attempts.append(dict(crash.bench.lanes.trying))
        raise ValueError

    crash.bench.run_async(fail)
    crash.own(a=careful())
    crash.bench.send("a", 1)
    await crash.acked(1)
    assert attempts == [{"a": 1}] * 3
    assert crash.bench.lanes.trying == {}


async def test_a_partition_that_is_let_go_while_its_note_is_written_starts_nothing(crash: Crash) -> None:
    crash.stored.clear()
    crash.own(a=careful(), b=careful())
    crash.bench.send("a", 1)
    crash.bench.send("b", 2)
    await crash.bench.until(lambda: crash.notes)
    crash.own(b=careful())
    crash.stored.set()
    await crash.acked(2)
    assert crash.bench.started() == [2]
    assert crash.bench.lanes.trying == {}


async def test_nothing_starts_while_a_state_is_saved(crash: Crash) -> None:
    crash.stored.clear()
    crash.own(a=careful())
    crash.bench.send("a", 1)
    await crash.bench.until(lambda: crash.notes)
    async with crash.bench.lanes.pauses.paused("a") as position:
        assert position == 1
        crash.stored.set()
        assert crash.caution._noting
        await asyncio.wait([crash.caution._noting])
        assert not crash.bench.started()
        assert crash.bench.lanes.trying == {}, "it is not being tried"
    await crash.acked(1)
    assert crash.notes == [{"a": 1}, {"a": 1}]


async def test_a_last_chance_that_was_paused_between_two_attempts_is_taken_up_again(crash: Crash) -> None:
    failed = asyncio.Event()

    async def fail_once(message: Message) -> None:
        if message.attempt == 1:
            failed.set()
            raise ValueError

    crash.bench.run_async(fail_once)
    crash.own(a=careful(suspect=1, deaths=1))
    crash.bench.send("a", 1)
    await failed.wait()
    async with crash.bench.lanes.pauses.paused("a"):
        pass
    await crash.acked(1)


async def test_a_message_that_failed_before_the_crash_is_noted_and_counted_on(crash: Crash) -> None:
    crash.bench.lanes.roster.note_failed("a", 5, 2)
    crash.own(a=careful(position=5))
    crash.bench.send("a", 5, 6)
    await crash.acked(5, 6)
    assert [(seq, attempt) for _, seq, attempt in crash.bench.starts] == [(5, 3), (6, 1)]
    assert {"a": 5} in crash.notes
