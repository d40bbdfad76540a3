"""A fleet under observation: what it agreed on, what its handlers did, and a network that can be cut.

What the fleet agreed on is read from the server: the bucket republishes every write that took effect, with its
sequence and time (`History`). What handlers did is noted where they start and end (`Journal`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, Sent, eventually, only_suffixes_repeat
from tests.integration.processes import whole_lines
from tests.integration.proxy import Proxy

import parti
from parti.app.worker import Worker
from parti.core.fleet_view import FleetState
from parti.errors import PartiError
from parti.jetstream.kv import Bucket
from parti.model.fleet import Assignment, Claim, LeaderRecord, decode, key_of

TTL_S = 2.0
LATE_S = 1.5
"""What is allowed on top of a lease before its partitions have another owner."""
PARTITIONS = [f"p{n}" for n in range(8)]
FLEET: Mapping[str, Any] = {
    "fleet": True,
    "worker_id": None,
    "lease_ttl_s": TTL_S,
    "leader_ttl_s": TTL_S,
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.2,
    "min_rebalance_interval_s": 0.2,
    "progress_interval_s": 0.2,
    "pull_heartbeat_s": 0.5,
    "ping_interval_s": 1.0,
    "reconnect_wait_s": 0.1,
}


# ── what handlers did ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Call:
    """The start or the end of a handler; `at_s` is the wall clock's, like the server's."""

    what: str
    at_s: float
    partition: str
    seq: int
    fence: int
    worker: str
    pid: int


class Journal:
    """Starts and ends of handlers, in the order in which they happened."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._calls: list[Call] = []

    def note(self, what: str, message: parti.Message) -> None:
        self._calls.append(
            Call(what, time.time(), message.partition.id, message.seq, message.fence, message.worker_id, 0)
        )

    @property
    def calls(self) -> list[Call]:
        if self._path is None:
            return self._calls
        return [
            Call(what, float(at), partition, int(seq), int(fence), worker, int(pid))
            for what, at, partition, seq, fence, worker, pid in map(str.split, whole_lines(self._path))
        ]

    @property
    def starts(self) -> list[Call]:
        return [call for call in self.calls if call.what == "start"]

    @property
    def by_partition(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = defaultdict(list)
        for call in self.starts:
            found[call.partition].append(call)
        return dict(found)

    def has(self, sent: Sent) -> bool:
        """Whether every message has been started."""
        return {call.seq for call in self.starts} >= {seq for seqs in sent.values() for seq in seqs}

    # ── what must hold ────────────────────────────────────────────────────────────────────────────────────────

    def nothing_is_lost(self, sent: Sent) -> None:
        missing = {seq for seqs in sent.values() for seq in seqs} - {call.seq for call in self.starts}
        assert not missing, f"{len(missing)} messages were never handled"

    def order_holds(self) -> None:
        for partition, calls in self.by_partition.items():
            assert only_suffixes_repeat([call.seq for call in calls]), f"order broken in {partition}"

    def fences_never_go_back(self) -> None:
        for partition, calls in self.by_partition.items():
            fenced = [call for call in calls if call.fence]
            backwards = [(a, b) for a, b in itertools.pairwise(fenced) if b.fence < a.fence]
            assert not backwards, f"{len(backwards)} times in {partition}, first: {backwards[0]}"

    def all_are_fenced(self) -> None:
        unfenced = Counter(call.partition for call in self.starts if not call.fence)
        assert not unfenced, f"handlers were started without a fence: {unfenced}"

    def one_at_a_time(self) -> None:
        """No two handlers of a partition ran at once; not for tests that kill a worker."""
        running: dict[str, Call] = {}
        for call in self.calls:
            if call.what == "end":
                del running[call.partition]
            else:
                assert call.partition not in running, f"{call} began while {running[call.partition]} ran"
                running[call.partition] = call

    @property
    def repeats(self) -> list[Call]:
        """Starts of what had been started before."""
        seen: set[int] = set()
        found = []
        for call in self.starts:
            if call.seq in seen:
                found.append(call)
            seen.add(call.seq)
        return found

    def is_clean(self, sent: Sent) -> None:
        """Nothing lost, nothing repeated, order and fences kept."""
        self.nothing_is_lost(sent)
        assert not self.repeats, f"{len(self.repeats)} repeated, first: {self.repeats[0]}"
        self.order_holds()
        self.one_at_a_time()
        self.fences_never_go_back()


# ── what the fleet agreed on ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Revision:
    """A write that took effect; no value: the key was deleted or has expired."""

    seq: int
    at_s: float
    key: str
    value: bytes


class History:
    """Every write to the bucket in the order of the server, gap-free."""

    def __init__(self, revisions: list[Revision]) -> None:
        self._revisions = revisions

    @property
    def revisions(self) -> list[Revision]:
        found = sorted(self._revisions, key=lambda revision: revision.seq)
        seqs = [revision.seq for revision in found]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True, "the recording has holes"
        return found

    def of(self, kind: str) -> list[Revision]:
        return [revision for revision in self.revisions if revision.key.startswith(f"{kind}.")]

    def is_fenced(self) -> None:
        """One leader at a time, terms that only grow, and claims and assignments of the present leader alone."""
        term, holder = 0, ""
        for revision in self.revisions:
            if revision.key == "leader.rebalancer":
                holder = ""
                if revision.value:
                    record = decode(revision.value, LeaderRecord)
                    assert record.term >= term, f"term {record.term} after {term}"
                    term, holder = record.term, record.holder
            elif revision.key.startswith(("claims.", "assignment.")) and revision.value:
                kind = Claim if revision.key.startswith("claims.") else Assignment
                record_term = decode(revision.value, kind).term  # type: ignore[attr-defined]
                assert holder, f"{revision.key} was written while nobody led"
                assert record_term == term, f"{revision.key} of term {record_term} was written in term {term}"

    def terms(self) -> list[int]:
        """The terms of the rebalancer, each once, in order."""
        written = [decode(r.value, LeaderRecord).term for r in self.of("leader") if r.value and "rebal" in r.key]
        return list(dict.fromkeys(written))

    def ended(self, worker: str) -> list[float]:
        """When the server let the id of a worker expire."""
        return [r.at_s for r in self.of("ids") if r.key == f"ids.{worker}" and not r.value]


def _time_of(stamp: str) -> float:
    return datetime.fromisoformat(stamp[:26].rstrip("Z") + "+00:00").timestamp()


@contextlib.asynccontextmanager
async def recorded(kit: Kit) -> AsyncIterator[History]:
    """Make the bucket, and record what is written to it."""
    name, subject = f"b{kit.root}", f"h{kit.root}"
    bucket = await Bucket.open(kit.api, name, replicas=1)
    config = await kit.api.stream_config(bucket.stream)
    republish = {"src": f"$KV.{name}.>", "dest": f"{subject}.>"}
    revisions: list[Revision] = []

    async def take(message: Msg) -> None:
        headers = message.headers or {}
        key = headers["Nats-Subject"].removeprefix(f"$KV.{name}.")
        value = b"" if "KV-Operation" in headers else message.data
        revisions.append(Revision(int(headers["Nats-Sequence"]), _time_of(headers["Nats-Time-Stamp"]), key, value))

    client = await nats.connect(kit.url)
    try:
        await client.subscribe(f"{subject}.>", cb=take)
        await client.flush()
        await kit.api.call(f"STREAM.UPDATE.{bucket.stream}", {**config, "republish": republish})
        yield History(revisions)
    finally:
        await client.close()


# ── the network ───────────────────────────────────────────────────────────────────────────────────────────────────


class Network(Proxy):
    """A proxy that can also be slow, be silent both ways without closing anything, and lose answers by content."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.delay_s = 0.0
        self.loses_answer: Callable[[bytes], bool] = lambda body: False
        self._flows = asyncio.Event()
        self._flows.set()

    def block(self, blocked: bool = True) -> None:
        """Let nothing through, in either direction, until `block(False)`."""
        if blocked:
            self._flows.clear()
        else:
            self._flows.set()

    async def _upwards(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._flows.wait()
            sink.write(data)

    async def _copy_messages(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        later = asyncio.get_running_loop().call_later
        while line := await source.readline():
            size = int(line.split()[-1]) + 2 if line[:4] in {b"MSG ", b"HMSG"} else 0
            body = await source.readexactly(size)
            await self._flows.wait()
            if b"_INBOX" in line and self.loses_answer(body):
                self.lost += 1
            else:
                later(self.delay_s, sink.write, line + body)


@contextlib.asynccontextmanager
async def network_to(kit: Kit) -> AsyncIterator[Network]:
    network = Network(int(kit.url.rpartition(":")[2]))
    await network.start()
    try:
        yield network
    finally:
        network.block(False)
        await network.stop()


# ── fleets ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Traffic:
    """Publishes to all partitions in turn for the length of a `with` block."""

    def __init__(self, kit: Kit, rate: float = 200.0) -> None:
        self.sent: Sent = {p: [] for p in PARTITIONS}
        self._kit = kit
        self._rate = rate
        self._task: asyncio.Task[None] | None = None
        self._on_their_way: set[asyncio.Future[int]] = set()

    async def __aenter__(self) -> Traffic:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        assert self._task
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        # What is being stored right now is handled too, so it must be known.
        await asyncio.gather(*self._on_their_way, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for partition in PARTITIONS:
                publishing = asyncio.ensure_future(self._kit.api.publish(self._kit.subject(partition), b"x"))
                self._on_their_way.add(publishing)
                publishing.add_done_callback(self._on_their_way.discard)
                publishing.add_done_callback(lambda done, p=partition: self._note(p, done))  # type: ignore[misc]
                await asyncio.sleep(1 / self._rate)

    def _note(self, partition: str, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.sent[partition].append(done.result())

    async def goes_on(self, messages: int = 40) -> None:
        """Wait until so many more have been published."""
        goal = sum(map(len, self.sent.values())) + messages
        await eventually(lambda: sum(map(len, self.sent.values())) >= goal)


def fleet_app(
    kit: Kit, journal: Journal, *, plain: bool = False, takes_s: float = 0.002, **settings: Any
) -> parti.App:
    """An app that notes what it handles, for workers inside this process."""

    async def handle(message: parti.Message) -> None:
        journal.note("start", message)
        await asyncio.sleep(takes_s)
        journal.note("end", message)

    def handle_plainly(message: parti.Message) -> None:
        journal.note("start", message)
        time.sleep(takes_s)
        journal.note("end", message)

    return kit.app(handle_plainly if plain else handle, PARTITIONS, **{**FLEET, **settings})


class Fleet:
    """Workers inside this process; all that still run are stopped with the block."""

    def __init__(self, kit: Kit, journal: Journal) -> None:
        self.kit = kit
        self.journal = journal
        self.workers: list[Worker] = []

    async def join(self, **settings: Any) -> Worker:
        worker = fleet_app(self.kit, self.journal, **settings).worker()
        await worker.start()
        self.workers.append(worker)
        return worker

    async def leave(self, worker: Worker) -> bool:
        self.workers.remove(worker)
        return await worker.stop()

    @property
    def leader(self) -> Worker:
        (leader,) = [w for w in self.workers if w.manager and w.manager.leads]
        return leader

    @property
    def others(self) -> list[Worker]:
        leader = self.leader
        return [worker for worker in self.workers if worker is not leader]

    def shared(self) -> bool:
        """Whether each partition is owned once, evenly."""
        owned = [p.id for worker in self.workers for p in worker.partitions]
        sizes = [len(worker.partitions) for worker in self.workers]
        return sorted(owned) == sorted(PARTITIONS) and max(sizes) - min(sizes) <= 1

    async def settles(self, timeout_s: float = 10.0) -> None:
        await eventually(lambda: self.shared() and all(w.state is FleetState.STABLE for w in self.workers), timeout_s)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))


@contextlib.asynccontextmanager
async def running(kit: Kit, count: int, **settings: Any) -> AsyncIterator[Fleet]:
    """So many workers that have shared the partitions."""
    async with Fleet(kit, Journal()) as fleet:
        for _ in range(count):
            await fleet.join(**settings)
        await fleet.settles()
        yield fleet


async def claims_of(kit: Kit) -> dict[str, Claim]:
    bucket = Bucket(kit.api, f"b{kit.root}")
    entries = await asyncio.gather(*(bucket.get(key_of("claims", partition)) for partition in PARTITIONS))
    return {p: decode(e.value, Claim) for p, e in zip(PARTITIONS, entries, strict=True) if e and e.value}


def owners(claims: Mapping[str, Claim]) -> dict[str, str]:
    return {partition: claim.owner for partition, claim in claims.items()}


def newest_fence(claims: Mapping[str, Claim]) -> int:
    return max(claim.fence_token for claim in claims.values())


async def owned_again(kit: Kit, above: int) -> dict[str, Claim]:
    """Wait until every partition has an owner with a larger fence than this."""
    claims: dict[str, Claim] = {}

    async def all_owned() -> bool:
        try:
            claims.update(await claims_of(kit))
        except PartiError:
            return False
        return len(claims) == len(PARTITIONS) and all(
            claim.state == "owned" and claim.fence_token > above for claim in claims.values()
        )

    await eventually(all_owned)
    return claims
