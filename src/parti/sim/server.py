"""A model of one nats-server with JetStream, at the level of messages and in virtual time.

It answers what parti asks as nats-server 2.15 does, including what is not written down (the hidden cursor of a
consumer, which messages an acknowledgement deletes, what a restart forgets); a differential test runs the same
operations on both. What parti does not use raises NotImplementedError: nobody is to trust a made-up answer.

Everything that follows from an operation happens inside it, in one order that is always the same. Whoever wants lost,
late or reordered messages puts a network in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parti.sim import api
from parti.sim.subscriptions import Subscriptions
from parti.sim.timers import Timer, Timers

if TYPE_CHECKING:
    from parti.sim.consumers import Consumer
    from parti.sim.streams import Stream

_ORPHAN_CHECK_NS = 30_000_000_000
_CLOCK_SLACK_NS = 1_000
"""Seconds as floats do not hold every nanosecond: what is due within this time is due."""


@dataclass(slots=True)
class Delivery:
    """One message on its way to a subscription; `header` is the raw block, status line included, or None."""

    sid: bytes
    subject: bytes
    reply: bytes
    header: bytes | None
    payload: bytes


class ModelClient:
    """One connection to the model; of no use after `close` or a restart of the server."""

    __slots__ = ("_server", "connected", "deliver", "subscriptions")

    def __init__(self, server: ModelServer, deliver: Callable[[Delivery], None]) -> None:
        self._server = server
        self.deliver = deliver
        self.subscriptions: dict[bytes, str] = {}
        self.connected = True

    def subscribe(self, subject: str, sid: bytes) -> None:
        """Get what is sent to a subject or pattern."""
        if self.connected:
            self._server.add_subscription(self, subject, sid)

    def unsubscribe(self, sid: bytes) -> None:
        """End a subscription; an unknown one is ignored."""
        if self.connected and sid in self.subscriptions:
            self._server.drop_subscriptions(self, [sid])

    def publish(self, subject: str, payload: bytes, *, reply: str = "", header: bytes | None = None) -> None:
        """Send a message; what follows from it is delivered before this returns."""
        if self.connected:
            self._server.take(self, subject, payload, reply, header)

    def close(self) -> None:
        """Leave: subscriptions end, and so do the pulls that were to be answered here."""
        if self.connected:
            self._server.drop_subscriptions(self, list(self.subscriptions))
            self.connected = False


class ModelServer:
    """The model: connect clients, and call `advance` when the clock reaches `next_due_s`.

    `created` is the server's wall clock at virtual second 0. `chance` decides the few things that the server leaves
    to chance (jitter of timers); without it they take their middle. `replicated`: streams and consumers live on
    several servers, and so a consumer's cursor is stored with its state whenever it reaches the end.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        created: float = 1_700_000_000.0,
        chance: random.Random | None = None,
        replicated: bool = False,
    ) -> None:
        self._clock = clock
        self._chance = chance
        self.replicated = replicated
        self.epoch_ns = int(created * 1e9)
        """The wall clock at virtual second 0."""
        self.now_ns = 0
        """The time of the operation under way."""
        self._stamp_ns = 0
        self.streams: dict[str, Stream] = {}
        self._stream_of: dict[str, Stream | None] = {}
        self._clients: list[ModelClient] = []
        self.subscriptions = Subscriptions()
        self._ready: list[Consumer] = []
        self._finished: list[tuple[Consumer, int, int]] = []
        self._out: list[tuple[ModelClient, Delivery]] = []
        self._sending = False
        self.timers = Timers()
        self._orphan_check = Timer(self.timers, self._check_orphans)

    # ── what the world uses ───────────────────────────────────────────────────────────────────────────────────

    def connect(self, deliver: Callable[[Delivery], None]) -> ModelClient:
        """Open a connection whose messages go to `deliver`."""
        client = ModelClient(self, deliver)
        self._clients.append(client)
        return client

    def next_due_s(self) -> float | None:
        """When the server next does something of its own accord; None when it has no plans."""
        due_ns = self.timers.next_due_ns()
        return due_ns / 1e9 if due_ns else None

    def advance(self) -> None:
        """Do everything that is due at the clock's time."""
        timers, until_ns = self.timers, self._tick() + _CLOCK_SLACK_NS
        while 0 < (due_ns := timers.next_due_ns()) <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            timers.pop().fire()
            self._settle()
        self._send()

    def restart(self, *, lose_unsynced_acks_s: float = 0.0) -> None:
        """Stop without a word to anybody and start again.

        All connections are gone, and with them standing pulls; memory streams, consumers that are not durable and
        unfinished batches vanish; each durable consumer goes on from its stored state (at most `lose_unsynced_acks_s`
        old), so its hidden cursor is forgotten. Messages of file streams stay.
        """
        self._tick()
        for client in self._clients:
            client.connected = False
            client.subscriptions.clear()
        self._clients.clear()
        self.subscriptions = Subscriptions()
        self._ready.clear()
        self._finished.clear()
        self._out.clear()
        self.timers.clear()
        self._stream_of.clear()
        self._orphan_check = Timer(self.timers, self._check_orphans)
        self.streams = {s.name: s for s in self.streams.values() if s.config["storage"] == "file"}
        for stream in self.streams.values():
            stream.recover(int(lose_unsynced_acks_s * 1e9))
        self._plan_orphan_check()
        self._settle()

    def step_down(self) -> None:
        """Do what a change of leader does to every stream and consumer.

        Standing pulls end with `409 Leadership Change`; the cursor is kept; messages of streams with interest or
        work-queue retention that their consumers count as acknowledged are deleted.
        """
        self._tick()
        for stream in self.streams.values():
            for consumer in list(stream.consumers.values()):
                consumer.change_leader()
        self._delete_orphans()
        self._settle()
        self._send()

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> int:
        now_ns = int(self._clock() * 1e9)
        self.now_ns = max(self.now_ns, now_ns)
        return self.now_ns

    @property
    def wall_ns(self) -> int:
        """The server's wall clock."""
        return self.epoch_ns + self.now_ns

    def stamp_ns(self) -> int:
        """A wall time for something that is made now, later than any given before, by a microsecond at least."""
        self._stamp_ns = max(self.wall_ns, self._stamp_ns + 1_000)
        return self._stamp_ns

    def jitter_ns(self, most_ns: int) -> int:
        """A time that the server draws by chance."""
        return self._chance.randrange(most_ns) if self._chance else most_ns // 2

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────

    def add_stream(self, stream: Stream) -> None:
        """Take in a new stream."""
        self.streams[stream.name] = stream
        self._stream_of.clear()
        self._plan_orphan_check()

    def drop_stream(self, stream: Stream) -> None:
        """Forget a stream."""
        del self.streams[stream.name]
        self._stream_of.clear()

    def stream_of(self, subject: str) -> Stream | None:
        """The stream that takes a subject."""
        try:
            return self._stream_of[subject]
        except KeyError:
            found = next((s for s in self.streams.values() if s.takes.matches(subject)), None)
            self._stream_of[subject] = found
            return found

    def _plan_orphan_check(self) -> None:
        if not self._orphan_check.due_ns and any(s.retention != "limits" for s in self.streams.values()):
            self._orphan_check.set(self.now_ns + _ORPHAN_CHECK_NS)

    def _check_orphans(self) -> None:
        self._delete_orphans()
        self._plan_orphan_check()

    def _delete_orphans(self) -> None:
        for stream in self.streams.values():
            stream.check_interest()

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, client: ModelClient, subject: str, payload: bytes, reply: str, header: bytes | None) -> None:
        """Handle what a client has published."""
        self._tick()
        if subject.startswith("$JS."):
            heard = api.handle(self, subject, payload, reply, header)
        else:
            stream = self.stream_of(subject)
            if stream is not None:
                stream.publishing.take(subject, payload, reply, header)
            heard = self.send(subject, subject, reply, header, payload) or stream is not None
        if reply and not heard:
            header = f"NATS/1.0 503\r\nNats-Subject: {subject}\r\n\r\n".encode()
            to, address = self.subscriptions.listeners(reply), reply.encode()
            self._out += [(c, Delivery(sid, address, b"", header, b"")) for c, sid in to if c is client]
        if self._ready or self._finished:
            self._settle()
        if self._out:
            self._send()

    def add_subscription(self, client: ModelClient, subject: str, sid: bytes) -> None:
        """Begin a subscription; push consumers that were waiting for it begin to deliver."""
        self._tick()
        self.subscriptions.add(client, subject, sid)
        self._settle()
        self._send()

    def drop_subscriptions(self, client: ModelClient, sids: Sequence[bytes]) -> None:
        """End some subscriptions of a client."""
        self._tick()
        self.subscriptions.drop(client, sids)
        self._settle()
        self._send()

    def send(self, to: str, subject: str, reply: str, header: bytes | None, payload: bytes) -> bool:
        """Send a message to everybody who listens on `to`; False when nobody does."""
        listeners = self.subscriptions.listeners(to)
        if listeners:
            name, answer = subject.encode(), reply.encode()
            for client, sid in listeners:
                self._out.append((client, Delivery(sid, name, answer, header, payload)))
        return bool(listeners)

    def make_ready(self, consumer: Consumer) -> None:
        """Let a consumer look for messages to deliver before the operation ends."""
        if not consumer.is_ready:
            consumer.is_ready = True
            self._ready.append(consumer)

    def finish_later(self, consumer: Consumer, seq: int, number: int) -> None:
        """Count a message that was deleted while in flight as acknowledged, at the end of the operation.

        The server does it in the background: whatever deletes messages is done first.
        """
        self._finished.append((consumer, seq, number))

    def _settle(self) -> None:
        ready, finished = self._ready, self._finished
        while ready or finished:
            while finished:
                consumer, seq, number = finished.pop(0)
                if not consumer.closed:
                    consumer.acknowledge(seq, number)
            if ready:
                consumer = ready.pop(0)
                consumer.is_ready = False
                consumer.run()

    def _send(self) -> None:
        # What is delivered may publish at once: then it is this loop that delivers what follows.
        if self._sending:
            return
        self._sending = True
        try:
            while self._out:
                out, self._out = self._out, []
                for client, delivery in out:
                    if delivery.sid in client.subscriptions:
                        client.deliver(delivery)
        finally:
            self._sending = False
