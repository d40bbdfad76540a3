"""A NATS connection on a plain socket, for code without an event loop: the tasks and drivers of Spark.

It speaks the client protocol itself, because per-message objects are what reading costs (2 us here, 30 us with
nats-py's fetch), and imports nothing but the standard library, so that a Spark executor needs nothing but parti.
One thread at a time. There is no reconnecting: whoever reads knows where it was and opens another connection.

Invariant guarded here, as in `connection`: "no" (ApiError, NoResponders), "unreachable" (ConnectionFailed) and
"unknown" (RequestTimeout) are three different errors.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from parti.errors import (
    ApiError,
    AuthenticationFailed,
    ConnectionFailed,
    JetStreamUnavailable,
    NoResponders,
    NotFound,
    PartiError,
    PermissionDenied,
    RequestTimeout,
    StreamNotFound,
    WrongRevision,
)
from parti.jetstream.protocol import MalformedError, Scanner, Stray
from parti.jetstream.target import Address, Target
from parti.model.headers import status_of

REQUEST_S = 5.0
_ATTEMPT_S = 3.0
_LONG_SID = 20
_CHUNK = 1 << 18
_NOT_FOUND = frozenset({10014, 10037, 10059})
_WRONG_REVISION = frozenset({10071, 10164})
_NOT_ENABLED = frozenset({10039, 10076})
_NO_STREAM = 10059
_REFUSED = ("authorization violation", "authentication")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message from the server."""

    sid: int
    subject: str
    reply: str
    header: bytes | None
    data: bytes


class BlockingClient:
    """One connection; made by `BlockingClient.open`, closed by `with`.

    with BlockingClient.open(target, name="reader") as client:
        info = client.stream_info("DC")
    """

    def __init__(
        self, sock: socket.socket, info: Mapping[str, Any], rest: bytes, *, inbox_prefix: str = "_INBOX"
    ) -> None:
        self.max_payload = int(info.get("max_payload", 1 << 20))
        self.server = f"{info.get('host')}:{info.get('port')}"
        self._sock = sock
        self._buffer = rest
        self._sids = itertools.count(1)
        self._tokens = itertools.count(1)
        self._inbox = f"{inbox_prefix}.{os.urandom(12).hex()}"
        self._inbox_sid = 0
        self._denials: list[PermissionDenied] = []

    @classmethod
    def open(cls, target: Target, *, name: str) -> BlockingClient:
        """Connect to the first server that answers, within `connect_timeout_s`.

        Raises AuthenticationFailed or ConnectionFailed, in one line that says what each server answered, and
        ConfigError for unusable addresses, files and variables.
        """
        addresses = target.addresses()
        deadline_s = time.monotonic() + target.connect_timeout_s
        answers: dict[str, str] = {}
        while addresses:
            for address in tuple(addresses):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    addresses.clear()
                    break
                try:
                    return _dial(target, address, name, min(_ATTEMPT_S, left_s))
                except ConnectionFailed as error:
                    if error.fatal:
                        raise
                    answers[str(address)] = str(error)
                    if isinstance(error, _CertificateWantedError):
                        addresses.remove(address)
                except OSError as error:
                    answers[str(address)] = _describe(error)
                    if isinstance(error, ssl.SSLCertVerificationError):
                        addresses.remove(address)  # Another try would end the same.
            time.sleep(min(0.2, max(0.0, deadline_s - time.monotonic())) if addresses else 0)
        why = "; ".join(f"{server}: {answer}" for server, answer in answers.items())
        raise ConnectionFailed(
            f"could not connect within {target.connect_timeout_s:g} s: {why or 'no answer'}; "
            f"check that nats-server runs there and that the address is right"
        )

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; the server forgets every subscription."""
        self._sock.close()

    # ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, data: bytes) -> None:
        """Write protocol bytes."""
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise ConnectionFailed(f"the connection to {self.server} broke: {_describe(error)}") from None

    def receive(self, timeout_s: float) -> bytes:
        """What has come in: at least one byte more than was left over; empty when nothing came in time.

        The caller takes what it can use and puts the rest back with `put_back`.
        """
        data, self._buffer = self._buffer, b""
        self._sock.settimeout(timeout_s)
        try:
            more = self._sock.recv(_CHUNK)
        except TimeoutError:
            self._buffer = data
            return b""
        except OSError as error:
            raise ConnectionFailed(f"the connection to {self.server} broke: {_describe(error)}") from None
        if not more:
            raise ConnectionFailed(f"the server {self.server} closed the connection")
        return data + more if data else more

    def put_back(self, rest: bytes) -> None:
        """Bytes that were received and not used yet."""
        self._buffer = rest

    def take_line(self, line: bytes) -> None:
        """Deal with a protocol line that is no message; raises when the server says that it ends here."""
        if line == b"PING":
            self.send(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            text = line[4:].strip().strip(b"'").decode("utf-8", "replace")
            lowered = text.lower()
            if lowered.startswith("permissions violation"):
                words = text.split('"')
                operation = "publish to" if "publish" in lowered else "subscribe on"
                self._denials.append(PermissionDenied(operation, words[1] if len(words) > 1 else text))
            elif any(word in lowered for word in _REFUSED):
                raise AuthenticationFailed(f"{self.server} ended the connection: {text}; check the credentials")
            else:
                raise ConnectionFailed(f"{self.server} ended the connection: {text}")

    def raise_denials(self) -> None:
        """Raise PermissionDenied when the server has refused a publish or a subscription."""
        if self._denials:
            raise self._denials[0]

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────

    def new_inbox(self) -> str:
        """A fresh reply subject."""
        return f"{self._inbox}.{next(self._tokens)}"

    def subscribe(self, subject: str) -> int:
        """Subscribe; returns the subscription's number."""
        sid = next(self._sids)
        self.send(b"SUB %b %d\r\n" % (subject.encode(), sid))
        return sid

    def unsubscribe(self, sid: int) -> None:
        """End a subscription; what is still on its way is to be ignored."""
        self.send(b"UNSUB %d\r\n" % sid)

    def publish(
        self, subject: str, payload: bytes = b"", *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Write one message and wait for nothing."""
        self.send(publish_bytes(subject, payload, reply=reply, headers=headers))

    def next_delivery(self, timeout_s: float) -> Delivery | None:
        """The next message of any subscription; None when none came in time."""
        deadline_s = time.monotonic() + timeout_s
        data, self._buffer = self._buffer, b""
        while True:
            scanner = Scanner({})
            while (stray := self.scan(scanner, data)) is not None:
                if stray.sid:
                    self._buffer = data[scanner.pos :]
                    return _delivery(stray)
                self.take_line(stray.line[:-2])
            self._buffer = data[scanner.pos :]
            left_s = deadline_s - time.monotonic()
            data = self.receive(left_s) if left_s > 0 and not self._denials else b""
            if not data:
                return None

    def scan(self, scanner: Scanner, data: bytes) -> Stray | None:
        """The next stray in `data`; raises ConnectionFailed when these bytes are not the NATS protocol."""
        try:
            stray = scanner.scan(data)
            if stray is not None and stray.sid and not (stray.sid.isdigit() and len(stray.sid) < _LONG_SID):
                raise MalformedError("malformed MSG")
            return stray
        except MalformedError as error:
            raise ConnectionFailed(f"the server {self.server} sent what cannot be read: {error}") from None

    def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_S,
    ) -> Delivery:
        """Send a request and wait for its answer; only while no other subscription delivers.

        Raises NoResponders, PermissionDenied, RequestTimeout (the outcome is unknown) and ConnectionFailed.
        """
        if not self._inbox_sid:
            self._inbox_sid = self.subscribe(f"{self._inbox}.*")
        inbox = self.new_inbox()
        self._denials.clear()
        self.publish(subject, payload, reply=inbox, headers=headers)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            # A denial comes before the answer would, or instead of it.
            answer = self.next_delivery(min(left_s, 0.05) if self._denials else left_s)
            if answer is not None and answer.subject == inbox:
                if answer.header is not None and status_of(answer.header)[0] == 503:
                    raise NoResponders(f"nobody answers on {subject!r}; check that the service runs")
                return answer
            if answer is None and self._denials:
                break
        if self._denials and self._denials[0].subject.startswith(self._inbox):
            self._inbox_sid = 0  # There is no subscription for answers.
        self.raise_denials()
        raise RequestTimeout(f"no answer on {subject!r} within {timeout_s:g} s; the outcome is unknown")

    # ── JetStream ─────────────────────────────────────────────────────────────────────────────────────────────

    def api(
        self, name: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = REQUEST_S
    ) -> dict[str, Any]:
        """Call `$JS.API.<name>`; ApiError or a subclass when the server says no."""
        try:
            answer = self.request(f"$JS.API.{name}", json.dumps(body).encode() if body else b"", timeout_s=timeout_s)
        except NoResponders:
            raise JetStreamUnavailable(
                f"JetStream does not answer at {self.server}; enable it on the server and for this account"
            ) from None
        found: dict[str, Any] = json.loads(answer.data)
        if "error" in found:
            raise api_error(found["error"])
        return found

    def stream_info(self, stream: str, **body: Any) -> dict[str, Any]:
        """Configuration and state of a stream, from its leader; StreamNotFound when there is none."""
        try:
            return self.api(f"STREAM.INFO.{stream}", body)
        except NotFound as error:
            if error.code != _NO_STREAM:
                raise
            raise StreamNotFound(
                f"stream {stream!r} does not exist on {self.server}; create it or check the name"
            ) from None


def _delivery(stray: Stray) -> Delivery:
    return Delivery(
        int(stray.sid),
        stray.subject.decode("utf-8", "replace"),
        stray.reply.decode("utf-8", "replace"),
        stray.header,
        stray.payload,
    )


def api_error(error: Mapping[str, Any]) -> PartiError:
    """The error that JetStream answered with, as ours."""
    code, text = int(error.get("err_code", 0)), str(error.get("description", "unknown error"))
    status = int(error.get("code", 0))
    if code in _NOT_ENABLED:
        return JetStreamUnavailable(f"JetStream is not enabled for this account ({text}); enable it on the server")
    kind = NotFound if code in _NOT_FOUND else WrongRevision if code in _WRONG_REVISION else ApiError
    return kind(code, text, status=status)


def passes(error: PartiError) -> bool:
    """Whether the same call may succeed soon: an outage, or a cluster that looks for a leader."""
    if isinstance(error, ApiError):
        return error.status == 503
    return isinstance(error, ConnectionFailed | NoResponders | RequestTimeout) and not error.fatal


def publish_bytes(
    subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
) -> bytes:
    """Protocol bytes that publish one message."""
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    block = f"NATS/1.0\r\n{lines}\r\n".encode()
    size = len(block) + len(payload)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply.encode(), len(block), size, block, payload)


# ── dialing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _dial(target: Target, address: Address, name: str, timeout_s: float) -> BlockingClient:
    context = target.tls() if target.wants_tls else None
    sock = socket.create_connection((address.host, address.port), timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host = target.tls_hostname or address.host
        if context is not None and target.tls_handshake_first:
            sock = context.wrap_socket(sock, server_hostname=host)
        info = _read_info(sock, timeout_s)
        if context is not None and not target.tls_handshake_first:
            if not info.get("tls_required") and not info.get("tls_available"):
                raise ConnectionFailed("the server offers no TLS; enable it there, or use no TLS options")
            sock = context.wrap_socket(sock, server_hostname=host)
        elif context is None and info.get("tls_required"):
            sock = target.tls().wrap_socket(sock, server_hostname=host)
        rest = _greet(sock, target, info, name, address)
    except BaseException:
        sock.close()
        raise
    return BlockingClient(sock, info, rest, inbox_prefix=target.inbox_prefix)


def _greet(sock: socket.socket, target: Target, info: Mapping[str, Any], name: str, address: Address) -> bytes:
    """Say who we are. With TLS 1.3 a server that refuses our certificate does so only now."""
    try:
        return _say_hello(sock, target, info, name, address)
    except AuthenticationFailed:
        raise
    except (OSError, ConnectionFailed) as error:
        if not info.get("tls_verify"):
            raise
        if target.tls_cert is None:
            raise _CertificateWantedError(
                "the server wants a client certificate; give one and its key (tls_cert and tls_key, or tlsCert and "
                "tlsKey)"
            ) from None
        why = _describe(error) if isinstance(error, OSError) else str(error)
        raise ConnectionFailed(
            f"{why}; the server checks client certificates: is ours valid, and of an authority that it knows?"
        ) from None


class _CertificateWantedError(ConnectionFailed):
    """Another try would end the same."""


def _read_info(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    data, deadline_s = b"", time.monotonic() + timeout_s
    while b"\r\n" not in data:
        try:
            more = sock.recv(_CHUNK)
        except TimeoutError:
            raise ConnectionFailed(
                "it says nothing; check that it is a NATS server, and whether it wants the TLS handshake first"
            ) from None
        if not more:
            raise ConnectionFailed("the server closed the connection")
        data += more
        if not data.startswith(b"INFO "[: len(data)]) or time.monotonic() > deadline_s:
            break
    try:
        found = json.loads(data.removeprefix(b"INFO ").partition(b"\r\n")[0])
    except ValueError:
        found = None
    if not data.startswith(b"INFO ") or not isinstance(found, dict):
        raise ConnectionFailed("this is no NATS server: its first line is not INFO; check address and port")
    return found


def _say_hello(sock: socket.socket, target: Target, info: Mapping[str, Any], name: str, address: Address) -> bytes:
    hello = {
        "verbose": False,
        "pedantic": False,
        "lang": "python-parti",
        "version": "1",
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "name": name,
        **target.proof(info),
    }
    sock.sendall(b"CONNECT " + json.dumps(hello).encode() + b"\r\nPING\r\n")
    data = b""
    while b"PONG\r\n" not in data:
        if b"-ERR" in data and b"\r\n" in data:
            text = data[data.index(b"-ERR") + 4 :].split(b"\r\n")[0].strip().strip(b"'").decode("utf-8", "replace")
            if any(word in text.lower() for word in _REFUSED):
                raise AuthenticationFailed(
                    f"{address} refused the connection (sent: {target.method}); expected valid credentials; "
                    f"check the credential options and the server's users"
                )
            raise ConnectionFailed(f"the server refused: {text}")
        more = sock.recv(_CHUNK)
        if not more:
            raise ConnectionFailed("the server closed the connection")
        data += more
    return data.split(b"PONG\r\n", 1)[1]


def _describe(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        return f"TLS: {reason}; check the authority and the host name that TLS was told to expect"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return error.strerror or str(error) or type(error).__name__
