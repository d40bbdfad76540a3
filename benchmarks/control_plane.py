"""What single operations of the control plane cost: reads, writes, batches, discovery, decisions.

Everything is measured on a bucket of the size of a fleet of 100 workers and 2,000 partitions, with records such as
the fleet writes them, through parti's own `Bucket`. Used by `benchmarks.coordination`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from parti.coordination.control_plane import ControlPlane
from parti.coordination.records import KEYS, Records
from parti.core.fleet_view import FleetView, MemberView, Policy
from parti.core.planner import Planner
from parti.jetstream.kv import Bucket, Write
from parti.model.fleet import Assignment, Claim, Grant, HealthRecord, LeaderRecord, MemberRecord, encode, key_of
from parti.strategies import strategy_named

WORKERS, PARTITIONS = 100, 2_000
_IN_FLIGHT = 500
_BATCH = 800
"""As the rebalancer's batches."""
_CREATED = "2026-01-01T00:00:00.000000000Z"


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one operation, in milliseconds."""

    what: str
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, what: str, seconds: Sequence[float]) -> Timing:
        """Sum up some durations."""
        values = sorted(1000 * s for s in seconds)
        p99 = values[min(len(values) - 1, round(0.99 * (len(values) - 1)))]
        return cls(what, len(values), *(round(ms, 2) for ms in (statistics.median(values), p99, values[-1])))


async def timed(what: str, count: int, operation: Callable[[int], Awaitable[object]]) -> Timing:
    """Do an operation again and again, one at a time."""
    seconds = []
    for number in range(count):
        began_s = time.perf_counter()
        await operation(number)
        seconds.append(time.perf_counter() - began_s)
    return Timing.of(what, seconds)


# ── a bucket like a fleet's ───────────────────────────────────────────────────────────────────────────────────────


def claim_of(number: int, fence: int = 1) -> Claim:
    """A claim as the rebalancer writes it."""
    return Claim(
        owner=f"worker-{number % WORKERS}",
        incarnation=1_700_000_000_000_000,
        fence_token=1_700_000_000_000_000 + fence,
        claimed_at=datetime.now(UTC),
        ttl_seconds=5.0,
        position=1_000_000 + number,
        stream_created=_CREATED,
        term=1_700_000_000_000_000,
        reason="balance (worker-17 has more)",
    )


class Ledger:
    """The bucket, and the revision of each of its keys."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.revisions: dict[str, int] = {}

    def write_of(self, key: str, value: bytes, ttl_s: float | None = None) -> Write:
        """A compare-and-set of a key."""
        return Write(key, value, self.revisions.get(key, 0), ttl_s)

    async def write(self, writes: Sequence[Write]) -> None:
        """All or nothing."""
        revisions = await self.bucket.write(writes)
        self.revisions.update(zip((write.key for write in writes), revisions, strict=True))

    async def put(self, write: Write) -> None:
        """One compare-and-set by itself."""
        self.revisions[write.key] = await self.bucket.put(write.key, write.value, revision=write.revision)

    def office(self) -> Write:
        """The renewal of the rebalancer's lease."""
        now = datetime.now(UTC)
        record = LeaderRecord(holder="worker-0", token="0" * 32, term=1, state="stable", since=now, ttl_seconds=60.0)
        return self.write_of(key_of("leader", "rebalancer"), encode(record), 60.0)

    def claims(self, count: int, fence: int) -> list[Write]:
        """So many claims, changed."""
        return [self.write_of(key_of("claims", f"p{n}"), encode(claim_of(n, fence))) for n in range(count)]

    async def fill(self) -> None:
        """Write the records of a whole fleet."""
        now = datetime.now(UTC)
        share = PARTITIONS // WORKERS
        for number in range(WORKERS):
            worker, mine = f"worker-{number}", range(number, PARTITIONS, WORKERS)
            grants = {f"p{n}": Grant(1_700_000_000_000_000 + n, 1_000_000 + n) for n in mine}
            member = MemberRecord(token="0" * 32, incarnation=number + 1, started_at=now, ttl_seconds=5.0)
            health = HealthRecord(incarnation=number + 1, applied=3, state="stable", subjects=share, at=now)
            assignment = Assignment(version=3, term=1, incarnation=number + 1, partitions=grants)
            records = {"ids": member, "health": health, "assignment": assignment}
            await self.write([self.write_of(key_of(kind, worker), encode(r)) for kind, r in records.items()])
        await write_batched(self, 1)


async def write_batched(ledger: Ledger, fence: int) -> None:
    """Change all claims by atomic batches, one after the other, each with the renewal of a lease."""
    writes = ledger.claims(PARTITIONS, fence)
    for begin in range(0, len(writes), _BATCH):
        await ledger.write([ledger.office(), *writes[begin : begin + _BATCH]])


async def write_pipelined(ledger: Ledger, fence: int) -> None:
    """Change all claims by single writes, many of them under way at a time."""
    writes = ledger.claims(PARTITIONS, fence)
    for begin in range(0, len(writes), _IN_FLIGHT):
        await asyncio.gather(*map(ledger.put, writes[begin : begin + _IN_FLIGHT]))


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def time_operations(ledger: Ledger, count: int) -> list[Timing]:
    """Reads, writes and batches, one at a time."""
    bucket, claim = ledger.bucket, encode(claim_of(0))
    now = datetime.now(UTC)
    member = encode(MemberRecord(token="0" * 32, incarnation=1, host="h" * 30, started_at=now, ttl_seconds=5.0))
    health = encode(HealthRecord(incarnation=1, applied=3, state="stable", subjects=80, finished=1_000_000, at=now))

    async def beat(_number: int) -> None:
        await ledger.write([ledger.write_of("ids.x", member, 60.0)])
        await ledger.put(ledger.write_of("health.x", health))

    async def batch(size: int, number: int) -> None:
        await ledger.write([ledger.office(), *ledger.claims(size, number)])

    return [
        await timed("get a key from the leader", count, lambda n: bucket.get(key_of("claims", f"p{n % PARTITIONS}"))),
        await timed("compare-and-set of a key", count, lambda n: ledger.put(ledger.write_of("claims.p0", claim))),
        await timed("heartbeat: lease, then health", count, beat),
        await timed(
            "the same two in a batch",
            max(5, count // 5),
            lambda n: ledger.write([ledger.write_of("ids.x", member, 60.0), ledger.write_of("health.x", health)]),
        ),
        await timed("a batch of 100 claims", max(5, count // 20), lambda n: batch(100, n)),
        await timed("a batch of 800 claims", max(5, count // 100), lambda n: batch(800, n)),
    ]


async def compare_writes(ledger: Ledger, rounds: int) -> tuple[Timing, Timing]:
    """All claims by atomic batches against all claims by pipelined single writes, in turn."""
    batched: list[float] = []
    pipelined: list[float] = []
    for number in range(rounds):
        for durations, write in ((batched, write_batched), (pipelined, write_pipelined)):
            began_s = time.perf_counter()
            await write(ledger, number)
            durations.append(time.perf_counter() - began_s)
    return (
        Timing.of(f"{PARTITIONS:,} claims in atomic batches of {_BATCH}", batched),
        Timing.of(f"{PARTITIONS:,} claims by pipelined compare-and-set", pipelined),
    )


async def time_discovery(plane: ControlPlane, count: int) -> Timing:
    """Read and decode every record of the fleet."""

    async def discover(_number: int) -> None:
        records = Records.of(await plane.read(*KEYS))
        assert len(records.claims) == PARTITIONS
        assert not records.unreadable

    return await timed(f"read all records: {WORKERS} workers, {PARTITIONS:,} claims", count, discover)


def time_decisions(strategy: str, rounds: int) -> list[Timing]:
    """One step of the planner in typical situations."""
    members = {f"worker-{n}": MemberView(1_700_000_000_000_000, capacity=500) for n in range(WORKERS)}
    partitions = tuple(f"p{n}" for n in range(PARTITIONS))
    even = {p: claim_of(n) for n, p in enumerate(partitions)}
    health = {w: HealthRecord(incarnation=1_700_000_000_000_000, applied=1, at=datetime.now(UTC)) for w in members}
    fewer = {w: m for w, m in members.items() if w != "worker-3"}
    more = {**members, "worker-new": MemberView(1_700_000_000_000_000)}
    policy = Policy()
    views = {
        "at rest": [(members, 100.0)],
        "a worker crashed": [(members, 100.0), (fewer, 200.0)],
        "a worker joined, window open": [(members, 100.0), (more, 200.0)],
        "a worker joined, window over": [(members, 100.0), (more, 200.0), (more, 210.0)],
    }
    timings = []
    for situation, steps in views.items():
        seconds = []
        for _ in range(rounds):
            planner = Planner(strategy_named(strategy), policy, elected_s=0.0)
            for seen, now_s in steps:
                view = FleetView(now_s=now_s, members=seen, partitions=partitions, claims=even, health=health)
                began_s = time.thread_time()
                planner.step(view)
                taken_s = time.thread_time() - began_s
            seconds.append(taken_s)
        timings.append(Timing.of(f"decision ({strategy}, {WORKERS} x {PARTITIONS:,}): {situation}", seconds))
    return timings
