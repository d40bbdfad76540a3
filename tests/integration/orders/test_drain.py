"""`parti drain`: workers that own nothing while they go on running."""

from __future__ import annotations

import re
from collections import Counter

from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import PARTITIONS, Traffic, claims_of, owners, running
from tests.integration.orders.operators import Operator, answer_of, orders_in, owned_by

from parti.model.fleet import Orders


async def test_a_drained_worker_owns_nothing_until_that_is_undone(kit: Kit, operator: Operator) -> None:
    async with running(kit, 3) as fleet:
        async with Traffic(kit) as traffic:
            await traffic.goes_on()
            number = len(await owned_by(kit, "worker-1"))
            line = await operator.orders("drain", "worker-1")
            pattern = (
                rf"worker-1 is drained: {number} partitions moved to worker-0 \(\d\), worker-2 \(\d\) in \d\.\d s\."
            )
            assert re.fullmatch(pattern, line), line
            assert Counter(owners(await claims_of(kit)).values()).keys() == {"worker-0", "worker-2"}
            await traffic.goes_on()
            status = await operator.status()
            assert status["orders"]["drained"] == ["worker-1"]
            assert status["notes"] == ["worker-1 is drained"]
            assert {row["worker"]: row["state"] for row in status["workers"]}["worker-1"] == "drained"
            detail = (await operator.type("workers", "worker-1")).out
            assert "to own nothing, until 'parti drain worker-1 --undo'" in detail
            assert await operator.orders("drain", "worker-1") == "worker-1 is drained; there was nothing to move."

            line = await operator.orders("drain", "worker-1", "--undo")
            assert line.startswith("worker-1 gets its share again")
            await fleet.settles()
            assert await owned_by(kit, "worker-1")
            assert await operator.orders("drain", "worker-1", "--undo") == (
                "worker-1 was not drained; nothing has changed."
            )
        await eventually(lambda: fleet.journal.has(traffic.sent))
        fleet.journal.is_clean(traffic.sent)


async def test_the_last_worker_is_drained_only_by_force(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        await operator.orders("drain", "worker-0")
        reason = "nobody would be left to take what"
        assert await operator.is_refused("drain", "worker-1") == (
            f"{reason} worker-1 owns; start another worker, undo another drain, or insist with --force"
        )
        assert reason in await operator.is_refused("drain", "worker-1", "worker-0")
        said = await operator.type("drain", "worker-1", "--force", "--timeout", "0.5", "--json")
        assert said.code == 1
        assert len(answer_of(said)["missing"]) == len(PARTITIONS)
        await fleet.join()

        async def gone() -> bool:
            return Counter(owners(await claims_of(kit)).values()) == {"worker-2": len(PARTITIONS)}

        await eventually(gone)


async def test_an_order_about_a_worker_that_has_gone_since_can_be_undone(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        await operator.orders("drain", "worker-1")
        await fleet.leave(next(w for w in fleet.workers if w.worker_id == "worker-1"))
        await operator.orders("drain", "worker-1", "--undo")
        assert await orders_in(kit) == Orders()
