"""Lanes at run time: where deliveries wait for their turn and outcomes are settled.

Everything here runs on the event loop. A runner (see `runners`) takes a lane from `ready`, calls the handler with
the lane's head and reports back through `succeeded` or `failed`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import structlog

from parti.core.lane import Lane, Phase, Verdict
from parti.core.retry import GiveUp, HandlerTimeout, RetryPolicy, TryAgain, after_failure, describe
from parti.errors import SubjectMismatch
from parti.model.message import Message, Ownership
from parti.model.partition import Partition, Template
from parti.model.subjects import covers
from parti.telemetry.metrics import Metrics
from parti.worker.acks import AckWriter

_log = structlog.get_logger("parti.lanes")
_EVICT_ABOVE = 10_000


class DeadLetters(Protocol):
    """Where messages go that no attempt could handle."""

    async def send(self, message: Message, reason: str) -> None:
        """Return only when the message is stored; keep trying until then."""


class Lanes:
    """All lanes of a worker.

    With `each_subject`, every subject that fits the template is a partition of its own, found as it arrives.
    """

    def __init__(
        self,
        *,
        template: Template,
        stream: str,
        worker_id: str,
        policy: RetryPolicy,
        acks: AckWriter,
        dead_letters: DeadLetters,
        metrics: Metrics,
        each_subject: bool = False,
    ) -> None:
        self.ready: deque[Lane] = deque()
        self.held = 0
        self.finished = 0
        self.next_seq = 1
        self.running = 0
        # Held where a lane changes hands between the event loop and a handler's thread.
        self.lock = threading.Lock()
        self.draining = False
        self.on_ready: Callable[[], None] = lambda: None
        self._template = template
        self._stream = stream
        self._worker_id = worker_id
        self._policy = policy
        self._acks = acks
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._each_subject = each_subject
        self._partitions: dict[str, Partition] = {}
        self._position_of: Callable[[str, str], int] = lambda partition_id, subject: 0
        self._lanes: dict[str, Lane] = {}
        self._by_subject: dict[bytes, tuple[Lane, str]] = {}
        self._retired: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._messages = metrics.messages
        self._latency = metrics.handler_latency

    # ── ownership ─────────────────────────────────────────────────────────────────────────────────────────────

    def own(self, partitions: dict[str, Partition], position_of: Callable[[str, str], int]) -> None:
        """Replace the set of owned partitions (by subject) and where each of them starts.

        A partition that is no longer owned starts nothing more; a handler that runs finishes, and its position
        counts.
        """
        for subject, partition in self._partitions.items():
            if subject not in partitions:
                self._release(partition, position_of)
        self._partitions = dict(partitions)
        self._position_of = position_of

    def _release(self, partition: Partition, position_of: Callable[[str, str], int]) -> None:
        lanes = [lane for lane in self._lanes.values() if covers(partition.subject, lane.ownership.partition.subject)]
        for lane in lanes:
            self._retire(lane)
        if not lanes:
            self._retired[partition.id] = position_of(partition.id, partition.subject)

    def _retire(self, lane: Lane) -> None:
        partition_id = lane.ownership.partition.id
        with self.lock:
            running = lane.phase is Phase.RUNNING
            lane.phase = Phase.CLOSED
        self._retired[partition_id] = lane.position
        if not running:
            self._abandon(lane)
        del self._lanes[partition_id]
        self._by_subject = {s: entry for s, entry in self._by_subject.items() if entry[0] is not lane}
        self._metrics.partition_messages.remove(partition_id)

    def _abandon(self, lane: Lane) -> None:
        """Drop what waits in a closed lane: it belongs to the next owner, who starts at the position."""
        self.held -= len(lane.waiting)
        lane.waiting.clear()
        self._retired[lane.ownership.partition.id] = lane.position

    @property
    def retired(self) -> dict[str, int]:
        """Positions of partitions that were owned once."""
        return self._retired

    @property
    def floor(self) -> int:
        """Every message of an owned partition below this sequence is finished."""
        floors = (lane.floor for lane in self._lanes.values() if lane.waiting)
        return min((f for f in floors if f is not None), default=self.next_seq)

    def positions(self) -> Iterator[tuple[str, int]]:
        """Partition id and position of every lane."""
        return ((partition_id, lane.position) for partition_id, lane in self._lanes.items())

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        """Take in one delivery (the pull engine calls this for each message)."""
        entry = self._by_subject.get(subject) or self._route(subject)
        if entry is None:
            return
        lane, name = entry
        self._messages.value += 1
        if seq >= self.next_seq:
            self.next_seq = seq + 1
        self._take(lane, Message(name, payload, seq, lane.ownership, reply, header, time.time()))

    def _take(self, lane: Lane, message: Message) -> None:
        verdict = lane.offer(message)
        if verdict is Verdict.ACCEPTED:
            self.held += 1
            if lane.phase is Phase.IDLE:
                lane.phase = Phase.READY
                self.ready.append(lane)
        elif verdict is Verdict.FINISHED:
            self._acks.ack(message.reply)
            self._metrics.skipped.value += 1
            self._metrics.redeliveries.value += 1
        elif verdict is Verdict.DUPLICATE:
            self._metrics.redeliveries.value += 1
        else:
            self.held += 1
            _log.error("a message was overtaken", **_fields(message))

    def _route(self, subject: bytes) -> tuple[Lane, str] | None:
        """Find or make the lane of a subject that was not seen before; None when it is not ours."""
        name = subject.decode()
        partition = self._partitions.get(name)
        if partition is None:
            owner = next((p for s, p in self._partitions.items() if covers(s, name)), None)
            if owner is None:
                return None
            partition = owner
            if self._each_subject:
                try:
                    partition = self._template.parse(name)
                except SubjectMismatch:
                    return None
        lane = self._lanes.get(partition.id)
        if lane is None:
            ownership = Ownership(partition, self._stream, self._worker_id)
            position = self._retired.pop(partition.id, 0)
            position = max(position, self._position_of(partition.id, partition.subject))
            lane = self._lanes[partition.id] = Lane(ownership, position)
        entry = self._by_subject[subject] = (lane, name)
        return entry

    def evict(self) -> None:
        """Forget idle lanes whose position the floor implies, when there are very many subjects."""
        if len(self._lanes) <= _EVICT_ABOVE or not self._each_subject:
            return
        floor = self.floor
        gone = {pid: lane for pid, lane in self._lanes.items() if lane.phase is Phase.IDLE and lane.position <= floor}
        for partition_id in gone:
            del self._lanes[partition_id]
        dead = set(map(id, gone.values()))
        self._by_subject = {s: entry for s, entry in self._by_subject.items() if id(entry[0]) not in dead}

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────

    def succeeded(self, lane: Lane, elapsed_s: float, *, more: bool = False) -> None:
        """The handler of the lane's head returned. `more`: the runner goes on with this lane by itself."""
        self._latency.observe(elapsed_s)
        self._settle(lane, more=more)

    def failed(self, lane: Lane, error: BaseException, elapsed_s: float) -> None:
        """The handler of the lane's head raised."""
        self._latency.observe(elapsed_s)
        message = lane.waiting[0]
        if lane.phase is Phase.CLOSED:
            _log.warning("handler failed after its partition was released", error=describe(error), **_fields(message))
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
            self._try_again(lane, message, decision, error)

    def _try_again(self, lane: Lane, message: Message, decision: TryAgain, error: BaseException) -> None:
        self._log_retry(message, decision, error)
        lane.phase = Phase.BACKOFF
        message.attempt += 1
        self._loop.call_later(decision.delay_s, self._backoff_over, lane)

    def _log_retry(self, message: Message, decision: TryAgain, error: BaseException) -> None:
        _log.warning(
            "handler failed, will retry", error=describe(error), delay_s=decision.delay_s, **_fields(message)
        )

    def _backoff_over(self, lane: Lane) -> None:
        if lane.phase is Phase.BACKOFF:
            lane.phase = Phase.READY
            self.ready.append(lane)
            self.on_ready()

    async def _bury(self, lane: Lane, message: Message, reason: str) -> None:
        await self._dead_letters.send(message, reason)
        self._metrics.dead_letters.inc()
        _log.error("message dead-lettered", reason=reason, **_fields(message))
        self._settle(lane)
        self.on_ready()

    def _settle(self, lane: Lane, *, more: bool = False) -> None:
        """The head is finished: acknowledge it and let the lane go on."""
        message = lane.finish()
        self.held -= 1
        self.finished += 1
        self._acks.ack(message.reply)
        if more:
            return
        if lane.phase is Phase.CLOSED:
            self._abandon(lane)
        elif lane.waiting:
            lane.phase = Phase.READY
            self.ready.append(lane)
        else:
            lane.phase = Phase.IDLE

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server of everything that has waited or run this long that it is still in hand."""
        limit = time.time() - older_than_s
        for lane in self._lanes.values():
            for message in lane.waiting:
                if message.received_s > limit:
                    break
                self._acks.in_progress(message.reply)

    def running_lanes(self) -> list[Lane]:
        """Lanes whose head is with a runner."""
        return [lane for lane in self._lanes.values() if lane.phase is Phase.RUNNING and lane.waiting]

    def overdue(self, lane: Lane, running_s: float) -> None:
        """A handler that cannot be interrupted has run longer than it should: say so."""
        self._metrics.handler_failures.inc("timeout")
        _log.error(
            "handler exceeds its timeout and cannot be interrupted; its partition waits",
            running_s=round(running_s, 1),
            **_fields(lane.waiting[0]),
        )

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


def _fields(message: Message) -> dict[str, object]:
    return {
        "stream": message.stream,
        "seq": message.seq,
        "subject": message.subject,
        "partition": message.partition.id,
        "attempt": message.attempt,
    }
