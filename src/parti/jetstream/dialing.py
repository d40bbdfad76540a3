"""How parti dials: settings become nats-py options, and refusals become parti's errors.

Guarantees: addresses in options, texts and logs carry no user name or password; secrets are handed to nats-py as
callables, never as values that a repr could show; with TLS asked for, nothing is sent in clear (see `client`).
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from nats import errors as nats_errors

from parti.errors import AuthenticationFailed, ConfigError, ConnectionFailed
from parti.jetstream.credentials import KeyFile, tls_context

if TYPE_CHECKING:
    from parti.config import Settings

DEFAULT_PORT = 4222
ATTEMPT_S = 3.0
"""Longest wait for one server's answer; shorter when the whole opening has less time."""
OUTSTANDING_PINGS = 2
"""The third ping without an answer ends the connection: a frozen server is noticed after 3 x ping interval."""

_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)", re.IGNORECASE)


def noticed_within_s(ping_interval_s: float) -> float:
    """How long it takes, at the most, until a connection is given up that takes nothing to the server any more."""
    # The first ping that is not answered may be an interval away; nothing is exact on a busy machine.
    return (OUTSTANDING_PINGS + 3) * ping_interval_s


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
    inbox_prefix: str = "_INBOX"


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
        "inbox_prefix": settings.inbox_prefix,
        **auth,
    }
    if require_tls:
        options["tls"] = tls_context(settings.tls_ca, settings.tls_cert, settings.tls_key)
        options["tls_hostname"] = settings.tls_hostname
        options["tls_handshake_first"] = settings.tls_handshake_first
    return Dial(
        servers,
        method,
        require_tls,
        settings.tls_handshake_first,
        settings.tls_cert is not None,
        keys,
        options,
        settings.inbox_prefix,
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
