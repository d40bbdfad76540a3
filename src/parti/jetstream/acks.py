"""Acknowledgements: the first one of a turn of the event loop at once, the others of the turn together at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from parti.jetstream.wire import Wire
from parti.telemetry.metrics import Metrics


class AckWriter:
    """Sends acknowledgements in as few writes as possible, and none of them late.

    Under little load every message is the only one of its turn and is acknowledged in the same breath in which its
    handler ends: a process that is stopped or killed a moment later has not kept it to itself. Under much load a turn
    has hundreds of them, which cost two writes.

    While there is no connection they are dropped. Nothing has to be remembered for that: the next session begins at
    the confirmed floor (`parti.core.confirmed_floor`), the server delivers those messages again, and their lane
    recognises them as finished.
    """

    def __init__(self, wire: Wire, metrics: Metrics, after_flush: Callable[[], None]) -> None:
        self.silent = False
        """Nothing is sent: the consumer wants no acknowledgements (a hot mirror)."""
        self._wire = wire
        self._acks = metrics.acks
        self._after_flush = after_flush
        self._begun = False
        """Something was acknowledged in this turn, and its end will be seen to."""
        self._finished: list[bytes] = []
        self._other: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message: it is finished."""
        if self._begun:
            self._finished.append(reply)
        else:
            self.ack_all([reply])

    def ack_all(self, replies: list[bytes]) -> None:
        """Acknowledge many messages."""
        if self._begun:
            self._finished += replies
        elif replies:
            self._begun = True
            self._loop.call_soon(self.flush)
            self._write(replies)

    def in_progress(self, reply: bytes) -> None:
        """Tell the server that a message is still being worked on."""
        self._send(b"PUB %b 4\r\n+WPI\r\n" % reply)

    def give_back(self, reply: bytes, delay_s: float) -> None:
        """Ask the server to deliver a message again after a delay."""
        body = b'-NAK {"delay": %d}' % int(delay_s * 1e9)
        self._send(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))

    def terminate(self, reply: bytes) -> None:
        """Tell the server never to deliver a message again."""
        self._send(b"PUB %b 5\r\n+TERM\r\n" % reply)

    def _send(self, command: bytes) -> None:
        if not self._other:
            self._loop.call_soon(self.flush)
        self._other.append(command)

    def flush(self) -> None:
        """Write what has gathered: the turn ends."""
        begun, self._begun = self._begun, False
        if self._other:
            other, self._other = self._other, []
            if not self.silent:
                self._wire.write(b"".join(other))
        if self._finished:
            finished, self._finished = self._finished, []
            self._write(finished)
        if begun:
            self._after_flush()

    def _write(self, finished: list[bytes]) -> None:
        if not self.silent:
            self._acks.value += len(finished)
            # One join for all of them: formatting each would cost as much as handling it.
            self._wire.write(b"PUB " + b" 4\r\n+ACK\r\nPUB ".join(finished) + b" 4\r\n+ACK\r\n")
