"""Stateful handlers in a fleet: whatever happens to their owners, the state of a partition is exact.

The handler counts the messages of each partition. Every call notes the count that it left behind, and that must be
the number of messages of the partition up to this one: so a state that is too old or too new shows at the first
message that is handled on it, not only at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, Sent, eventually, merge, only_suffixes_repeat
from tests.integration.fleet import FLEET, PARTITIONS, Traffic, claims_of
from tests.integration.processes import WorkerProcess

import parti
from parti.app.worker import Worker
from parti.errors import ConfigError, NotFound
from parti.jetstream.kv import Bucket
from parti.model.fleet import HealthRecord, decode, key_of
from parti.model.state import StatePointer, state_key

SETTINGS = {**FLEET, "checkpoint_interval_s": 0.3}
BALLAST = 40 << 20


class Book:
    """What all handlers of a test did, in order: worker, partition, sequence, and the count that it left behind."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, int, int]] = []
        self.restored: list[tuple[int, str, bool]] = []

    def has(self, sent: Sent) -> bool:
        return {seq for _, _, seq, _ in self.calls} >= {seq for seqs in sent.values() for seq in seqs}

    def of(self, partition: str) -> list[int]:
        return [seq for _, p, seq, _ in self.calls if p == partition]

    def is_exact(self, sent: Sent) -> None:
        """Every message in every state, once and in its place."""
        ranks = {seq: rank for seqs in sent.values() for rank, seq in enumerate(sorted(seqs), start=1)}
        wrong = [(call, ranks[call[2]]) for call in self.calls if call[3] != ranks[call[2]]]
        assert not wrong, f"{len(wrong)} of {len(self.calls)} counts are wrong, first: {wrong[0]}"
        assert self.has(sent)
        for partition in sent:
            assert only_suffixes_repeat(self.of(partition)), f"order broken in {partition}"

    def is_clean(self, sent: Sent) -> None:
        """Exact, and nothing was handled twice."""
        self.is_exact(sent)
        assert len(self.calls) == sum(map(len, sent.values()))


class Counter:
    """Counts the messages of each partition, in threads."""

    def __init__(self, number: int, book: Book) -> None:
        self.number = number
        self.states: dict[str, dict[str, int]] = {}
        self.ballast: dict[str, bytes] = {}
        self.snapshots_fail = False
        self.restores_to_fail: dict[str, int] = {}
        self.gates: dict[str, threading.Event] = {}
        self.at_gates: set[str] = set()
        self._book = book

    def __call__(self, message: parti.Message) -> None:
        partition = message.partition.id
        if partition in self.gates:
            self.at_gates.add(partition)
            assert self.gates[partition].wait(30)
        self._count(message)

    def _count(self, message: parti.Message) -> None:
        state = self.states[message.partition.id]
        assert message.seq > state["last"], "in the state already"
        state["count"] += 1
        state["last"] = message.seq
        self._book.calls.append((self.number, message.partition.id, message.seq, state["count"]))

    def snapshot(self, partition: parti.Partition) -> Iterator[bytes]:
        if self.snapshots_fail:
            raise OSError("the disk is full")
        yield json.dumps(self.states[partition.id]).encode() + b"\n"
        ballast = self.ballast.get(partition.id, b"")
        for begin in range(0, len(ballast), 1 << 20):
            yield ballast[begin : begin + (1 << 20)]

    def restore(self, partition: parti.Partition, state: Any) -> None:
        self._fail(partition)
        self._take(partition, state.read() if state else None)

    def _fail(self, partition: parti.Partition) -> None:
        left = self.restores_to_fail.get(partition.id, 0)
        self.restores_to_fail[partition.id] = left - 1
        if left > 0:
            raise OSError("the disk is away")

    def _take(self, partition: parti.Partition, data: bytes | None) -> None:
        text, _, ballast = (data or b"").partition(b"\n")
        self.states[partition.id] = json.loads(text) if text else {"count": 0, "last": 0}
        self.ballast[partition.id] = ballast
        self._book.restored.append((self.number, partition.id, data is not None))


class AsyncCounter(Counter):
    """The same on the event loop."""

    async def __call__(self, message: parti.Message) -> None:  # type: ignore[override]
        await asyncio.sleep(0.001)
        self._count(message)

    async def snapshot(self, partition: parti.Partition) -> bytes:  # type: ignore[override]
        return b"".join(super().snapshot(partition))

    async def restore(self, partition: parti.Partition, state: Any) -> None:  # type: ignore[override]
        self._fail(partition)
        self._take(partition, await state.read() if state else None)


class NeverReady(Counter):
    """Can restore nothing."""

    def _fail(self, partition: parti.Partition) -> None:
        raise OSError("the disk is away")


class Stateful:
    """Workers of this process with a counter each."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.book = Book()
        self.workers: list[Worker] = []
        self.counters: dict[Worker, Counter] = {}

    async def join(self, kind: type[Counter] = Counter, partitions: Any = PARTITIONS, **settings: Any) -> Worker:
        counter = kind(len(self.counters), self.book)
        worker = self.kit.app(counter, partitions, **{**SETTINGS, **settings}).worker()
        self.counters[worker] = counter
        await worker.start()
        self.workers.append(worker)
        return worker

    async def leave(self, worker: Worker, *, drain: bool = True) -> bool:
        self.workers.remove(worker)
        return await worker.stop(drain=drain)

    async def place(self, *workers: Worker) -> None:
        """Put the partitions on these workers in turn, and wait until they are there."""
        wanted = {p: workers[n % len(workers)].worker_id for n, p in enumerate(PARTITIONS)}
        bucket = Bucket(self.kit.api, f"b{self.kit.root}")
        entry = await bucket.get("orders")
        orders = json.dumps({"kind": "orders", "placed": wanted}).encode()
        await bucket.put("orders", orders, revision=entry.revision if entry else 0)

        async def obeyed() -> bool:
            claims = await claims_of(self.kit)
            return all(p in claims and (claims[p].owner, claims[p].state) == (w, "owned") for p, w in wanted.items())

        await eventually(obeyed, 20.0)

    async def pointer(self, partition: str) -> StatePointer | None:
        entry = await Bucket(self.kit.api, f"b{self.kit.root}").get(state_key(partition))
        return decode(entry.value, StatePointer) if entry and entry.value else None

    async def saved(self, sent: Sent) -> None:
        """Wait until there is a state of each of these partitions that contains all of these messages."""

        async def all_saved() -> bool:
            pointers = [await self.pointer(p) for p in sent]
            return all(f and f.position > max(sent[p]) for p, f in zip(sent, pointers, strict=True))

        await eventually(all_saved)

    async def handled(self, sent: Sent) -> None:
        await eventually(lambda: self.book.has(sent))

    async def close(self) -> None:
        for counter in self.counters.values():
            for gate in counter.gates.values():
                gate.set()
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        with contextlib.suppress(NotFound):
            await self.kit.delete_stream(f"b{self.kit.root}-state")


@pytest.fixture
async def fleet(kit: Kit) -> AsyncIterator[Stateful]:
    fleet = Stateful(kit)
    try:
        yield fleet
    finally:
        await fleet.close()


BOTH = pytest.mark.parametrize("kind", [Counter, AsyncCounter])


# ── planned moves ─────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_partitions_are_placed_here_and_there_under_traffic(
    kit: Kit, fleet: Stateful, kind: type[Counter]
) -> None:
    a, b = await fleet.join(kind), await fleet.join(kind)
    async with Traffic(kit, 200) as traffic:
        for workers in ((a,), (b,), (a, b), (b, a), (a,)):
            await fleet.place(*workers)
            await traffic.goes_on(20)
        await traffic.stop()
    await fleet.handled(traffic.sent)
    fleet.book.is_clean(traffic.sent)
    moves = sum(had for _, _, had in fleet.book.restored)
    assert moves >= 24, "each change of owner has restored a state"


async def test_workers_come_and_go_under_traffic(kit: Kit, fleet: Stateful) -> None:
    first = await fleet.join()
    async with Traffic(kit, 200) as traffic:
        await traffic.goes_on(40)
        second = await fleet.join(AsyncCounter)
        await eventually(lambda: len(second.partitions) >= 4, 20.0)
        await traffic.goes_on(40)
        assert await fleet.leave(first)
        await eventually(lambda: len(second.partitions) == len(PARTITIONS), 20.0)
        await traffic.goes_on(40)
        await traffic.stop()
    await fleet.handled(traffic.sent)
    fleet.book.is_clean(traffic.sent)


async def test_a_handler_that_runs_is_in_the_state_that_moves(kit: Kit, fleet: Stateful) -> None:
    a, b = await fleet.join(), await fleet.join()
    await fleet.place(a)
    gate = fleet.counters[a].gates["p0"] = threading.Event()
    sent = await kit.publish(["p0"])
    await eventually(lambda: fleet.counters[a].at_gates == {"p0"})
    moving = asyncio.create_task(fleet.place(b))
    sent = merge(sent, await kit.publish(PARTITIONS, 3))
    await eventually(lambda: fleet.book.has({p: sent[p] for p in PARTITIONS if p != "p0"}), 20.0)

    async def told_to_let_go() -> bool:
        entry = await Bucket(kit.api, f"b{kit.root}").get(key_of("health", a.worker_id))
        return entry is not None and decode(entry.value, HealthRecord).busy == ("p0",)

    await eventually(told_to_let_go)
    assert not fleet.book.of("p0")
    gate.set()
    await moving
    await fleet.handled(sent)
    fleet.book.is_clean(sent)
    assert {number for number, p, _, _ in fleet.book.calls if p == "p0"} == {0, 1}


async def test_a_large_state_moves(kit: Kit, fleet: Stateful) -> None:
    a, b = await fleet.join(checkpoint_interval_s=60.0), await fleet.join(checkpoint_interval_s=60.0)
    await fleet.place(a)
    sent = await kit.publish(PARTITIONS, 5)
    await fleet.handled(sent)
    ballast = fleet.counters[a].ballast["p0"] = bytes(range(256)) * (BALLAST >> 8)
    began_s = time.monotonic()
    await fleet.place(b)
    sent = merge(sent, await kit.publish(PARTITIONS, 5))
    await fleet.handled(sent)
    took_s = time.monotonic() - began_s
    print(f"{BALLAST >> 20} MB moved, and the next message handled, in {took_s:.2f} s")
    fleet.book.is_clean(sent)
    arrived = fleet.counters[b].ballast["p0"]
    assert hashlib.sha256(arrived).digest() == hashlib.sha256(ballast).digest()


async def test_a_snapshot_that_fails_holds_up_no_move(kit: Kit, fleet: Stateful) -> None:
    """The last state that was saved is brought up to date by the messages since."""
    a, b = await fleet.join(), await fleet.join()
    await fleet.place(a)
    sent = await kit.publish(PARTITIONS, 5)
    await fleet.handled(sent)
    await fleet.saved(sent)
    fleet.counters[a].snapshots_fail = True
    more = await kit.publish(PARTITIONS, 5)
    await fleet.handled(more)
    moving = asyncio.create_task(fleet.place(b))
    await eventually(lambda: "disk is full" in a.health.reasons.get("state", ""))
    await moving
    last = await kit.publish(PARTITIONS)
    await fleet.handled(last)
    fleet.book.is_exact(merge(sent, more, last))
    replayed = [seq for number, _, seq, _ in fleet.book.calls if number == 1]
    assert sorted(replayed) == sorted(seq for part in (more, last) for seqs in part.values() for seq in seqs)
    await eventually(lambda: "state" not in a.health.reasons)


async def test_a_partition_does_not_begin_before_its_state_is_restored(kit: Kit, fleet: Stateful) -> None:
    a, b = await fleet.join(), await fleet.join()
    await fleet.place(a)
    sent = await kit.publish(PARTITIONS, 5)
    await fleet.handled(sent)
    fleet.counters[b].restores_to_fail = {"p0": 4}
    moving = asyncio.create_task(fleet.place(b))
    await eventually(lambda: "disk is away" in b.health.reasons.get("state", ""))
    more = await kit.publish(PARTITIONS, 5)
    await moving
    others = {p: seqs for p, seqs in more.items() if p != "p0"}
    await fleet.handled(others)
    if fleet.counters[b].restores_to_fail["p0"] >= 0:
        assert not [call for call in fleet.book.calls if call[:2] == (1, "p0")]
        assert "p0" in b.health.reasons["state"], "others that went well do not hide it"
    await fleet.handled(more)
    await eventually(lambda: "state" not in b.health.reasons)
    fleet.book.is_clean(merge(sent, more))


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
@pytest.mark.parametrize("interval_s", [0.3, 60.0])
async def test_after_a_crash_the_last_checkpoint_is_brought_up_to_date(
    kit: Kit, fleet: Stateful, kind: type[Counter], interval_s: float
) -> None:
    """Also when there was no time for a checkpoint: a partition begins with one."""
    a, b = [await fleet.join(kind, checkpoint_interval_s=interval_s) for _ in range(2)]
    async with Traffic(kit, 200) as traffic:
        await fleet.place(a)
        await traffic.goes_on(80)
        if interval_s < 1:
            await fleet.saved({p: traffic.sent[p][:3] for p in PARTITIONS})
        await fleet.leave(a, drain=False)
        await eventually(lambda: len(b.partitions) == len(PARTITIONS), 20.0)
        await traffic.goes_on(40)
        await traffic.stop()
    await fleet.handled(traffic.sent)
    fleet.book.is_exact(traffic.sent)


APP = """
import json, os
import parti

app = parti.App(stream={stream!r}, subject={template!r}, partitions={partitions!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class Counter:
    def __init__(self):
        self.states = {{}}

    def __call__(self, message):
        if message.data == b"kill":
            os._exit(7)
        state = self.states[message.partition.id]
        state["count"] += 1
        os.write(journal, f"{{os.getpid()}} {{message.partition.id}} {{message.seq}} {{state['count']}}\\n".encode())

    def snapshot(self, partition):
        return json.dumps(self.states[partition.id]).encode()

    def restore(self, partition, state):
        self.states[partition.id] = json.loads(state.read()) if state else {{"count": 0}}


app.handler(Counter())
"""


class Journal(Book):
    """A book that processes write."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def read(self) -> None:
        text = self._path.read_text() if self._path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        self.calls = [(int(pid), p, int(seq), int(n)) for pid, p, seq, n in map(str.split, lines)]

    def has(self, sent: Sent) -> bool:
        self.read()
        return super().has(sent)


def write_app(kit: Kit, directory: Path, **settings: Any) -> Journal:
    known = {**kit.settings, **SETTINGS, **settings}
    text = APP.format(
        stream=kit.stream,
        template=kit.template,
        partitions=PARTITIONS,
        settings={k: v for k, v in known.items() if k not in {"nats", "log_level"}},
        journal=str(directory / "journal"),
    )
    (directory / "counts.py").write_text(text)
    return Journal(directory / "journal")


async def test_processes_are_killed_under_traffic(kit: Kit, fleet: Stateful, tmp_path: Path) -> None:
    """Each takes over from the one before it, with the state of its last checkpoint."""
    journal = write_app(kit, tmp_path)

    def handlers() -> set[int]:
        """Who has handled the newest messages."""
        journal.read()
        return {pid for pid, _, _, _ in journal.calls[-50:]}

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(WorkerProcess(tmp_path, "counts:app", kit.url)) for _ in range(3)]
        async with Traffic(kit, 150) as traffic:
            await eventually(lambda: handlers() == {p.process.pid for p in processes}, 40.0)
            for victim in processes[:2]:
                await traffic.goes_on(60)
                await asyncio.to_thread(victim.kill)
                pid = victim.process.pid
                await eventually(lambda pid=pid: pid not in handlers(), 20.0)  # type: ignore[misc]
            await traffic.goes_on(60)
            await traffic.stop()
        await eventually(lambda: journal.has(traffic.sent), 20.0)
    journal.is_exact(traffic.sent)
    repeats = len(journal.calls) - sum(map(len, traffic.sent.values()))
    print(f"{repeats} of {len(journal.calls)} handled again after two kills")


async def test_a_message_that_kills_is_left_out_of_the_state(kit: Kit, fleet: Stateful, tmp_path: Path) -> None:
    """Each process begins with the last checkpoint, and comes upon the message again."""
    journal = write_app(kit, tmp_path, crash_limit=1, lease_ttl_s=60.0)
    with WorkerProcess(tmp_path, "counts:app", kit.url, "--processes", "1"):
        sent = await kit.publish(PARTITIONS, 5)
        await kit.api.publish(kit.subject("p3"), b"kill")
        sent = merge(sent, await kit.publish(PARTITIONS, 20))
        await eventually(lambda: journal.has(sent), 45.0)
        journal.is_exact(sent)
        assert len(await kit.dead_letters()) == 1


# ── stopping and starting ─────────────────────────────────────────────────────────────────────────────────────────


@BOTH
@pytest.mark.parametrize("alone", [False, True])
async def test_a_worker_that_is_restarted_in_order_goes_on(
    kit: Kit, fleet: Stateful, kind: type[Counter], alone: bool
) -> None:
    settings = {"fleet": False, "worker_id": "one"} if alone else {}
    sent: Sent = {}
    for _ in range(3):
        sent = merge(sent, await kit.publish(PARTITIONS, 4))
        worker = await fleet.join(kind, checkpoint_interval_s=60.0, **settings)
        await fleet.handled(sent)
        sent = merge(sent, await kit.publish(PARTITIONS, 4))
        await fleet.handled(sent)
        assert await fleet.leave(worker)
    fleet.book.is_clean(sent)
    assert {had for number, _, had in fleet.book.restored if number} == {True}


async def test_checkpoints_do_not_wait_for_a_slow_partition(kit: Kit, fleet: Stateful) -> None:
    worker = await fleet.join()
    slow = PARTITIONS[:3]
    fleet.counters[worker].gates = {p: threading.Event() for p in slow}
    sent = await kit.publish(PARTITIONS, 3)
    await fleet.saved({p: sent[p] for p in PARTITIONS[3:]})
    more = await kit.publish(PARTITIONS[3:], 3)
    await fleet.saved(more)
    for gate in fleet.counters[worker].gates.values():
        gate.set()
    await fleet.saved(sent)
    fleet.book.is_clean(merge(sent, more))


async def test_the_state_of_a_stream_that_was_made_anew_is_not_used(kit: Kit, fleet: Stateful) -> None:
    worker = await fleet.join()
    sent = await kit.publish(PARTITIONS, 5)
    await fleet.handled(sent)
    assert await fleet.leave(worker)
    await kit.delete_stream()
    await kit.create_stream()
    fleet.book.calls.clear()
    anew = await kit.publish(PARTITIONS, 3)
    worker = await fleet.join()
    await fleet.handled(anew)
    fleet.book.is_clean(anew)
    assert not any(had for number, _, had in fleet.book.restored if number == 1)
    await fleet.saved(anew)


async def test_when_the_stream_is_made_anew_under_a_running_worker_states_begin_anew(
    kit: Kit, fleet: Stateful
) -> None:
    await fleet.join()
    sent = await kit.publish(PARTITIONS, 5)
    await fleet.handled(sent)
    await fleet.saved(sent)
    await kit.delete_stream()
    await kit.create_stream()
    fleet.book.calls.clear()
    anew = await kit.publish(PARTITIONS, 3)
    await fleet.handled(anew)
    fleet.book.is_clean(anew)


# ── beginning ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_state_that_is_restored_before_the_stream_was_looked_at_loses_nothing(
    kit: Kit, fleet: Stateful, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restore may be quicker than the answer to where the stream ends."""
    from parti.worker.starts import Starts  # noqa: PLC0415

    sent = await kit.publish(PARTITIONS, 5)
    last_seq: Callable[[Starts], Any] = Starts.last_seq

    async def all_begun() -> bool:
        found = [await fleet.pointer(p) for p in PARTITIONS]
        return all(pointer and pointer.holds_state for pointer in found)

    async def late(starts: Starts) -> int:
        seq: int = await last_seq(starts)
        with contextlib.suppress(AssertionError):  # it must not matter whether anything is restored meanwhile
            await eventually(all_begun, 3.0)
            await asyncio.sleep(0.2)
        return seq

    monkeypatch.setattr(Starts, "last_seq", late)
    await fleet.join(fleet=False, worker_id="one")
    await fleet.handled(sent)
    fleet.book.is_clean(sent)


@pytest.mark.parametrize("alone", [False, True])
async def test_what_was_acknowledged_before_any_state_was_restored_is_not_taken_for_handled(
    kit: Kit, fleet: Stateful, alone: bool
) -> None:
    """Messages of partitions that have not begun are let go: they are read from the stream later."""
    sent = await kit.publish(PARTITIONS, 5)
    worker = await fleet.join(NeverReady, fleet=not alone, worker_id="one")
    await worker.wait_assigned()
    sent = merge(sent, await kit.publish(PARTITIONS, 5))
    await eventually(kit.all_acked)
    assert not fleet.book.calls
    await fleet.leave(worker)
    await fleet.join(fleet=not alone, worker_id="one")
    await fleet.handled(sent)
    fleet.book.is_clean(sent)


async def test_what_an_heir_let_go_is_not_taken_for_handled(kit: Kit) -> None:
    """The same without states: owner and heir die in the midst of a move, and the heir comes back first."""
    handled: list[int] = []
    gate = asyncio.Event()

    async def handle(message: parti.Message) -> None:
        await gate.wait()
        handled.append(message.seq)

    def worker(worker_id: str) -> Worker:
        return kit.app(handle, PARTITIONS, **{**FLEET, "worker_id": worker_id}).worker()

    owner, heir = worker("a"), worker("b")
    await owner.start()
    sent = await kit.publish(PARTITIONS, 5)
    await owner.wait_assigned()
    await heir.start()

    async def waits_for_the_owner() -> bool:
        claims = await claims_of(kit)
        return any(claim.state == "moving" for claim in claims.values())

    async def let_go() -> bool:
        info = await kit.api.consumer_info(kit.stream, f"w{kit.root}-b")
        return not info.ack_pending and not info.pending and info.ack_floor > 0

    await eventually(waits_for_the_owner)
    sent = merge(sent, await kit.publish(PARTITIONS, 5))
    await eventually(let_go)
    await asyncio.gather(heir.stop(drain=False), owner.stop(drain=False))
    gate.set()
    heir = worker("b")
    await heir.start()
    try:
        await eventually(lambda: set(handled) >= {seq for seqs in sent.values() for seq in seqs})
    finally:
        await heir.stop()


async def test_a_worker_alone_that_wants_only_new_messages_gets_no_old_ones(kit: Kit, fleet: Stateful) -> None:
    await kit.publish(PARTITIONS, 5)
    await fleet.join(fleet=False, worker_id="one", start="new")
    await eventually(lambda: len(fleet.book.restored) == len(PARTITIONS))
    sent = await kit.publish(PARTITIONS, 3)
    await fleet.handled(sent)
    fleet.book.is_clean(sent)


async def test_a_worker_alone_that_wants_only_new_messages_gets_no_old_ones_of_what_is_added(
    kit: Kit, fleet: Stateful
) -> None:
    await kit.publish(["p0", "p1"], 5)
    worker = await fleet.join(partitions=["p0"], fleet=False, worker_id="one", start="new")
    await worker.update_worker_consumer("one", ["p0", "p1"])
    await eventually(lambda: len(fleet.book.restored) == 2)
    sent = await kit.publish(["p0", "p1"], 3)
    await fleet.handled(sent)
    fleet.book.is_clean(sent)


async def test_fleets_with_buckets_of_their_own_have_states_of_their_own(kit: Kit, fleet: Stateful) -> None:
    """The same partitions of the same stream, for another purpose."""
    sent = await kit.publish(PARTITIONS, 5)
    first = await fleet.join()
    await fleet.handled(sent)
    await fleet.saved(sent)
    calls, fleet.book.calls = fleet.book.calls, []
    second = await fleet.join(bucket=f"o{kit.root}", prefix=f"o{kit.root}")
    await fleet.handled(sent)
    assert await fleet.leave(second)
    fleet.book.is_clean(sent)
    fleet.book.calls = calls
    assert await fleet.leave(first)
    more = await kit.publish(PARTITIONS, 2)
    await fleet.join()
    await fleet.handled(more)
    fleet.book.is_clean(merge(sent, more))
    for name in (f"o{kit.root}-state", f"KV_o{kit.root}"):
        await kit.delete_stream(name)


# ── where there can be no state ───────────────────────────────────────────────────────────────────────────────────


async def test_streams_that_forget_what_was_handled_are_refused(kit: Kit, fleet: Stateful) -> None:
    for retention in ("workqueue", "interest"):
        await kit.delete_stream()
        await kit.create_stream(retention=retention)
        with pytest.raises(ConfigError, match=f"{retention} retention"):
            await fleet.join()


async def test_an_unordered_handler_with_state_is_refused(fleet: Stateful) -> None:
    with pytest.raises(ConfigError, match="ordered=true"):
        await fleet.join(ordered=False)


async def test_a_worker_alone_without_a_list_of_partitions_is_refused(fleet: Stateful) -> None:
    with pytest.raises(ConfigError, match="list of partitions"):
        await fleet.join(partitions=None, fleet=False, worker_id="one")


class Hanging:
    """Its restore, or its snapshot, does not return for partition a until it is told to."""

    def __init__(self, what: str, record: Record) -> None:
        self.returns = asyncio.Event()
        self._what = what
        self._record = record

    async def __call__(self, message: parti.Message) -> None:
        self._record.note(message)

    async def snapshot(self, partition: parti.Partition) -> bytes:
        await self._wait("saved", partition)
        return b"state"

    async def restore(self, partition: parti.Partition, state: Any) -> None:
        await self._wait("restored", partition)

    async def _wait(self, what: str, partition: parti.Partition) -> None:
        if (what, partition.id) == (self._what, "a"):
            await self.returns.wait()


@pytest.mark.parametrize("what", ["restored", "saved"])
async def test_a_partition_whose_handler_never_returns_its_state_is_told_of(
    kit: Kit, record: Record, what: str
) -> None:
    handler = Hanging(what, record)
    async with kit.app(handler, ["a", "b"], stall_after_s=0.5).running() as worker:
        sent = await kit.publish(["a", "b"], 3)
        await eventually(lambda: f"partition a stands still: its state is not {what}" in str(worker.health.reasons))
        await record.reaches(3)
        assert record.of("b") == sent["b"]
        handler.returns.set()
        await record.reaches(6)
        await eventually(lambda: worker.health.healthy)
    record.is_exactly(sent)


async def test_half_a_stateful_handler_is_refused(kit: Kit) -> None:
    class Half:
        def __call__(self, message: parti.Message) -> None:
            """Fine."""

        def snapshot(self, partition: parti.Partition) -> bytes:
            return b""

    with pytest.raises(ConfigError, match="snapshot alone"):
        await kit.app(Half(), PARTITIONS, **SETTINGS).worker().start()
