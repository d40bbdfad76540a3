"""The lean path on a NATS connection: our own protocol reader and raw writes.

Touches private parts of nats-py, as `client` does (a test holds the parts we lean on in place). nats-py keeps
dialling, TLS, authentication, pings and everything that is not ours; deliveries to subscriptions made here skip
its parser, its message objects and its queues: about 2.5 us a message instead of 10 to 50.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import structlog
from nats.aio.client import Client
from nats.errors import ProtocolError

Sink: TypeAlias = Callable[[bytes, bytes, bytes | None, bytes], None]
"""Takes subject, reply, header block or None, and payload of one message. Must not block."""

_log = structlog.get_logger("parti.wire")
_MAX_LINE = 1 << 20


class LeanParser:
    """Reads the protocol in place of nats-py's parser.

    Messages for `sinks` go straight to them; everything else is handed to nats-py unchanged. A sink that raises
    is logged and does not stop the connection.
    """

    def __init__(self, client: Any, sinks: dict[bytes, Sink], after_chunk: Callable[[], None]) -> None:
        self._client = client
        self._sinks = sinks
        self._after_chunk = after_chunk
        self._fallback = client._ps
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    def reset(self) -> None:
        """Forget a half-read message; nats-py calls this when a connection ends."""
        self._parts = []
        self._have = self._need = 0
        self._fallback.reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take in a chunk from the socket."""
        if self._parts:
            # A large payload arrives in many chunks: join once, when it is complete.
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
            self._parts = []
        used, ours = await self._parse(data)
        if used < len(data):
            rest = data[used:]
            self._parts = [rest]
            self._have = len(rest)
        if ours:
            self._after_chunk()

    async def _parse(self, buf: bytes) -> tuple[int, bool]:  # noqa: PLR0912 - the hot loop: each call would cost
        """Handle every whole message in `buf`; return how much was used and whether a sink was called."""
        pos, end_of_buf, ours = 0, len(buf), False
        find, sinks = buf.find, self._sinks
        self._need = 0
        while pos < end_of_buf:
            eol = find(b"\r\n", pos)
            if eol < 0:
                if end_of_buf - pos > _MAX_LINE:
                    raise ProtocolError("nats: protocol line too long")
                break
            op = buf[pos]
            if op not in (77, 72):  # neither MSG nor HMSG
                await self._fallback.parse(buf[pos : eol + 2])
                pos = eol + 2
                continue
            args = buf[pos:eol].split()
            try:
                body = eol + 2
                end = body + int(args[-1])
                if end < body:
                    raise ValueError("negative size")
                if end + 2 > end_of_buf:
                    self._need = end + 2 - pos
                    break
                sid = args[2]
                if op == 77:
                    reply = args[3] if len(args) == 5 else b""
                    header, payload = None, buf[body:end]
                else:
                    reply = args[3] if len(args) == 6 else b""
                    split = body + int(args[-2])
                    if not body <= split <= end:
                        raise ValueError("header outside the message")
                    header, payload = buf[body:split], buf[split:end]
                sink = sinks.get(sid)
                number = 0 if sink else int(sid)
            except (ValueError, IndexError) as error:
                raise ProtocolError("nats: malformed MSG") from error
            if sink is None:
                await self._client._process_msg(number, args[1], reply, payload, header)
            else:
                ours = True
                try:
                    sink(args[1], reply, header, payload)
                except Exception:
                    _log.exception("a message sink failed", sid=int(sid))
            pos = end + 2
        return pos, ours


class Wire:
    """Raw subscriptions and writes on one nats-py client.

    Subscriptions made here do not outlive their connection: after a reconnect they are gone on the server, and
    whoever made them makes new ones. That is wanted, because deliveries may have been lost in between.
    """

    def __init__(self, client: Client) -> None:
        self._client: Any = client
        self._sinks: dict[bytes, Sink] = {}
        self._listeners: list[Callable[[], None]] = []
        parser: Any = LeanParser(self._client, self._sinks, self._chunk_done)
        self._client._ps = parser

    def on_chunk(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each chunk that carried messages for a sink; returns what removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _chunk_done(self) -> None:
        for listener in self._listeners:
            listener()

    def subscribe(self, subject: str, sink: Sink) -> bytes:
        """Subscribe on the current connection; returns the subscription id as it stands in the protocol."""
        self._client._sid += 1
        sid = b"%d" % self._client._sid
        self._sinks[sid] = sink
        self.write(b"SUB %b  %b\r\n" % (subject.encode(), sid))
        return sid

    def unsubscribe(self, sid: bytes) -> None:
        """End a subscription; what is still on its way is dropped."""
        if self._sinks.pop(sid, None) is not None:
            self.write(b"UNSUB %b\r\n" % sid)

    def write(self, data: bytes) -> bool:
        """Send protocol bytes now; False, and nothing sent or kept, when there is no connection."""
        client = self._client
        if not client.is_connected or client._transport is None:
            return False
        client._transport.write(data)
        return True

    def new_inbox(self) -> str:
        """A fresh reply subject under the connection's inbox prefix."""
        return str(self._client.new_inbox())


def pub(subject: bytes, payload: bytes, reply: bytes = b"") -> bytes:
    """Protocol bytes that publish `payload`."""
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)
