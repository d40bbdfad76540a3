"""The lean path on a NATS connection: our own protocol reader and raw writes.

Touches private parts of nats-py, as `client` does (a test holds the parts we lean on in place). nats-py keeps
dialling, TLS, authentication, pings and everything that is not ours; deliveries to subscriptions made here skip
its parser, its message objects and its queues: about 2.5 us a message instead of 10 to 50.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from nats.aio.client import Client
from nats.errors import ProtocolError

from parti.jetstream.protocol import MalformedError, Scanner, Sink, Stray

_log = structlog.get_logger("parti.wire")


class LeanParser:
    """Reads the protocol in place of nats-py's parser.

    Messages for `sinks` go straight to them; everything else is handed to nats-py unchanged. A sink that raises
    is logged and does not stop the connection.
    """

    def __init__(self, client: Any, sinks: dict[bytes, Sink], after_chunk: Callable[[], None]) -> None:
        self._client = client
        self._scanner = Scanner(sinks)
        self._after_chunk = after_chunk
        self._fallback = client._ps
        self._parts: list[bytes] = []
        self._have = 0

    def reset(self) -> None:
        """Forget a half-read message; nats-py calls this when a connection ends."""
        self._parts = []
        self._have = self._scanner.need = 0
        self._fallback.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take in a chunk from the socket."""
        scanner = self._scanner
        if self._parts:
            # A large payload arrives in many chunks: join once, when it is complete.
            self._parts.append(data)
            self._have += len(data)
            if self._have < scanner.need:
                return
            data = b"".join(self._parts)
            self._parts = []
        scanner.pos, scanner.called = 0, False
        try:
            while (stray := self._scan(data)) is not None:
                await self._hand_over(stray)
        except MalformedError as error:
            raise ProtocolError(f"nats: {error}") from error
        if scanner.pos < len(data):
            rest = data[scanner.pos :]
            self._parts = [rest]
            self._have = len(rest)
        if scanner.called:
            self._after_chunk()

    def _scan(self, data: bytes) -> Stray | None:
        while True:
            try:
                return self._scanner.scan(data)
            except MalformedError:
                raise
            except Exception:
                _log.exception("a message sink failed")

    async def _hand_over(self, stray: Stray) -> None:
        """Give nats-py what is not ours."""
        if stray.line:
            await self._fallback.parse(stray.line)
            return
        try:
            number = int(stray.sid)
        except ValueError as error:
            raise MalformedError("malformed MSG") from error
        await self._client._process_msg(number, stray.subject, stray.reply, stray.payload, stray.header)


class PlainParser:
    """nats-py's own parser, with messages for `sinks` taken out behind it: slower, but well tried."""

    def __init__(self, client: Any, sinks: dict[bytes, Sink], after_chunk: Callable[[], None]) -> None:
        self._sinks = sinks
        self._after_chunk = after_chunk
        self._parser = client._ps
        self._others = client._process_msg
        self._called = False
        client._process_msg = self._process_msg

    def reset(self) -> None:
        """Forget a half-read message; nats-py calls this when a connection ends."""
        self._parser.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take in a chunk from the socket."""
        self._called = False
        await self._parser.parse(data)
        if self._called:
            self._after_chunk()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        sink = self._sinks.get(b"%d" % sid)
        if sink is None:
            await self._others(sid, subject, reply, data, headers)
            return
        self._called = True
        try:
            sink(bytes(subject), bytes(reply), headers, bytes(data))
        except Exception:
            _log.exception("a message sink failed")


class Wire:
    """Raw subscriptions and writes on one nats-py client.

    Subscriptions made here do not outlive their connection: after a reconnect they are gone on the server, and
    whoever made them makes new ones. That is wanted, because deliveries may have been lost in between.
    """

    def __init__(self, client: Client, *, plain: bool = False) -> None:
        """`plain`: nats-py's parser reads the bytes."""
        self._client: Any = client
        self._sinks: dict[bytes, Sink] = {}
        self._listeners: list[Callable[[], None]] = []
        parser: Any = (PlainParser if plain else LeanParser)(self._client, self._sinks, self._chunk_done)
        self._client._ps = parser

    def on_chunk(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each chunk that carried messages for a sink; returns what removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _chunk_done(self) -> None:
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception:
                # The connection serves others too: what fails here must not end it.
                _log.exception("a chunk listener failed")

    def subscribe(self, subject: str, sink: Sink) -> bytes:
        """Subscribe on the current connection; returns the subscription id as it stands in the protocol."""
        self._client._sid += 1
        sid = b"%d" % self._client._sid
        self._sinks[sid] = sink
        self.write(b"SUB %b  %b\r\n" % (subject.encode(), sid))
        return sid

    def redirect(self, sid: bytes, sink: Sink) -> None:
        """Give what still comes on a subscription to another sink."""
        if sid in self._sinks:
            self._sinks[sid] = sink

    def unsubscribe(self, sid: bytes) -> None:
        """End a subscription; what is still on its way is dropped."""
        if self._sinks.pop(sid, None) is not None:
            self.write(b"UNSUB %b\r\n" % sid)

    def write(self, data: bytes) -> bool:
        """Send protocol bytes now; False, and nothing sent or kept, when there is no connection. Never raises."""
        client = self._client
        if not client.is_connected or client._transport is None:
            return False
        try:
            client._transport.write(data)
        except Exception as error:
            # The transport is closed and nats-py has not noticed yet. uvloop raises then; asyncio drops the data.
            _log.debug("not written: the connection is closing", error=repr(error))
            return False
        return True

    def new_inbox(self) -> str:
        """A fresh reply subject under the connection's inbox prefix."""
        return str(self._client.new_inbox())


def pub(subject: bytes, payload: bytes, reply: bytes = b"") -> bytes:
    """Protocol bytes that publish `payload`."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
