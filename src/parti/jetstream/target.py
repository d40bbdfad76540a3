"""Where a NATS server is and how to prove who we are, as something that may be pickled, logged and shown.

A target holds references only: names of files and of environment variables. Whoever dials resolves them, on the
machine where it runs. Invariant guarded here: no secret is ever part of a target, so none can appear in a Spark plan,
an event log or the UI. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import SplitResult, urlsplit

from parti.errors import ConfigError
from parti.jetstream.credentials import KeyFile, KeyVariable, secret_variable, tls_context

if TYPE_CHECKING:
    from parti.config import Settings

DEFAULT_PORT = 4222
PASSWORD_VARIABLE = "PARTI_PASSWORD"
TOKEN_VARIABLE = "PARTI_TOKEN"


@dataclass(frozen=True, slots=True)
class Address:
    """One server."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Servers and references to credentials; `check` before anything is started."""

    servers: tuple[str, ...]
    user: str | None = None
    password_env: str | None = None
    token_env: str | None = None
    credentials_file: str | None = None
    credentials_env: str | None = None
    nkey_seed_file: str | None = None
    nkey_seed_env: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_hostname: str | None = None
    tls_handshake_first: bool = False
    inbox_prefix: str = "_INBOX"
    read_by: Literal["consumers", "requests"] = "consumers"
    connect_timeout_s: float = 10.0

    @classmethod
    def of(cls, settings: Settings) -> Target:
        """The target of parti's settings.

        Raises ConfigError where a secret is in the settings themselves: it could not be referred to.
        """
        for name, variable in (("password", PASSWORD_VARIABLE), ("token", TOKEN_VARIABLE)):
            if getattr(settings, name) is not None and not os.environ.get(variable):
                raise ConfigError(
                    f"{name}: Spark's tasks read it from the environment, and {variable} is not set; set {variable} "
                    f"instead of the setting, or use credentials_file"
                )

        def path(name: str) -> str | None:
            value = getattr(settings, name)
            return str(Path(value).absolute()) if value is not None else None

        return cls(
            servers=tuple(settings.nats),
            user=settings.user,
            password_env=PASSWORD_VARIABLE if settings.password is not None else None,
            token_env=TOKEN_VARIABLE if settings.token is not None else None,
            credentials_file=path("credentials_file"),
            nkey_seed_file=path("nkey_seed_file"),
            tls_ca=path("tls_ca"),
            tls_cert=path("tls_cert"),
            tls_key=path("tls_key"),
            tls_hostname=settings.tls_hostname,
            tls_handshake_first=settings.tls_handshake_first,
            inbox_prefix=settings.inbox_prefix,
            read_by=settings.read_by,
            connect_timeout_s=settings.connect_timeout_s,
        )

    def check(self) -> None:
        """Raise ConfigError unless addresses, files and variables are all usable here."""
        self.addresses()
        ways = {
            "user": self.user,
            "token": self.token_env,
            "credentials": self.credentials_file or self.credentials_env,
            "nkey": self.nkey_seed_file or self.nkey_seed_env,
        }
        given = [way for way, value in ways.items() if value]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} are given; expected one way to authenticate; leave out the rest"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("a TLS certificate and its key belong together; give both or neither")
        if self.wants_tls:
            self.tls()
        self.proof({"nonce": "check"})

    def addresses(self) -> list[Address]:
        """The servers to try, in order."""
        if not self.servers:
            raise ConfigError("servers: no address given; expected at least one, such as nats://localhost:4222")
        return [_address(url) for url in self.servers]

    @property
    def wants_tls(self) -> bool:
        """Whether nothing may be sent in clear."""
        return (
            self.tls_handshake_first
            or any((self.tls_ca, self.tls_cert, self.tls_hostname))
            or any(address.tls for address in self.addresses())
        )

    def tls(self) -> ssl.SSLContext:
        """What TLS needs."""
        return tls_context(self.tls_ca, self.tls_cert, self.tls_key)

    def proof(self, info: Mapping[str, Any]) -> dict[str, str]:
        """The fields of CONNECT that say who we are, resolved here and now."""
        keys = self._keys()
        if keys is not None:
            signed = keys.sign(str(info.get("nonce", ""))).decode()
            if keys.has_jwt:
                return {"jwt": keys.jwt().decode(), "sig": signed}
            return {"nkey": keys.public_key(), "sig": signed}
        if self.user is not None:
            password = secret_variable(self.password_env, "password") if self.password_env else ""
            return {"user": self.user, "pass": password}
        if self.token_env is not None:
            return {"auth_token": secret_variable(self.token_env, "token")}
        return {}

    @property
    def method(self) -> str:
        """How we prove who we are, for error texts."""
        if self._keys() is not None:
            return "credentials file" if self.credentials_file or self.credentials_env else "nkey"
        return "user and password" if self.user else "token" if self.token_env else "no credentials"

    def _keys(self) -> KeyFile | None:
        if self.credentials_file:
            return KeyFile(Path(self.credentials_file), setting="credentials_file", has_jwt=True)
        if self.credentials_env:
            return KeyVariable(Path(self.credentials_env), setting="credentials_env", has_jwt=True)
        if self.nkey_seed_file:
            return KeyFile(Path(self.nkey_seed_file), setting="nkey_seed_file", has_jwt=False)
        if self.nkey_seed_env:
            return KeyVariable(Path(self.nkey_seed_env), setting="nkey_seed_env", has_jwt=False)
        return None


def _address(url: str) -> Address:
    part = _split(url)
    blank = any(c.isspace() for c in url)
    if part is None or blank or part.scheme not in {"nats", "tls"} or not part.hostname:
        shown = re.sub(r"//.*@", "//", url) if "://" in url else url.rpartition("@")[2]
        raise ConfigError(f"servers: {shown!r} is no server address; expected nats://host:port or tls://host:port")
    if part.username is not None:
        raise ConfigError(
            f"servers: the address of {part.hostname} carries a user name or password, which Spark would show in its "
            f"plans; leave it out and name an environment variable (user with passwordEnv, or tokenEnv) or a file"
        )
    return Address(part.hostname, part.port or DEFAULT_PORT, part.scheme == "tls")


def _split(url: str) -> SplitResult | None:
    try:
        part = urlsplit(url if "://" in url else f"nats://{url}")
        return part if part.port is None or part.port > 0 else None
    except ValueError:
        return None
