"""What `benchmarks.approaches` does to one topology on a server of its own: create, load, drain, stall, rebalance.

Every phase ends in bounded time, whatever the server does; a backlog that is left is purged before the next one.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.arrivals import Arrivals
from benchmarks.remote import Remote
from benchmarks.server_costs import ServerCosts
from benchmarks.stamped_load import Sample
from benchmarks.topologies import Consumer, Topology

from parti.jetstream.api import JetStreamApi

_POLL_S = 0.1
_SETTLE_S = 3.0
"""A backlog that a load has left may take so long to go by itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much."""

    rates: tuple[int, ...] = (5_000, 10_000, 20_000, 50_000)
    warm_s: float = 2.0
    measure_s: float = 5.0
    idle_s: float = 2.0
    backlog: int = 100_000
    fill_limit_s: float = 15.0
    drain_limit_s: float = 12.0
    stall_rate: int = 10_000
    stall_s: float = 2.0
    before_stall_s: float = 3.0
    recovery_limit_s: float = 15.0
    rebalance_rate: int = 1_000
    rebalance_limit_s: float = 15.0
    create_limit_s: float = 60.0
    limit_s: float = 150.0
    """For all phases of a topology; what is not done by then is left out."""
    patience_s: float = 30.0
    """So long, for all phases of a topology together, for other processes to end what they do."""
    calm_s: float = 0.3
    """The server is calm after so long with little CPU time."""
    quiet_s: float = 3.0
    """So long without a backlog, and a stall is over."""


class Stage:
    """One topology on one server, with its readers and its load."""

    def __init__(
        self, topology: Topology, plan: Plan, api: JetStreamApi, costs: ServerCosts, readers: Remote, load: Remote
    ) -> None:
        self._topology = topology
        self._plan = plan
        self._api = api
        self._costs = costs
        self._readers = readers
        self._load = load

    # ── looking and waiting ─────────────────────────────────────────────────────────────────────────────────────────

    async def _until_come(self, number: int, limit_s: float) -> bool:
        """Wait until so many messages of this phase have come."""
        until_s = time.monotonic() + limit_s
        while await self._readers.call("count") < number:
            if time.monotonic() > until_s:
                return False
            self._costs.rss_mb()
            await asyncio.sleep(_POLL_S)
        return True

    async def _sent(self) -> int:
        return int((await self._load.call("count"))[0])

    async def _stored(self) -> int:
        return int((await self._load.call("count"))[1])

    async def _pull_all(self) -> None:
        await self._readers.call("pull", [_pulled(c) for c in self._topology.consumers.values()])

    async def _mirrored(self) -> None:
        """Wait until mirrors have what their streams have."""
        for mirror, origin in self._topology.mirrors.items():
            last = (await self._api.stream_info(origin)).last_seq
            async with asyncio.timeout(30):
                while (await self._api.stream_info(mirror)).last_seq < last:  # noqa: ASYNC110 - the server's count
                    await asyncio.sleep(0.02)

    async def _empty(self) -> None:
        """Leave no backlog: purge all streams. Pulls go on standing."""
        await self._mirrored()
        for name in self._topology.names:
            await self._api.call(f"STREAM.PURGE.{name}")
        await self._costs.calm(self._plan.calm_s)

    async def _settle(self, base: int) -> bool:
        """Let what was sent come, or else purge it; whether it came."""
        if await self._until_come(await self._sent() - base, _SETTLE_S):
            return True
        await self._empty()
        return False

    async def _arrivals(self, samples: list[Sample], base: int) -> Arrivals:
        at, age = array("q"), array("q")
        for values, data in zip((at, age), await self._readers.call("take"), strict=True):
            values.frombytes(data)
        return Arrivals(at, age, [(ns, sent - base, stored - base) for ns, sent, stored in samples])

    # ── the phases ────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self) -> dict[str, Any]:
        """Streams one by one; then the workers, all at a time, each its consumers one by one."""
        began_s = time.perf_counter()
        async with asyncio.timeout(self._plan.create_limit_s):
            for config in self._topology.streams:
                await self._api.call(f"STREAM.CREATE.{config['name']}", config)
            streams_s = time.perf_counter() - began_s
            await self._each(self._topology.consumers.values(), self._create)
        took_s = time.perf_counter() - began_s
        await self._costs.calm(self._plan.calm_s)
        bare_mb = self._costs.rss_mb()
        await self._pull_all()
        await self._costs.calm(self._plan.calm_s)
        before_s = self._costs.cpu_s()
        await asyncio.sleep(self._plan.idle_s)
        return {
            "streams": len(self._topology.streams),
            "consumers": len(self._topology.consumers),
            "create_s": round(took_s, 3),
            "create_streams_s": round(streams_s, 3),
            "rss_created_mb": bare_mb,
            "rss_idle_mb": self._costs.rss_mb(),
            "idle_cpu_percent": round(100 * (self._costs.cpu_s() - before_s) / self._plan.idle_s, 1),
        }

    async def hold(self, rate: int) -> dict[str, Any]:
        """A steady load for some seconds: is it kept up with, and how old are messages when they come?"""
        base = await self._sent()
        await self._readers.call("mark", base)
        await self._load.call("start", rate)
        await asyncio.sleep(self._plan.warm_s)
        began_ns, cpu_s, others_s = time.time_ns(), self._costs.cpu_s(), self._costs.others_s()
        await self._costs.watch(self._plan.measure_s)
        ended_ns, cpu_s, others_s = time.time_ns(), self._costs.cpu_s() - cpu_s, self._costs.others_s() - others_s
        samples = await self._load.call("stop")
        arrivals = await self._arrivals(samples, base)
        found = arrivals.steady(rate, began_ns, ended_ns)
        came = round(found["delivered_per_s"] * self._plan.measure_s)
        settled = await self._settle(base)
        return {
            "offered_per_s": rate,
            **found,
            "server_cpu_us_per_msg": round(cpu_s * 1e6 / came, 1) if came else None,
            "server_cores": round(cpu_s / self._plan.measure_s, 2),
            "others_cores": round(max(0.0, others_s) / self._plan.measure_s, 2),
            "settled_after": settled,
        }

    async def drain(self) -> dict[str, Any]:
        """A backlog that has gathered while nobody pulled: how fast does it come?"""
        await self._readers.call("drop")
        base = await self._sent()
        await self._readers.call("mark", base)
        await self._load.call("burst", self._plan.backlog, self._plan.fill_limit_s)
        backlog = await self._sent() - base
        await self._mirrored()
        await self._costs.calm(self._plan.calm_s)
        began_ns, cpu_s = time.time_ns(), self._costs.cpu_s()
        await self._pull_all()
        finished = await self._until_come(backlog, self._plan.drain_limit_s)
        cpu_s = self._costs.cpu_s() - cpu_s
        arrivals = await self._arrivals([], base)
        if not finished:
            await self._empty()
        came, seconds = arrivals.span(began_ns)
        return {
            "drained_msgs": came,
            "backlog_msgs": backlog,
            "drained_per_s": round(came / seconds) if seconds else 0,
            "finished": finished,
            "server_cpu_us_per_msg": round(cpu_s * 1e6 / came, 1) if came else None,
        }

    async def stall(self) -> dict[str, Any]:
        """Under a steady load nobody pulls for a while: until the backlog is gone and messages come young again."""
        plan, base = self._plan, await self._sent()
        await self._readers.call("mark", base)
        await self._load.call("start", plan.stall_rate)
        await self._costs.watch(plan.before_stall_s)
        stalled_ns = time.time_ns()
        await self._readers.call("drop")
        await asyncio.sleep(plan.stall_s)
        resumed_ns = time.time_ns()
        await self._pull_all()
        small, quiet_s = plan.stall_rate / 10, 0.0
        until_s = time.monotonic() + plan.recovery_limit_s
        while time.monotonic() < until_s and quiet_s < plan.quiet_s:
            await self._costs.watch(0.25)
            backlog = await self._stored() - base - await self._readers.call("count")
            quiet_s = quiet_s + 0.25 if backlog < small else 0.0
        ended_ns = time.time_ns()
        samples = await self._load.call("stop")
        arrivals = await self._arrivals(samples, base)
        await self._settle(base)
        return {
            "rate_per_s": plan.stall_rate,
            "stall_s": plan.stall_s,
            "limit_s": plan.recovery_limit_s,
            **arrivals.recovery(plan.stall_rate, stalled_ns, resumed_ns, ended_ns),
        }

    async def rebalance(self) -> dict[str, Any]:
        """Under a light load a worker leaves: until each of its partitions has brought a message to its next worker.

        Add, then remove: the others get the subjects and pull; the leaver stops pulling, its consumers are deleted;
        then a message is sent on each moved subject.
        """
        plan, change = self._plan, self._topology.without(0)
        moved = self._topology.of_worker(0)
        await self._empty()
        await self._load.call("start", plan.rebalance_rate)
        await asyncio.sleep(plan.warm_s)
        began_s = time.perf_counter()
        figures: dict[str, Any] = {"partitions": len(moved), "requests": change.requests}
        try:
            async with asyncio.timeout(plan.rebalance_limit_s):
                await self._each(change.create, self._create)
                await self._each(change.update, self._update)
                await self._readers.call("pull", [_pulled(c) for c in change.pull])
                await self._readers.call("leave", 0)
                await self._each(change.delete, self._delete)
        except TimeoutError:
            await self._load.call("stop")
            return {**figures, "changed_ms": None, "rebalance_ms": None}
        changed_s = time.perf_counter() - began_s
        await self._load.call("stop")
        base = await self._sent()
        await self._readers.call("mark", base)
        probed_ns = time.time_ns()
        await self._load.call("probe", moved)
        came = await self._until_come(len(moved), plan.rebalance_limit_s)
        _, probes_s = (await self._arrivals([], base)).span(probed_ns)
        return {
            **figures,
            "changed_ms": round(changed_s * 1e3, 1),
            "rebalance_ms": round((changed_s + probes_s) * 1e3, 1) if came else None,
        }

    # ── changes on the server ─────────────────────────────────────────────────────────────────────────────────────

    async def _create(self, consumer: Consumer) -> None:
        await self._api.put_consumer(consumer.stream, consumer.config(), action="create")

    async def _update(self, consumer: Consumer) -> None:
        await self._api.put_consumer(consumer.stream, consumer.config(), action="update")

    async def _delete(self, consumer: Consumer) -> None:
        await self._api.delete_consumer(consumer.stream, consumer.name)

    async def _each(self, consumers: Iterable[Consumer], change: Callable[[Consumer], Awaitable[None]]) -> None:
        """Change consumers as workers do: all workers at a time, each one by one."""
        by_worker: dict[int, list[Consumer]] = {}
        for consumer in consumers:
            by_worker.setdefault(consumer.worker, []).append(consumer)

        async def of_worker(mine: list[Consumer]) -> None:
            for consumer in mine:
                await change(consumer)

        await asyncio.gather(*map(of_worker, by_worker.values()))


def _pulled(consumer: Consumer) -> tuple[str, str, int]:
    return consumer.stream, consumer.name, consumer.worker
