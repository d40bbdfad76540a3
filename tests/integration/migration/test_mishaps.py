"""What may happen to a migration from outside: a leader that lags, consumers that vanish, an SLO broken too late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import nats
import pytest
from fuzz.raw import Raw, RawClient
from tests.integration.conftest import Kit
from tests.integration.fleet import FLEET
from tests.integration.migration.conftest import MakeScene

import parti
from parti.app.migration.switch import Switch
from parti.coordination.claims import ClaimStore
from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Office
from parti.coordination.migration_desk import MigrationDesk
from parti.coordination.orders import change_orders
from parti.coordination.rebalancer import Rebalancer
from parti.core.lease import LeaseTerms
from parti.core.migration import ConsumerState
from parti.jetstream.kv import Bucket, Entry
from parti.model.fleet import Claim, decode, encode
from parti.model.migration import OldConsumer

VALIDATE = ("run", "--phase", "validate", "--windows", "1", "--window", "0.2")

# ── a leader that lags ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_leader_that_decided_before_gives_away_nothing_that_is_sealed(kit: Kit) -> None:
    """Otherwise it would give a partition to a worker whose old consumer goes on at that moment."""
    plane = await ControlPlane.open(kit.connection, kit.api, f"b{kit.root}", replicas=1)
    bucket = plane.bucket
    free = Claim(claimed_at=datetime.now(UTC), ttl_seconds=5.0, state="free", term=1, position=7)
    await bucket.put("claims.free", encode(free), revision=0)
    await bucket.put("claims.owned", encode(msgspec.structs.replace(free, owner="w", state="owned")), revision=0)
    office = Office(bucket, LeaseTerms(5.0, 0.75), "rebalancer", "leader", "token")
    await office.take(await bucket.get("leader.rebalancer"))
    lagging = ClaimStore(bucket, office, ttl_s=5.0)
    lagging.load(await plane.read("claims.>"))
    desk = MigrationDesk(plane, "test")
    async with desk.held():
        assert await desk.seal(["free", "unknown", "owned"]) == ["owned"]
        assert await desk.seal([]) == []
    assert not await lagging.claim("free", "worker-0")
    assert not await lagging.claim("unknown", "worker-0")
    entry = await bucket.get("claims.free")
    assert entry
    assert decode(entry.value, Claim) == free
    assert await lagging.claim("free", "worker-0"), "it has read it again"


async def test_a_leader_reads_orders_with_the_claims(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who seals a claim wrote the orders before; a leader that knows the one must know the other."""
    bucket, take = await Bucket.open(kit.api, f"b{kit.root}", replicas=1), Rebalancer._on_entry

    def hear_no_orders(self: Rebalancer, key: str, entry: Entry) -> None:
        if key != "orders":
            take(self, key, entry)

    async def handle(message: parti.Message) -> None:
        pass

    monkeypatch.setattr(Rebalancer, "_on_entry", hear_no_orders)
    await change_orders(bucket, lambda orders: msgspec.structs.replace(orders, withheld=("p0",)))
    async with kit.app(handle, ["p0", "p1"], **FLEET).running() as worker:
        await worker.wait_assigned()
        assert [partition.id for partition in worker.partitions] == ["p1"]


# ── what vanishes, and what nobody takes ──────────────────────────────────────────────────────────────────────────


async def test_an_old_consumer_that_vanishes_while_it_is_busy_stops_nobody_else(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, drain = await make_scene(2), Switch._drain

    async def drain_and_lose(self: Switch, paused: Sequence[OldConsumer]) -> dict[str, ConsumerState]:
        busy = await drain(self, paused)
        for partition in busy:
            await scene.kit.api.delete_consumer(scene.kit.stream, f"old-{partition}")
        return busy

    async with scene.old_worker(["p1"]) as worker:
        await worker.create("p0")
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await scene.does(*VALIDATE)
            client = await nats.connect(scene.kit.url)
            await scene.publish(1)
            subscription = await client.jetstream().pull_subscribe_bind("old-p0", scene.kit.stream)
            await subscription.fetch(1)
            monkeypatch.setattr(Switch, "_drain", drain_and_lose)
            said = await scene.type("run", "--phase", "switch", "--drain-timeout", "0.5", "--json")
            await client.close()
            assert said.code == 1, said
            (left,) = json.loads(said.out)["left"]
            assert left["partition"] == "p0"
            assert "old-p0 is gone" in left["why"]
            found = await scene.kit.api.consumers(scene.kit.stream)
            assert {each.name for each in found if each.name.startswith("old-") and each.paused} == {"old-p1"}


async def test_what_no_worker_takes_is_told_and_not_called_unchanged(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await make_scene(4)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await scene.does(*VALIDATE)
            monkeypatch.setattr(Rebalancer, "_claim_for", lambda *_: None)
            said = await scene.type("run", "--phase", "switch", "--at-once", "2", "--take-timeout", "0.2", "--json")
            assert said.code == 1, said
            left = json.loads(said.out)["left"]
            assert 0 < len(left) < 4, "more old consumers are stopped although nobody takes anything"


# ── records that nobody can have written ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [b"nonsense", b""])
async def test_a_migration_comes_to_its_end_beside_keys_that_parti_never_writes(
    make_scene: MakeScene, value: bytes
) -> None:
    scene = await make_scene(3)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        keys = [
            kind + name for kind in (b"migration", b"progress", b"claims", b"ids") for name in (b".\xff", b".p0/x")
        ]
        with RawClient(scene.kit.url) as client:
            odd = [Raw(f"$KV.b{scene.kit.root}.".encode() + key, value) for key in keys]
            assert all(await asyncio.to_thread(client.publish, odd))
        async with scene.fleet():
            await scene.does(*VALIDATE)
            await scene.does("run", "--phase", "switch")
            await scene.does("status")
            answer = await scene.does("run", "--phase", "cleanup", "--yes")
    assert answer["phase"] == "cleaned"
    assert await scene.consumers() == {f"w{scene.kit.root}": 2}


# ── an SLO that is broken too late ────────────────────────────────────────────────────────────────────────────────


async def test_after_the_cleanup_nothing_is_taken_back_by_itself(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever read the old consumers may be gone: everything would go to nobody."""
    scene, gate = await make_scene(3), asyncio.Event()
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await scene.does(*VALIDATE)
            await scene.does("run", "--phase", "switch")
    async with scene.fleet():
        await scene.does("run", "--phase", "cleanup", "--yes")

        async def wait() -> None:
            await gate.wait()

        scene.takes = wait
        await scene.publish(5)
        monkeypatch.setenv("PARTI_MIGRATE_MAX_LAG_MSGS", "0")
        monkeypatch.setenv("PARTI_MIGRATE_BREACHES", "1")
        try:
            said = await scene.type(*VALIDATE, "--json")
        finally:
            gate.set()
        assert said.code == 1, said
        answer = json.loads(said.out)
        assert (answer["rolled_back"], answer["phase"]) == (False, "cleaned")
        assert "nothing is taken back" in answer["summary"]
        assert [name for name in await scene.consumers() if name.startswith("old-")] == []
