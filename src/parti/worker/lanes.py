"""Lanes at run time: where deliveries wait for their turn and outcomes are settled.

Everything here runs on the event loop. A runner (see `runners`) takes a lane from `ready`, calls the handler with
the lane's head and reports back through `settle` or `failed`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import structlog

from parti.core.lane import Lane, Phase, Verdict
from parti.core.loads import Effort
from parti.core.retry import GiveUp, HandlerTimeout, RetryPolicy, TryAgain, after_failure, describe
from parti.errors import SubjectMismatch
from parti.model.message import Message, Ownership
from parti.model.partition import Partition, Template
from parti.model.subjects import covers
from parti.telemetry.metrics import Metrics
from parti.worker.acks import Acks

_log = structlog.get_logger("parti.lanes")
_EVICT_ABOVE = 10_000
_LOOK_AGAIN_S = 0.2
_now = time.time

# Looked up for every message: a global is cheaper than an attribute of an enum.
_ACCEPTED, _IDLE, _HELD, _READY, _CLOSED = Verdict.ACCEPTED, Phase.IDLE, Phase.HELD, Phase.READY, Phase.CLOSED


class DeadLetters(Protocol):
    """Where messages go that no attempt could handle."""

    async def send(self, message: Message, reason: str) -> None:
        """Return only when the message is stored; keep trying until then."""


class Reached(Protocol):
    """How far a consumer has got. A worker's only consumer has it in its lanes, several have it each for itself."""

    next_seq: int
    """One past the highest sequence that was ever delivered."""
    cursor: int
    """One past the last sequence that was delivered in this session."""


class Lanes:
    """All lanes of a worker.

    With `each_subject`, every subject that fits the template is a partition of its own, found as it arrives. With
    `measures`, what handlers take is counted for each partition.
    """

    def __init__(  # noqa: PLR0915 - a list of what there is
        self,
        *,
        template: Template,
        stream: str,
        worker_id: str,
        policy: RetryPolicy,
        acks: Acks,
        dead_letters: DeadLetters,
        metrics: Metrics,
        each_subject: bool = False,
        measures: bool = False,
    ) -> None:
        self.ready: deque[Lane] = deque()
        self.held = 0
        """Messages that the server counts as delivered to us and not acknowledged."""
        self.finished = 0
        self.next_seq = 1
        """One past the highest sequence that was ever delivered, by whichever consumer."""
        self.cursor = 1
        """One past the last sequence that was delivered in this session."""
        self.carriers: tuple[Reached, ...] = ()
        """With several consumers: those that carry something. What each has delivered says nothing of the others."""
        self._carrier_of: Mapping[str, Reached] = {}
        self.draining = False
        self.permitted_until_s = float("inf")
        """Handlers may be started until this moment of `time.perf_counter`: the worker's lease ends then."""
        self.fences: Mapping[str, int] = {}
        """Fence tokens by partition id."""
        self.on_ready: Callable[[], None] = lambda: None
        self.count_running: Callable[[], int] = lambda: 0
        self.on_starved: Callable[[Lane], None] = lambda lane: None
        self.on_held: Callable[[Lane], None] = lambda lane: None
        """Called when a lane that is held has something that could be started."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when a handler has ended whose partition was released."""
        self.lets_go = False
        """Messages of others may be acknowledged: whoever handles them reads them from the stream."""
        self.careful: Mapping[str, int] = {}
        """Partitions whose last owner died, and the sequence up to which each message is noted before its start."""
        self.trying: dict[str, int] = {}
        """What has been noted down as about to be started, by partition id."""
        self.observe_latency = metrics.handler_latency.observe
        # Held where a lane changes hands between the event loop and a handler's thread.
        self.lock = threading.Lock()
        self._template = template
        self._stream = stream
        self._worker_id = worker_id
        self._policy = policy
        self._acks = acks
        self._ack: Callable[[bytes], None] = acks.ack
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._each_subject, self._measures = each_subject, measures
        self._partitions: dict[str, Partition] = {}
        self._position_of: Callable[[str, str], int] = lambda partition_id, subject: 0
        self._lanes: dict[str, Lane] = {}
        self._by_subject: dict[bytes, tuple[Lane, str]] = {}
        # Subjects that arrive and are nobody's business here: others', or those to get ready for.
        self._strangers: set[bytes] = set()
        # What was owned here once: the stored record may still speak for it.
        self._let_go_subjects: set[str] = set()
        self._released: dict[str, int] = {}
        # Lanes that were forgotten had finished everything below this.
        self._evicted_below = 0
        # Released, but their handler still runs.
        self._leaving: dict[str, Lane] = {}
        # What arrives for a parked lane whose position is not stored yet.
        self._keeping: dict[Lane, list[Message]] = {}
        # Carried for partitions that somebody else still handles, by subject.
        self._incoming: dict[str, Partition] = {}
        # To be acknowledged once a record is stored that no longer speaks for their partitions.
        self._foreign: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    # ── ownership ─────────────────────────────────────────────────────────────────────────────────────────────

    def own(self, partitions: dict[str, Partition], position_of: Callable[[str, str], int]) -> None:
        """Replace the set of owned partitions (by subject) and where each of them starts.

        A partition that is no longer owned starts nothing more; a handler that runs finishes, and its position
        counts.
        """
        gone = [partition for subject, partition in self._partitions.items() if subject not in partitions]
        for partition in gone:
            self._release(partition)
        if gone:
            self._by_subject.clear()  # only a short cut: the next delivery finds its lane again
        self._let_go_subjects = (self._let_go_subjects | {p.subject for p in gone}) - partitions.keys()
        self._strangers.clear()
        self._partitions = dict(partitions)
        self._position_of = position_of
        for subject in self._incoming.keys() & partitions.keys():
            lane = self._lanes.get(self._incoming.pop(subject).id)
            if lane and lane.incoming:
                lane.incoming = False
                self._released.pop(lane.ownership.partition.id, None)
                self._refence(lane, self._ownership(lane.ownership.partition))
                self.skip_to({lane.ownership.partition.id: position_of(lane.ownership.partition.id, subject)})
                self._be_careful(lane)
                self.wake(lane)

    def expect(self, incoming: Mapping[str, Partition]) -> None:
        """Replace the set of partitions (by subject) that are delivered here while somebody else handles them."""
        for subject in self._incoming.keys() - incoming.keys():
            lane = self._lanes.get(self._incoming[subject].id)
            if lane and lane.incoming:
                lane.phase = Phase.CLOSED
                del self._lanes[lane.ownership.partition.id]
                self._abandon(lane)
        self._incoming = dict(incoming)
        self._let_go_subjects -= incoming.keys()
        self._by_subject.clear()
        self._strangers.clear()

    def gain(self, partition: Partition, position: int, *, feed_to: int = 0) -> None:
        """Take up a partition whose unfinished messages lie below what has been delivered already."""
        lane = self._lanes.get(partition.id) or self._open(partition, position)
        reached = self.reached(partition.subject)
        lane.start_behind(reached.next_seq, feed_to)
        # At once, not only when the server has been told: until then nobody may think that it has caught up.
        reached.cursor = min(reached.cursor, position)
        if feed_to:
            self.on_starved(lane)

    def begin_at(self, start: int, partitions: Iterable[Partition], reached: Reached | None = None) -> None:
        """The next session (of one consumer) begins at `start` and may count on nothing below: feed what it lacks.

        A lane that has fallen behind is read from the stream although the session could bring its messages: nobody
        but its position knows that they are needed.
        """
        reached = reached or self
        floor = self.floor_of(reached)  # by what was delivered, not by what is about to be skipped
        reached.next_seq = max(reached.next_seq, start)
        for partition in partitions:
            lane = self._lanes.get(partition.id)
            known = self._position_of(partition.id, partition.subject)
            behind = lane is not None and lane.behind
            position = known if behind else max(known, floor)
            if (behind and not (lane and lane.parked)) or position < start:
                self.gain(partition, position, feed_to=reached.next_seq - 1)

    def _open(self, partition: Partition, position: int) -> Lane:
        """Give a partition its lane; one whose last handler still runs goes on with the same."""
        if partition.subject not in self._incoming:
            position = max(position, self._released.pop(partition.id, 0))
        lane = self._leaving.pop(partition.id, None)
        if lane is None:
            lane = Lane(self._ownership(partition), position)
            lane.effort = Effort() if self._measures else None
            lane.incoming = partition.subject in self._incoming
            if lane.incoming:
                lane.phase = Phase.HELD
            else:
                self._be_careful(lane)
        else:
            lane.phase = Phase.RUNNING
            self._refence(lane, self._ownership(partition))
        self._lanes[partition.id] = lane
        return lane

    def _be_careful(self, lane: Lane) -> None:
        lane.careful_to = self.careful.get(lane.ownership.partition.id, 0)
        if lane.careful_to:
            lane.phase = Phase.HELD

    def wake(self, lane: Lane) -> None:
        """Let a lane that was held go on, unless something else holds it."""
        if lane.phase is not Phase.HELD or lane.incoming or lane.pausing:
            return
        if lane.careful_to:
            self.on_held(lane)
        else:
            self.let_through(lane)

    def let_through(self, lane: Lane) -> None:
        """Nothing holds the lane any more."""
        lane.phase = Phase.READY if lane.waiting else Phase.IDLE
        if lane.waiting:
            self.ready.append(lane)
            self.on_ready()
        elif lane.parked:
            self.on_starved(lane)

    def _ownership(self, partition: Partition) -> Ownership:
        return Ownership(partition, self._stream, self._worker_id, self.fences.get(partition.id, 0))

    @property
    def permitted(self) -> bool:
        """Whether handlers may be started now."""
        return time.perf_counter() < self.permitted_until_s

    def permit(self, until_s: float) -> None:
        """Allow or forbid the start of handlers; what waits goes on when it is allowed again."""
        shut = not self.permitted
        self.permitted_until_s = until_s
        if shut and self.permitted:
            self.on_ready()

    def fence(self, tokens: Mapping[str, int]) -> None:
        """Give these partitions their fence tokens; what has not been started carries the new one.

        Others keep theirs: they are about to be released, but what still starts until then is rightly started.
        """
        self.fences = {**self.fences, **tokens}
        for partition_id, lane in self._lanes.items():
            if lane.ownership.fence != self.fences.get(partition_id, 0):
                self._refence(lane, self._ownership(lane.ownership.partition))

    def skip_to(self, positions: Mapping[str, int]) -> None:
        """Others have finished these partitions up to there: what waits below need not be handled."""
        for partition_id, position in positions.items():
            lane = self._lanes.get(partition_id)
            if lane is None or position <= lane.position:
                continue
            with self.lock:
                dropped = lane.skip_to(position)
            for message in dropped:
                if message.reply:
                    self.held -= 1
                    self._ack(message.reply)
            if dropped and lane.phase is _READY:
                self.ready.append(lane)

    def _refence(self, lane: Lane, ownership: Ownership) -> None:
        with self.lock:
            lane.ownership = ownership
            for message in lane.waiting:
                message.ownership = ownership

    @property
    def released(self) -> tuple[str, ...]:
        """Partitions that were released and not gained again."""
        return tuple(self._released)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Partitions that were released and whose handler still runs."""
        return tuple(self._leaving)

    def start_over(self) -> None:
        """The stream was made anew: sequences and positions of the old one mean nothing any more.

        Handlers that run may finish, but nothing comes of it.
        """
        for lane in (*self._lanes.values(), *self._leaving.values()):
            with self.lock:
                lane.phase = Phase.CLOSED
            for message in lane.waiting:
                message.reply = b""
        for positions in (self._lanes, self._leaving, self._released, self._keeping, self._by_subject):
            positions.clear()
        self._foreign.clear()
        self.trying.clear()
        self.held = self._evicted_below = 0
        for reached in (self, *self.carriers):
            reached.next_seq = reached.cursor = 1

    def restore(self, released: dict[str, int]) -> None:
        """Remember positions of partitions that an earlier run had released or parked."""
        self._released.update(released)

    def forget_position(self, partition_id: str) -> None:
        """Whatever is known of a released partition counts no more: somebody knows better."""
        self._released.pop(partition_id, None)

    def has(self, partition_id: str) -> bool:
        """Whether a partition has a lane already."""
        return partition_id in self._lanes

    def catch_up(self) -> None:
        """Let the floor speak again for lanes that have nothing left below it."""
        done = [lane for lane in self._lanes.values() if lane.behind and lane.caught_up(self._reached(lane).cursor)]
        for lane in done:
            lane.behind = False
            _log.debug("partition has caught up", partition=lane.ownership.partition.id, position=lane.position)
        if done:
            _log.info("partitions have caught up", partitions=len(done))

    def _release(self, partition: Partition) -> None:
        lanes = [lane for lane in self._lanes.values() if covers(partition.subject, lane.ownership.partition.subject)]
        for lane in lanes:
            self._close(lane)
        position = self._position_of(partition.id, partition.subject)
        if not lanes and position:
            self._released[partition.id] = position

    def _close(self, lane: Lane) -> None:
        partition_id = lane.ownership.partition.id
        with self.lock:
            running = lane.phase is Phase.RUNNING
            lane.phase = Phase.CLOSED
        del self._lanes[partition_id]
        self._released[partition_id] = lane.position
        if running:
            self._leaving[partition_id] = lane
        else:
            self._abandon(lane)
        self._metrics.partition_messages.remove(partition_id)

    def _abandon(self, lane: Lane) -> None:
        """Drop what waits in a closed lane: it belongs to the next owner, who starts at the position."""
        dropped = [message.reply for message in (*lane.waiting, *self._keeping.pop(lane, ())) if message.reply]
        self.held -= len(dropped)
        if self.lets_go:
            # Otherwise the server would deliver them again, here, for as long as the consumer lives.
            self._foreign += dropped
        lane.waiting.clear()
        partition_id = lane.ownership.partition.id
        self.trying.pop(partition_id, None)
        if self._leaving.get(partition_id) is lane:
            del self._leaving[partition_id]
            self._released[partition_id] = lane.position
            self._tell_waiters()
            self.on_left()

    def forget_foreign(self) -> None:
        """A record is stored that speaks for none of what was let go: acknowledge it."""
        foreign, self._foreign = self._foreign, []
        for reply in foreign:
            self._ack(reply)

    def carry(self, carrier_of: Mapping[str, Reached]) -> None:
        """Say which of several consumers carries a subject; one alone needs no saying."""
        self._carrier_of = carrier_of
        self.carriers = tuple(dict.fromkeys(carrier_of.values()))

    def reached(self, subject: str) -> Reached:
        """How far the consumer has got that brings a partition."""
        return self._carrier_of.get(subject, self)

    def _reached(self, lane: Lane) -> Reached:
        return self.reached(lane.ownership.partition.subject)

    @property
    def floor(self) -> int:
        """Every message of an owned partition that is not `behind` is finished below this sequence.

        With several consumers, a slow one has undelivered messages below what a fast one has delivered: the floor is
        never above the lowest of them.
        """
        return min([self._lowest(self._lanes.values(), self.next_seq), *(r.next_seq for r in self.carriers)])

    def floor_of(self, reached: Reached) -> int:
        """The floor of what one consumer brings."""
        return self._lowest(self._brought_by(reached), reached.next_seq)

    def _lowest(self, lanes: Iterable[Lane], default: int) -> int:
        keeping = self._keeping
        floors = (lane.floor for lane in lanes if lane.waiting and (not lane.behind or lane in keeping))
        return min((f for f in floors if f is not None), default=default)

    def _brought_by(self, reached: Reached) -> Iterable[Lane]:
        lanes = self._lanes.values()
        return [lane for lane in lanes if self._reached(lane) is reached] if self.carriers else lanes

    @property
    def resume_at(self) -> int:
        """The lowest sequence that has to be delivered (again), by whichever consumer."""
        return self._resume(self._lanes.values(), self.floor)

    def resume_of(self, reached: Reached) -> int:
        """The lowest sequence that one consumer has to deliver (again) in a new session."""
        return self._resume(self._brought_by(reached), self.floor_of(reached))

    def _resume(self, lanes: Iterable[Lane], floor: int) -> int:
        behind = [lane.position for lane in lanes if lane.behind and not lane.parked]
        return max(1, min([floor, *behind]))

    def positions(self) -> Iterator[tuple[str, int]]:
        """Partition id and position of every lane."""
        return ((pid, lane.position) for pid, lane in self._lanes.items() if not lane.incoming)

    def behind(self) -> dict[str, int]:
        """Positions that the floor does not speak for: of released partitions and of parked lanes."""
        own = {pid: lane.position for pid, lane in self._lanes.items() if lane.behind and not lane.incoming}
        return self._released | own

    def known_position(self, partition_id: str) -> int:
        """Where a partition stands that is owned, or was once; 0 when it has no position here."""
        lane = self._lanes.get(partition_id)
        return lane.position if lane else self._released.get(partition_id, 0)

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        """Take in one delivery (the pull engine calls this for each message)."""
        entry = self._by_subject.get(subject) or (None if subject in self._strangers else self._route(subject))
        self.cursor = seq + 1
        if seq >= self.next_seq:
            self.next_seq = seq + 1
        if entry is None:
            self._not_ours(subject, reply)
            return
        lane, name = entry
        message = Message(name, payload, seq, lane.ownership, reply, header, _now())
        if lane.phase is _IDLE and seq >= lane.position and not lane.parked:
            # By far the most frequent case, and what `offer` would answer: nothing waits in this lane.
            lane.waiting.append(message)
            lane.phase = _READY
            self.ready.append(lane)
            self.held += 1
            return
        verdict = lane.offer(message)
        if verdict is _ACCEPTED:
            self.held += 1
            if lane.phase is _HELD:
                self.wake(lane)
        else:
            self._refuse(lane, message, verdict)

    def _not_ours(self, subject: bytes, reply: bytes) -> None:
        """Deal with a delivery that somebody else handles, or is going to."""
        if not self.lets_go:
            return
        if subject in self._strangers:
            # No record speaks for it, so nobody takes the acknowledgement for a position.
            self._ack(reply)
        else:
            self._foreign.append(reply)

    def _refuse(self, lane: Lane, message: Message, verdict: Verdict) -> None:
        """Deal with a delivery that is not simply the next one."""
        if verdict is Verdict.FINISHED:
            self._acks.ack(message.reply)
            self._metrics.skipped.value += 1
            self._metrics.redeliveries.value += 1
        elif verdict is Verdict.PARKED:
            if lane in self._keeping:
                self.held += 1
                self._keeping[lane].append(message)
            else:
                self._acks.ack(message.reply)
        elif verdict is Verdict.DUPLICATE:
            if any(waits.seq == message.seq and not waits.reply for waits in lane.waiting):
                self._acks.ack(message.reply)  # it was read from the stream before it was delivered
            else:
                self._metrics.redeliveries.value += 1
        else:
            self.held += 1
            _log.error("a message was overtaken", **log_fields(message))

    def park(self, lane: Lane) -> list[Message]:
        """Park a lane; what it lets go is to be given to `let_go` once its position is stored."""
        with self.lock:
            let_go = lane.park()
        self._keeping[lane] = []
        return [message for message in let_go if message.reply]

    def let_go(self, lane: Lane, messages: list[Message]) -> None:
        """The position of a parked lane is stored: acknowledge what it let go, now and from now on."""
        arrived = self._keeping.pop(lane, [])
        self.held -= len(messages) + len(arrived)
        for message in (*messages, *arrived):
            self._acks.ack(message.reply)

    def _route(self, subject: bytes) -> tuple[Lane, str] | None:
        """Find or make the lane of a subject that was not seen before; None when it is not ours."""
        name = subject.decode("utf-8", "replace")
        partition = self._partitions.get(name)
        if partition is None and not self.lets_go:
            partition = self._incoming.get(name)
        if partition is None:
            owner = next((p for s, p in self._partitions.items() if covers(s, name)), None)
            if owner is None:
                if name not in self._let_go_subjects:
                    self._strangers.add(subject)
                return None
            partition = owner
            if self._each_subject:
                try:
                    partition = self._template.parse(name)
                except SubjectMismatch:
                    return None
        lane = self._lanes.get(partition.id)
        if lane is None:
            start = self._position_of(partition.id, partition.subject)
            lane = self._open(partition, max(start, self._evicted_below if self._each_subject else 0))
        entry = self._by_subject[subject] = (lane, name)
        return entry

    def evict(self) -> None:
        """Forget idle lanes whose position the floor implies, when there are very many subjects."""
        if len(self._by_subject) > 2 * max(_EVICT_ABOVE, len(self._lanes)):
            self._by_subject.clear()
        if len(self._lanes) <= _EVICT_ABOVE or not self._each_subject:
            return
        floor = self._evicted_below = self.floor
        gone = {
            pid: lane
            for pid, lane in self._lanes.items()
            if lane.phase is Phase.IDLE and lane.position <= floor and not lane.behind
        }
        for partition_id in gone:
            del self._lanes[partition_id]
        dead = set(map(id, gone.values()))
        self._by_subject = {s: entry for s, entry in self._by_subject.items() if id(entry[0]) not in dead}

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────

    def settle(
        self,
        lane: Lane,
        more: bool = False,
        message: Message | None = None,
        started_s: float = 0.0,
        finished_s: float = 0.0,
    ) -> None:
        """A message is finished (the head, if none is named): acknowledge it and let the lane go on.

        `more`: the runner that reports goes on with this lane by itself. The times (`time.perf_counter`) are for
        lanes that record them; a runner that goes on before it reports has to name them.
        """
        message = lane.finish(message)
        self.finished += 1
        if message.reply:
            self.held -= 1
            self._ack(message.reply)
        if more:
            return
        if lane.phase is _CLOSED:
            self._abandon(lane)
        elif lane.careful_to or lane.pausing:
            self._go_on_carefully(lane)
        elif lane.waiting:
            lane.phase = _READY
            self.ready.append(lane)
        else:
            lane.phase = _IDLE
            if lane.parked:
                self.on_starved(lane)

    def _go_on_carefully(self, lane: Lane) -> None:
        self.trying.pop(lane.ownership.partition.id, None)
        lane.phase = Phase.HELD
        if lane.pausing:
            self._tell_waiters()
        elif lane.waiting:
            self.wake(lane)
        elif lane.parked:
            self.on_starved(lane)

    # ── standing still ────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def paused(self, partition_id: str) -> AsyncIterator[int | None]:
        """Start nothing of a partition meanwhile; gives its position, once no handler of it runs.

        None when it has no lane, or is released before its handler has ended.
        """
        lane = self._lanes.get(partition_id)
        if lane is None:
            yield None
            return
        with self.lock:
            lane.pausing = True
            if lane.phase is not Phase.RUNNING:
                lane.phase = Phase.HELD
        try:
            while lane.phase is Phase.RUNNING:
                await self.someone_left()
            yield lane.position if lane.phase is Phase.HELD else None
        finally:
            lane.pausing = False
            if not lane.waiting and lane.phase is Phase.HELD and not lane.careful_to and not lane.incoming:
                self.let_through(lane)
            else:
                self.wake(lane)

    async def someone_left(self) -> None:
        """Return when a handler has ended that somebody waits for, or after a moment."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await asyncio.wait([waiter], timeout=_LOOK_AGAIN_S)

    def _tell_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def bury_head(self, lane: Lane, reason: str) -> None:
        """Dead-letter the head of a lane that is held, without starting it."""
        lane.phase = Phase.RUNNING
        self._spawn(self._bury(lane, lane.waiting[0], reason))

    def put_back(self, lane: Lane) -> None:
        """A runner took a lane and started nothing: its permission had ended."""
        if lane.phase is _CLOSED:
            self._abandon(lane)
        else:
            lane.phase = _READY
            self.ready.append(lane)

    def failed(self, lane: Lane, error: BaseException, elapsed_s: float, message: Message | None = None) -> None:
        """The handler of a message (the head, if none is named) raised."""
        self.observe_latency(elapsed_s)
        if lane.effort:
            lane.effort.seconds += elapsed_s
        message = message or lane.waiting[0]
        if lane.phase is Phase.CLOSED:
            _log.warning(
                "handler failed after its partition was released", error=describe(error), **log_fields(message)
            )
            self._abandon(lane)
            return
        decision = after_failure(self._policy, message.attempt, error)
        if isinstance(error, HandlerTimeout):
            self._metrics.handler_failures.inc("timeout")
        if isinstance(decision, GiveUp):
            self._metrics.handler_failures.inc(decision.outcome)
            self._spawn(self._bury(lane, message, decision.reason))
        else:
            self._metrics.handler_failures.inc("retry")
            _log.warning(
                "handler failed, will retry", error=describe(error), delay_s=decision.delay_s, **log_fields(message)
            )
            self._try_again(lane, message, decision)

    def _try_again(self, lane: Lane, message: Message, decision: TryAgain) -> None:
        lane.phase = Phase.BACKOFF
        message.attempt += 1
        self._loop.call_later(decision.delay_s, self._backoff_over, lane)

    def _backoff_over(self, lane: Lane) -> None:
        if lane.phase is Phase.BACKOFF:
            lane.phase = Phase.READY
            self.ready.append(lane)
            self.on_ready()

    async def _bury(self, lane: Lane, message: Message, reason: str) -> None:
        await self._dead_letters.send(message, reason)
        self._metrics.dead_letters.inc()
        _log.error("message dead-lettered", reason=reason, **log_fields(message))
        self._settle_buried(lane, message)
        self.on_ready()

    def _settle_buried(self, lane: Lane, message: Message) -> None:
        self.settle(lane, message=message)

    def fed(self, lane: Lane) -> None:
        """A parked lane got messages from the stream."""
        if lane.waiting and lane.phase is Phase.IDLE:
            lane.phase = Phase.READY
            self.ready.append(lane)
            self.on_ready()
        elif lane.waiting:
            self.wake(lane)

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server of everything that has waited or run this long that it is still in hand."""
        limit = time.time() - older_than_s
        for lane in self._lanes.values():
            for message in lane.waiting:
                if message.reply and message.received_s <= limit:
                    self._acks.in_progress(message.reply)

    def all(self) -> list[Lane]:
        """Every lane."""
        return list(self._lanes.values())

    def running_lanes(self) -> list[Lane]:
        """Lanes whose head is with a runner."""
        return [lane for lane in self._lanes.values() if lane.phase is Phase.RUNNING and lane.waiting]

    def overdue(self, lane: Lane, running_s: float) -> None:
        """A handler that cannot be interrupted has run longer than it should: say so."""
        self._metrics.handler_failures.inc("timeout")
        _log.error(
            "handler exceeds its timeout and cannot be interrupted; its partition waits",
            running_s=round(running_s, 1),
            **log_fields(lane.waiting[0]),
        )

    @property
    def owned(self) -> tuple[str, ...]:
        """Ids of the partitions that are owned, those without a lane included."""
        return tuple(partition.id for partition in self._partitions.values())

    def queued(self) -> Mapping[str, int]:
        """How many messages are in hand, by partition."""
        return {partition_id: len(lane.waiting) for partition_id, lane in self._lanes.items()}

    @property
    def running(self) -> int:
        """Handlers that run now."""
        return self.count_running()

    @property
    def count(self) -> int:
        """Number of lanes."""
        return len(self._lanes)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle_dead_letters(self) -> None:
        """Wait for dead letters that are on their way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cancel_dead_letters(self) -> None:
        """Give up on dead letters that are on their way; their messages stay unfinished."""
        for task in self._tasks:
            task.cancel()


def log_fields(message: Message) -> dict[str, object]:
    """What a log line says of a message: where it is, never what it contains."""
    return {
        "stream": message.stream,
        "seq": message.seq,
        "subject": message.subject,
        "partition": message.partition.id,
        "attempt": message.attempt,
    }
