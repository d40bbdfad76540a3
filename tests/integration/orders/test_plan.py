"""`parti plan` for a fleet with orders: it foresees what the rebalancer, who obeys them, then does."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import PARTITIONS, claims_of, owners, running
from tests.integration.orders.operators import Operator

from parti.jetstream.kv import Bucket


async def planned(operator: Operator, *arguments: str) -> dict[str, Any]:
    said = await operator.type("plan", *arguments, "--json")
    assert (said.code, said.err) == (0, ""), said
    plan: dict[str, Any] = json.loads(said.out)
    return plan


async def test_what_a_leaver_had_is_not_planned_for_a_drained_worker(kit: Kit, operator: Operator) -> None:
    async with running(kit, 3) as fleet:
        await operator.orders("drain", "worker-1")
        assert (await planned(operator))["moves"] == []
        plan = await planned(operator, "--leave", "worker-2")
        assert {row["worker"]: row["then"] for row in plan["workers"]}["worker-0"] == len(PARTITIONS)
        assert plan["notes"] == ["Orders stand: worker-1 is drained."]
        await fleet.leave(next(w for w in fleet.workers if w.worker_id == "worker-2"))

        async def given() -> bool:
            return set(owners(await claims_of(kit)).values()) == {"worker-0"}

        await eventually(given)


async def test_while_moves_are_paused_nothing_is_planned_for_a_new_worker(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        assert (await planned(operator, "--join", "1"))["moved"] == 2
        await operator.orders("pause")
        plan = await planned(operator, "--join", "1")
        assert (plan["moves"], plan["minimum"]) == ([], 2)
        assert plan["summary"] == (
            "If worker-2 joined, nothing would move: 2 moves would even out the shares, but moves are paused."
        )
        await operator.orders("pause", "p0")
        plan = await planned(operator)
        assert (plan["partitions"], plan["unowned"]) == (len(PARTITIONS) - 1, [])


async def test_orders_that_cannot_be_read_are_told_of(kit: Kit, operator: Operator) -> None:
    async with running(kit, 1):
        await Bucket(kit.api, f"b{kit.root}").put("orders", b'{"placed": 7}', revision=0)
        assert (await planned(operator))["notes"] == [
            "Not in this plan is what cannot be read: unreadable record orders: run 'parti doctor --repair orders', "
            "which takes all orders back: give them again then."
        ]
