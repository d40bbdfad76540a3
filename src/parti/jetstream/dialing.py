"""How parti dials: settings become nats-py options, refusals become parti's errors, and nats-py's client is mended.

Guarantees: addresses in options, texts and logs carry no user name or password; secrets are handed to nats-py as
callables, never as values that a repr could show; with TLS asked for, nothing is sent in clear (see Session).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

import nkeys  # type: ignore[import-untyped]
from nats import errors as nats_errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import ERR_RE

from parti.errors import AuthenticationFailed, ConfigError, ConnectionFailed

if TYPE_CHECKING:
    from nats.aio.client import Srv

    from parti.config import Settings

DEFAULT_PORT = 4222
ATTEMPT_S = 3.0
"""Longest wait for one server's answer; shorter when the whole opening has less time."""
OUTSTANDING_PINGS = 2
"""The third ping without an answer ends the connection: a frozen server is noticed after 3 x ping interval."""

DISCARD_S = 1.0
READ_SIZE = 128 * 1024
"""Most bytes taken from the socket at once."""

_JWT = re.compile(rb"BEGIN NATS USER JWT-+\s+([\w.-]+)\s+-")
_SEED = re.compile(rb"BEGIN USER NKEY SEED-+\s+([A-Z2-7]+)\s+-")
_DENIED = re.compile(
    r'permissions violation for (publish|subscription)(?: to| with reply of) "((?:[^"\\]|\\.)*)"', re.IGNORECASE
)
_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Dial:
    """Everything needed to dial: addresses without userinfo, nats-py options, and how parti proves who it is."""

    servers: tuple[str, ...]
    method: str
    require_tls: bool
    handshake_first: bool
    has_client_cert: bool
    keys: KeyFile | None
    options: Mapping[str, Any] = field(repr=False)


class KeyFile:
    """A seed file, or a credentials file with user JWT and seed; read again at each dial, so rotation just works.

    nats-py would read a credentials file that lacks its JWT for ever, blocking the loop; here that is a ConfigError.
    """

    def __init__(self, path: Path, *, setting: str) -> None:
        self.path = path
        self.setting = setting
        self.has_jwt = setting == "credentials_file"

    def public_key(self) -> str:
        """Return the public key of the seed."""
        public: bytes = self._pair().public_key
        return public.decode()

    def sign(self, nonce: str) -> bytes:
        """Sign the server's nonce; base64, as CONNECT wants it."""
        return base64.b64encode(self._pair().sign(nonce.encode()))

    def jwt(self) -> bytes:
        """Return the user JWT of a credentials file."""
        return self._section(_JWT, "user JWT")

    def check(self) -> None:
        """Raise ConfigError unless the file holds what its setting promises."""
        self.public_key()
        if self.has_jwt:
            self.jwt()

    def _pair(self) -> Any:
        seed = self._section(_SEED, "user seed") if self.has_jwt else self._read().strip()
        try:
            raw = base64.b32decode(seed + b"=" * (-len(seed) % 8))
            sound = nkeys.crc16(bytearray(raw[:-2])) == int.from_bytes(raw[-2:], "little")
            if not (seed.startswith(b"SU") and len(raw) == 36 and sound):
                raise nkeys.ErrInvalidSeed
            return nkeys.from_seed(bytearray(seed))
        except (binascii.Error, nkeys.NkeysError):
            raise ConfigError(
                f"{self.setting}: {self.path} holds no valid user seed; expected a line of 58 characters that begins "
                f"with SU; create the file again with `nsc` or `nk`"
            ) from None

    def _section(self, pattern: re.Pattern[bytes], what: str) -> bytes:
        match = pattern.search(self._read())
        if match is None:
            raise ConfigError(
                f"{self.setting}: {self.path} holds no {what}; "
                f"expected a credentials file as `nsc generate creds` writes it"
            )
        return match[1]

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.setting}: cannot read {self.path}: {error.strerror}") from None


def plan_dial(settings: Settings, *, name: str) -> Dial:
    """Turn settings into a Dial; ConfigError when an address, a certificate or a key file is unusable."""
    parts = [_split(url) for url in settings.nats]
    if not parts:
        raise ConfigError("nats: no server address given; expected at least one, such as nats://localhost:4222")
    servers = tuple(f"{part.scheme}://{_host_port(part)}" for part in parts)
    method, auth, keys = _authentication(settings, parts)
    require_tls = settings.tls_handshake_first or any(
        (settings.tls_ca, settings.tls_cert, settings.tls_hostname, *(part.scheme == "tls" for part in parts))
    )
    options: dict[str, Any] = {
        "servers": list(servers),
        "name": name,
        "connect_timeout": min(ATTEMPT_S, settings.connect_timeout_s * 0.9 / len(servers)),
        "reconnect_time_wait": settings.reconnect_wait_s,
        "max_reconnect_attempts": -1,
        "ping_interval": settings.ping_interval_s,
        "max_outstanding_pings": OUTSTANDING_PINGS,
        # Off: what is published while disconnected would be sent after it was reported as failed.
        "pending_size": -1,
        **auth,
    }
    if require_tls:
        options["tls"] = _tls_context(settings)
        options["tls_hostname"] = settings.tls_hostname
        options["tls_handshake_first"] = settings.tls_handshake_first
    return Dial(
        servers, method, require_tls, settings.tls_handshake_first, settings.tls_cert is not None, keys, options
    )


def _split(url: str) -> SplitResult:
    try:
        part = urlsplit(url if "://" in url else f"nats://{url}")
        if part.scheme in ("nats", "tls") and part.hostname and (part.port is None or part.port > 0):
            return part
    except ValueError:
        pass
    shown = re.sub(r"//.*@", "//", url) if "://" in url else url.rpartition("@")[2]
    raise ConfigError(f"nats: {shown!r} is no server address; expected nats://host:port or tls://host:port")


def _host_port(part: SplitResult) -> str:
    host = part.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{part.port or DEFAULT_PORT}"


def _authentication(settings: Settings, parts: list[SplitResult]) -> tuple[str, dict[str, Any], KeyFile | None]:
    if settings.credentials_file is not None or settings.nkey_seed_file is not None:
        setting = "credentials_file" if settings.credentials_file is not None else "nkey_seed_file"
        keys = KeyFile(Path(getattr(settings, setting)), setting=setting)
        keys.check()
        return setting, {}, keys
    user, password, token = settings.user, settings.password, settings.token
    if user is not None:
        return "user and password", {"user": user, "password": password.get_secret_value if password else str}, None
    if token is not None:
        return "token", {"token": token.get_secret_value}, None
    return _userinfo(parts)


def _userinfo(parts: list[SplitResult]) -> tuple[str, dict[str, Any], None]:
    """Take user and password out of the addresses: servers found by gossip have none of their own."""
    found = {(part.username, part.password) for part in parts if part.username is not None}
    if len(found) > 1:
        raise ConfigError(
            "nats: the addresses carry different users; expected one; use the settings user and password"
        )
    if not found:
        return "no credentials", {}, None
    user, password = found.pop()
    if password is None:
        return "token", {"token": lambda: unquote(user or "")}, None
    return "user and password", {"user": unquote(user or ""), "password": lambda: unquote(password)}, None


def _tls_context(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_ca: cannot use {settings.tls_ca}: {_one_line(error)}; expected PEM") from None
    if settings.tls_cert is not None:
        try:
            # Without a password callable OpenSSL asks on the terminal when the key is encrypted.
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password=str)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_cert, tls_key: cannot use {settings.tls_cert} with {settings.tls_key}: {_one_line(error)}; "
                f"expected a PEM certificate and its unencrypted key"
            ) from None
    return context


class Attempts:
    """What each server answered while opening, and whether waiting longer could still help."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._started = time.monotonic()
        self._answers: dict[str, tuple[str, str]] = {}

    def record(self, server: str, error: Exception, info: Mapping[str, Any]) -> None:
        """Note why one server could not be used; the newest answer of a server counts."""
        self._answers.pop(server, None)
        self._answers[server] = self._judge(error, info)

    def hopeless(self, pool: Collection[str]) -> bool:
        """Every server has answered, and one refused the credentials or all refused TLS."""
        kinds = [self._answers[server][0] if server in self._answers else "unknown" for server in pool]
        return "unknown" not in kinds and ("auth" in kinds or set(kinds) == {"tls"})

    def failure(self) -> ConnectionFailed:
        """Return the error to raise, in one line: which servers, why, how long, what to do."""
        refused = [server for server, (kind, _) in self._answers.items() if kind == "auth"]
        if refused:
            return AuthenticationFailed(
                f"{', '.join(refused)} refused the connection (sent: {self._dial.method}); expected valid "
                f"credentials; check user, password, token, nkey_seed_file or credentials_file, and its users"
            )
        answers = dict.fromkeys(self._dial.servers, ("unknown", "no answer")) | self._answers
        why = "; ".join(f"{server}: {reason}" for server, (_, reason) in answers.items())
        hint = (
            "" if self.hopeless(answers) else "; check that nats-server runs there and that the setting nats is right"
        )
        return ConnectionFailed(f"could not connect within {time.monotonic() - self._started:.1f} s: {why}{hint}")

    def _judge(self, error: Exception, info: Mapping[str, Any]) -> tuple[str, str]:
        text = describe(error)
        if refused_credentials(error):
            return "auth", text
        if isinstance(error, nats_errors.SecureConnWantedError):
            return "tls", "the server offers no TLS; enable it there, or use nats:// and drop the tls_ settings"
        if isinstance(error, ssl.SSLError):
            return "tls", f"TLS: {text}; {self._tls_hint(error, info)}"
        if info.get("tls_verify"):
            # With TLS 1.3 a refused client certificate may show up only as a broken connection.
            kind = "network" if self._dial.has_client_cert else "tls"
            return kind, f"{text}; the server wants a client certificate: set tls_cert and tls_key to a valid one"
        if isinstance(error, TimeoutError) and self._dial.require_tls and not self._dial.handshake_first:
            return "network", f"{text}; if the server speaks TLS first, set tls_handshake_first"
        return "network", text

    def _tls_hint(self, error: ssl.SSLError, info: Mapping[str, Any]) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            if "mismatch" in error.verify_message:
                return "check the address in nats, or set tls_hostname to a name in the server's certificate"
            if "expired" in error.verify_message:
                return "renew the server's certificate"
            return "set tls_ca to the authority that signed the server's certificate"
        if "CERTIFICATE_REQUIRED" in str(error.reason) or (info.get("tls_verify") and not self._dial.has_client_cert):
            return "the server wants a client certificate: set tls_cert and tls_key"
        if "ALERT" in str(error.reason):
            return "the server refused the client certificate: check tls_cert and tls_key"
        return "check tls_handshake_first and that the server speaks TLS there"


def refused_credentials(error: Exception | None) -> bool:
    """Whether the server said that it does not accept who we are."""
    return isinstance(error, nats_errors.AuthorizationError) or _REFUSED.search(str(error)) is not None


def describe(error: Exception) -> str:
    """Say in one line, without nats-py's prefix, what went wrong."""
    if refused_credentials(error):
        return f"the server refused the credentials ({_one_line(error)})"
    if isinstance(error, nats_errors.UnexpectedEOF):
        return "the server closed the connection"
    if isinstance(error, nats_errors.StaleConnectionError):
        return "the server stopped answering pings"
    if isinstance(error, TimeoutError) and not isinstance(error, nats_errors.Error) and not error.args:
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return _one_line(error)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).removeprefix("nats: ").strip("'").split())
    return (text or type(error).__name__)[:300]


class Session(Client):
    """A nats-py client that reconnects after anything but close(), and reports at once when it goes down.

    Each override names the behaviour of nats-py 2.16 that forces it; pyproject.toml pins nats-py for that reason.
    """

    def __init__(self, dial: Dial, *, on_down: Callable[[str], None], on_denied: Callable[[str, str], None]) -> None:
        super().__init__()
        self._dial = dial
        self._on_down = on_down
        self._on_denied = on_denied
        self._parser = self._ps  # The wire may put its own in front of it.
        self._server_said: Exception | None = None
        self.dialled = ""
        """Address of the server dialled last."""
        if dial.keys is not None:
            # Set here because connect() turns it on only for its own, blocking, ways to read key files.
            self._auth_configured = True

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

    def _stop_loops(self) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
