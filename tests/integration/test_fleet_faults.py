"""A fleet under faults: nothing is lost, each partition stays in order, fences never go back, and what must not
be repeated is not.

What the fleet agreed on is read from the server: the bucket republishes every write that took effect, with its
sequence and time (`History`). What handlers did is noted where they start and end (`Journal`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
import pytest
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, Sent, eventually, only_suffixes_repeat, open_kit
from tests.integration.processes import WorkerProcess
from tests.integration.proxy import LOOPBACK, Proxy

import parti
from parti.app.worker import Worker
from parti.core.fleet_view import FleetState
from parti.embedded import Server
from parti.errors import ConfigError, PartiError, WrongRevision
from parti.jetstream.kv import Bucket
from parti.model.fleet import Assignment, Claim, LeaderRecord, MemberRecord, decode, encode, key_of

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
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [
            Call(what, float(at), partition, int(seq), int(fence), worker, int(pid))
            for what, at, partition, seq, fence, worker, pid in map(str.split, lines)
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
        self._port = port
        self._flows = asyncio.Event()
        self._flows.set()

    def block(self, blocked: bool = True) -> None:
        """Let nothing through, in either direction, until `block(False)`."""
        if blocked:
            self._flows.clear()
        else:
            self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection(LOOPBACK, self._port)
        both = {writer, up_writer}
        self._open |= both
        pumps = [
            asyncio.create_task(self._upwards(reader, up_writer)),
            asyncio.create_task(self._copy_messages(up_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in both:
                end.transport.abort()
            self._open -= both

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

    async def __aenter__(self) -> Traffic:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        assert self._task
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for partition in PARTITIONS:
                publishing = asyncio.ensure_future(self._kit.api.publish(self._kit.subject(partition), b"x"))
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


# ── joining and leaving under load ────────────────────────────────────────────────────────────────────────────────


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


# ── the control bucket ────────────────────────────────────────────────────────────────────────────────────────────


async def reset(kit: Kit, fleet: Fleet, *, anew: bool) -> None:
    """Delete the bucket; `anew`: and make it again, and let everybody's next heartbeat come at once."""
    bucket = Bucket(kit.api, f"b{kit.root}")
    await kit.api.call(f"STREAM.DELETE.{bucket.stream}")
    if anew:
        await Bucket.open(kit.api, bucket.name, replicas=1)
        for worker in fleet.workers:
            assert worker.manager
            worker.manager._beat.set()


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


def newest_fence(claims: Mapping[str, Claim]) -> int:
    return max(claim.fence_token for claim in claims.values())


async def test_a_fleet_survives_a_control_bucket_made_anew(kit: Kit) -> None:
    """Nobody crashed, so every position is known to somebody: nothing is lost, and nothing need be repeated."""
    with structlog.testing.capture_logs() as lines:
        # The window is to the lease as by default.
        async with Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
            for _ in range(3):
                await fleet.join(cold_start_window_s=0.2 * TTL_S)
                # One by one they share in another way than all at once, as after the reset.
                await fleet.settles()
            before = await claims_of(kit)
            reset_s = time.time()
            await reset(kit, fleet, anew=True)
            after = await owned_again(kit, newest_fence(before))
            recovered_s = time.time() - reset_s
            await fleet.settles()
            await traffic.goes_on()
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
    journal = fleet.journal
    print(
        f"bucket made anew: every partition owned again after {recovered_s:.2f} s, "
        f"{sum(after[p].owner != before[p].owner for p in PARTITIONS)} moved, "
        f"{len(journal.repeats)} of {len(journal.starts)} repeated"
    )
    told = [str(line["reason"]) for line in lines if line["event"] == "stopped handling"]
    assert len(told) >= 3
    assert any("control plane was reset" in reason for reason in told), told
    journal.is_clean(traffic.sent)


async def test_nothing_of_a_deleted_bucket_is_given_out_before_every_lease_has_ended(kit: Kit) -> None:
    """Who cannot be reached at that moment acts under its lease of the old bucket, and rightly so."""
    settings = {"cold_start_window_s": 0.2 * TTL_S}
    async with (
        network_to(kit) as network,
        running(kit, 1, **settings) as fleet,
        Traffic(kit, 300) as traffic,
    ):
        # Slow enough to have work waiting that it does not need a connection for.
        far = await fleet.join(nats=network.url, takes_s=0.1, ping_interval_s=30.0, **settings)
        await fleet.settles()
        await traffic.goes_on(200)
        before = await claims_of(kit)
        network.block()
        await reset(kit, fleet, anew=False)
        await owned_again(kit, newest_fence(before))
        await eventually(lambda: max(c.fence for c in fleet.journal.starts) > newest_fence(before))
        await asyncio.sleep(0.3)
        network.block(False)
        await eventually(lambda: far.state is FleetState.STABLE)
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.fences_never_go_back()


# ── outages ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def own_kit(nats_server_factory: Callable[..., Server], stream_name: str) -> AsyncIterator[tuple[Kit, Server]]:
    """A kit on a server that the test may kill; the stream is kept on disk."""
    server = nats_server_factory()
    kit = await open_kit(server, stream_name)
    await kit.create_stream(storage="file")
    try:
        yield kit, server
    finally:
        await kit.connection.close()


@pytest.mark.parametrize(
    "late",
    [
        False,
        True,
    ],
    ids=["together", "one returns late"],
)
async def test_a_crash_of_the_server_longer_than_the_leases_moves_and_repeats_nothing(
    own_kit: tuple[Kit, Server], late: bool
) -> None:
    kit, server = own_kit
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
        for n in range(3):
            await fleet.join(nats=network.url if n == 2 else kit.url)
        await fleet.settles()
        await traffic.goes_on(100)
        before = await claims_of(kit)
        await server.kill()
        if late:
            network.refuse()
        await asyncio.sleep(TTL_S + 0.5)
        stopped = len(fleet.journal.starts)
        await server.restart()
        back_s = time.time()
        if late:
            # Well within the time that a new rebalancer gives everybody to come back.
            await eventually(lambda: any(c.at_s > back_s for c in fleet.journal.starts[-5:]))
            await asyncio.sleep(0.3)
            network.refuse(False)
        await eventually(lambda: len(fleet.journal.starts) > stopped)
        resumed_s = fleet.journal.starts[stopped].at_s - back_s
        await fleet.settles()
        after = await claims_of(kit)
        await traffic.goes_on()
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    print(f"first handler {resumed_s:.2f} s after the server was back, {len(fleet.journal.repeats)} repeated")
    fleet.journal.is_clean(traffic.sent)
    assert owners(after) == owners(before), "nobody was gone: nothing had to move"


async def test_workers_that_are_cut_off_stop_before_their_leases_end(kit: Kit) -> None:
    """One by a network that swallows everything, one by connections that are refused; one with threads."""
    settings = {"takes_s": 0.1, "ping_interval_s": 0.7}
    async with (
        recorded(kit) as history,
        network_to(kit) as swallowing,
        network_to(kit) as refusing,
        running(kit, 1, **settings) as fleet,
    ):
        cut_off = [
            await fleet.join(nats=swallowing.url, **settings),
            await fleet.join(nats=refusing.url, plain=True, **settings),
        ]
        await fleet.settles()
        theirs = {worker.worker_id: [p.id for p in worker.partitions] for worker in cut_off}
        # Work for longer than their leases: they could go on without a connection.
        sent = await kit.publish([p for partitions in theirs.values() for p in partitions], 30)
        await eventually(lambda: len(fleet.journal.starts) >= len(sent))
        cut_s = time.time()
        swallowing.block()
        refusing.refuse()
        await eventually(lambda: all(history.ended(worker) for worker in theirs), TTL_S + LATE_S)
        ended_s = {worker: history.ended(worker)[0] for worker in theirs}
        await eventually(lambda: len(fleet.workers[0].partitions) == len(PARTITIONS), LATE_S + 1)
        swallowing.block(False)
        refusing.refuse(False)
        await fleet.settles()
        await eventually(lambda: fleet.journal.has(sent))
    for worker, partitions in theirs.items():
        for partition in partitions:
            calls = fleet.journal.by_partition[partition]
            last_s = max(c.at_s for c in calls if c.fence == calls[0].fence) - cut_s
            others_s = min(c.at_s for c in calls if c.fence > calls[0].fence) - cut_s
            after_s = ended_s[worker] - cut_s
            assert last_s < after_s < others_s
        print(
            f"cut off: last handler {last_s:.2f} s later, lease ended at {after_s:.2f} s, others at {others_s:.2f} s"
        )
    fleet.journal.nothing_is_lost(sent)
    fleet.journal.order_holds()
    fleet.journal.fences_never_go_back()
    history.is_fenced()


async def test_who_comes_back_does_not_repeat_what_another_has_finished_meanwhile(kit: Kit) -> None:
    """It still has messages waiting of partitions that another owned in the meantime and gave back in good order."""
    settings = {"takes_s": 0.05, "ping_interval_s": 0.7}
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet:
        far = await fleet.join(nats=network.url, **settings)
        await fleet.settles()
        sent = await kit.publish(PARTITIONS, 60)
        await eventually(lambda: len(fleet.journal.starts) >= 40)
        network.refuse()
        other = await fleet.join(**{**settings, "takes_s": 0.001})
        await eventually(lambda: len(other.partitions) == len(PARTITIONS), TTL_S + LATE_S + 1)
        await eventually(lambda: fleet.journal.has(sent))
        finished = len(fleet.journal.starts)
        assert await fleet.leave(other)
        before = await claims_of(kit)
        network.refuse(False)
        await owned_again(kit, newest_fence(before))
        await fleet.settles()
        more = await kit.publish(PARTITIONS)
        await eventually(lambda: fleet.journal.has(more))
    assert fleet.workers == [far]
    late = [call for call in fleet.journal.repeats if call not in fleet.journal.starts[:finished]]
    assert not late, f"{len(late)} repeated after it was back, first: {late[0]}"


async def test_who_gets_its_id_back_from_another_believes_the_record(kit: Kit) -> None:
    with structlog.testing.capture_logs() as lines:
        async with network_to(kit) as network, Fleet(kit, Journal()) as fleet:
            await fleet.join(nats=network.url, worker_id="press-4")
            await fleet.settles()
            network.refuse()
            other = await fleet.join(worker_id="press-4")
            sent = await kit.publish(PARTITIONS, 5)
            await eventually(lambda: fleet.journal.has(sent))
            assert await fleet.leave(other)
            before = await claims_of(kit)
            network.refuse(False)
            await owned_again(kit, newest_fence(before))
            await fleet.settles()
    fleet.journal.is_clean(sent)
    assert not [line["event"] for line in lines if "ahead of the stream" in line["event"]]


# ── answers that get lost, records that cannot be read ────────────────────────────────────────────────────────────


async def test_moves_that_were_begun_without_an_answer_are_brought_to_their_end(kit: Kit) -> None:
    """The batch took effect: the owner lets go. A rebalancer that believes the old state leaves it at that."""
    armed = False

    def is_of_moves(body: bytes) -> bool:
        nonlocal armed
        # Heartbeats are batches of two.
        lost = armed and b'"batch"' in body and int(json.loads(body.strip())["count"]) > 2
        armed = armed and not lost
        return lost

    # Between two rebalances nothing is looked at again.
    settings = {"min_rebalance_interval_s": 8.0, "scale_window_s": 0.5}
    async with network_to(kit) as network, Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
        network.loses_answer = is_of_moves
        leader = await fleet.join(nats=network.url, ping_interval_s=30.0, **settings)
        await fleet.settles()
        await fleet.join(**settings)
        await eventually(lambda: leader.state is FleetState.SCALING)
        armed = True
        await eventually(lambda: network.lost == 1)
        lost_s = time.time()
        try:
            await fleet.settles(6.0)
        except AssertionError:
            stuck = {p: claim.next for p, claim in (await claims_of(kit)).items() if claim.state == "moving"}
            raise AssertionError(f"the leader says {leader.state}, and nobody handles {sorted(stuck)}") from None
        print(f"moves begun without an answer were complete after {time.time() - lost_s:.2f} s")
        await traffic.stop()
        await eventually(lambda: fleet.journal.has(traffic.sent))
    fleet.journal.is_clean(traffic.sent)


@pytest.mark.parametrize(
    "keys",
    [
        ("claims.p0", "health.worker-0"),
        ("leader.rebalancer",),
        ("assignment.worker-0",),
    ],
    ids=["claim and health", "leader", "assignment"],
)
async def test_an_unreadable_record_does_not_stop_a_fleet(kit: Kit, keys: Sequence[str]) -> None:
    """Written by a newer version, by mistake, or by a person."""
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    async with running(kit, 1) as fleet:
        for key in keys:
            await spoil(bucket, key)
        await fleet.join()
        await fleet.settles(4.0)
        sent = await kit.publish(PARTITIONS)
        await eventually(lambda: fleet.journal.has(sent))


async def spoil(bucket: Bucket, key: str) -> None:
    """Overwrite a key, however often others write it."""
    while True:
        found = await bucket.get(key)
        assert found
        with contextlib.suppress(WrongRevision):
            await bucket.put(key, b"not json", revision=found.revision)
            return


async def test_a_fleet_of_250_workers_gets_2000_partitions(kit: Kit) -> None:
    """As many claims and assignments as do not fit into one batch of the server."""
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    template = MemberRecord(token="t", incarnation=1, started_at=datetime.now().astimezone(), ttl_seconds=60)
    await asyncio.gather(
        *(bucket.put(f"ids.worker-{n}", encode(template), revision=0, ttl_s=60) for n in range(1, 250))
    )
    app = kit.app(lambda message: None, [f"q{n}" for n in range(2000)], **FLEET)
    worker = app.worker()
    with structlog.testing.capture_logs() as lines:
        await worker.start()
        try:
            await eventually(lambda: bool(worker.partitions or [x for x in lines if "failed" in x["event"]]), 15.0)
        finally:
            await worker.stop()
    assert not [line for line in lines if "failed" in line["event"]]
    assert len(worker.partitions) == 8


async def test_leaving_right_after_a_reset_is_no_error(kit: Kit) -> None:
    async with running(kit, 1) as fleet:
        await reset(kit, fleet, anew=True)
        await fleet.leave(fleet.workers[0])


async def test_a_worker_may_be_stopped_twice(kit: Kit) -> None:
    async with running(kit, 1) as fleet:
        worker = fleet.workers[0]
        await fleet.leave(worker)
        await worker.stop()


# ── what cannot go together is said ───────────────────────────────────────────────────────────────────────────────


async def test_a_worker_without_capacity_gets_nothing(kit: Kit) -> None:
    async with Fleet(kit, Journal()) as fleet:
        standby = await fleet.join(capacity=0)
        other = await fleet.join()
        await eventually(lambda: len(other.partitions) == len(PARTITIONS), 5.0)
        assert standby.partitions == ()


async def test_more_capacity_than_a_consumer_can_carry_is_refused(kit: Kit) -> None:
    async with Fleet(kit, Journal()) as fleet:
        with pytest.raises(ConfigError, match="max_subjects"):
            await fleet.join(capacity=8, max_subjects=4)


async def test_two_deployments_in_one_bucket_do_not_take_each_others_partitions(kit: Kit) -> None:
    """They differ in stream and prefix and share the bucket, which has the same name by default."""
    other_stream, other_root = f"{kit.stream}_2", f"{kit.root}x"
    await kit.api.call(
        f"STREAM.CREATE.{other_stream}", {"name": other_stream, "subjects": [f"{other_root}.>"], "storage": "memory"}
    )
    journal = Journal()
    try:
        async with running(kit, 1) as fleet:
            settings = {**kit.settings, **FLEET, "prefix": f"w{other_root}"}
            other = parti.App(stream=other_stream, subject=f"{other_root}.{{p}}", partitions=["q0", "q1"], **settings)
            other.handler(lambda message: journal.note("start", message))
            try:
                worker = other.worker()
                await worker.start()
            except ConfigError:
                return  # A clear word is as good.
            fleet.workers.append(worker)
            sent = await kit.publish(PARTITIONS)
            theirs = [await kit.api.publish(f"{other_root}.{p}", b"x") for p in ("q0", "q1")]
            await eventually(lambda: fleet.journal.has(sent) and journal.has({"q": theirs}), 5.0)
    finally:
        await kit.delete_stream(other_stream)


async def test_a_bucket_restored_from_a_copy_does_not_bring_back_old_owners(kit: Kit) -> None:
    stream = f"KV_b{kit.root}"
    client = await nats.connect(kit.url)
    try:
        async with Fleet(kit, Journal()) as fleet, Traffic(kit, 200) as traffic:
            await fleet.join()
            await fleet.settles()
            copy = await backup(client, stream)
            await fleet.join()
            await fleet.settles()
            before = await claims_of(kit)
            await kit.api.call(f"STREAM.DELETE.{stream}")
            await restore(client, stream, *copy)
            await owned_again(kit, newest_fence(before))
            await fleet.settles()
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
    finally:
        await client.close()
    # The copy knows old positions and old owners: what was finished since may be handled again, and a worker that the
    # copy does not know goes on until its next heartbeat. But nothing is lost, and newer owners have larger tokens.
    fleet.journal.nothing_is_lost(traffic.sent)


async def backup(client: Client, stream: str) -> tuple[dict[str, Any], list[bytes]]:
    """A copy of a stream, by the server's own means."""
    inbox, chunks, complete = client.new_inbox(), list[bytes](), asyncio.Event()

    async def take(message: Msg) -> None:
        if message.data:
            chunks.append(message.data)
            await message.respond(b"")
        else:
            complete.set()

    await client.subscribe(inbox, cb=take)
    request = json.dumps({"deliver_subject": inbox}).encode()
    answer = json.loads((await client.request(f"$JS.API.STREAM.SNAPSHOT.{stream}", request)).data)
    await asyncio.wait_for(complete.wait(), 5)
    return {"config": answer["config"], "state": answer["state"]}, chunks


async def restore(client: Client, stream: str, what: dict[str, Any], chunks: Sequence[bytes]) -> None:
    request = json.dumps(what).encode()
    answer = json.loads((await client.request(f"$JS.API.STREAM.RESTORE.{stream}", request)).data)
    for chunk in (*chunks, b""):
        reply = await client.request(answer["deliver_subject"], chunk, timeout=5)
    assert "error" not in json.loads(reply.data)


# ── real processes ────────────────────────────────────────────────────────────────────────────────────────────────

APP = """
import asyncio, os, time
import parti

app = parti.App(stream={stream!r}, subject={template!r}, partitions={partitions!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, m):
    line = f"{{what}} {{time.time():.6f}} {{m.partition.id}} {{m.seq}} {{m.fence}} {{m.worker_id}} {{os.getpid()}}\\n"
    os.write(journal, line.encode())


@app.handler
async def handle(message):
    note("start", message)
    await asyncio.sleep(0.002)
    note("end", message)
"""


class Processes:
    """`parti worker` as often as one likes, all noting into one journal."""

    def __init__(self, kit: Kit, directory: Path, stack: contextlib.ExitStack, **settings: Any) -> None:
        self.journal = Journal(directory / "journal")
        self._kit = kit
        self._directory = directory
        self._stack = stack
        known = {**kit.settings, **FLEET, **settings}
        text = APP.format(
            stream=kit.stream,
            template=kit.template,
            partitions=PARTITIONS,
            settings={k: v for k, v in known.items() if k not in {"nats", "log_level"}},
            journal=str(directory / "journal"),
        )
        (directory / "orders.py").write_text(text)

    def start(self, *options: str) -> WorkerProcess:
        return self._stack.enter_context(WorkerProcess(self._directory, "orders:app", self._kit.url, *options))

    async def share(self, count: int) -> None:
        """Wait until so many processes own the partitions evenly and none is moving."""

        async def even() -> bool:
            claims = await claims_of(self._kit)
            sizes = Counter(owners(claims).values())
            return (
                len(claims) == len(PARTITIONS)
                and len(sizes) == count
                and max(sizes.values()) - min(sizes.values()) <= 1
                and all(claim.state == "owned" for claim in claims.values())
            )

        await eventually(even, 30.0)

    async def leader(self, processes: Sequence[WorkerProcess]) -> WorkerProcess:
        """The process that is the rebalancer."""
        bucket = Bucket(self._kit.api, f"b{self._kit.root}")
        leader = await bucket.get("leader.rebalancer")
        assert leader
        member = await bucket.get(key_of("ids", decode(leader.value, LeaderRecord).holder))
        assert member
        pid = decode(member.value, MemberRecord).pid
        (found,) = [process for process in processes if process.process.pid == pid]
        return found


def first_after(journal: Journal, partition: str, at_s: float, pid: int) -> Call | None:
    """The first handler of a partition after a moment in another process than this one."""
    found = (c for c in journal.starts if c.partition == partition and c.at_s > at_s and c.pid != pid)
    return next(found, None)


async def taken_over(journal: Journal, pid: int, at_s: float) -> dict[str, Call]:
    """Wait until others handle what a process handled just before; returns the first call of each partition."""
    theirs = {c.partition for c in journal.starts if c.pid == pid and at_s - 0.5 < c.at_s <= at_s}
    assert theirs

    def first() -> dict[str, Call]:
        others = [c for c in journal.starts if c.pid != pid and c.at_s > at_s and c.partition in theirs]
        return {call.partition: call for call in reversed(others)}

    await eventually(lambda: first().keys() == theirs)
    return first()


async def test_a_process_leaves_and_another_is_killed_under_load(kit: Kit, tmp_path: Path) -> None:
    """Each time it is the leader."""
    with contextlib.ExitStack() as stack:
        fleet = Processes(kit, tmp_path, stack)
        processes = [fleet.start() for _ in range(3)]
        async with recorded(kit) as history, Traffic(kit, 200) as traffic:
            await fleet.share(3)
            await traffic.goes_on(100)
            leaving = await fleet.leader(processes)
            left_s = time.time()
            code = await asyncio.to_thread(leaving.terminate)
            processes.remove(leaving)
            first = await taken_over(fleet.journal, leaving.process.pid, left_s)
            last = {c.partition: c.at_s for c in fleet.journal.starts if c.pid == leaving.process.pid}
            print(f"pause after SIGTERM of the leader: {max(first[p].at_s - last[p] for p in first):.2f} s")
            await fleet.share(2)
            repeated_by_leaving = len(fleet.journal.repeats)

            await traffic.goes_on(100)
            victim = await fleet.leader(processes)
            pid, killed_s = victim.process.pid, time.time()
            victim.kill()
            first = await taken_over(fleet.journal, pid, killed_s)
            took_s = max(call.at_s for call in first.values()) - killed_s
            print(f"takeover after SIGKILL of the leader: {took_s:.2f} s")
            assert took_s < TTL_S + LATE_S
            await fleet.share(1)
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
        repeats = fleet.journal.repeats[repeated_by_leaving:]
        print(f"{len(repeats)} of {len(fleet.journal.starts)} repeated after the crash")
        for repeat in repeats:
            before = [c for c in fleet.journal.starts if c.seq == repeat.seq and c.pid == pid]
            assert before, f"{repeat} was not in the hands of the killed process"
            assert killed_s - before[0].at_s < FLEET["progress_interval_s"] + 1.0
        fleet.journal.nothing_is_lost(traffic.sent)
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
        history.is_fenced()
        assert not code
        assert not repeated_by_leaving


async def test_a_leader_stopped_for_three_leases_changes_nothing_when_it_wakes(kit: Kit, tmp_path: Path) -> None:
    ttl_s = 1.0
    with contextlib.ExitStack() as stack:
        fleet = Processes(kit, tmp_path, stack, lease_ttl_s=ttl_s, leader_ttl_s=ttl_s)
        processes = [fleet.start() for _ in range(3)]
        async with recorded(kit) as history, Traffic(kit, 200) as traffic:
            await fleet.share(3)
            await traffic.goes_on()
            leader = await fleet.leader(processes)
            term, pid = history.terms()[-1], leader.process.pid
            leader.signal(signal.SIGSTOP)
            stopped_s = time.time()
            await asyncio.sleep(3 * ttl_s)
            await fleet.share(2)
            leader.signal(signal.SIGCONT)
            woken_s = time.time()
            await fleet.share(3)
            await eventually(lambda: any(c.pid == pid and c.at_s > woken_s for c in fleet.journal.starts))
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent))
        written = [r for r in history.of("leader") if r.key == "leader.rebalancer" and r.value]
        elected_s = next(r.at_s for r in written if decode(r.value, LeaderRecord).term > term)
        print(
            f"leader stopped: another elected after {elected_s - stopped_s:.2f} s, "
            f"{len(fleet.journal.repeats)} of {len(fleet.journal.starts)} repeated"
        )
        assert elected_s < woken_s
        assert leader.process.poll() is None, "it is still there"
        history.is_fenced()
        fleet.journal.nothing_is_lost(traffic.sent)
        fleet.journal.order_holds()
        fleet.journal.fences_never_go_back()
