"""Standing pulls on a consumer of the model: who is next, who has waited long enough, who is gone."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from parti.sim.timers import Timer

if TYPE_CHECKING:
    from parti.sim.consumers import Consumer
    from parti.sim.server import ModelServer

_FIELDS = frozenset({"batch", "expires", "no_wait", "idle_heartbeat", "max_bytes"})
_Request = tuple[int, int, bool, int, int]
_requests: dict[bytes, _Request] = {}
_FULL_CHECK_NS = 1_000_000_000


def _parse(body: bytes) -> _Request:
    """Batch, expiry, no_wait, heartbeat and bytes of a request; parsed once, for pulls repeat themselves."""
    request = _requests.get(body)
    if request is None:
        if not body:
            request = (1, 0, False, 0, 0)
        elif body.isdigit():
            request = (int(body), 0, False, 0, 0)
        else:
            given = msgspec.json.decode(body)
            if unknown := given.keys() - _FIELDS:
                raise NotImplementedError(f"the model does not know {sorted(unknown)} in a pull")
            request = (
                int(given.get("batch", 0)),
                int(given.get("expires", 0)),
                bool(given.get("no_wait", False)),
                int(given.get("idle_heartbeat", 0)),
                int(given.get("max_bytes", 0)),
            )
        _requests[body] = request
    return request


class Pull:
    """A pull that stands."""

    __slots__ = ("beat_at_ns", "beat_ns", "bytes_left", "delivered", "expires_at_ns", "left", "no_wait", "reply")

    def __init__(self, reply: str, request: _Request, now_ns: int) -> None:
        self.left, expires_ns, self.no_wait, self.beat_ns, self.bytes_left = request
        self.reply = reply
        self.delivered = 0
        self.expires_at_ns = now_ns + expires_ns if expires_ns else 0
        self.beat_at_ns = now_ns + self.beat_ns if self.beat_ns else 0


class Pulls:
    """The queue of standing pulls: each message goes to the first, which then moves to the end."""

    __slots__ = ("_checked_ns", "_consumer", "_max_waiting", "_server", "_wake", "last_ns", "waiting")

    def __init__(self, server: ModelServer, consumer: Consumer, max_waiting: int) -> None:
        self._server = server
        self._consumer = consumer
        self._max_waiting = max_waiting
        self.waiting: deque[Pull] = deque()
        self.last_ns = server.now_ns
        """When somebody last pulled or got something."""
        self._checked_ns = -_FULL_CHECK_NS
        self._wake = Timer(server.timers, self._on_wake)

    def add(self, body: bytes, reply: str) -> None:
        """Take a request, or answer it with a status."""
        server, consumer, now_ns = self._server, self._consumer, self._server.now_ns
        if consumer.deliver_to:
            self._status(reply, "409 Consumer is push based")
            return
        request = _parse(body)
        _, expires_ns, no_wait, beat_ns, _ = request
        if beat_ns and beat_ns * 2 > expires_ns:
            self._status(reply, "400 Bad Request - heartbeat value too large")
            return
        if len(self.waiting) == self._max_waiting and now_ns - self._checked_ns > _FULL_CHECK_NS:
            self.check(ended=False)
        if no_wait:
            ahead = max(0, consumer.unseen) + len(consumer.again)
            if not ahead and not expires_ns:
                self.last_ns = now_ns
                self._status(reply, "404 No Messages")
                return
            if ahead:
                self.check(ended=False)
                if ahead < sum(p.left for p in self.waiting):
                    self.last_ns = now_ns
                    self._status(reply, "408 Requests Pending")
                    return
        if len(self.waiting) == self._max_waiting:
            if not beat_ns:
                self._status(reply, "409 Exceeded MaxWaiting")
            return
        self.waiting.append(Pull(reply, request, now_ns))
        self.last_ns = now_ns
        server.make_ready(consumer)

    def next_for(self, size: int) -> Pull | None:
        """The pull that gets a message of this size."""
        waiting, now_ns = self.waiting, self._server.now_ns
        while waiting:
            pull = waiting[0]
            if pull.expires_at_ns and now_ns >= pull.expires_at_ns:
                waiting.popleft()
                self._status(pull.reply, "408 Request Timeout", pull)
                continue
            if pull.bytes_left > 0:
                if size > pull.bytes_left:
                    waiting.popleft()
                    self._status(pull.reply, "409 Message Size Exceeds MaxBytes", pull)
                    continue
                pull.bytes_left -= size
                if not pull.bytes_left:
                    pull.left = 1
            if not self._server.subscriptions.heard(pull.reply):
                waiting.popleft()
                continue
            pull.delivered += 1
            pull.left -= 1
            if pull.left <= 0:
                waiting.popleft()
            elif len(waiting) > 1:
                waiting.rotate(-1)
            return pull
        return None

    def delivered(self, pull: Pull) -> None:
        """A message went to this pull."""
        now_ns = self._server.now_ns
        self.last_ns = now_ns
        if pull.left > 0:
            if pull.beat_ns:
                pull.beat_at_ns = now_ns + pull.beat_ns
        elif pull.bytes_left > 0:
            self._status(pull.reply, "409 Batch Completed", pull)

    def check(self, *, ended: bool) -> None:
        """End pulls that have expired or that nobody waits for; `ended`: nothing is there to deliver.

        Heartbeats that are due are sent.
        """
        if not self.waiting:
            return
        server, now_ns = self._server, self._server.now_ns
        self._checked_ns = now_ns
        wake_ns, kept = 1 << 62, []
        for pull in self.waiting:
            if pull.expires_at_ns and now_ns >= pull.expires_at_ns:
                self._status(pull.reply, "408 Request Timeout", pull)
                continue
            if ended and pull.no_wait and (not pull.expires_at_ns or pull.delivered):
                self._status(pull.reply, "404 No Messages")
                continue
            if not server.subscriptions.heard(pull.reply):
                continue
            if pull.beat_ns:
                if now_ns >= pull.beat_at_ns:
                    self._consumer.send_heartbeat(pull.reply)
                    pull.beat_at_ns = now_ns + pull.beat_ns
                wake_ns = min(wake_ns, pull.beat_at_ns)
            if pull.expires_at_ns:
                wake_ns = min(wake_ns, pull.expires_at_ns)
            kept.append(pull)
        if len(kept) != len(self.waiting):
            self.waiting = deque(kept)
        self._wake.set(wake_ns if kept and wake_ns < 1 << 62 else 0)

    def _on_wake(self) -> None:
        self.check(ended=True)
        self._server.make_ready(self._consumer)

    def end(self, status: str) -> None:
        """End all pulls with a status."""
        for pull in self.waiting:
            self._status(pull.reply, status)
        self.waiting.clear()
        self._wake.set(0)

    def _status(self, reply: str, status: str, pull: Pull | None = None) -> None:
        rest = f"Nats-Pending-Messages: {pull.left}\r\nNats-Pending-Bytes: {pull.bytes_left}\r\n" if pull else ""
        self._server.send(reply, reply, "", f"NATS/1.0 {status}\r\n{rest}\r\n".encode(), b"")
