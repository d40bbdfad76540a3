"""A part of a worker's place in the fleet meets an error that nobody has foreseen: it goes on, and it is told.

On a real server; the error is planted in what the part is given: the reading side, or the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.test_hooks import FLEET, PARTITIONS, Reading, health_of

from parti.config import Settings
from parti.coordination.fleet_parts import FleetParts
from parti.coordination.history import read_history
from parti.coordination.hooks import Hooks
from parti.coordination.manager import Manager
from parti.coordination.sources import Static
from parti.core.fleet_view import FleetState
from parti.core.lease import NEVER_S
from parti.core.retention import LIMITS
from parti.jetstream.api import JetStreamApi
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.vitals import Vitals
from parti.jetstream.watch import Watch
from parti.model.history import history_subject
from parti.model.partition import Partition, Template
from parti.strategies import strategy_named

SOON_S = 10.0


class OddApi(JetStreamApi):
    """The server's API, some of whose calls raise an error, each so many times."""

    odd: dict[str, list[BaseException]]

    async def call(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        wanted = f"{verb} {body or ''}"
        for part, errors in self.odd.items():
            if part in wanted and errors:
                raise errors.pop()
        return await super().call(verb, body)

    async def publish(self, subject: str, *arguments: Any, **options: Any) -> int:
        for part, errors in self.odd.items():
            if part in subject and errors:
                raise errors.pop()
        return await super().publish(subject, *arguments, **options)


def odd_api(kit: Kit, odd: dict[str, list[BaseException]]) -> OddApi:
    api = OddApi(kit.connection)
    api.odd = odd
    return api


class Place:
    """A manager, what it told, and whether it ever had to stop handling."""

    def __init__(self, manager: Manager, vitals: Vitals, errors: list[Exception]) -> None:
        self.manager = manager
        self.vitals = vitals
        self.errors = errors

    def deaths(self, task: str) -> int:
        return self.vitals.metrics.task_deaths.child(task).value


@asynccontextmanager
async def managed(kit: Kit, reading: Reading, api: JetStreamApi | None = None) -> AsyncIterator[Place]:
    vitals, errors = Vitals(""), list[Exception]()
    parts = FleetParts(
        connection=kit.connection,
        api=api or kit.api,
        settings=Settings(**{**kit.settings, **FLEET}),
        stream=kit.stream,
        retention=LIMITS,
        template=Template(kit.template),
        source=Static(PARTITIONS),
        strategy=strategy_named("sticky"),
        weights=lambda: None,
        metrics=vitals.metrics,
        health=vitals.health,
    )
    manager = Manager(parts, reading, Hooks(on_error=[errors.append]))
    await manager.start()
    try:
        yield Place(manager, vitals, errors)
    finally:
        await manager.stop()


def owns_all(reading: Reading) -> bool:
    return bool(reading.updates) and reading.updates[-1][1] == PARTITIONS and reading.permitted_until_s > NEVER_S


# ── the manager ───────────────────────────────────────────────────────────────────────────────────────────────────


class Cancelling(Reading):
    """Something that an update of the consumer awaits is cancelled, by somebody else."""

    cancels = 1

    async def update_worker_consumer(self, worker_id: str, partitions: Sequence[Partition]) -> None:
        if self.cancels:
            self.cancels -= 1
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(answer.cancel)
            await answer
        await super().update_worker_consumer(worker_id, partitions)


async def test_an_update_whose_answer_is_cancelled_does_not_end_the_manager(kit: Kit) -> None:
    reading = Cancelling()
    async with managed(kit, reading) as place:
        await eventually(lambda: owns_all(reading), SOON_S)
        assert place.deaths("manager") == 1


class Unsettled(Reading):
    """Positions cannot be stored, for a reason that nobody has foreseen."""

    fails_to_settle = 3

    async def settle(self) -> Sequence[str]:
        if self.fails_to_settle:
            self.fails_to_settle -= 1
            raise RuntimeError("unable to perform operation on a closed transport")
        return await super().settle()


async def test_a_manager_that_starts_over_says_so_for_as_long_as_it_does(kit: Kit) -> None:
    reading, seen = Unsettled(), set[str]()
    async with managed(kit, reading) as place:
        place.vitals.health.on_change(lambda health: seen.update(health.reasons))
        await eventually(lambda: owns_all(reading) and place.manager.state is FleetState.STABLE, SOON_S)
        assert place.deaths("manager") == 3
        assert "closed transport" in place.vitals.health.reasons["task-manager"], "it was well for no time at all"
        assert [type(error) for error in place.errors] == [RuntimeError] * 3
    assert "task-manager" in seen


class Silent(Reading):
    """The reading side cannot tell how it is."""

    def report(self) -> Mapping[str, Any]:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


async def test_a_heartbeat_that_cannot_tell_how_a_worker_is_says_that_and_renews_the_lease(kit: Kit) -> None:
    reading = Silent()
    async with managed(kit, reading) as place:
        await eventually(lambda: owns_all(reading), SOON_S)

        async def told() -> bool:
            health = await health_of(kit, "worker-0")
            return health is not None and any("cannot be written" in problem for problem in health.problems)

        await eventually(told, SOON_S)
        renewed = place.vitals.metrics.lease_renewals.value
        await eventually(lambda: place.vitals.metrics.lease_renewals.value > renewed + 2, SOON_S)
        assert not place.errors, "it never had to stop"
        assert place.deaths("heartbeat") == 1, "told once, not with each beat"


# ── elections ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("role", ["rebalancer", "cleanup"])
async def test_an_election_that_dies_is_repeated_and_handling_goes_on(kit: Kit, role: str) -> None:
    reading = Reading()
    odd: list[BaseException] = [RecursionError("nested"), asyncio.CancelledError()]
    async with managed(kit, reading, odd_api(kit, {f"leader.{role}": odd})) as place:
        await eventually(lambda: place.deaths(f"election-{role}") == 2 and owns_all(reading), SOON_S)
        assert not place.errors, "an election is no reason to stop handling"


async def test_a_history_that_meets_something_odd_goes_on_with_the_next_records(kit: Kit) -> None:
    reading, odd = Reading(), list[BaseException]([RuntimeError("a mistake")])
    subject = history_subject(f"b{kit.root}", "")
    async with managed(kit, reading, odd_api(kit, {subject: odd})) as place:
        await eventually(lambda: not odd and owns_all(reading), SOON_S)
        await eventually(lambda: place.deaths("history") == 1, SOON_S)
        async with managed(kit, Reading()) as other:
            await eventually(lambda: len(other.manager.partitions) == 2, SOON_S)
            moved = other.manager.partitions[0].id

            async def recorded() -> bool:
                return bool(await read_history(kit.api, f"b{kit.root}", moved))

            await eventually(recorded, SOON_S)
    assert place.vitals.metrics.history_lost.value >= 1


# ── the watch ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_watch_whose_request_is_cancelled_begins_again(kit: Kit) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    odd: list[BaseException] = [asyncio.CancelledError()]
    api = odd_api(kit, {f"STREAM.INFO.{bucket.stream}": odd})
    seen: dict[str, Entry] = {}
    watch = Watch(kit.connection, api, bucket.name, ["key"], seen.__setitem__)
    async with asyncio.timeout(SOON_S):
        await watch.start()
    try:
        await bucket.put("key", b"value", revision=0)
        await eventually(lambda: "key" in seen, SOON_S)
        assert not odd
    finally:
        await watch.stop()


async def test_a_callback_of_a_watch_that_raises_hides_no_later_change(kit: Kit) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    seen: list[bytes] = []

    def take(key: str, entry: Entry) -> None:
        seen.append(entry.value)
        if entry.value == b"first":
            raise ValueError("a mistake")

    watch = Watch(kit.connection, kit.api, bucket.name, ["key"], take)
    await watch.start()
    try:
        revision = await bucket.put("key", b"first", revision=0)
        await bucket.put("key", b"second", revision=revision)
        await eventually(lambda: seen[-1:] == [b"second"], SOON_S)
    finally:
        await watch.stop()
