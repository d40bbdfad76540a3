"""Publishers for tests and benchmarks: plain nats-py on a connection of their own, nothing of parti in them."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from benchmarks.audit import MSG_ID
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

_WINDOW = 1000
_BURST = 100
_RETRY_S = 0.5


class _TidyClient(Client):
    """nats-py, but the socket of an attempt that failed is closed: a frozen server costs it one each second."""

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)


async def connect(servers: str | list[str]) -> Client:
    """Connect so that an outage of any length is survived and its end is noticed quickly."""
    client = _TidyClient()
    options: dict[str, Any] = {"max_reconnect_attempts": -1, "reconnect_time_wait": 0.05, "connect_timeout": 1}
    await client.connect(servers, **options, ping_interval=1, max_outstanding_pings=2, error_cb=_ignore)
    return client


async def _ignore(error: Exception) -> None:
    """Errors of a connection are expected here: what is not acknowledged is sent again."""


class SteadyPublisher:
    """Publishes `count` numbered messages, many at a time, each one until the stream has acknowledged it.

    The id of message n is `str(n)`; a repeat carries the same one, so the stream stores it once.
    """

    def __init__(self, servers: str | list[str], count: int, subject_of: Callable[[int], str]) -> None:
        self.sent = 0
        self.acknowledged = 0
        self._servers = servers
        self._count = count
        self._subject_of = subject_of
        self._unacknowledged: dict[int, float] = {}
        self._inbox = ""

    async def run(self, may_send: Callable[[int], bool] = lambda number: True) -> None:
        """Return when all is acknowledged; message n is first sent when `may_send(n)` says so."""
        client = await connect(self._servers)
        try:
            self._inbox = client.new_inbox()
            await client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
            while self.acknowledged < self._count:
                sent = await self._send_some(client, may_send) if client.is_connected else 0
                await asyncio.sleep(0 if sent else 0.002)
        finally:
            await client.close()

    async def _send_some(self, client: Client, may_send: Callable[[int], bool]) -> int:
        overdue_s = time.monotonic() - _RETRY_S
        # The oldest come first: a repeat is put at the end again.
        late = []
        for number, tried_s in self._unacknowledged.items():
            if tried_s > overdue_s:
                break
            late.append(number)
        for number in late:
            if number in self._unacknowledged:
                await self._send(client, number)
        fresh = 0
        while fresh < _BURST and self.sent < self._count and len(self._unacknowledged) < _WINDOW:
            if not may_send(self.sent):
                break
            await self._send(client, self.sent)
            self.sent += 1
            fresh += 1
        return len(late) + fresh

    async def _send(self, client: Client, number: int) -> None:
        self._unacknowledged.pop(number, None)
        self._unacknowledged[number] = time.monotonic()
        try:
            await client.publish(
                self._subject_of(number),
                b"%0128d" % number,
                reply=f"{self._inbox}.{number}",
                headers={MSG_ID: str(number)},
            )
        except (NatsError, OSError):
            pass  # Sent again when it is overdue.

    async def _on_answer(self, msg: Msg) -> None:
        if not msg.data or "error" in json.loads(msg.data):
            return
        if self._unacknowledged.pop(int(msg.subject.rpartition(".")[2]), None) is not None:
            self.acknowledged += 1


def answering_again(url: str, stream: str, timeout_s: float = 30.0) -> float:
    """Ask on bare sockets until JetStream tells of the stream; returns that moment (monotonic clock).

    Blocks: call it in a thread. A client library would add its own waits between attempts to the figure.
    """
    address = urlsplit(url)
    deadline_s = time.monotonic() + timeout_s
    ask = b'CONNECT {"verbose":false}\r\nSUB probe 1\r\nPUB $JS.API.STREAM.INFO.%b probe 0\r\n\r\n' % stream.encode()
    while time.monotonic() < deadline_s:
        try:
            with socket.create_connection((address.hostname, address.port), timeout=0.2) as connection:
                connection.sendall(ask)
                heard = b""
                while b"stream_info_response" not in heard and (data := connection.recv(65536)):
                    heard += data
        except OSError:
            heard = b""
        if b"stream_info_response" in heard and b'"error"' not in heard:
            return time.monotonic()
        time.sleep(0.005)
    raise TimeoutError(f"JetStream did not answer for stream {stream!r} within {timeout_s:g} s")


class BareSocket:
    """Protocol bytes straight to the server, without acknowledgements: as fast as this machine can publish."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname, address.port), timeout=10)
        self._socket.sendall(b'CONNECT {"verbose":false}\r\n')

    def send(self, commands: bytes) -> None:
        """Send, waiting while the server does not keep up, and answer its pings."""
        self._socket.sendall(commands)
        while select.select([self._socket], [], [], 0)[0]:
            if b"PING" in self._socket.recv(4096):
                self._socket.sendall(b"PONG\r\n")

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
