"""The pull engine: standing, overlapping pulls on one consumer, kept alive through everything.

A *session* is one uninterrupted chain of deliveries on one connection. While it lasts, the server's delivery
counter grows by one with each message; a hole means that a delivery was lost on its way, and later ones must not
be handled before it. So whenever the chain may be broken (a hole, a reconnect, two missed heartbeats, a consumer
that went away) the session is closed, `prepare` puts the consumer back to the position, and a new one begins.
Guards Order across every kind of interruption.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from parti.core.batch import Load, after_a_while, after_fill, pull_size
from parti.core.pull_status import PullStep, next_step
from parti.errors import ConnectionFailed, PartiError
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.protocol import Sink
from parti.jetstream.pull_group import PullGroup
from parti.jetstream.wire import Wire, pub
from parti.model.headers import parse_headers, parse_reply, status_of
from parti.telemetry.health import Health
from parti.telemetry.metrics import PULL_STATUS, Metrics
from parti.telemetry.tasks import Supervised, supervise

_log = structlog.get_logger("parti.pull")

_SLOTS = 2
"""Pulls that stand at the same time: while one is being refilled the other keeps messages coming."""
_ADAPT_INTERVAL_S = 0.1
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_SETTLED_S = 1.0
_RIVAL_GAPS = 4
_PREPARING_S = 15.0
"""Longest time that a session may take to be prepared: some requests in a row, each with 5 s for its answer."""
_BETWEEN_S = 2 * _RETRY_MAX_S
_SOON_S = 0.5
"""A session that is prepared sooner changes nothing: pulls have been without an answer all the same."""
_REFUSALS = 3
"""Times in a row that one delivery could not be taken in when that is signalled."""
_PLAIN_DOTS = frozenset({8, 10})
_ENDS_SESSION = frozenset({PullStep.NEW_SESSION, PullStep.RECREATE, PullStep.REFUSED})


class Intake(Protocol):
    """Where deliveries go."""

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        """Take one message. Called on the event loop, for each message: it must be quick and must not raise."""

    @property
    def held(self) -> int:
        """Messages taken and not yet acknowledged."""

    @property
    def finished(self) -> int:
        """Messages finished since the start."""


@dataclass(frozen=True, slots=True)
class PullTuning:
    """The engine's settings."""

    batch: int
    max_bytes: int
    expires_s: float
    heartbeat_s: float
    limit: int
    """Messages in flight at which pulling stops."""


class _Slot:
    """One standing pull and the subscription that it arrives on."""

    __slots__ = ("inbox", "pin_id", "remaining", "sid", "unlimited")

    def __init__(self) -> None:
        self.sid = b""
        self.inbox = b""
        self.remaining = 0
        self.unlimited = False
        self.pin_id = ""
        """What the pull was sent with, or has got since."""


class PullEngine:
    """Keeps pulls standing on one consumer from `start` to `stop`.

    `prepare` verifies the consumer and puts it to the position; it returns False when there is nothing to pull
    (no partitions). Its errors are retried with backoff for as long as the engine runs. No session is open while it
    runs: what stands on the consumer then, and does not end, are pulls of another process.
    """

    def __init__(
        self,
        connection: Connection,
        wire: Wire,
        intake: Intake,
        tuning: PullTuning,
        metrics: Metrics,
        health: Health,
        *,
        stream: str,
        consumer: str,
        prepare: Callable[[str], Awaitable[bool]],
        signal: str = "pull",
        passed: Callable[[int], None] | None = None,
        group: PullGroup | None = None,
        shared: bool = False,
    ) -> None:
        """`passed` is for one engine of several on a connection, each with a `signal` of its own.

        It is told how far the server has looked when there is nothing to deliver; and what arrives for the other
        engines is no sign of life. `group`: pulls belong to a priority group. `shared`: others pull from the consumer
        too, so a hole in its counter says nothing, and a lost pin ends no session. Otherwise a pin that is taken or
        lost begins a new one, and `prepare` decides by `group.pin_id` what follows.
        """
        self._connection = connection
        self._wire = wire
        self._intake = intake
        self._tuning = tuning
        self._metrics = metrics
        self._health = health
        self._consumer = consumer
        self.aim(stream)
        self._prepare = prepare
        self._signal = signal
        self._passed = passed
        self._group = group
        if group is not None:
            group.moved = self._on_pin_lost
        self._shared = shared
        # Where publishers set no headers, all messages under a pin have the same: they share one copy, since what is
        # in hand should stay in the processor's cache.
        self._pin_header: bytes | None = None
        self._batch = tuning.batch
        self._slots: list[_Slot] = []
        self._open = False
        self._paused = False
        self._suspended = False
        self._nothing_to_pull = False
        self._hold_until_tick = False
        self._expected = self._counted = 0
        self._heard = False
        self._filled = False
        self._ceiling = max(1, tuning.limit // _SLOTS)
        self._gaps = 0
        self._signs = 0
        self._quiet_since_s = 0.0
        self._preparing_since_s: float | None = None
        self._refused_seq = self._refusals = 0
        self._reason = "start"
        self._trouble = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._tasks: list[Supervised] = []
        self._removers: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Begin pulling; returns when the first session stands, or raises what `prepare` raised."""
        pull = await self._prepare(self._reason)
        self._nothing_to_pull = not pull
        self._begin_to_wait()
        if pull:
            self._open_session()
        self._removers = [self._wire.on_chunk(self._chunk_done), self._connection.on_state(self._on_state)]
        self._start_tasks()

    def _start_tasks(self) -> None:
        self._tasks = [
            supervise(self._supervise, "pull-supervisor", self._health),
            supervise(self._watch, "pull-watch", self._health),
        ]

    def revive(self, reason: str) -> None:
        """Replace the engine's tasks, whatever has become of them, and begin a new session."""
        for task in self._tasks:
            task.cancel()
        if self._removers:
            self._start_tasks()
            self._trouble.clear()
            self.new_session(reason)

    async def stop(self) -> None:
        """Stop pulling at once; messages still on their way are dropped and will be delivered again."""
        self._close_session()
        if self._group is not None:
            self._group.deafen(self._wire)
        for remove in self._removers:
            remove()
        self._removers = []
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def aim(self, stream: str) -> None:
        """Pull from the consumer on this stream from now on; only `prepare` may call this, between two sessions."""
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{self._consumer}".encode()

    def pause(self) -> None:
        """Close the session and stay closed until `resume`."""
        self._paused = True
        self._resumed.clear()
        self._close_session()

    def resume(self, *, prepared: bool, pull: bool = True, reason: str = "resumed") -> None:
        """Go on after `pause`: at once when the consumer has been prepared, else through `prepare`."""
        self._paused = False
        self._resumed.set()
        self._begin_to_wait()
        # After a reconnect the supervisor may be in `prepare`, waiting for the update that paused pulls. It would
        # take pulls of a session that is opened now for those of another process.
        if prepared and not self._trouble.is_set() and self._preparing_since_s is None:
            self._nothing_to_pull = not pull
            if pull:
                self._open_session()
        else:
            self.new_session(reason)

    def suspend(self) -> None:
        """Stop pulling until `unsuspend`, whatever else happens: this process may not act."""
        self._suspended = True
        self._close_session()

    def unsuspend(self, reason: str) -> None:
        """Go on, through `prepare`."""
        if self._suspended:
            self._suspended = False
            self._begin_to_wait()
            self.new_session(reason)

    def new_session(self, reason: str) -> None:
        """Close the session because its chain may be broken, and begin a new one."""
        self._close_session()
        if not self._trouble.is_set():
            self._reason = reason
            self._trouble.set()

    @property
    def healthy(self) -> bool:
        """Whether pulls stand, or deliberately do not."""
        return self._open or self._paused or (self._nothing_to_pull and not self._suspended)

    @property
    def consumer(self) -> str:
        """Name of the consumer."""
        return self._consumer

    @property
    def sign(self) -> int | None:
        """A number that grows with every answer or refusal of the server; None while no pull is wanted."""
        wanted = self._removers and not (self._paused or self._suspended or self._nothing_to_pull)
        if not wanted or self._connection.state is not ConnectionState.CONNECTED:
            return None
        full = self._intake.held >= self._tuning.limit
        return None if self._open and full and not self.credit else self._signs

    @property
    def quiet_s(self) -> float:
        """Time since the last sign, or since pulls are wanted.

        Sessions do not count: those that begin again and again, and get no answer, are what is to be noticed.
        """
        return asyncio.get_running_loop().time() - self._quiet_since_s

    @property
    def may_be_quiet_s(self) -> float:
        """How long there may be no sign while all is well."""
        since_s = self._preparing_since_s
        if since_s is not None and asyncio.get_running_loop().time() - since_s >= _SOON_S:
            return _PREPARING_S
        return _BETWEEN_S if since_s is None and not self._open else 2 * self._tuning.heartbeat_s + 1.0

    def _sign(self) -> None:
        self._signs += 1
        self._begin_to_wait()

    def _begin_to_wait(self) -> None:
        self._quiet_since_s = asyncio.get_running_loop().time()

    def tell(self) -> dict[str, Any]:
        """What a log line says of the pulls."""
        return {
            "open": self._open,
            "credit": self.credit,
            "paused": self._paused,
            "suspended": self._suspended,
            "reason": self._reason,
            "dead_tasks": [task.name for task in self._tasks if task.done()],
        }

    @property
    def credit(self) -> int:
        """Messages that the server may still send on standing pulls."""
        return sum(slot.remaining for slot in self._slots)

    @property
    def batch(self) -> int:
        """The present batch size."""
        return self._batch

    def _chunk_done(self) -> None:
        if self._passed is None or self._expected != self._counted:
            self._heard = True
            self._sign()
        if self._group is not None and self._expected != self._counted:
            self._group.on_messages()
        self._metrics.messages.value += self._expected - self._counted
        self._counted = self._expected
        self.refill()

    def refill(self) -> None:
        """Send pulls for the room there is. Called after each chunk of input and after acknowledgements."""
        if not self._open or self._hold_until_tick:
            return
        held = self._intake.held
        if self._filled:
            # Asked again after acknowledgements: right after a chunk, nothing of it has been handled yet.
            grown = after_fill(self._batch, held=held, ceiling=self._ceiling)
            self._filled = grown == self._batch
            self._batch = grown
        one = self._group is not None and self._group.waiting
        for slot in self._slots[:1] if one else self._slots:
            if slot.remaining <= 0:
                size = pull_size(self._batch, limit=self._tuning.limit, inflight=held, credit=self.credit)
                if not size:
                    return
                self._request(slot, size)

    # ── session ───────────────────────────────────────────────────────────────────────────────────────────────

    def _open_session(self) -> None:
        self._close_session()
        if self._suspended:
            return
        self._expected = self._counted = 1  # RESET makes the server count from one again
        self._heard = True
        self._hold_until_tick = False
        self._slots = []
        for _ in range(_SLOTS):
            slot = _Slot()
            self._listen(slot)
            self._slots.append(slot)
        if self._group is not None:
            self._group.listen(self._wire)
        self._open = True
        self.refill()

    def _listen(self, slot: _Slot) -> None:
        inbox = self._wire.new_inbox()
        slot.inbox, slot.remaining = inbox.encode(), 0
        waiting = self._group is not None and self._group.waiting
        slot.sid = self._wire.subscribe(inbox, self._waiting_sink_for(slot) if waiting else self._sink_for(slot))

    def _close_session(self) -> None:
        self._open = False
        for slot in self._slots:
            self._wire.unsubscribe(slot.sid)
        self._slots = []

    def _sink_for(self, slot: _Slot) -> Sink:
        deliver, pin_header = self._intake.deliver, self._pin_header

        def sink(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
            if header == pin_header:
                header = pin_header
            if not reply:
                self._heard = True
                self._sign()
                self._on_status(slot, header or b"")
                return
            # Both forms of the subject end in: stream sequence, consumer sequence, timestamp, pending.
            if reply.count(b".") in _PLAIN_DOTS:
                _, sequence, number, _, _ = reply.rsplit(b".", 4)
                seq, counter = int(sequence), int(number)
            else:
                info = parse_reply(reply)
                seq, counter = info.stream_seq, info.consumer_seq
            if counter != self._expected:
                if not self._shared:
                    if self._open:
                        self._gaps += 1
                        self.new_session(f"delivery {self._expected} is missing, got {counter}")
                    return
                self._counted += counter - self._expected  # went to others
            self._expected = counter + 1
            slot.remaining -= 1
            if not slot.remaining:
                self._filled = True
            try:
                deliver(subject, reply, header, payload, seq)
            except Exception as error:
                # It must come again before anything after it.
                _log.exception("a delivery could not be taken in", seq=seq)
                self._note_refusal(seq, error)
                self.new_session("a delivery could not be taken in")

        return sink

    def _note_refusal(self, seq: int, error: Exception) -> None:
        """A delivery that fails again and again stops its consumer: that is worth a signal."""
        self._refusals = self._refusals + 1 if seq == self._refused_seq else 1
        self._refused_seq = seq
        if self._refusals >= _REFUSALS:
            self._health.raise_signal(f"{self._signal}-delivery", f"message {seq} cannot be taken in: {error!r}")

    def _waiting_sink_for(self, slot: _Slot) -> Sink:
        """The same for a pull without an id, whose first message pins this client.

        From then on nothing but what the pin is good for comes here, and nobody has to look at headers.
        """
        group, sink = self._group, self._sink_for(slot)
        assert group is not None

        def waiting_sink(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
            if reply and group.on_message(header):
                slot.pin_id = group.pin_id
                self._pin_header = header
                if not self._shared:
                    # Somebody else may have had deliveries since: `prepare` says where to go on.
                    self.new_session("pinned")
                    return
                for each in self._slots:
                    self._wire.redirect(each.sid, self._sink_for(each))
            sink(subject, reply, header, payload)

        return waiting_sink

    def _on_pin_lost(self, reason: str) -> None:
        """Pull without the id; pulls that stand with it get nothing more, and are told so at some time."""
        if not self._shared:
            self.new_session(f"pinned no more: {reason}")
            return
        for slot in self._slots:
            if slot.pin_id:
                self._wire.unsubscribe(slot.sid)
                slot.pin_id = ""
                self._listen(slot)

    def _request(self, slot: _Slot, size: int) -> None:
        body: dict[str, Any] = {
            "batch": size,
            "expires": int(self._tuning.expires_s * 1e9),
            "idle_heartbeat": int(self._tuning.heartbeat_s * 1e9),
        }
        if slot.unlimited:
            slot.unlimited = False
            body["batch"] = size = 1
        elif self._tuning.max_bytes:
            body["max_bytes"] = self._tuning.max_bytes
        if self._group is not None:
            body |= self._group.fields(asyncio.get_running_loop().time())
            slot.pin_id = self._group.pin_id
        if self._wire.write(pub(self._next_subject, json.dumps(body).encode(), slot.inbox)):
            slot.remaining = size
            self._metrics.pull_requests.inc()

    def _on_status(self, slot: _Slot, header: bytes) -> None:
        code, text = status_of(header)
        self._metrics.pull_status.inc(PULL_STATUS.get(code, "other"))
        step = next_step(code, text)
        if self._group is not None and self._group.on_status(code, text, slot.pin_id):
            self._on_pin_lost(f"{code} {text}".strip())
        if step is PullStep.ALIVE or not self._open:
            if self._open and self._passed:
                self._note_passed(header, self._passed)
            return
        slot.remaining = 0
        if step is PullStep.PULL_LARGER:
            slot.unlimited = True
        elif step is PullStep.WAIT_FOR_ROOM:
            self._hold_until_tick = True
        elif step in _ENDS_SESSION or (step is PullStep.UNPINNED and not self._shared):
            log = _log.error if step is PullStep.REFUSED else _log.warning
            log("pull ended by the server", status=code, text=text, consumer=self._consumer, next=step.value)
            self.new_session(f"{code} {text}".strip())

    def _note_passed(self, header: bytes, passed: Callable[[int], None]) -> None:
        """A heartbeat says up to where there is nothing more; only if nothing that was sent before is missing."""
        said = parse_headers(header)
        try:
            count, seq = int(said["Nats-Last-Consumer"]), int(said["Nats-Last-Stream"])
        except (KeyError, ValueError):
            return
        if count == self._expected - 1:
            passed(seq)

    # ── supervision ───────────────────────────────────────────────────────────────────────────────────────────

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        # Also on the way back up: the subscriptions of the old connection are gone.
        if self._group is not None:
            self._group.on_reconnect()
        self._begin_to_wait()
        self.new_session(f"connection {state.value}: {reason}")

    async def _supervise(self) -> None:
        """Bring a closed session back, for as long as the engine runs."""
        delay = _RETRY_MIN_S
        while True:
            await self._trouble.wait()
            await self._resumed.wait()
            try:
                await self._connection.wait_connected()
            except ConnectionFailed:
                return  # closed for good: whoever closed it knows
            reason, opened = self._reason, False
            self._trouble.clear()
            self._preparing_since_s = asyncio.get_running_loop().time()
            self._close_session()  # one that was asked for during the start was opened all the same
            try:
                pull = await self._prepare(reason)
                if self._nothing_to_pull:
                    self._begin_to_wait()
                self._nothing_to_pull = not pull
                opened = not self._trouble.is_set() and not self._paused
                if opened and pull:
                    self._open_session()
                    _log.info("pulling again", consumer=self._consumer, reason=reason)
                self._health.clear(self._signal)
            except PartiError as error:
                self._health.raise_signal(self._signal, f"consumer {self._consumer} cannot be read: {error}")
                _log.warning("consumer not ready, will try again", reason=reason, error=str(error))
                self._reason = reason
                self._trouble.set()
                self._sign()  # a refusal is an answer; that the consumer is there says nothing of pulls
            except BaseException:
                self._trouble.set()  # whoever begins this loop again has to try again
                raise
            finally:
                self._preparing_since_s = None
            self._warn_of_rivals()
            lasted = opened and await self._stays_open(_SETTLED_S)
            delay = _RETRY_MIN_S if lasted else min(delay * 2, _RETRY_MAX_S)
            if self._trouble.is_set() and delay > 2 * _RETRY_MIN_S:
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))

    async def _stays_open(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._trouble.wait(), seconds)
        except TimeoutError:
            self._gaps = self._refusals = 0
            self._health.clear(f"{self._signal}-delivery")
            return True
        return False

    def _warn_of_rivals(self) -> None:
        if self._gaps >= _RIVAL_GAPS:
            reason = (
                f"deliveries of consumer {self._consumer} keep going elsewhere: another process seems to pull from "
                f"it; give each worker its own worker_id"
            )
            self._health.raise_signal(self._signal, reason)
            _log.error("pull chain keeps breaking", reason=reason)

    async def _watch(self) -> None:
        """Adapt the batch, retry after "wait for room", and notice silence."""
        loop = asyncio.get_running_loop()
        finished, silent_s, looked_s = self._intake.finished, 0.0, loop.time()
        while True:
            await asyncio.sleep(_ADAPT_INTERVAL_S)
            elapsed_s, looked_s = loop.time() - looked_s, loop.time()
            self._hold_until_tick = False
            load = Load(self._intake.finished - finished, elapsed_s, self._intake.held)
            finished = self._intake.finished
            self._batch = after_a_while(self._batch, load, ceiling=self._ceiling)
            if self._heard or not self._open or not self.credit:
                silent_s, self._heard = 0.0, False
            else:
                silent_s += _ADAPT_INTERVAL_S
                if silent_s > 2 * self._tuning.heartbeat_s:
                    silent_s = 0.0
                    self._metrics.pull_missed_heartbeats.inc()
                    self.new_session("two heartbeats missed")
            self.refill()
            if self._group is not None and not self._suspended:
                # Also between two sessions: `prepare` may have to wait, and nobody else should begin meanwhile.
                self._group.keep(self._wire, self._next_subject, loop.time())
