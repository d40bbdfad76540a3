"""Acknowledgements, gathered and written once per turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from parti.jetstream.wire import Wire
from parti.telemetry.metrics import Metrics


class Acks(Protocol):
    """What is said to the server of a message."""

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message: it is finished."""

    def in_progress(self, reply: bytes) -> None:
        """Tell the server that a message is still being worked on."""

    def give_back(self, reply: bytes, delay_s: float) -> None:
        """Ask the server to deliver a message again after a delay."""


class AckWriter:
    """Sends acknowledgements in as few writes as possible.

    While there is no connection they are dropped: the server will deliver those messages again, and their lane
    recognises them as finished.
    """

    def __init__(self, wire: Wire, metrics: Metrics, after_flush: Callable[[], None]) -> None:
        self.silent = False
        """Nothing is sent: the consumer wants no acknowledgements (a hot mirror)."""
        self._wire = wire
        self._acks = metrics.acks
        self._after_flush = after_flush
        self._finished: list[bytes] = []
        self._other: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message: it is finished."""
        if not self._finished:
            self._loop.call_soon(self.flush)
        self._finished.append(reply)

    def ack_all(self, replies: list[bytes]) -> None:
        """Acknowledge many messages."""
        if replies and not self._finished:
            self._loop.call_soon(self.flush)
        self._finished += replies

    def in_progress(self, reply: bytes) -> None:
        """Tell the server that a message is still being worked on."""
        self._send(b"PUB %b 4\r\n+WPI\r\n" % reply)

    def give_back(self, reply: bytes, delay_s: float) -> None:
        """Ask the server to deliver a message again after a delay."""
        body = b'-NAK {"delay": %d}' % int(delay_s * 1e9)
        self._send(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))

    def _send(self, command: bytes) -> None:
        if not self._other:
            self._loop.call_soon(self.flush)
        self._other.append(command)

    def flush(self) -> None:
        """Write what has gathered."""
        finished, other = self._finished, self._other
        if other:
            self._other = []
            if not self.silent:
                self._wire.write(b"".join(other))
        if finished:
            self._finished = []
            if not self.silent:
                self._acks.value += len(finished)
                # One join for all of them: formatting each would cost as much as handling it.
                self._wire.write(b"PUB " + b" 4\r\n+ACK\r\nPUB ".join(finished) + b" 4\r\n+ACK\r\n")
            self._after_flush()
