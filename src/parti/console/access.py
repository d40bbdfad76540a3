"""Who may look: everybody on this machine, and elsewhere those who know a secret.

Secrets come from files, are compared in constant time, and are never shown, logged or put into a URL. A browser that
has named the token gets a cookie whose value is another secret, made at random by this process.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from parti.config.secret_files import find_exposure
from parti.errors import ConfigError

COOKIE = "parti-console"
LEAST_TOKEN = 16
LEAST_PASSWORD = 12
MOST_SECRET = 1024
_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII)


class Access:
    """What a request has to bring; without token and passwords nothing, but then for this machine only."""

    def __init__(self, token: str = "", passwords: Mapping[str, str] | None = None) -> None:
        self._token = token.encode()
        self._passwords = {user.encode(): password.encode() for user, password in (passwords or {}).items()}
        self._session = secrets.token_urlsafe(32)

    def __repr__(self) -> str:
        return f"<Access token={bool(self._token)} users={len(self._passwords)}>"

    @property
    def required(self) -> bool:
        """Whether a secret has to be named."""
        return bool(self._token or self._passwords)

    @property
    def takes_token(self) -> bool:
        """Whether there is a token that a form may ask for."""
        return bool(self._token)

    @property
    def schemes(self) -> tuple[str, ...]:
        """What a refusal says about how to name a secret."""
        basic, bearer = ('Basic realm="parti", charset="UTF-8"',), ('Bearer realm="parti"',)
        return basic * bool(self._passwords) + bearer * bool(self._token)

    @property
    def session(self) -> str:
        """The value of the cookie of whoever has named the token."""
        return self._session

    def admits(self, authorization: str, cookie: str) -> bool:
        """Whether the headers `Authorization` and `Cookie` of a request name a secret."""
        if not self.required:
            return True
        if self._token and any(
            hmac.compare_digest(given.encode(), self._session.encode()) for given in _sessions_in(cookie)
        ):
            return True
        kind, _, value = authorization.partition(" ")
        if kind.lower() == "bearer":
            return self.is_token(value.strip())
        return kind.lower() == "basic" and self._is_password(value.strip())

    def is_token(self, given: str) -> bool:
        """Whether this is the token."""
        return bool(self._token) and hmac.compare_digest(given.encode(errors="replace"), self._token)

    def _is_password(self, encoded: str) -> bool:
        try:
            user, _, password = base64.b64decode(encoded, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        found = False
        # All are compared, so that the time tells nothing of which names there are.
        for name, wanted in self._passwords.items():
            found |= hmac.compare_digest(name, user) & hmac.compare_digest(wanted, password)
        return found


def _sessions_in(cookie: str) -> Iterator[str]:
    """Yield the values of our cookie, which need no quotes; the standard library takes long for many of them."""
    for pair in cookie.split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE:
            yield value


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine only; a name other than localhost is taken for one that may not."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.lower() in _LOOPBACK_NAMES


def is_host(host: str) -> bool:
    """Whether this can be the header `Host`: a name, an IPv4 address or one of IPv6 in brackets, and a port."""
    return _HOST.fullmatch(host) is not None


def names_this_machine(host: str) -> bool:
    """Whether the header `Host` of a request names this machine itself.

    A page of somebody else can make a name of its own lead to 127.0.0.1 and would then read what it likes; the name
    that it was opened under still stands in this header. So there is nothing to be generous about in it.
    """
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    in_brackets, name = found.groups()
    if name is not None and name.lower() in _LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.IPv6Address(in_brackets) if name is None else ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return address.is_loopback


class Proxies:
    """The proxies whose word counts for how a browser has reached them."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def trusts(self, address: str) -> bool:
        """Whether a connection from this address is one of theirs."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)
        return any((mapped or found) in network for network in self._networks)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_access(token_file: Path | None, basic_auth_file: Path | None, *, readable: bool = False) -> Access:
    """Read the secrets; raises `ConfigError`, without them, for files that cannot be used.

    `readable`: other users may be able to read them.
    """
    for setting, path in (("console_token_file", token_file), ("console_basic_auth_file", basic_auth_file)):
        if not readable and path is not None and (exposure := find_exposure(setting, path)):
            raise ConfigError(
                f"{exposure.text}; run '{exposure.fix}' (Kubernetes: defaultMode 0400 of the volume), or accept it "
                f"with console_allow_readable_files=true"
            )
    token = _read_token(token_file) if token_file else ""
    return Access(token, _read_passwords(basic_auth_file) if basic_auth_file else None)


def _read_token(path: Path) -> str:
    token = _read(path, "console_token_file").strip()
    if not LEAST_TOKEN <= len(token) <= MOST_SECRET or len(token.split()) != 1:
        raise ConfigError(
            f"console_token_file must hold one token of {LEAST_TOKEN} characters or more without spaces; make one "
            f"with 'python -c \"import secrets; print(secrets.token_urlsafe(32))\"'"
        )
    return token


def _read_passwords(path: Path) -> dict[str, str]:
    passwords: dict[str, str] = {}
    lines = enumerate(_read(path, "console_basic_auth_file").splitlines(), start=1)
    for number, line in ((number, line.strip()) for number, line in lines):
        if not line or line.startswith("#"):
            continue
        user, _, password = line.partition(":")
        if not user or not LEAST_PASSWORD <= len(password) <= MOST_SECRET or user in passwords:
            raise ConfigError(
                f"line {number} of console_basic_auth_file is no 'user:password', or that user was there before; "
                f"passwords need {LEAST_PASSWORD} characters or more"
            )
        passwords[user] = password
    if not passwords:
        raise ConfigError("console_basic_auth_file holds no 'user:password'; write one on a line of its own")
    return passwords


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{setting} cannot be read: {reason}; name a text file that this user may read") from None
