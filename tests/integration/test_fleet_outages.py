"""A fleet without its server for a while: nothing is lost, partitions stay in order, fences never go back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest
import structlog
from tests.integration.conftest import Kit, eventually, open_kit
from tests.integration.fleet import (
    LATE_S,
    PARTITIONS,
    TTL_S,
    Fleet,
    Journal,
    Traffic,
    claims_of,
    network_to,
    newest_fence,
    owned_again,
    owners,
    recorded,
    running,
)

from parti.core.fleet_view import FleetState
from parti.embedded import Server


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


async def test_who_comes_back_goes_on_with_a_parked_partition_that_another_has_handled_meanwhile(kit: Kit) -> None:
    """A page of it, read back from the stream, still waits; all of that has been finished."""
    crowded, busy = {"takes_s": 0.02, "ping_interval_s": 0.7, "max_ack_pending": 64}, PARTITIONS[0]
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet:
        far = await fleet.join(nats=network.url, **crowded)
        await fleet.settles()
        sent = await kit.publish([busy], 600)
        await eventually(lambda: far.metrics.parked.value == 1)
        parked_at = len(fleet.journal.starts)
        await eventually(lambda: len(fleet.journal.starts) >= parked_at + 50)
        network.refuse()
        other = await fleet.join(**{**crowded, "takes_s": 0.0})
        await eventually(lambda: fleet.journal.has(sent))
        assert await fleet.leave(other)
        before = await claims_of(kit)
        network.refuse(False)
        await owned_again(kit, newest_fence(before))
        await fleet.settles()
        more = await kit.publish([busy], 3)
        await eventually(lambda: fleet.journal.has(more))
        assert not far.metrics.stalls.child("lanes").value, "only the watchdog has noticed that it stood still"
    fleet.journal.order_holds()


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
