"""Subjects on shards, and the record of a worker whose shards run at their own pace, over all orders of events."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.conftest import only_suffixes_repeat
from tests.trials import examples_of
from tests.unit.shards_bench import Server, World, by_partition

from parti.core.consumer_config import consumer_name, owner_of, shard_metadata, shard_number, workers_of
from parti.core.progress import Progress
from parti.core.shards import place

SUBJECTS = [f"s{n}" for n in range(12)]
some = st.sets(st.sampled_from(SUBJECTS))


@given(st.lists(some, min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 4))
def test_placement_is_stable_and_full_from_the_front(sets: list[set[str]], cap: int, shards: int) -> None:
    now: dict[str, int] = {}
    for subjects in sets:
        placed = place(subjects, now, cap=cap, shards=shards)
        assert placed.keys() == subjects
        assert all(placed[s] == number for s, number in now.items() if s in subjects), "a subject has moved"
        assert all(1 <= number <= shards for number in placed.values())
        taken = Counter(placed.values())
        kept = Counter(number for s, number in now.items() if s in subjects)
        if len(subjects) <= cap * shards:
            assert all(taken[n] <= max(cap, kept[n]) for n in taken)
        for number in {placed[s] for s in subjects - now.keys()}:
            assert all(taken[n] >= cap for n in range(1, number)), "a shard was filled while one before it had room"
        now = placed


@given(some, st.integers(1, 5), st.integers(1, 4))
def test_no_more_shards_are_opened_than_are_needed(subjects: set[str], cap: int, shards: int) -> None:
    used = set(place(subjects, {}, cap=cap, shards=shards).values())
    assert used == set(range(1, min(shards, -(-len(subjects) // cap)) + 1))


@given(some, st.integers(2, 9), st.integers(1, 4))
def test_what_lies_beyond_the_last_shard_or_above_the_cap_stays_and_gets_nothing(
    subjects: set[str], beyond: int, cap: int
) -> None:
    now = dict.fromkeys(SUBJECTS[:4], beyond)
    placed = place(subjects, now, cap=cap, shards=1)
    assert all(placed[s] == (beyond if s in now else 1) for s in subjects)


names = st.from_regex(r"[a-z]{1,3}(-[0-9]{1,2}){0,2}", fullmatch=True)


@given(names, st.integers(1, 64))
def test_a_consumer_can_be_attributed_to_its_worker(worker: str, shard: int) -> None:
    name = consumer_name("p", worker, shard)
    assert worker in workers_of(name, "p")
    assert worker in workers_of(f"{name}-hold-1a2b3c4d", "p")
    assert owner_of({"name": name, "metadata": shard_metadata(worker, shard)}, "p") == (worker, shard)
    assert shard_number(name, consumer_name("p", worker)) == (shard if shard > 1 else 0)


# ── at their own pace ─────────────────────────────────────────────────────────────────────────────────────────────

PARTITIONS = "abcde"
partition = st.sampled_from(PARTITIONS)
step = st.one_of(
    st.tuples(st.just("publish"), st.lists(partition, min_size=1, max_size=4)),
    st.tuples(st.just("serve"), st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.just("heartbeat"), st.integers(1, 3)),
    st.tuples(st.just("work"), st.integers(1, 4)),
    st.tuples(st.just("catch up")),
    st.tuples(st.just("store")),
    st.tuples(st.just("own"), st.sets(partition)),
    st.tuples(st.just("break"), st.integers(1, 3)),
    st.tuples(st.just("lose"), st.integers(1, 3)),
    st.tuples(st.just("fail"), st.integers(1, 3)),
    st.tuples(st.just("restart"), st.booleans()),
)


class Story:
    """A worker whose shards, handlers and process do what the steps say."""

    def __init__(self, retention: str, shards: int) -> None:
        self.server = Server(retention=retention)
        self._room = {"max_subjects": 2 if shards > 1 else 5, "consumer_shards": shards}
        self.subjects: dict[int, str] = {}
        self.owned = tuple(PARTITIONS)
        self.crashed = False
        self.stored: Progress | None = None
        self.world = self._make(None)

    def _make(self, record: Progress | None, handled: list[int] | None = None) -> World:
        return World(self.server, record, handled, update_attempts=1, **self._room)

    def shard(self, number: int) -> int | None:
        return number if number <= len(self.world.shards) else None

    async def play(self, steps: list[Any]) -> None:
        await self.world.start(*self.owned)
        for name, *what in steps:
            await self._do(name, *what)
            self.check()
        await self.world.stop()

    async def _do(self, name: str, *what: Any) -> None:
        world = self.world
        number = self.shard(what[0]) if name in {"serve", "heartbeat", "break", "lose"} else None
        if name == "publish":
            self.server.publish(*what[0])
            self.subjects |= self.server.messages
        elif name == "work":
            world.work(what[0])
        elif name == "catch up":
            world.lanes.floors.catch_up()
        elif name == "store":
            self.stored = world.record()
        elif name == "own":
            await self._own(what[0])
        elif name == "fail":
            self.server.fail[consumer_name("parti", "w0", what[0])] = 1
        elif name == "restart":
            await self._restart(*what)
        elif number is None:
            return
        elif name == "serve":
            world.serve(number, what[1])
        elif name == "heartbeat":
            world.heartbeat(number)
        else:
            if name == "lose":
                self.server.consumers.pop(world.shards[number - 1].name, None)
            self.server.fail.clear()
            await world.break_session(number)

    async def _own(self, partitions: set[str]) -> None:
        try:
            await self.world.update(*partitions)
            self.owned = tuple(partitions)
        except Exception:
            # One of the shards has failed: whatever is owned now, the next update says.
            self.server.fail.clear()
            await self.world.rest()
            await self.world.update(*partitions)
            self.owned = tuple(partitions)

    async def _restart(self, graceful: bool) -> None:
        """A crash forgets what has happened since positions were stored last."""
        if graceful:
            self.stored = self.world.record()
        self.crashed |= not graceful
        await self.world.stop()
        self.server.fail.clear()
        self.world = self._make(self.stored, self.world.handled)
        await self.world.start(*self.owned)

    def check(self) -> None:
        """No position is past a message that is not handled."""
        record, handled = self.world.record(), set(self.world.handled)
        for seq, subject in self.subjects.items():
            if seq not in handled:
                position = record.position(subject.removeprefix("dc."), subject)
                assert position <= seq, f"{seq} on {subject} is not handled, but the position is {position}"

    def has_all(self) -> None:
        handled = self.world.handled
        assert set(handled) == self.subjects.keys(), f"lost: {sorted(self.subjects.keys() - set(handled))}"
        for subject, seqs in by_partition(self.subjects, handled).items():
            assert only_suffixes_repeat(seqs), f"order broken on {subject}: {seqs}"
        if not self.crashed:
            assert len(handled) == len(set(handled)), "something was handled twice"


def whatever_they_do(retention: str, shards: int, steps: list[Any]) -> None:
    async def run() -> None:
        story = Story(retention, shards)
        await story.play(steps)
        story.server.fail.clear()
        story.owned = tuple(PARTITIONS)
        story.world = story._make(story.world.record(), story.world.handled)
        await story.world.start(*story.owned)
        await story.world.finish()
        story.has_all()
        await story.world.stop()

    asyncio.run(run())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@settings(max_examples=examples_of(40, at_least=10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=40))
def test_whatever_the_shards_do_no_position_passes_a_message_and_none_is_lost(
    retention: str, shards: int, steps: list[Any]
) -> None:
    whatever_they_do(retention, shards, steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(step, max_size=40))
def test_the_same_for_many_more_stories(retention: str, shards: int, steps: list[Any]) -> None:
    whatever_they_do(retention, shards, steps)
