"""Lanes at run time: where deliveries wait for their turn and outcomes are settled.

Everything here runs on the event loop. A runner (see `runners`) takes a lane from `ready`, calls the handler with
the lane's head and reports back through `settle` or `failed`. `deliver` and `settle` run for each message and touch
nothing but the lanes' own attributes; what is rarer has a part of its own: `roster` (which partitions have a lane),
`floors` (how far they have got), `failures` (what was not handled) and `pauses` (a partition stands still).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping

import structlog

from parti.core.lane import Lane, Phase, Verdict
from parti.core.retry import RetryPolicy, TryAgain
from parti.model.message import Message, Ownership
from parti.model.partition import Template
from parti.telemetry.metrics import Metrics
from parti.worker.acks import Acks
from parti.worker.failures import DeadLetters, Failures, log_fields
from parti.worker.floors import Floors
from parti.worker.pauses import Pauses
from parti.worker.roster import Roster

_log = structlog.get_logger("parti.lanes")
_now = time.time
_RECOVERY_S = 1.0
_COPIES = 5

# Looked up for every message: a global is cheaper than an attribute of an enum.
_ACCEPTED, _IDLE, _HELD, _READY, _CLOSED = Verdict.ACCEPTED, Phase.IDLE, Phase.HELD, Phase.READY, Phase.CLOSED


class Lanes:
    """All lanes of a worker, those that are ready, and what is in hand.

    A message is acknowledged when it is finished, or once a record is stored that lets somebody read it from the
    stream; never before. A lane that was closed starts nothing more. `each_subject` and `measures`: see `Roster`.
    """

    def __init__(
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
        self.draining = False
        self.permitted_until_s = float("inf")
        """Handlers may be started until this moment of `time.perf_counter`: the worker's lease ends then."""
        self.on_ready: Callable[[], None] = lambda: None
        self.count_running: Callable[[], int] = lambda: 0
        self.on_starved: Callable[[Lane], None] = lambda lane: None
        self.on_held: Callable[[Lane], None] = lambda lane: None
        """Called when a lane that is held has something that could be started."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when a handler has ended whose partition was released."""
        self.lets_go = False
        """Messages of others may be acknowledged: whoever handles them reads them from the stream."""
        self.trying: dict[str, int] = {}
        """What has been noted down as about to be started, by partition id."""
        self.observe_latency = metrics.handler_latency.observe
        # Held where a lane changes hands between the event loop and a handler's thread.
        self.lock = threading.Lock()
        self._acks = acks
        self._ack: Callable[[bytes], None] = acks.ack
        self._metrics = metrics
        # What arrives for a parked lane whose position is not stored yet.
        self._keeping: dict[Lane, list[Message]] = {}
        # To be acknowledged once a record is stored that no longer speaks for their partitions; the latter, once the
        # one is stored that was summarised last.
        self._foreign: list[bytes] = []
        self._foreign_summarised: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        lanes: dict[str, Lane] = {}
        self.floors = self._make_floors(lanes)
        self.roster = Roster(
            self,
            self.floors,
            lanes,
            template=template,
            stream=stream,
            worker_id=worker_id,
            each_subject=each_subject,
            measures=measures,
        )
        self.failures = Failures(self, policy, dead_letters, metrics)
        self.pauses = Pauses(self, lanes)
        # The roster's own, looked up for every message.
        self._by_subject, self._strangers = self.roster.by_subject, self.roster.strangers
        self._route = self.roster.route

    def _make_floors(self, lanes: Mapping[str, Lane]) -> Floors:
        return Floors(self, lanes, self._keeping)

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

    def passed(self, seq: int) -> None:
        """The server has nothing more for us up to `seq`."""
        self.cursor = max(self.cursor, seq + 1)
        self.next_seq = max(self.next_seq, seq + 1)

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
            self.abandon(lane)
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
            self.pauses.tell()
        elif lane.waiting:
            self.wake(lane)
        elif lane.parked:
            self.on_starved(lane)

    def put_back(self, lane: Lane) -> None:
        """A runner took a lane and started nothing: its permission had ended."""
        if lane.phase is _CLOSED:
            self.abandon(lane)
        else:
            lane.phase = _READY
            self.ready.append(lane)

    def failed(self, lane: Lane, error: BaseException, elapsed_s: float, message: Message | None = None) -> None:
        """The handler of a message (the head, if none is named) raised."""
        self.observe_latency(elapsed_s)
        if lane.effort:
            lane.effort.seconds += elapsed_s
        message = message or lane.waiting[0]
        attempt = message.attempt
        try:
            self._decide(lane, message, error)
        except Exception:
            # The runner recovers the lane, and the message is handled again: not as the same attempt for ever.
            message.attempt = attempt + 1
            raise

    def _decide(self, lane: Lane, message: Message, error: BaseException) -> None:
        """Have a message that failed tried again or dead-lettered, or leave it to the next owner."""
        if lane.phase is not Phase.CLOSED:
            self.failures.failed(lane, message, error)
            return
        leaves = self.roster.is_leaving(lane)
        if leaves and self.permitted and self.failures.gives_up(message, error):
            # The partition is handed over when its running handler has ended, dead letter included.
            self.failures.failed(lane, message, error)
            return
        if leaves:
            self.roster.note_failed(lane.ownership.partition.id, message.seq, message.attempt)
        self.failures.failed_after_release(message, error)
        self.abandon(lane)

    def recover(self, lane: Lane, error: BaseException, *, more: bool = False) -> None:
        """Something of ours broke while an outcome was settled: say so, and let the lane go on after a moment.

        What was finished stays finished; what was not is handled again. `more`: a runner still works on the lane.
        """
        _log.error(
            "an outcome could not be settled; the partition goes on",
            partition=lane.ownership.partition.id,
            position=lane.position,
            exc_info=error,
        )
        if more:
            return
        if lane.phase is _CLOSED:
            self.abandon(lane)
        elif lane.phase is Phase.RUNNING:
            self._back_off(lane, _RECOVERY_S, self._backoff_over)

    def front(self) -> Lane | None:
        """The lane whose head is started next; None when nothing is ready."""
        for _ in range(_COPIES):
            try:
                return next((lane for lane in list(self.ready) if lane.phase is _READY and lane.waiting), None)
            except RuntimeError:  # a thread took one while the others were copied
                continue
        return None

    def orphans(self, at_work: Container[Lane]) -> list[Lane]:
        """Lanes that wait for something that nobody does: a handler that does not run, or leave to go on."""
        return [
            lane
            for lane in (*self.running_lanes(), *(lane for lane in self.roster.all() if lane.phase is _HELD))
            if lane.waiting
            and lane not in at_work
            and not self.failures.buries(lane)
            and not (lane.incoming or lane.pausing)
        ]

    def readopt(self, lane: Lane) -> None:
        """Let a lane go on that waits for something that nobody does."""
        if lane.phase is _HELD:
            self.wake(lane)
        else:
            self.recover(lane, RuntimeError("no runner works on it"))

    def runner_died(self, lane: Lane | None, error: BaseException) -> None:
        """A runner died, with the handler of a lane (None: between two handlers): say so; the message has failed."""
        _log.error(
            "a runner died; another one takes its place",
            partition=lane.ownership.partition.id if lane else None,
            exc_info=error,
        )
        if lane is None or not lane.waiting:
            return
        try:
            self.failed(lane, error, time.perf_counter() - lane.started_s)
        except Exception as broken:
            self.recover(lane, broken)

    def try_again(self, lane: Lane, message: Message, decision: TryAgain) -> None:
        """Have the message handled again after a delay; its lane waits."""
        self.roster.note_failed(lane.ownership.partition.id, message.seq, message.attempt)
        message.attempt += 1
        self._back_off(lane, decision.delay_s, self._backoff_over)

    def _back_off(self, lane: Lane, delay_s: float, over: Callable[[Lane], None]) -> None:
        """Start nothing of a lane until `over` is called. If no timer can be had, it is not waited for either."""
        self._loop.call_later(delay_s, over, lane)
        lane.phase = Phase.BACKOFF

    def _backoff_over(self, lane: Lane) -> None:
        if lane.phase is Phase.BACKOFF:
            lane.phase = Phase.READY if lane.waiting else Phase.IDLE
            if lane.waiting:
                self.ready.append(lane)
                self.on_ready()
            elif lane.parked:
                self.on_starved(lane)

    def still_fails(self, partition_id: str, seq: int) -> bool:
        """Whether a message that has failed is still to be handled here."""
        lane = self.roster.lanes.get(partition_id)
        return lane is not None and lane.position <= seq

    def buried(self, lane: Lane, message: Message) -> None:
        """The message is stored as a dead letter: it is finished, and its lane goes on."""
        self._settle_buried(lane, message)
        self.on_ready()

    def _settle_buried(self, lane: Lane, message: Message) -> None:
        self.settle(lane, message=message)

    # ── going on ──────────────────────────────────────────────────────────────────────────────────────────────

    def wake(self, lane: Lane) -> None:
        """Let a lane that was held go on, unless something else holds it."""
        if lane.phase is not Phase.HELD or lane.incoming or lane.pausing:
            return
        if lane.retry and not self._counts_on(lane):
            return
        if lane.careful_to:
            self.on_held(lane)
        else:
            self.let_through(lane)

    def _counts_on(self, lane: Lane) -> bool:
        """Give the head the attempts that earlier owners made, and its pause; whether the lane may go on now."""
        assert lane.retry
        if not lane.waiting:
            if lane.parked:
                self.on_starved(lane)
            return False
        (seq, attempts), lane.retry = lane.retry, None
        head = lane.waiting[0]
        if head.seq != seq or head.attempt > attempts:
            return True
        head.attempt = attempts + 1
        lane.started_s = time.perf_counter()
        self._back_off(lane, self.failures.pause_s(attempts), self._pause_over)
        return False

    def _pause_over(self, lane: Lane) -> None:
        if lane.phase is Phase.BACKOFF:
            lane.phase = Phase.HELD
            self.wake(lane)

    def let_through(self, lane: Lane) -> None:
        """Nothing holds the lane any more."""
        lane.phase = Phase.READY if lane.waiting else Phase.IDLE
        if lane.waiting:
            self.ready.append(lane)
            self.on_ready()
        elif lane.parked:
            self.on_starved(lane)

    def fed(self, lane: Lane) -> None:
        """A parked lane got messages from the stream."""
        if lane.waiting and lane.phase is Phase.IDLE:
            lane.phase = Phase.READY
            self.ready.append(lane)
            self.on_ready()
        elif lane.waiting:
            self.wake(lane)

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

    # ── parking ───────────────────────────────────────────────────────────────────────────────────────────────

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

    # ── when partitions come and go ───────────────────────────────────────────────────────────────────────────

    def skip_to(self, positions: Mapping[str, int]) -> None:
        """Others have finished these partitions up to there: what waits below need not be handled."""
        for partition_id, position in positions.items():
            lane = self.roster.lanes.get(partition_id)
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
            elif dropped and lane.starved:
                self.on_starved(lane)

    def refence(self, lane: Lane, ownership: Ownership) -> None:
        """What has not been started carries this ownership."""
        with self.lock:
            lane.ownership = ownership
            for message in lane.waiting:
                message.ownership = ownership

    def closed(self, lane: Lane) -> int:
        """A lane is closed; returns its position."""
        self._metrics.partition_messages.remove(lane.ownership.partition.id)
        return lane.position

    def abandon(self, lane: Lane) -> None:
        """Drop what waits in a closed lane: it belongs to the next owner, who starts at the position."""
        dropped = [message.reply for message in (*lane.waiting, *self._keeping.pop(lane, ())) if message.reply]
        self.held -= len(dropped)
        if self.lets_go:
            # Otherwise the server would deliver them again, here, for as long as the consumer lives.
            self._foreign += dropped
        lane.waiting.clear()
        self.trying.pop(lane.ownership.partition.id, None)
        if self.roster.left(lane):
            self.pauses.tell()
            self.on_left()

    @property
    def leaving(self) -> tuple[str, ...]:
        """Partitions that were released and whose handler still runs."""
        return tuple(self.roster.leaving)

    def summarised(self) -> None:
        """Positions were summed up, to be stored: what is let go by now is not in them.

        What is let go while they are being stored is: were it acknowledged then, the ack floor would be taken for
        its position after a crash.
        """
        self.roster.summarised()
        self._foreign_summarised += self._foreign
        self._foreign.clear()

    def stored(self) -> None:
        """The positions that were summed up last are stored: acknowledge what they do not speak for."""
        self.roster.stored()
        foreign, self._foreign_summarised = self._foreign_summarised, []
        for reply in foreign:
            self._ack(reply)

    def start_over(self) -> None:
        """The stream was made anew: sequences and positions of the old one mean nothing any more.

        Handlers that run may finish, but nothing comes of it.
        """
        for lane in (*self.roster.lanes.values(), *self.roster.leaving.values()):
            with self.lock:
                lane.phase = Phase.CLOSED
            for message in lane.waiting:
                message.reply = b""
        self.roster.start_over()
        self.failures.start_over()
        self.floors.start_over()
        self._keeping.clear()
        self._foreign.clear()
        self._foreign_summarised.clear()
        self.trying.clear()
        self.held = 0

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server of everything that has waited or run this long that it is still in hand."""
        limit = time.time() - older_than_s
        for lane in self.roster.lanes.values():
            for message in lane.waiting:
                if message.reply and message.received_s <= limit:
                    self._acks.in_progress(message.reply)

    def running_lanes(self) -> list[Lane]:
        """Lanes whose head is with a runner."""
        return [lane for lane in self.roster.lanes.values() if lane.phase is Phase.RUNNING and lane.waiting]

    def queued(self) -> Mapping[str, int]:
        """How many messages are in hand, by partition."""
        return {partition_id: len(lane.waiting) for partition_id, lane in self.roster.lanes.items()}

    @property
    def running(self) -> int:
        """Handlers that run now."""
        return self.count_running()
