"""A fleet under faults: nothing is lost, each partition stays in order, fences never go back, and what must not
be repeated is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import nats
import pytest
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, eventually, open_kit
from tests.integration.fleet import (
    FLEET,
    LATE_S,
    PARTITIONS,
    TTL_S,
    Fleet,
    Journal,
    Traffic,
    claims_of,
    network_to,
    owners,
    recorded,
    running,
)

from parti.core.fleet_view import FleetState
from parti.embedded import Server
from parti.errors import PartiError, WrongRevision
from parti.jetstream.kv import Bucket
from parti.model.fleet import Claim, MemberRecord, encode

# ── joining and leaving under load ────────────────────────────────────────────────────────────────────────────────


async def test_ten_joins_and_ten_leaves_under_load_repeat_and_lose_nothing(kit: Kit) -> None:
    chance = random.Random(os.getpid())
    clean = True
    async with recorded(kit) as history, running(kit, 1, takes_s=0.01) as fleet, Traffic(kit, 300) as traffic:
        for _ in range(10):
            worker = await fleet.join(takes_s=0.01)
            await asyncio.sleep(chance.uniform(0.0, 0.6))
            if chance.random() < 0.5:
                await fleet.settles()
            clean = await fleet.leave(worker if chance.random() < 0.7 else fleet.workers[0]) and clean
            await asyncio.sleep(chance.uniform(0.0, 0.2))
        await fleet.settles()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.nothing_is_lost(traffic.sent)
    history.is_fenced()
    assert clean
    fleet.journal.is_clean(traffic.sent)


async def test_a_worker_far_away_leaves_under_load_without_a_repeat(kit: Kit) -> None:
    """Its position is being written at almost any moment, and so at the moment when it leaves."""
    async with (
        network_to(kit) as network,
        running(kit, 1, progress_interval_s=0.02) as fleet,
        Traffic(kit, 200) as traffic,
    ):
        network.delay_s = 0.05
        far = await fleet.join(nats=network.url, progress_interval_s=0.02)
        await fleet.settles()
        await traffic.goes_on(60)
        clean = await fleet.leave(far)
        await fleet.settles()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.is_clean(traffic.sent)
    assert clean


async def test_what_is_about_to_be_let_go_keeps_its_fence(kit: Kit) -> None:
    """Updates of a consumer are paced: in between, handlers of a partition that is to go are still started."""
    settings = {"update_min_interval_s": 0.5, "scale_window_s": 0.0, "min_rebalance_interval_s": 0.0}
    async with running(kit, 1, **settings) as fleet, Traffic(kit, 400) as traffic:
        for _ in range(3):
            await fleet.join(**settings)
            await eventually(fleet.shared)
        await traffic.goes_on()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.is_clean(traffic.sent)
    fleet.journal.all_are_fenced()


# ── the control bucket ────────────────────────────────────────────────────────────────────────────────────────────


async def reset(kit: Kit, fleet: Fleet, *, anew: bool) -> None:
    """Delete the bucket; `anew`: and make it again, and let everybody's next heartbeat come at once."""
    bucket = Bucket(kit.api, f"b{kit.root}")
    await kit.api.call(f"STREAM.DELETE.{bucket.stream}")
    if anew:
        await Bucket.open(kit.api, bucket.name, replicas=1)
        for worker in fleet.workers:
            assert worker.manager
            worker.manager._beat.set()


async def owned_again(kit: Kit, above: int) -> dict[str, Claim]:
    """Wait until every partition has an owner with a larger fence than this."""
    claims: dict[str, Claim] = {}

    async def all_owned() -> bool:
        try:
            claims.update(await claims_of(kit))
        except PartiError:
            return False
        return len(claims) == len(PARTITIONS) and all(
            claim.state == "owned" and claim.fence_token > above for claim in claims.values()
        )

    await eventually(all_owned)
    return claims


def newest_fence(claims: Mapping[str, Claim]) -> int:
    return max(claim.fence_token for claim in claims.values())


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


# ── outages ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def own_kit(nats_server_factory: Callable[..., Server], stream_name: str) -> AsyncIterator[tuple[Kit, Server]]:
    """A kit on a server that the test may kill; the stream is kept on disk."""
    server = nats_server_factory()
    kit = await open_kit(server, stream_name)
    await kit.create_stream(storage="file")
    try:
        yield kit, server
    finally:
        await kit.connection.close()


@pytest.mark.parametrize(
    "late",
    [
        False,
        True,
    ],
    ids=["together", "one returns late"],
)
async def test_a_crash_of_the_server_longer_than_the_leases_moves_and_repeats_nothing(
    own_kit: tuple[Kit, Server], late: bool
) -> None:
    kit, server = own_kit
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
        for n in range(3):
            await fleet.join(nats=network.url if n == 2 else kit.url)
        await fleet.settles()
        await traffic.goes_on(100)
        before = await claims_of(kit)
        await server.kill()
        if late:
            network.refuse()
        await asyncio.sleep(TTL_S + 0.5)
        stopped = len(fleet.journal.starts)
        await server.restart()
        back_s = time.time()
        if late:
            # Well within the time that a new rebalancer gives everybody to come back.
            await eventually(lambda: any(c.at_s > back_s for c in fleet.journal.starts[-5:]))
            await asyncio.sleep(0.3)
            network.refuse(False)
        await eventually(lambda: len(fleet.journal.starts) > stopped)
        resumed_s = fleet.journal.starts[stopped].at_s - back_s
        await fleet.settles()
        after = await claims_of(kit)
        await traffic.goes_on()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    print(f"first handler {resumed_s:.2f} s after the server was back, {len(fleet.journal.repeats)} repeated")
    fleet.journal.is_clean(traffic.sent)
    assert owners(after) == owners(before), "nobody was gone: nothing had to move"


async def test_workers_that_are_cut_off_stop_before_their_leases_end(kit: Kit) -> None:
    """One by a network that swallows everything, one by connections that are refused; one with threads."""
    settings = {"takes_s": 0.1, "ping_interval_s": 0.7}
    async with (
        recorded(kit) as history,
        network_to(kit) as swallowing,
        network_to(kit) as refusing,
        running(kit, 1, **settings) as fleet,
    ):
        cut_off = [
            await fleet.join(nats=swallowing.url, **settings),
            await fleet.join(nats=refusing.url, plain=True, **settings),
        ]
        await fleet.settles()
        theirs = {worker.worker_id: [p.id for p in worker.partitions] for worker in cut_off}
        # Work for longer than their leases: they could go on without a connection.
        sent = await kit.publish([p for partitions in theirs.values() for p in partitions], 30)
        await eventually(lambda: len(fleet.journal.starts) >= len(sent))
        cut_s = time.time()
        swallowing.block()
        refusing.refuse()
        await eventually(lambda: all(history.ended(worker) for worker in theirs), TTL_S + LATE_S)
        ended_s = {worker: history.ended(worker)[0] for worker in theirs}
        await eventually(lambda: len(fleet.workers[0].partitions) == len(PARTITIONS), LATE_S + 1)
        swallowing.block(False)
        refusing.refuse(False)
        await fleet.settles()
        await eventually(lambda: fleet.journal.has(sent))
    for worker, partitions in theirs.items():
        for partition in partitions:
            calls = fleet.journal.by_partition[partition]
            last_s = max(c.at_s for c in calls if c.fence == calls[0].fence) - cut_s
            others_s = min(c.at_s for c in calls if c.fence > calls[0].fence) - cut_s
            after_s = ended_s[worker] - cut_s
            assert last_s < after_s < others_s
        print(
            f"cut off: last handler {last_s:.2f} s later, lease ended at {after_s:.2f} s, others at {others_s:.2f} s"
        )
    fleet.journal.nothing_is_lost(sent)
    fleet.journal.order_holds()
    fleet.journal.fences_never_go_back()
    history.is_fenced()


async def test_who_comes_back_does_not_repeat_what_another_has_finished_meanwhile(kit: Kit) -> None:
    """It still has messages waiting of partitions that another owned in the meantime and gave back in good order."""
    settings = {"takes_s": 0.05, "ping_interval_s": 0.7}
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet:
        far = await fleet.join(nats=network.url, **settings)
        await fleet.settles()
        sent = await kit.publish(PARTITIONS, 60)
        await eventually(lambda: len(fleet.journal.starts) >= 40)
        network.refuse()
        other = await fleet.join(**{**settings, "takes_s": 0.001})
        await eventually(lambda: len(other.partitions) == len(PARTITIONS), TTL_S + LATE_S + 1)
        await eventually(lambda: fleet.journal.has(sent))
        finished = len(fleet.journal.starts)
        assert await fleet.leave(other)
        before = await claims_of(kit)
        network.refuse(False)
        await owned_again(kit, newest_fence(before))
        await fleet.settles()
        more = await kit.publish(PARTITIONS)
        await eventually(lambda: fleet.journal.has(more))
    assert fleet.workers == [far]
    late = [call for call in fleet.journal.repeats if call not in fleet.journal.starts[:finished]]
    assert not late, f"{len(late)} repeated after it was back, first: {late[0]}"


async def test_who_gets_its_id_back_from_another_believes_the_record(kit: Kit) -> None:
    with structlog.testing.capture_logs() as lines:
        async with network_to(kit) as network, Fleet(kit, Journal()) as fleet:
            await fleet.join(nats=network.url, worker_id="press-4")
            await fleet.settles()
            network.refuse()
            other = await fleet.join(worker_id="press-4")
            sent = await kit.publish(PARTITIONS, 5)
            await eventually(lambda: fleet.journal.has(sent))
            assert await fleet.leave(other)
            before = await claims_of(kit)
            network.refuse(False)
            await owned_again(kit, newest_fence(before))
            await fleet.settles()
    fleet.journal.is_clean(sent)
    assert not [line["event"] for line in lines if "ahead of the stream" in line["event"]]


# ── answers that get lost, records that cannot be read ────────────────────────────────────────────────────────────


async def test_moves_that_were_begun_without_an_answer_are_brought_to_their_end(kit: Kit) -> None:
    """The batch took effect: the owner lets go. A rebalancer that believes the old state leaves it at that."""
    armed = False

    def is_of_moves(body: bytes) -> bool:
        nonlocal armed
        # Heartbeats are batches of two.
        lost = armed and b'"batch"' in body and int(json.loads(body.strip())["count"]) > 2
        armed = armed and not lost
        return lost

    # Between two rebalances nothing is looked at again.
    settings = {"min_rebalance_interval_s": 8.0, "scale_window_s": 0.5}
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
        network.loses_answer = is_of_moves
        leader = await fleet.join(nats=network.url, ping_interval_s=30.0, **settings)
        await fleet.settles()
        await fleet.join(**settings)
        await eventually(lambda: leader.state is FleetState.SCALING)
        armed = True
        await eventually(lambda: network.lost == 1)
        lost_s = time.time()
        try:
            await fleet.settles(6.0)
        except AssertionError:
            stuck = {p: claim.next for p, claim in (await claims_of(kit)).items() if claim.state == "moving"}
            raise AssertionError(f"the leader says {leader.state}, and nobody handles {sorted(stuck)}") from None
        print(f"moves begun without an answer were complete after {time.time() - lost_s:.2f} s")
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.is_clean(traffic.sent)


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


async def test_a_worker_may_be_stopped_twice(kit: Kit) -> None:
    async with running(kit, 1) as fleet:
        worker = fleet.workers[0]
        await fleet.leave(worker)
        await worker.stop()


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
