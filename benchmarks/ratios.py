"""Short runs of the benchmarks whose ratios must not get worse; more is better for each of them.

Every group has a server of its own, interleaves what it compares, and gives a ratio for each round. What a ratio
guards:

- `worker / nats-py fetch`, `worker / bare pulls`: the worker's own path, from the socket to the handler and back;
- `direct gets / leader gets`: reading what a partition has gathered;
- `no / single acks (mirror)`: what a hot mirror without acknowledgements gains over a write for each message;
- `mirror / stream (80 of 2000)`: what a hot mirror gains where the server has to pick 80 of 2000 subjects.

What joined writes of acknowledgements gain over single ones is not among them: that depends on what a system call
costs (2.1 on one machine, 1.3 on another of the same size), and `worker / bare pulls` sees what becomes of parti's
own. `make bench-acks` measures it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats
from benchmarks import backfill, bench_worker
from benchmarks.drains import FILTERS, STREAM, Acks, Drained, drain, drain_mirror, filled

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire

SUBJECTS = 2_000
BACKFILL_SUBJECTS, BACKFILL_PARTITIONS, BACKFILL_EACH = 20, 8, 500
MAX_ACK_PENDING = 2_000

Found = dict[str, list[float]]
"""Ratios by name, one for each round."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    messages: int
    rounds: int
    consumers: int
    """That drain a mirror one after the other: a single one would be done before the clock has moved."""


async def worker(size: Size) -> Found:
    """The worker against nats-py and against bare pulls (contenders c, a and b)."""
    found: Found = {"worker / nats-py fetch": [], "worker / bare pulls": []}
    async with Server() as server:
        client = await nats.connect(server.url)
        await bench_worker.fill(client, size.messages, SUBJECTS)
        bench = bench_worker.Bench(server.url, size.messages, MAX_ACK_PENDING, MAX_ACK_PENDING * 2 // 5)
        for number in range(size.rounds):
            rates = {
                key: await bench_worker.CONTENDERS[key][1](bench, f"check-{key}-{number}")
                for key in turned("abc", number)
            }
            found["worker / nats-py fetch"].append(rates["c"] / rates["a"])
            found["worker / bare pulls"].append(rates["c"] / rates["b"])
        await client.close()
    return found


async def backlog(size: Size) -> Found:
    """Batched direct gets against the leader's, one by one."""
    ratios: list[float] = []
    each = min(BACKFILL_EACH, size.messages // BACKFILL_SUBJECTS)
    count = each * BACKFILL_SUBJECTS
    readers = {"direct": backfill.read_directly(256), "leader": backfill.read_by_leader}
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name="check")
        api, wire = JetStreamApi(connection, timeout_s=30.0), Wire(connection.client)
        await backfill.fill(api, wire, connection, storage="file", subjects=BACKFILL_SUBJECTS, count=count)
        wanted = tuple(f"b.{number}" for number in backfill.spread_out(BACKFILL_PARTITIONS, BACKFILL_SUBJECTS))
        cell = backfill.Cell(api, wire, connection, await api.stream_info(backfill.STREAM), wanted, 1, each)
        for number in range(size.rounds):
            seconds = {name: (await readers[name](cell)).total_s for name in turned(list(readers), number)}
            ratios.append(seconds["leader"] / seconds["direct"])
        await connection.close()
    return {"direct gets / leader gets": ratios}


async def drains(size: Size) -> Found:
    """A mirror without acknowledgements, and filters on a mirror against those on its stream."""
    silent, mirror = "no / single acks (mirror)", "mirror / stream (80 of 2000)"
    found: Found = {silent: [], mirror: []}
    async with filled(size.messages, SUBJECTS) as source:
        steps: dict[str, Callable[[str], Awaitable[Drained]]] = {
            "mirror-single": lambda name: drain_mirror(source, Acks.SINGLE, size.consumers, name),
            "mirror-none": lambda name: drain_mirror(source, Acks.NONE, size.consumers, name),
            # Both with acknowledgements, so that nothing but the storage differs.
            "mirror-joined": lambda name: drain_mirror(source, Acks.JOINED, size.consumers, name),
            "stream-filters": lambda name: drain(source, STREAM, source.filters(FILTERS, 0), Acks.JOINED, name),
        }
        for number in range(size.rounds):
            rates = {key: (await steps[key](f"{key}-{number}")).msg_per_s for key in turned(list(steps), number)}
            found[silent].append(rates["mirror-none"] / rates["mirror-single"])
            found[mirror].append(rates["mirror-joined"] / rates["stream-filters"])
    return found


def turned(names: str | list[str], number: int) -> list[str]:
    """The names in turn, another one first in each round: whoever comes first pays for a cold start."""
    at = number % len(names)
    return [*names[at:], *names[:at]]


GROUPS: dict[str, Callable[[Size], Awaitable[Found]]] = {"worker": worker, "backlog": backlog, "drains": drains}
