"""What an application hangs on the fleet's events, and what hangs on the manager in place of parti's own reading."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from tests.integration.conftest import Kit, Record, eventually, merge

import parti
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.fleet_parts import FleetParts
from parti.coordination.hooks import Hooks, current_worker_id
from parti.coordination.manager import Manager
from parti.coordination.sources import Static
from parti.coordination.worker_ids import Seat
from parti.core.fleet_view import FleetState
from parti.core.lease import NEVER_S
from parti.core.retention import LIMITS
from parti.errors import ConfigError, ControlPlaneReset
from parti.jetstream.kv import Bucket
from parti.model.fleet import Assignment, Claim, HealthRecord, decode
from parti.model.partition import Partition, Template
from parti.strategies import strategy_named
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics

PARTITIONS = [f"p{n}" for n in range(4)]
FLEET: Mapping[str, Any] = {
    "fleet": True,
    "worker_id": None,
    "lease_ttl_s": 2.0,
    "leader_ttl_s": 2.0,
    "cold_start_window_s": 0.0,
    "scale_window_s": 0.1,
    "min_rebalance_interval_s": 0.1,
}


def ids(partitions: Sequence[Partition]) -> list[str]:
    return [partition.id for partition in partitions]


# ── hooks of an app ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_assignment_hook_comes_before_reading_follows(kit: Kit, record: Record) -> None:
    await kit.publish(PARTITIONS, 5)
    app = kit.app(record.handle, PARTITIONS, **FLEET)
    entered, proceed = asyncio.Event(), asyncio.Event()
    calls: list[tuple[list[str], list[str]]] = []

    @app.on_assignment_changed
    async def changed(old: Sequence[Partition], new: Sequence[Partition]) -> None:
        calls.append((ids(old), ids(new)))
        entered.set()
        await proceed.wait()

    worker = app.worker()
    await worker.start()
    try:
        await asyncio.wait_for(entered.wait(), 5)
        await asyncio.sleep(0.3)
        assert not record.calls, "handlers were started while the hook was still at it"
        assert worker.partitions == ()
        proceed.set()
        await record.reaches(20)
        assert ids(worker.partitions) == PARTITIONS
    finally:
        proceed.set()
        await worker.stop()
    assert calls == [([], PARTITIONS)]


async def test_assignment_hooks_are_told_of_every_change_with_the_id_of_their_worker(
    kit: Kit, record: Record
) -> None:
    told: dict[str, list[tuple[list[str], list[str]]]] = {}
    app = kit.app(record.handle, PARTITIONS, **FLEET)

    @app.on_assignment_changed
    def changed(old: Sequence[Partition], new: Sequence[Partition]) -> None:
        told.setdefault(current_worker_id.get(), []).append((ids(old), ids(new)))

    async with app.running() as one:
        async with app.running() as other:
            await eventually(lambda: len(one.partitions) == len(other.partitions) == 2)
            theirs = ids(other.partitions)
        await eventually(lambda: len(one.partitions) == 4)
    changes = [(old, new) for old, new in told[one.worker_id] if old != new]
    assert changes[0] == ([], PARTITIONS)
    assert changes[-1][1] == PARTITIONS
    for (_, new), (old, _) in itertools.pairwise(changes):
        assert new == old
    assert told[other.worker_id][-1][1] == theirs
    assert set(told) == {"worker-0", "worker-1"}


async def test_hooks_that_raise_are_logged_counted_and_stop_nothing(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, PARTITIONS, **FLEET)
    reached: list[str] = []

    def failing(name: str) -> Callable[..., None]:
        def hook(*arguments: object) -> None:
            raise RuntimeError(f"{name} hook is broken")

        return hook

    async def failing_later(*arguments: object) -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    app.on_assignment_changed(failing("assignment"))
    app.on_assignment_changed(failing_later)
    app.on_assignment_changed(lambda old, new: reached.append("next"))
    app.on_state_changed(failing("state"))
    app.on_error(failing("error"))
    errors: list[tuple[str, Exception]] = []
    app.on_error(lambda error: errors.append((current_worker_id.get(), error)))
    with structlog.testing.capture_logs() as lines:
        async with app.running() as worker:
            sent = await kit.publish(PARTITIONS)
            await record.reaches(4)
            await kit.api.call(f"STREAM.DELETE.KV_b{kit.root}")
            await eventually(lambda: any("error hook" in str(line.get("error")) for line in lines))
            await eventually(lambda: worker.state is FleetState.STABLE)
            more = await kit.publish(PARTITIONS)
            await record.reaches(8)
            assert worker.metrics.hook_failures.value >= 4
    record.is_exactly(merge(sent, more))
    assert "next" in reached
    assert errors[0][0] == "worker-0"
    assert isinstance(errors[0][1], ControlPlaneReset)
    broken = {str(line["error"]) for line in lines if line["event"] == "a hook failed"}
    for name in ("assignment hook", "state hook", "error hook", "later"):
        assert any(name in text for text in broken), broken


async def test_an_assignment_hook_that_hangs_makes_the_worker_unhealthy_until_it_returns(
    kit: Kit, record: Record
) -> None:
    await kit.publish(PARTITIONS)
    app = kit.app(record.handle, PARTITIONS, **FLEET)
    proceed = asyncio.Event()

    @app.on_assignment_changed
    async def fill_cache(old: Sequence[Partition], new: Sequence[Partition]) -> None:
        await proceed.wait()

    worker = app.worker()
    await worker.start()
    try:
        await eventually(lambda: not worker.health.healthy, 10.0)
        assert "the hook 'fill_cache' has not returned" in worker.health.reasons["fleet"]
        assert worker.state is FleetState.DEGRADED
        assert not record.calls
        proceed.set()
        await record.reaches(4)
        await eventually(lambda: worker.health.healthy)
    finally:
        proceed.set()
        await worker.stop()


async def test_an_error_hook_that_hangs_keeps_no_worker_from_handling_again(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, PARTITIONS, **FLEET)
    told, proceed = list[Exception](), asyncio.Event()

    @app.on_error
    async def page_the_operator(error: Exception) -> None:
        told.append(error)
        await proceed.wait()

    async with app.running() as worker:
        try:
            sent = await kit.publish(PARTITIONS)
            await record.reaches(4)
            await kit.api.call(f"STREAM.DELETE.KV_b{kit.root}")
            await eventually(lambda: len(told) == 1)
            await eventually(lambda: worker.state is FleetState.STABLE)
            more = await kit.publish(PARTITIONS)
            await record.reaches(8)
        finally:
            proceed.set()
    record.is_exactly(merge(sent, more))


async def test_state_hooks_see_one_unbroken_story(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, PARTITIONS, **FLEET)
    story: list[tuple[FleetState, FleetState]] = []
    workers: set[str] = set()

    @app.on_state_changed
    def changed(before: FleetState, after: FleetState) -> None:
        story.append((before, after))
        if after is not FleetState.CLAIMING_ID:
            workers.add(current_worker_id.get())

    async with app.running() as worker:
        await eventually(lambda: worker.state is FleetState.STABLE)
    assert story[0][0] is FleetState.INIT
    states = [after for _, after in story]
    for state in (FleetState.CLAIMING_ID, FleetState.WAITING, FleetState.STABLE, FleetState.DRAINING):
        assert state in states
    assert states[-1] is FleetState.STOPPED
    for (_, after), (before, _) in itertools.pairwise(story):
        assert after is before
    assert workers == {"worker-0"}


async def test_the_last_state_hook_has_ended_when_the_worker_has(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, PARTITIONS, **FLEET)
    ended: list[FleetState] = []

    @app.on_state_changed
    async def changed(before: FleetState, after: FleetState) -> None:
        await asyncio.sleep(0.2)
        ended.append(after)

    async with app.running():
        pass
    assert ended[-1:] == [FleetState.STOPPED]


# ── an updater of one's own ───────────────────────────────────────────────────────────────────────────────────────


class Reading:
    """The reading side of somebody who does not read with parti."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, list[str]]] = []
        self.permitted_until_s = NEVER_S
        self.busy: tuple[str, ...] = ()
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        self.settling = 0
        self.fails: list[Exception] = []

    async def seated(self, seat: Seat, plane: ControlPlane) -> None:
        pass

    async def refuse(self, partitions: Sequence[Partition]) -> Mapping[str, str]:
        return {}

    def let_go(self, keep: Sequence[Partition], told: Callable[[], None]) -> bool:
        return False

    def permit(self, until_s: float) -> None:
        self.permitted_until_s = until_s

    async def update_worker_consumer(self, worker_id: str, partitions: Sequence[Partition]) -> None:
        if self.fails:
            raise self.fails.pop()
        self.updates.append((worker_id, ids(partitions)))

    async def settle(self) -> Sequence[str]:
        self.settling += 1
        await self.may_settle.wait()
        return self.busy

    def report(self) -> Mapping[str, Any]:
        return {"pulling": True}


@asynccontextmanager
async def managed(kit: Kit, reading: Reading, hooks: Hooks | None = None, **settings: Any) -> AsyncIterator[Manager]:
    """A manager without a worker around it."""
    known = Settings(**{**kit.settings, **FLEET, **settings})
    parts = FleetParts(
        connection=kit.connection,
        api=kit.api,
        settings=known,
        stream=kit.stream,
        retention=LIMITS,
        template=Template(kit.template),
        source=Static(PARTITIONS),
        strategy=strategy_named("sticky"),
        weights=lambda: None,
        metrics=Metrics(""),
        health=Health(),
    )
    manager = Manager(parts, reading, hooks or Hooks())
    await manager.start()
    try:
        yield manager
    finally:
        await manager.stop()


async def test_an_updater_is_called_after_the_hooks_with_the_whole_set(kit: Kit) -> None:
    reading, order = Reading(), list[str]()
    hooks = Hooks(on_assignment_changed=[lambda old, new: order.append(f"hook {len(reading.updates)}")])
    async with managed(kit, reading, hooks) as manager:
        await eventually(lambda: reading.updates == [("worker-0", PARTITIONS)])
        assert order == ["hook 0"]
        await eventually(lambda: reading.permitted_until_s > NEVER_S)
        assert ids(manager.partitions) == PARTITIONS
    assert reading.permitted_until_s == NEVER_S


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("cannot be"),
        ValueError("a mistake"),
    ],
    ids=["of parti", "any other"],
)
async def test_an_updater_that_fails_is_logged_and_tried_again(kit: Kit, error: Exception) -> None:
    reading, seen = Reading(), list[Exception]()
    reading.fails = [error]
    with structlog.testing.capture_logs() as lines:
        async with managed(kit, reading, Hooks(on_error=[seen.append])):
            await eventually(lambda: reading.updates == [("worker-0", PARTITIONS)], 5.0)
    assert seen == [error]
    assert any(str(error) in str(line.get("error")) for line in lines)


async def test_an_updater_is_tried_again_while_an_error_hook_hangs_which_is_told_of_each_error_in_turn(
    kit: Kit,
) -> None:
    reading, told, proceed = Reading(), list[Exception](), asyncio.Event()
    errors: list[Exception] = [ConfigError("cannot be"), ConfigError("still cannot be")]
    reading.fails = errors[::-1]

    async def page_the_operator(error: Exception) -> None:
        told.append(error)
        await proceed.wait()

    async with managed(kit, reading, Hooks(on_error=[page_the_operator])):
        try:
            await eventually(lambda: reading.updates == [("worker-0", PARTITIONS)], 5.0)
            assert told == errors[:1]
        finally:
            proceed.set()
        await eventually(lambda: told == errors, 5.0)


async def health_of(kit: Kit, worker: str) -> HealthRecord | None:
    entry = await Bucket(kit.api, f"b{kit.root}").get(f"health.{worker}")
    return decode(entry.value, HealthRecord) if entry and entry.value else None


async def test_a_heartbeat_does_not_say_that_a_partition_is_free_before_that_is_known(kit: Kit) -> None:
    """Between an update and what came of it lie a write of positions, and maybe a heartbeat."""
    one, other = Reading(), Reading()
    async with managed(kit, one):
        await eventually(lambda: one.updates == [("worker-0", PARTITIONS)])
        settled = one.settling
        await eventually(lambda: one.settling >= 1)
        one.may_settle.clear()
        async with managed(kit, other):
            # The first is told to let go of two; their handlers run, which it finds out only now.
            await eventually(lambda: len(one.updates) == 2 and one.settling > settled)
            kept = one.updates[-1][1]
            bucket = Bucket(kit.api, f"b{kit.root}")
            entry = await bucket.get("assignment.worker-0")
            assert entry
            version = decode(entry.value, Assignment).version
            began = await health_of(kit, "worker-0")
            assert began
            said: list[HealthRecord] = []

            async def two_more_heartbeats() -> bool:
                health = await health_of(kit, "worker-0")
                if health and health.at > began.at and health not in said:
                    said.append(health)
                return len(said) >= 2

            await eventually(two_more_heartbeats, 5.0)
            claims = await bucket.get("claims." + next(p for p in PARTITIONS if p not in kept))
            assert claims
            one.busy = tuple(p for p in PARTITIONS if p not in kept)
            one.may_settle.set()
            assert all(health.applied < version for health in said), "it said that it had let go"
            assert decode(claims.value, Claim).owner == "worker-0", "it was given away under a running handler"
            one.busy = ()


async def test_the_decorators_return_their_functions(kit: Kit) -> None:
    app = parti.App(stream="S", subject="s.{p}")

    def hook(*arguments: object) -> None:
        pass

    assert app.on_assignment_changed(hook) is hook
    assert app.on_state_changed(hook) is hook
    assert app.on_error(hook) is hook
