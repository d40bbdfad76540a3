"""`parti move`: partitions go where an operator wants them, stay there, and who is late is named."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS, Fleet, Journal, Traffic, claims_of, running
from tests.integration.orders.operators import Operator, Slow, answer_of, orders_in, owned_by, slow_fleet

import parti
from parti.coordination.orders import change_orders
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders, decode

# ── move ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_partitions_move_under_traffic_and_stay(kit: Kit, operator: Operator, retention: str) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    async with running(kit, 2) as fleet:
        async with Traffic(kit) as traffic:
            for there in ("worker-1", "worker-0"):
                moving = [p for p in PARTITIONS if p not in await owned_by(kit, there)][:3]
                await traffic.goes_on()
                line = await operator.orders("move", *moving, "--to", there)
                assert re.fullmatch(rf"Moved 3 partitions to {there} in \d+\.\d s\.", line)
                claims = await claims_of(kit)
                assert {(claims[p].owner, claims[p].state) for p in moving} == {(there, "owned")}
                assert {claims[p].reason for p in moving} == {"placed by an operator"}
                await fleet.settles()
                assert set(moving) <= set(await owned_by(kit, there)), "they were not left there"
        await eventually(lambda: fleet.journal.has(traffic.sent))
        fleet.journal.is_clean(traffic.sent)


async def test_partitions_that_are_there_are_only_placed(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        here, other = (await owned_by(kit, "worker-0"))[:1], (await owned_by(kit, "worker-1"))[:1]
        before = await claims_of(kit)
        line = await operator.orders("move", *here, "--to", "worker-0")
        assert line == "1 partition is on worker-0 already, and will stay there."
        assert await claims_of(kit) == before
        assert (await orders_in(kit)).placed == dict.fromkeys(here, "worker-0")
        line = await operator.orders("move", *here, *other, "--to", "worker-0")
        assert re.fullmatch(r"Moved 1 partition to worker-0 in \d\.\d s; 1 was there already\.", line)


async def test_placed_partitions_are_given_back_to_the_strategy(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        first = (await owned_by(kit, "worker-0"))[0]
        await operator.orders("move", first, "--to", "worker-1", "--no-wait")
        line = await operator.orders("move", first, "--auto")
        assert line == "The strategy decides about 1 partition again; what need not move stays."
        assert await orders_in(kit) == Orders()
        assert await operator.orders("move", first, "--auto") == (
            "1 partition was not placed by hand; nothing has changed."
        )


async def test_moves_for_scripts(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        moving = (await owned_by(kit, "worker-0"))[:2]
        said = await operator.type("move", *moving, "--to", "worker-1", "--json")
        assert (said.code, said.err) == (0, "")
        answer = answer_of(said)
        assert (answer["ok"], answer["changed"], answer["missing"]) == (True, True, [])
        assert answer["partitions"] == moving
        assert 0 < answer["waited_s"] < 10
        placed = dict.fromkeys(moving, "worker-1")
        assert answer["orders"] == {
            "placed": placed,
            "drained": [],
            "paused": [],
            "hold_moves": False,
            "withheld": [],
        }
        again = answer_of(await operator.type("move", *moving, "--to", "worker-1", "--json", "--no-wait"))
        assert (again["changed"], again["partitions"], again["waited_s"]) == (False, [], None)


async def test_a_worker_can_be_named_by_its_identity(kit: Kit, operator: Operator) -> None:
    async with Fleet(kit, Journal()) as fleet:
        await fleet.join()
        await fleet.join(identity="pod-b")
        await fleet.settles()
        moving = (await owned_by(kit, "worker-0"))[0]
        assert "to worker-1" in await operator.orders("move", moving, "--to", "pod-b")
        assert (await orders_in(kit)).placed == {moving: "worker-1"}


async def test_a_thousand_partitions_move_by_one_order(kit: Kit, operator: Operator) -> None:
    partitions = [f"q{n}" for n in range(1000)]
    settings = {**FLEET, "lease_ttl_s": 10.0, "leader_ttl_s": 10.0, "max_subjects": 1000}

    async def handle(message: parti.Message) -> None:
        pass

    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(kit.app(handle, partitions, **settings).running())

        async def shared() -> bool:
            status = await operator.status()
            return bool(status["ok"]) and [row["owned"] for row in status["workers"]] == [500, 500]

        await eventually(shared, 30)
        said = await operator.type("move", *partitions, "--to", "worker-1", "--json")
        assert said.code == 0, said
        assert len(answer_of(said)["partitions"]) == 500
        status = await operator.status()
        assert {row["worker"]: row["owned"] for row in status["workers"]} == {"worker-0": 0, "worker-1": 1000}
        entry = await Bucket(kit.api, f"b{kit.root}").get("orders")
        assert entry
        assert len(decode(entry.value, Orders).placed) == 1000
        print("moved 500 of 1,000 in", answer_of(said)["waited_s"], "s")


# ── not in time ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_that_runs_for_long_is_named(kit: Kit, operator: Operator) -> None:
    slow = Slow("p0")
    async with slow_fleet(kit, slow) as (here, there):
        quick = next(p for p in await owned_by(kit, here) if p != "p0")
        said = await operator.type("move", "p0", quick, "--to", there, "--timeout", "2")
        assert (said.code, said.err) == (1, "")
        summary, reason = said.out.splitlines()
        waited, rest = summary.removeprefix("After ").split(" s ", 1)
        assert 2.0 <= float(waited) < 3.0, summary
        assert rest == (
            f"1 of 2 partitions had moved to {there}; the order stands, and 'parti move PARTITION... --auto' "
            f"takes it back."
        )
        assert reason == f"  p0: its handler still runs on {here}"
        for arguments in (("pause", "p0"), ("drain", here)):
            answer = answer_of(await operator.type(*arguments, "--timeout", "1", "--json"))
            assert {"partition": "p0", "why": f"its handler still runs on {here}"} in answer["missing"]
        assert not answer["ok"]
        await operator.orders("drain", here, "--undo")
        await operator.orders("resume", "p0", "--no-wait")
        slow.may_end.set()
        line = await operator.orders("move", "p0", "--to", there)
        assert line.startswith(("Moved 1 partition", "1 partition is on"))


async def test_whoever_waits_hears_of_another_operators_order(kit: Kit, operator: Operator) -> None:
    async with slow_fleet(kit, Slow("p0")) as (_, there):
        waiting = asyncio.create_task(operator.type("move", "p0", "--to", there, "--json"))

        async def ordered() -> bool:
            return (await orders_in(kit)).placed == {"p0": there}

        await eventually(ordered, 20)
        await change_orders(Bucket(kit.api, f"b{kit.root}"), lambda orders: Orders())
        said = await waiting
        assert said.code == 1
        assert answer_of(said)["missing"] == [{"partition": "p0", "why": "another operator has taken this back"}]
        assert "the order stands" not in answer_of(said)["summary"]
