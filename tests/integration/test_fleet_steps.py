"""Workers come and go: each partition keeps exactly one owner, and no more moves than has to.

The full-size figures come from benchmarks/fleet_steps.py and benchmarks/fleet_scale.py.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from benchmarks.audit import audit, read_back
from benchmarks.fleet import Place, observing
from benchmarks.fleet_hosts import Host
from benchmarks.fleet_scale import UPDATES_LIMIT, Traffic
from benchmarks.fleet_steps import Step, steps_on
from tests.integration.conftest import Kit, eventually

WINDOWS: dict[str, Any] = {
    "cold_start_window_s": 0.3,
    "scale_window_s": 0.6,
    "min_rebalance_interval_s": 0.6,
    "lease_ttl_s": 4.0,
    "leader_ttl_s": 4.0,
}
SETTLE_S = 25.0


def place_of(kit: Kit) -> Place:
    return Place(kit.url, kit.stream, kit.template, bucket=kit.settings["bucket"], prefix=kit.settings["prefix"])


def settings_of(kit: Kit, **more: Any) -> dict[str, Any]:
    elsewhere = {"nats", "bucket", "prefix", "worker_id", "fleet", "log_level"}
    return {k: v for k, v in kit.settings.items() if k not in elsewhere} | WINDOWS | more


def check(step: Step) -> None:
    assert not step.problems
    assert step.movement.moved == step.movement.minimum
    assert step.most - step.least <= 1
    assert not step.stirred


@pytest.mark.parametrize(
    ("strategy", "how"),
    # By default: kills here, and workers that leave in order in the next test.
    [pytest.param("sticky", signal.SIGTERM, marks=pytest.mark.slow), ("hash", signal.SIGKILL)],
    ids=["sticky-SIGTERM", "hash-SIGKILL"],
)
async def test_processes_that_come_and_go_share_the_partitions(kit: Kit, strategy: str, how: signal.Signals) -> None:
    partitions = [f"p{n}" for n in range(40)]
    settings = settings_of(kit, strategy=strategy)
    async with steps_on(place_of(kit), partitions, settings, dwell_s=0.7) as steps:
        for size, moved in ((1, 0), (2, 20), (3, 13)):
            step = await steps.grow(size)
            check(step)
            assert step.movement.moved == moved
        step = await steps.shrink(1, how, rebalancer_goes=True)
        check(step)
        assert step.movement.orphans in {26, 27}


async def test_a_fleet_that_trebles_and_shrinks_handles_every_message_once(kit: Kit) -> None:
    partitions = [f"p{n}" for n in range(120)]
    host = Host(place_of(kit), partitions, settings_of(kit))
    async with observing(place_of(kit)) as observer:
        traffic = Traffic(observer, partitions, 100.0)
        try:
            await host.resize(5)
            assert not await observer.settle(partitions, 5, SETTLE_S)
            async with traffic.flowing():
                for size in (15, 5):
                    owners, began_s = observer.owners, asyncio.get_running_loop().time()
                    said = {w: h.updates for w, h in observer.records.health.items()}
                    await host.resize(size)
                    assert not await observer.settle(partitions, size, SETTLE_S)
                    assert not await observer.verify(partitions)
                    movement = observer.movement(owners, began_s)
                    assert movement.moved == movement.minimum
                    updates = {w: h.updates - said.get(w, 0) for w, h in observer.records.health.items()}
                    assert max(updates.values()) <= UPDATES_LIMIT
            await eventually(lambda: len(host.journal) >= len(traffic.sent_s), 20)
        finally:
            await host.resize(0)
    findings = audit(await read_back(kit.url, kit.stream), host.journal, traffic.sent_s)
    assert findings.clean, findings
    assert not host.unclean
    assert not host.failures
