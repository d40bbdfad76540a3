"""One connection to the model and one to a real nats-server, with the same few verbs."""

from __future__ import annotations

import json
import socket
import time
from typing import Protocol
from urllib.parse import urlparse

from parti.sim.server import Delivery, ModelServer

_PATIENCE_S = 3.0


class Backend(Protocol):
    """A connection, to the model or to the server."""

    def subscribe(self, subject: str, sid: int) -> None: ...

    def unsubscribe(self, sid: int) -> None: ...

    def publish(self, subject: str, payload: bytes, reply: str, header: bytes | None) -> None: ...

    def collect(self, expected: int) -> list[Delivery]: ...


class Model:
    """The model, with a clock that the test moves."""

    def __init__(self, created: float = 1_700_000_000.0) -> None:
        self.now_s = 0.0
        self.server = ModelServer(lambda: self.now_s, created=created)
        self._got: list[Delivery] = []
        self._client = self.server.connect(self._got.append)

    def subscribe(self, subject: str, sid: int) -> None:
        self._client.subscribe(subject, b"%d" % sid)

    def unsubscribe(self, sid: int) -> None:
        self._client.unsubscribe(b"%d" % sid)

    def publish(self, subject: str, payload: bytes, reply: str, header: bytes | None) -> None:
        self._client.publish(subject, payload, reply=reply, header=header)

    def collect(self, expected: int = 0) -> list[Delivery]:
        got = list(self._got)
        self._got.clear()
        return got

    def restart(self, *, lose_s: float = 0.0) -> None:
        """Restart the server and connect again."""
        self.server.restart(lose_unsynced_acks_s=lose_s)
        self._client = self.server.connect(self._got.append)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while (due_s := self.server.next_due_s()) is not None and due_s <= end_s:
            self.now_s = max(self.now_s, due_s)
            self.server.advance()
        self.now_s = end_s
        self.server.advance()


class Real:
    """A connection to a real server: the bare protocol, blocking."""

    def __init__(self, url: str) -> None:
        address = urlparse(url)
        assert address.hostname
        assert address.port
        self._socket = socket.create_connection((address.hostname, address.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._got: list[Delivery] = []
        options = {"verbose": False, "headers": True, "no_responders": True, "lang": "test", "version": "1"}
        self._write(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
        self.flush()

    def subscribe(self, subject: str, sid: int) -> None:
        self._write(f"SUB {subject} {sid}\r\n".encode())

    def unsubscribe(self, sid: int) -> None:
        self._write(f"UNSUB {sid}\r\n".encode())

    def publish(self, subject: str, payload: bytes, reply: str, header: bytes | None) -> None:
        if header is None:
            head = f"PUB {subject} {reply} {len(payload)}\r\n"
        else:
            head = f"HPUB {subject} {reply} {len(header)} {len(header) + len(payload)}\r\n"
        self._write(head.encode() + (header or b"") + payload + b"\r\n")

    def collect(self, expected: int) -> list[Delivery]:
        """What has come: wait for as many as are expected, and take more only if they are already there."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(self._got) < expected and time.monotonic() < deadline:
            self._read(deadline - time.monotonic())
        got = list(self._got)
        self._got.clear()
        return got

    def flush(self) -> None:
        """Return when the server has read everything, and its goroutines have had a moment."""
        self._write(b"PING\r\n")
        self._pong = False
        while not self._pong:
            self._read(5.0)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        deadline = time.monotonic() + seconds
        while (rest_s := deadline - time.monotonic()) > 0:
            self._read(rest_s)

    def close(self) -> None:
        self._socket.close()

    def _write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _read(self, timeout_s: float) -> None:
        self._socket.settimeout(max(0.0001, timeout_s))
        try:
            data = self._socket.recv(1 << 20)
        except TimeoutError:
            return
        if not data:
            raise ConnectionError("the server closed the connection")
        self._buffer += data
        while self._parse_one():
            pass

    def _parse_one(self) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        args = line.split()
        if args[0] in {b"MSG", b"HMSG"}:
            size = int(args[-1])
            if len(rest) < size + 2:
                return False
            body, self._buffer = rest[:size], rest[size + 2 :]
            split = int(args[-2]) if args[0] == b"HMSG" else 0
            reply = args[3] if len(args) == (6 if split else 5) else b""
            self._got.append(Delivery(args[2], args[1], reply, body[:split] if split else None, body[split:]))
            return True
        self._buffer = rest
        if args[0] == b"PING":
            self._write(b"PONG\r\n")
        elif args[0] == b"-ERR":
            raise ConnectionError(line.decode())
        self._pong = self._pong or args[0] == b"PONG"
        return True

    _pong = False
