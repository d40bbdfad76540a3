"""A control bucket that is made anew, restored, unreadable or large: fences never go back, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import nats
import pytest
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import (
    FLEET,
    PARTITIONS,
    TTL_S,
    Fleet,
    Journal,
    Traffic,
    claims_of,
    network_to,
    newest_fence,
    owned_again,
    running,
)

from parti.core.fleet_view import FleetState
from parti.errors import WrongRevision
from parti.jetstream.kv import Bucket
from parti.model.fleet import MemberRecord, encode


async def reset(kit: Kit, fleet: Fleet, *, anew: bool) -> None:
    """Delete the bucket; `anew`: and make it again, and let everybody's next heartbeat come at once."""
    bucket = Bucket(kit.api, f"b{kit.root}")
    await kit.api.call(f"STREAM.DELETE.{bucket.stream}")
    if anew:
        await Bucket.open(kit.api, bucket.name, replicas=1)
        for worker in fleet.workers:
            assert worker.manager
            worker.manager._beat.set()


async def test_a_fleet_survives_a_control_bucket_made_anew(kit: Kit) -> None:
    """Nobody crashed, so every position is known to somebody: nothing is lost, and nothing need be repeated."""
    with structlog.testing.capture_logs() as lines:
        # The window is to the lease as by default.
        async with Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
            for _ in range(3):
                await fleet.join(cold_start_window_s=0.2 * TTL_S)
                # One by one they share in another way than all at once, as after the reset.
                await fleet.settles()
            before = await claims_of(kit)
            reset_s = time.time()
            await reset(kit, fleet, anew=True)
            after = await owned_again(kit, newest_fence(before))
            recovered_s = time.time() - reset_s
            await fleet.settles()
            await traffic.goes_on()
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
    journal = fleet.journal
    print(
        f"bucket made anew: every partition owned again after {recovered_s:.2f} s, "
        f"{sum(after[p].owner != before[p].owner for p in PARTITIONS)} moved, "
        f"{len(journal.repeats)} of {len(journal.starts)} repeated"
    )
    told = [str(line["reason"]) for line in lines if line["event"] == "stopped handling"]
    assert len(told) >= 3
    assert any("control plane was reset" in reason for reason in told), told
    journal.is_clean(traffic.sent)


async def test_nothing_of_a_deleted_bucket_is_given_out_before_every_lease_has_ended(kit: Kit) -> None:
    """Who cannot be reached at that moment acts under its lease of the old bucket, and rightly so."""
    settings = {"cold_start_window_s": 0.2 * TTL_S}
    async with (
        network_to(kit) as network,
        running(kit, 1, **settings) as fleet,
        Traffic(kit, 300) as traffic,
    ):
        # Slow enough to have work waiting that it does not need a connection for.
        far = await fleet.join(nats=network.url, takes_s=0.1, ping_interval_s=30.0, **settings)
        await fleet.settles()
        await traffic.goes_on(200)
        before = await claims_of(kit)
        network.block()
        await reset(kit, fleet, anew=False)
        await owned_again(kit, newest_fence(before))
        await eventually(lambda: max(c.fence for c in fleet.journal.starts) > newest_fence(before))
        await asyncio.sleep(0.3)
        network.block(False)
        await eventually(lambda: far.state is FleetState.STABLE)
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.fences_never_go_back()


@pytest.mark.parametrize(
    "keys",
    [
        ("claims.p0", "health.worker-0"),
        ("leader.rebalancer",),
        ("assignment.worker-0",),
    ],
    ids=["claim and health", "leader", "assignment"],
)
async def test_an_unreadable_record_does_not_stop_a_fleet(kit: Kit, keys: Sequence[str]) -> None:
    """Written by a newer version, by mistake, or by a person."""
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    async with running(kit, 1) as fleet:
        for key in keys:
            await spoil(bucket, key)
        await fleet.join()
        await fleet.settles(4.0)
        sent = await kit.publish(PARTITIONS)
        await eventually(lambda: fleet.journal.has(sent))


async def spoil(bucket: Bucket, key: str) -> None:
    """Overwrite a key, however often others write it."""
    while True:
        found = await bucket.get(key)
        assert found
        with contextlib.suppress(WrongRevision):
            await bucket.put(key, b"not json", revision=found.revision)
            return


async def test_a_fleet_of_250_workers_gets_2000_partitions(kit: Kit) -> None:
    """As many claims and assignments as do not fit into one batch of the server."""
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    template = MemberRecord(token="t", incarnation=1, started_at=datetime.now().astimezone(), ttl_seconds=60)
    await asyncio.gather(
        *(bucket.put(f"ids.worker-{n}", encode(template), revision=0, ttl_s=60) for n in range(1, 250))
    )
    app = kit.app(lambda message: None, [f"q{n}" for n in range(2000)], **FLEET)
    worker = app.worker()
    with structlog.testing.capture_logs() as lines:
        await worker.start()
        try:
            await eventually(lambda: bool(worker.partitions or [x for x in lines if "failed" in x["event"]]), 15.0)
        finally:
            await worker.stop()
    assert not [line for line in lines if "failed" in line["event"]]
    assert len(worker.partitions) == 8


async def test_leaving_right_after_a_reset_is_no_error(kit: Kit) -> None:
    async with running(kit, 1) as fleet:
        await reset(kit, fleet, anew=True)
        await fleet.leave(fleet.workers[0])


async def test_a_bucket_restored_from_a_copy_does_not_bring_back_old_owners(kit: Kit) -> None:
    stream = f"KV_b{kit.root}"
    client = await nats.connect(kit.url)
    try:
        async with Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
            await fleet.join()
            await fleet.settles()
            copy = await backup(client, stream)
            await fleet.join()
            await fleet.settles()
            before = await claims_of(kit)
            await kit.api.call(f"STREAM.DELETE.{stream}")
            await restore(client, stream, *copy)
            await owned_again(kit, newest_fence(before))
            await fleet.settles()
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
    finally:
        await client.close()
    # The copy knows old positions and old owners: what was finished since may be handled again, and a worker that the
    # copy does not know goes on until its next heartbeat. But nothing is lost, and newer owners have larger tokens.
    fleet.journal.nothing_is_lost(traffic.sent)


async def backup(client: Client, stream: str) -> tuple[dict[str, Any], list[bytes]]:
    """A copy of a stream, by the server's own means."""
    inbox, chunks, complete = client.new_inbox(), list[bytes](), asyncio.Event()

    async def take(message: Msg) -> None:
        if message.data:
            chunks.append(message.data)
            await message.respond(b"")
        else:
            complete.set()

    await client.subscribe(inbox, cb=take)
    request = json.dumps({"deliver_subject": inbox}).encode()
    answer = json.loads((await client.request(f"$JS.API.STREAM.SNAPSHOT.{stream}", request)).data)
    await asyncio.wait_for(complete.wait(), 5)
    return {"config": answer["config"], "state": answer["state"]}, chunks


async def restore(client: Client, stream: str, what: dict[str, Any], chunks: Sequence[bytes]) -> None:
    request = json.dumps(what).encode()
    answer = json.loads((await client.request(f"$JS.API.STREAM.RESTORE.{stream}", request)).data)
    for chunk in (*chunks, b""):
        reply = await client.request(answer["deliver_subject"], chunk, timeout=5)
    assert "error" not in json.loads(reply.data)
