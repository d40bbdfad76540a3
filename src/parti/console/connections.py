"""Connections of browsers: how many there may be, and how long each may take to ask and to read.

Uvicorn waits for ever for the first request of a connection, and asyncio accepts connections until there are no file
descriptors left and then logs a line for each that it cannot accept. Here the number of connections is bounded: one
more closes the one that has been idle longest, and is refused when all are being answered. Who does not end a
request, or does not read an answer, counts as idle: otherwise a few could keep all others out.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from dataclasses import dataclass, field

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from parti.telemetry.log_rate import LogRate

_log = structlog.get_logger("parti.console")

MOST_CONNECTIONS = 256
LEAST_CONNECTIONS = 16
BACKLOG = 16
"""Connections that the event loop accepts in one turn, before any of them can be counted."""
_OTHER_FILES = 64
"""File descriptors that are left for everything else, the backlog included."""
_AT_ONCE = struct.pack("ii", 1, 0)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    b"Content-Length: 43\r\n\r\ntoo many connections to this console; wait\n"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one console grants to all of its browsers together, and to each."""

    connections: int = MOST_CONNECTIONS
    request_s: float = 10.0
    """A request that is not complete so long after its connection, or its first byte, came is given up."""
    answer_s: float = 30.0
    """An answer of which a browser takes too little for so long is given up."""

    @property
    def streams(self) -> int:
        """Connections that may be event streams, which have no end: others find room beside them."""
        return self.connections // 2


def limits_of_this_process() -> Limits:
    """The limits for a console alone in its process: no more connections than it may have files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return Limits()
    return Limits(connections=max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, files - _OTHER_FILES)))


@dataclass(slots=True)
class Places:
    """The connections of one console, oldest first."""

    limits: Limits
    taken: dict[Connection, None] = field(default_factory=dict)
    _rate: LogRate = field(default_factory=LogRate)

    def take(self, connection: Connection) -> bool:
        """Add a connection, at the cost of the one that has been idle longest; False: there is no room."""
        if len(self.taken) >= self.limits.connections:
            idle = next((each for each in self.taken if each.idle), None)
            self.tell("too many connections to the console", closed="the oldest idle one" if idle else "the new one")
            if idle is None:
                return False
            idle.give_up()
        self.taken[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a connection that is gone, or is about to be."""
        self.taken.pop(connection, None)

    def touch(self, connection: Connection) -> None:
        """Make a connection the youngest: it has asked for something."""
        if connection in self.taken:
            del self.taken[connection]
            self.taken[connection] = None

    def tell(self, event: str, **fields: object) -> None:
        """Log a line, unless there was one like it a moment ago."""
        left_out = self._rate.passes(event)
        if left_out is not None:
            _log.warning(event, connections=len(self.taken), **fields, **({"left_out": left_out} if left_out else {}))


class BoundedConfig(uvicorn.Config):
    """Uvicorn's settings, with the places that its connections share."""

    places: Places


class Connection(H11Protocol):
    """Uvicorn's connection, which gives up a browser that takes too long to ask or to read."""

    config: BoundedConfig
    _asking: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered, or the browser keeps the console waiting.

        It does so with the rest of a request, and with an answer that it does not read.
        """
        cycle: RequestResponseCycle | None = self.cycle
        waited_for = self.conn.their_state is h11.SEND_BODY or self.flow.write_paused
        return cycle is None or cycle.response_complete or waited_for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or say that there is none, and wait for a request."""
        super().connection_made(transport)
        if not self.config.places.take(self):
            transport.write(_REFUSAL)
            transport.close()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._cancel_timers()
        self.config.places.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless this connection was refused or given up."""
        if self in self.config.places.taken and not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        """Read requests, and see whether one is still incomplete."""
        super().handle_events()
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if begun or self.conn.their_state is h11.SEND_BODY:
            self._await_request()
        elif self._asking is not None:
            self._asking.cancel()
            self._asking = None
            self.config.places.touch(self)

    def on_response_complete(self) -> None:
        """The rest of the answer has to be read within a bounded time."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._await_reader()

    def pause_writing(self) -> None:
        """The browser does not keep up."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The browser has caught up."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def give_up(self) -> None:
        """Close at once, whatever has not been sent; the kernel keeps nothing of it either."""
        self._cancel_timers()
        self.config.places.leave(self)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _await_request(self) -> None:
        if self._asking is None:
            self._asking = self.loop.call_later(self.config.places.limits.request_s, self.give_up)

    def _await_reader(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.config.places.limits.answer_s, self._give_up_reader)

    def _give_up_reader(self) -> None:
        self._reading = None
        waits = self.idle and self.transport.get_write_buffer_size() > 0
        if self.flow.write_paused or waits:
            self.give_up()

    def _cancel_timers(self) -> None:
        for timer in (self._asking, self._reading):
            if timer is not None:
                timer.cancel()
        self._asking = self._reading = None
