"""A raw client: publishes bytes that no client library would let through, and knows what the server has stored."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from parti.jetstream.protocol import MalformedError, Scanner

_ANSWER_S = 5.0
_FORBIDDEN = b" \t\r\n\0\x7f"
"""What ends a word of the protocol, and DEL: nats-server 2.15.1 stores a message with it in the subject, but leaves
it out of the index of subjects, so that no consumer with a filter ever gets it."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A message as bytes; `block` is a header block, or None."""

    subject: bytes
    payload: bytes = b""
    block: bytes | None = None

    def written(self, reply: bytes) -> bytes:
        """The bytes that publish it."""
        if self.block is None:
            return b"PUB %b %b %d\r\n%b\r\n" % (self.subject, reply, len(self.payload), self.payload)
        sizes = b"%d %d" % (len(self.block), len(self.block) + len(self.payload))
        return b"HPUB %b %b %b\r\n%b%b\r\n" % (self.subject, reply, sizes, self.block, self.payload)


def as_subject(raw: bytes, most: int = 3_900) -> bytes:
    """A subject that a server takes, out of any bytes: no white space, no empty token, no wildcard."""
    tokens = [token for token in raw.translate(None, _FORBIDDEN).split(b".") if token]
    tokens = [b"x" if token in {b"*", b">"} else token for token in tokens]
    return (b".".join(tokens) or b"x")[:most].rstrip(b".") or b"x"


class RawClient:
    """One connection at a time; the server may close it, and then there is another."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._socket: socket.socket | None = None
        self._answers: dict[bytes, bytes] = {}
        self._number = 0
        self.refused = 0
        """Messages that the server did not store."""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def publish(self, messages: Sequence[Raw]) -> list[int]:
        """Publish these; returns the sequence of each in its stream, 0 for one that was not stored."""
        found = self._publish(messages)
        if len(messages) > 1 and found is None:
            # One of them has cost the connection, and what came behind it with it.
            return [self.publish([message])[0] for message in messages]
        found = found or [0] * len(messages)
        self.refused += found.count(0)
        return found

    def _publish(self, messages: Sequence[Raw]) -> list[int] | None:
        replies, parts = [], []
        for message in messages:
            self._number += 1
            replies.append(b"_INBOX.raw.%d" % self._number)
            parts.append(message.written(replies[-1]))
        try:
            client = self._open()
            client.sendall(b"".join(parts))
            self._read(client, frozenset(replies))
        except (OSError, MalformedError):
            self.close()
            return None
        return [_seq(self._answers.pop(reply, b"")) for reply in replies]

    def _open(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection(
                (self._place.hostname or "127.0.0.1", self._place.port or 4222), 5
            )
            self._socket.sendall(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
            self._socket.sendall(b"SUB _INBOX.raw.* 1\r\nPING\r\n")
        return self._socket

    def _read(self, client: socket.socket, wanted: frozenset[bytes]) -> None:
        def sink(subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
            self._answers[subject] = payload

        scanner, waiting, ends_s = Scanner({b"1": sink}), b"", time.monotonic() + _ANSWER_S
        client.settimeout(_ANSWER_S)
        while not wanted <= self._answers.keys():
            if time.monotonic() > ends_s:
                raise TimeoutError
            chunk = client.recv(1 << 16)
            if not chunk:
                raise ConnectionResetError
            waiting += chunk
            scanner.pos = 0
            while (stray := scanner.scan(waiting)) is not None:
                if stray.line == b"PING\r\n":
                    client.sendall(b"PONG\r\n")
                elif stray.line.startswith(b"-ERR"):
                    raise ConnectionResetError
            waiting = waiting[scanner.pos :]


def _seq(answer: bytes) -> int:
    try:
        return int(json.loads(answer).get("seq", 0))
    except (ValueError, AttributeError):
        return 0
