"""What comes in between while the rebalancer works: an order after its decision, its end before it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET

import parti
from parti.coordination.orders import change_orders
from parti.coordination.rebalancer import Rebalancer
from parti.coordination.takeover import Estates
from parti.core.fleet_view import Command
from parti.jetstream.kv import Bucket
from parti.model.fleet import Claim, decode


async def nothing(message: parti.Message) -> None:
    pass


async def test_an_order_that_comes_between_decision_and_write_is_obeyed(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave it sees a partition that nobody has, and may let an older consumer go on with it."""
    bucket, read = Bucket(kit.api, f"b{kit.root}"), Rebalancer._estates
    ordered = False

    async def read_slowly(self: Rebalancer, commands: Sequence[Command]) -> Estates | None:
        nonlocal ordered
        estates = await read(self, commands)
        if not ordered and any(command.partition == "p0" for command in commands):
            await change_orders(bucket, lambda orders: msgspec.structs.replace(orders, withheld=("p0",)))
            await eventually(lambda: self._orders.rests("p0", None))
            ordered = True
        return estates

    monkeypatch.setattr(Rebalancer, "_estates", read_slowly)
    worker = kit.app(nothing, ["p0", "p1"], **FLEET).worker()
    try:
        await worker.start()
        await worker.wait_assigned()
        assert ordered
        given = await bucket.get("claims.p1")
        assert given
        assert decode(given.value, Claim).owner == worker.worker_id
        assert await bucket.get("claims.p0") is None
    finally:
        await worker.stop()


async def test_a_rebalancer_that_ends_while_it_begins_leaves_nothing_running(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def listen(self: Rebalancer) -> Any:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Rebalancer, "_listen", listen)
    worker = kit.app(nothing, ["p0"], **FLEET).worker()
    starting = asyncio.create_task(worker.start())
    try:
        await asyncio.wait_for(begun.wait(), 10)
    finally:
        await starting
        await worker.stop()
    running = [str(getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks()]
    assert [name for name in running if name.startswith(("Rebalancer", "History"))] == []
