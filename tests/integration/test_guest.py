"""A guest takes partitions from a running fleet, has them handled, and gives them back: nothing lost or repeated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS, Fleet, Journal, Traffic, claims_of, owners, recorded, running

import parti
from parti.app.guest import Guest
from parti.app.worker import Job
from parti.config import Settings
from parti.coordination.lease import clock
from parti.coordination.sources import Static
from parti.core.replay import Ask
from parti.errors import ConfigError, WorkerIdTaken
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders, decode
from parti.model.message import Message, Ownership
from parti.model.partition import Template
from parti.strategies import strategy_named

NAME = "replay-a"
CHOSEN = PARTITIONS[:5]
WITHIN_S = 15.0


def guest_of(kit: Kit, name: str = NAME, **settings: Any) -> Guest:
    async def nothing(message: parti.Message) -> None:
        raise AssertionError("a guest calls no handlers")

    template = Template(kit.template)
    job = Job(kit.stream, template, Static(PARTITIONS), nothing, strategy_named("sticky"))
    return Guest(Settings(**{**kit.settings, **FLEET, **settings}), job, name)


@contextlib.asynccontextmanager
async def visiting(kit: Kit, partitions: Sequence[str], name: str = NAME) -> AsyncIterator[Guest]:
    """A guest that owns these."""
    guest = guest_of(kit, name)
    await guest.connect()
    try:
        await guest.join()
        await guest.place(partitions)
        await guest.owns(partitions, within_s=WITHIN_S, told=lambda count: None)
        yield guest
    finally:
        await guest.leave()


async def handle(kit: Kit, guest: Guest, journal: Journal, partition: str, end: int) -> None:
    """What a task does, in this process: ask, handle in order up to `end`, say how far it has got."""
    holdings, task = guest.reading.holdings, f"task-{partition}"
    number = holdings.begin_round([partition], end)
    at: dict[str, int] = {}
    handled = 0
    while True:
        ask = Ask(task, number, (partition,), at, handled)
        answer = holdings.answer(ask, clock(), guest.reading.permitted_until_s)
        if partition not in answer.keep:
            break
        found = await kit.api.next_on_subject(kit.stream, kit.subject(partition), answer.keep[partition])
        if found is None or found.seq >= end:
            at = {partition: end}
            break
        held = holdings.held[partition]
        ownership = Ownership(guest.visit.partitions[partition], kit.stream, guest.name, held.fence)
        message = Message(kit.subject(partition), b"", found.seq, ownership)
        journal.note("start", message)
        journal.note("end", message)
        handled, at = handled + 1, {partition: found.seq + 1}
    holdings.answer(Ask(task, number, (), at, handled), clock(), guest.reading.permitted_until_s)
    holdings.end_round(complete=False)


async def orders_of(kit: Kit) -> Orders:
    entry = await Bucket(kit.api, f"b{kit.root}").get("orders")
    return decode(entry.value, Orders) if entry and entry.value else Orders()


async def test_a_guest_handles_what_it_placed_on_itself_and_gives_it_back(kit: Kit) -> None:
    async with recorded(kit) as history, running(kit, 2) as fleet, Traffic(kit) as traffic:
        await traffic.goes_on()
        before = owners(await claims_of(kit))
        async with visiting(kit, CHOSEN) as guest:
            others = {p: owner for p, owner in before.items() if p not in CHOSEN}
            assert owners(await claims_of(kit)) == others | dict.fromkeys(CHOSEN, NAME)
            await traffic.goes_on()
            end = (await kit.api.stream_info(kit.stream)).last_seq + 1
            for partition in CHOSEN:
                await handle(kit, guest, fleet.journal, partition, end)
            await traffic.goes_on()
            assert await guest.give_back(within_s=WITHIN_S)
        await traffic.goes_on()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
        fleet.journal.is_clean(traffic.sent)
        assert {call.partition for call in fleet.journal.starts if call.worker == NAME} == set(CHOSEN)
        assert owners(await claims_of(kit)) == before
        assert not (await orders_of(kit)).placed
        history.is_fenced()


async def test_a_guest_that_dies_is_replaced_at_its_positions_and_goes_on_under_the_same_id(kit: Kit) -> None:
    sent = await kit.publish(PARTITIONS, each=30)
    end = max(seq for seqs in sent.values() for seq in seqs) + 1
    half = end // 2
    async with Fleet(kit, Journal()) as fleet:
        guest = guest_of(kit)
        await guest.connect()
        await guest.join()
        await guest.place(CHOSEN)
        await guest.owns(CHOSEN, within_s=WITHIN_S, told=lambda count: None)
        for partition in CHOSEN:
            await handle(kit, guest, fleet.journal, partition, half)
        assert await guest.reading.store()
        await guest.visit.connection.close()  # as if it had been killed
        crashed, guest = guest, guest_of(kit)
        await guest.connect()
        await guest.join()
        await guest.owns(CHOSEN, within_s=WITHIN_S, told=lambda count: None)
        assert all(guest.reading.holdings.held[p].position >= half for p in CHOSEN)
        for partition in CHOSEN:
            await handle(kit, guest, fleet.journal, partition, end)
        await fleet.join()
        assert await guest.give_back(within_s=WITHIN_S)
        await guest.leave()
        await crashed.manager.stop()
        await eventually(lambda: fleet.journal.has(sent))
        fleet.journal.is_clean(sent)


async def test_a_guest_that_stops_halfway_leaves_the_rest_to_the_workers(kit: Kit) -> None:
    async with running(kit, 2) as fleet:
        async with visiting(kit, CHOSEN) as guest:
            sent = await kit.publish(PARTITIONS, each=20)
            half = sorted(seq for seqs in sent.values() for seq in seqs)[60]
            await asyncio.gather(*(handle(kit, guest, fleet.journal, p, half) for p in CHOSEN[:1]))
        await eventually(lambda: fleet.journal.has(sent))
        fleet.journal.is_clean(sent)


async def test_a_guest_is_refused_what_another_order_is_about(kit: Kit) -> None:
    async with running(kit, 1) as fleet:
        (worker,) = fleet.workers
        async with visiting(kit, CHOSEN[:1]):
            other, again = guest_of(kit, "replay-b"), guest_of(kit)
            await other.connect()
            await again.connect()
            with pytest.raises(ConfigError, match=r"p0 is placed on replay-a by an operator"):
                await other.place(CHOSEN)
            with pytest.raises(WorkerIdTaken, match=r"replay-a"):
                await again.join()
            await other.visit.connection.close()
            await again.visit.connection.close()
        assert {p.id for p in worker.partitions} <= set(PARTITIONS)


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
async def test_a_guest_is_refused_by_streams_that_delete_what_is_finished(kit: Kit, retention: str) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    guest = guest_of(kit)
    with pytest.raises(ConfigError, match=rf"{retention} retention.*needs limits retention"):
        await guest.connect()
