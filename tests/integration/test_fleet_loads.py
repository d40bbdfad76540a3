"""Sharing by measured load: workers measure, the rebalancer shares their work out evenly, and then nothing moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS, Journal, Traffic, claims_of, owners, recorded

import parti
from parti.app.worker import Worker
from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records
from parti.core.fleet_view import FleetState

WINDOW_S = 1.5
RATE = 160.0
"""Of all partitions together: twenty messages a second for each."""
TAKES_S: Mapping[str, float] = {**dict.fromkeys(PARTITIONS, 0.004), "p0": 0.035, "p1": 0.012, "p2": 0.025}
"""Shared by count, one worker has both heavy ones, and three quarters of the work."""
BOUND = 1.25
"""Most that a worker has to do, against the mean; shared by count it is 1.5."""
QUIET_WINDOWS = 4


def skewed_app(kit: Kit, journal: Journal, **settings: Any) -> parti.App:
    async def handle(message: parti.Message) -> None:
        journal.note("start", message)
        await asyncio.sleep(TAKES_S[message.partition.id])
        journal.note("end", message)

    return kit.app(handle, PARTITIONS, **{**FLEET, "strategy": "load", "load_window_s": WINDOW_S, **settings})


async def records_of(kit: Kit) -> Records:
    return Records.of(await read_keys(kit.connection, kit.api, f"b{kit.root}", KEYS))


def work(journal: Journal, since: int) -> Counter[str]:
    """Seconds of handler work by worker, of the calls noted since then."""
    seconds: Counter[str] = Counter()
    began: dict[str, float] = {}
    for call in journal.calls[since:]:
        if call.what == "start":
            began[call.partition] = call.at_s
        elif call.partition in began:
            seconds[call.worker] += call.at_s - began.pop(call.partition)  # type: ignore[assignment]
    return seconds


async def test_seconds_of_work_are_shared_evenly_and_then_nothing_moves(kit: Kit) -> None:
    journal = Journal()
    workers: list[Worker] = []
    async with recorded(kit) as history, Traffic(kit, rate=RATE) as traffic:
        try:
            for _ in range(2):
                workers.append(skewed_app(kit, journal).worker())
                await workers[-1].start()
            await eventually(lambda: sum(len(w.partitions) for w in workers) == len(PARTITIONS))

            def is_even() -> bool:
                held = [sum(TAKES_S[p.id] for p in worker.partitions) for worker in workers]
                whole = sum(len(worker.partitions) for worker in workers) == len(PARTITIONS)
                return whole and max(held) <= BOUND * sum(held) / len(held)

            assert not is_even()
            await eventually(is_even, 30.0)
            await eventually(lambda: all(w.state is FleetState.STABLE for w in workers), 10.0)
            since, settled = len(journal.calls), owners(await claims_of(kit))
            before = len(history.of("claims"))

            # Windows are counted in messages: their rate is the clock of this test.
            await traffic.goes_on(round(QUIET_WINDOWS * WINDOW_S * RATE))
            assert owners(await claims_of(kit)) == settled
            assert len(history.of("claims")) == before, "something has moved for the sake of noise"
            done = work(journal, since)
            assert max(done.values()) <= BOUND * done.total() / len(workers), done

            records = await records_of(kit)
            report = {each.worker: each for each in records.report().workers}
            assert sum(each.load_share or 0.0 for each in report.values()) == pytest.approx(1.0)
            assert records.loads["worker-0"].loads.keys() | records.loads["worker-1"].loads.keys() == set(PARTITIONS)
            writes = len(history.of("load"))
            await traffic.stop()
            await eventually(lambda: journal.has(traffic.sent))
            assert writes < 200, "the records are written too often"
        finally:
            await asyncio.gather(*(worker.stop() for worker in workers))
    journal.is_clean(traffic.sent)


async def test_other_strategies_measure_nothing(kit: Kit) -> None:
    journal = Journal()
    async with (
        recorded(kit) as history,
        Traffic(kit, rate=RATE) as traffic,
        skewed_app(kit, journal, strategy="sticky").running(),
    ):
        await traffic.goes_on(round(2 * WINDOW_S * RATE))
        assert history.of("load") == []
