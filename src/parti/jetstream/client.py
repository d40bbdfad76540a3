"""nats-py's client, mended where it would hang, leak, lie or send a password in clear.

Each override says which behaviour of nats-py 2.16 forces it; a test holds the private parts in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import ERR_RE

from parti.jetstream.dialing import Dial, describe
from parti.jetstream.wire import LeanParser
from parti.model.headers import parse_headers
from parti.model.safe_text import text_of

if TYPE_CHECKING:
    from nats.aio.client import Srv

DISCARD_S = 1.0
READ_SIZE = 128 * 1024
"""Most bytes taken from the socket at once."""

_DENIED = re.compile(
    r'permissions violation for (publish|subscription)(?: to| with reply of) "((?:[^"\\]|\\.)*)"', re.IGNORECASE
)


class MendedClient(Client):
    """A nats-py client that reconnects after anything but close(), and reports at once when it goes down.

    Each override names the behaviour of nats-py 2.16 that forces it; pyproject.toml pins nats-py for that reason.
    """

    def __init__(self, dial: Dial, *, on_down: Callable[[str], None], on_denied: Callable[[str, str], None]) -> None:
        super().__init__()
        self._dial = dial
        self._on_down = on_down
        self._on_denied = on_denied
        # Here too, because inboxes are named before connect(), which takes it as an option.
        self._inbox_prefix = bytearray(dial.inbox_prefix.encode())
        self._parser = self._ps  # The wire may put its own in front of it.
        self._server_said: Exception | None = None
        self.dialled = ""
        """Address of the server dialled last."""
        if dial.keys is not None:
            # Set here because connect() turns it on only for its own, blocking, ways to read key files.
            self._auth_configured = True

    def read_leanly(self) -> None:
        """Read with our own parser: nats-py's takes no subject with a vertical tab or form feed, which servers do."""
        parser: Any = LeanParser(self, {}, lambda: None)
        self._ps = parser

    @property
    def info(self) -> dict[str, Any]:
        """The INFO of the server dialled last."""
        return self._server_info

    @property
    def pool(self) -> set[str]:
        """Addresses of all servers, configured and discovered."""
        return {f"{server.uri.scheme}://{server.uri.netloc}" for server in self._server_pool}

    async def connect(self, *args: Any, **options: Any) -> None:
        """Connect as nats-py does, with keys read by parti."""
        keys = self._dial.keys
        if keys is not None:
            options["signature_cb"] = self._sign
            options["user_jwt_cb"] = keys.jwt if keys.has_jwt else None
        await super().connect(*args, **options)

    def _sign(self, nonce: str) -> bytes:
        assert self._dial.keys is not None
        self._public_nkey = self._dial.keys.public_key()  # CONNECT is built after the signature: rotation works.
        return self._dial.keys.sign(nonce)

    async def barrier(self, timeout_s: float) -> None:
        """Return once the server has processed all that was written before; TimeoutError, ConnectionError."""
        async with asyncio.timeout(timeout_s):
            pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            await self._send_ping(pong)
            if not await pong:
                raise ConnectionError("the connection broke")

    async def drain_writes(self, timeout_s: float) -> None:
        """Return once the socket took what was waiting; TimeoutError, ConnectionError otherwise."""
        assert self._flush_queue is not None
        async with asyncio.timeout(timeout_s):
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            await self._flush_queue.put(written)
            await written
        if not self.is_connected:
            raise ConnectionError("the connection broke")

    async def discard(self) -> None:
        """Close for good, at once, without flushing; never raises."""
        self.abort()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(DISCARD_S):
                await self.close()
        self.abort()
        await asyncio.sleep(0)  # An aborted socket is closed in the next turn of the loop.

    def abort(self) -> None:
        """Drop the socket without flushing.

        A plain close waits: for ever when a frozen server leaves our send buffer full or when the TLS handshake
        failed, 30 s for a frozen server under TLS. Without a transport nats-py has nothing to wait for.
        """
        if isinstance(self._transport, TcpTransport) and self._transport._io_writer is not None:
            self._transport._io_writer.transport.abort()
        self._transport = None

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """nats-py waits for ever, while dialling, for the end of a socket whose TLS handshake failed."""
        if not self.is_connected:
            self.abort()
        await super()._close(status, do_cbs)

    async def _connect_to_server(self, s: Srv) -> None:
        """nats-py leaves the socket of a failed attempt open."""
        self.abort()
        self.dialled = f"{s.uri.scheme}://{s.uri.netloc}"
        self._server_info = {}
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """nats-py takes a connection that the server closed instead of answering for a good one."""
        self._stop_loops()
        self._server_said = None
        await super()._process_connect_init()
        if self._status != Client.CONNECTED:
            self._stop_loops()
            raise nats_errors.Error("nats: the server closed the connection before it answered")

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """nats-py goes on in clear, password and all, when TLS was asked for and the server offers none."""
        if initial_connection and self._dial.require_tls and not self._dial.handshake_first:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise nats_errors.SecureConnWantedError
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        """nats-py closes for good after most errors; the server hangs up by itself where it means it."""
        text = err_msg
        # The parser lowercases the text, but has not yet removed the original from its buffer.
        original = ERR_RE.match(self._parser.buf)
        if original and original[1] and original[1].decode().lower() == err_msg:
            text = original[1].decode()
        denied = _DENIED.search(text)
        if denied:
            self._on_denied("publish to" if denied[1].lower() == "publish" else "subscribe to", denied[2])
            return
        self._server_said = self._err = nats_errors.Error(f"nats: {text}")
        await self._error_cb(self._server_said)

    async def _process_op_err(self, e: Exception) -> None:
        """nats-py reports a disconnect only after it has closed the socket, and without the reason."""
        if self.is_connected:
            self._on_down(describe(self._server_said or e))
        await super()._process_op_err(e)

    async def _attempt_reconnect(self) -> None:
        """nats-py resends what was pending, and stops trying after an error it did not foresee."""
        while True:
            self.abort()
            self._forget_pending()
            try:
                await super()._attempt_reconnect()
                return
            except Exception as error:
                await self._error_cb(error)
                self._status = Client.RECONNECTING
                await asyncio.sleep(self.options["reconnect_time_wait"])

    def _forget_pending(self) -> None:
        self._pending = []
        self._pending_data_size = 0
        for pong in self._pongs:
            if not pong.done():
                pong.set_result(False)
        self._pongs = []
        while self._flush_queue is not None and not self._flush_queue.empty():
            written = self._flush_queue.get_nowait()
            if not written.done():
                written.set_result(None)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """nats-py sends the PING ahead of what is pending, so that its PONG proves nothing about that."""
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        """nats-py's reader dies when a PONG arrives after its flush() has timed out."""
        self._pings_outstanding = 0
        self._pongs_received += 1
        if self._pongs:
            pong = self._pongs.pop(0)
            if not pong.done():
                pong.set_result(True)

    async def _read_loop(self) -> None:
        """nats-py stops reading, with a traceback, after an error it did not foresee; here that is a disconnect."""
        reader = getattr(self._transport, "_io_reader", None)
        if reader is not None:
            # asyncio stops and starts reading, two system calls each time, whenever twice this limit has gathered.
            reader._limit = READ_SIZE
        try:
            while self._transport is not None and not (self.is_closed or self.is_reconnecting):
                if self._transport.at_eof():
                    raise nats_errors.UnexpectedEOF
                chunk = await self._transport.read(READ_SIZE)
                await self._ps.parse(chunk)  # Looked up after the wait: the wire may just have replaced it.
        except Exception as error:
            await self._process_op_err(error)

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        """nats-py breaks the connection over a subject that is not UTF-8, which the server does not forbid."""
        subject, reply = (name if name.isascii() else text_of(bytes(name)).encode() for name in (subject, reply))
        return super()._build_message(sid, subject, reply, data, headers)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        """nats-py breaks the connection over a header block shorter than its first line; servers store such."""
        try:
            return await super()._process_headers(headers)
        except (IndexError, UnicodeDecodeError):
            return parse_headers(bytes(headers or b"")) or None

    def _stop_loops(self) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
