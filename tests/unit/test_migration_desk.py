"""The desk of a migration: what it costs to begin again, and a lease that is lost at the very end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from parti.coordination import migration_desk
from parti.coordination.control_plane import ControlPlane
from parti.coordination.lease import Lease
from parti.coordination.migration_desk import MigrationDesk
from parti.errors import LeaseLost
from parti.jetstream.kv import Write
from parti.model.fleet import key_of
from parti.model.migration import MigrationRecord, OldConsumer

RECORD = MigrationRecord(
    stream="S", stream_created="t", retention="limits", template="s.{p}", prefix="w", consumers="c", workers=1
)


def a_desk() -> MigrationDesk:
    return MigrationDesk(cast("ControlPlane", None), "somebody")


async def test_beginning_again_costs_in_proportion_to_the_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens under a lease of ten seconds, which nobody renews while this is worked out."""
    named, written = 0, list[Write]()

    def count_keys(*tokens: str) -> str:
        nonlocal named
        named += 1
        return key_of(*tokens)

    async def write(self: MigrationDesk, writes: Sequence[Write]) -> list[int]:
        written.extend(writes)
        return [1] * len(writes)

    monkeypatch.setattr(migration_desk, "key_of", count_keys)
    monkeypatch.setattr(MigrationDesk, "_write", write)
    desk, many = a_desk(), 300
    olds = [OldConsumer(partition=f"p{n}", subject=f"s.p{n}") for n in range(many)]
    await desk.found(RECORD, olds)
    await desk.found(RECORD, olds[1:])
    assert [each.key for each in written if each.deletes] == ["migration.p0"]
    assert set(desk.old) == {old.partition for old in olds[1:]}
    assert named < 20 * many


class LeaseThatEnds:
    """A lease that somebody else gets when it is to be renewed."""

    renew_at_s = 0.0

    def __init__(self) -> None:
        self.taken = asyncio.Event()
        self.released = False

    async def renew(self, value: bytes) -> None:
        await self.taken.wait()
        raise LeaseLost("taken")

    async def release(self) -> None:
        self.released = True


@pytest.fixture
async def lease(monkeypatch: pytest.MonkeyPatch) -> LeaseThatEnds:
    lease = LeaseThatEnds()

    async def take(self: MigrationDesk, wait_s: float) -> Lease:
        return cast("Lease", lease)

    async def load(self: MigrationDesk) -> Any:
        await asyncio.sleep(0)

    monkeypatch.setattr(MigrationDesk, "_take", take)
    monkeypatch.setattr(MigrationDesk, "load", load)
    return lease


async def test_a_lease_that_is_lost_ends_the_block(lease: LeaseThatEnds) -> None:
    async def migrate() -> None:
        async with a_desk().held():
            lease.taken.set()
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost, match="run this again"):
        await migrate()
    assert lease.released


@pytest.mark.parametrize("turns", range(6))
async def test_a_lease_that_is_lost_when_all_is_written_is_no_matter(lease: LeaseThatEnds, turns: int) -> None:
    """Whatever was written was written under it. A cancellation that nobody asked for would be a bare traceback."""
    with_loss = False
    try:
        async with a_desk().held():
            await asyncio.sleep(0)
            lease.taken.set()
            for _ in range(turns):
                await asyncio.sleep(0)
    except LeaseLost:
        with_loss = True
    assert lease.released
    task = asyncio.current_task()
    assert task
    assert not task.cancelling()
    assert with_loss == (turns > 1)
