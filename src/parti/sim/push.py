"""The sending side of a push consumer of the model: who listens, heartbeats and flow control."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parti.sim.timers import Timer

if TYPE_CHECKING:
    from parti.sim.consumers import Consumer

_WINDOW = 32 * 1024 * 1024


class Push:
    """Sends to the consumer's deliver subject while somebody listens there."""

    __slots__ = (
        "_beat_ns",
        "_consumer",
        "_limit",
        "_on_their_way",
        "_server",
        "_timer",
        "active",
        "asked",
        "question",
    )

    def __init__(self, consumer: Consumer, beat_ns: int, *, flow_control: bool) -> None:
        self._consumer = consumer
        self._server = consumer.server
        self._beat_ns = beat_ns
        self._timer = Timer(consumer.server.timers, self._beat)
        self._limit = _WINDOW // 16 if flow_control else 0
        self._on_their_way = 0
        self.asked = 0
        """Bytes that an answer to the question accounts for."""
        self.question = ""
        """Where the other side is to say that it has what was sent."""
        self.active = False
        if beat_ns:
            self._timer.set(self._server.now_ns + beat_ns)

    @property
    def open(self) -> bool:
        """Whether more may be sent."""
        return self.active and not (self._limit and self._on_their_way > self._limit)

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._timer.set(0)

    def sent(self, size: int) -> None:
        """Count a message on its way, and ask the other side to say when it has what was sent."""
        if self._beat_ns:
            self._timer.set(self._server.now_ns + self._beat_ns)
        if not self._limit:
            return
        self._on_their_way += size
        if not self.question:
            if self._on_their_way > self._limit // 2:
                self._ask()
        elif self._on_their_way - self.asked >= self._limit:
            self.asked += size

    def _ask(self) -> None:
        consumer = self._consumer
        self.question = f"$JS.FC.{consumer.stream.name}.{consumer.name}.{consumer.number % 10_000:04d}"
        self.asked = self._on_their_way
        header = b"NATS/1.0 100 FlowControl Request\r\n\r\n"
        self._server.send(consumer.deliver_to, consumer.deliver_to, self.question, header, b"")

    def take_answer(self, subject: str) -> None:
        """The other side has what was sent before it was asked."""
        if subject == self.question:
            self._limit = min(2 * self._limit, _WINDOW)
            self._on_their_way = max(0, self._on_their_way - self.asked)
            self.question, self.asked = "", 0
            self._server.make_ready(self._consumer)

    def _beat(self) -> None:
        if self.active:
            self._consumer.send_heartbeat(self._consumer.deliver_to, self.question)
        self._timer.set(self._server.now_ns + self._beat_ns)
