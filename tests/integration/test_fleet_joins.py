"""Workers that join and leave a fleet under load: nothing is lost, and nothing is repeated."""

from __future__ import annotations

import asyncio
import os
import random

from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import (
    Traffic,
    network_to,
    recorded,
    running,
)


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


async def test_a_worker_may_be_stopped_twice(kit: Kit) -> None:
    async with running(kit, 1) as fleet:
        worker = fleet.workers[0]
        await fleet.leave(worker)
        await worker.stop()
