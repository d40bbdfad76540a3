"""Key files, seeds and certificates: read where they are used, checked with a clear line, never shown.

Imports nothing but the standard library until a seed is used, so that Spark's tasks can use it without nats-py.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import ssl
from pathlib import Path
from typing import Any

from parti.errors import ConfigError
from parti.model.safe_text import looks_like_key

_JWT = re.compile(rb"BEGIN NATS USER JWT-+\s+([\w.-]+)\s+-")
# No path looks like this: as long as half a key, nothing but letters and digits, and no directory to begin with.
_BASE64 = re.compile(r"(?!/\w{1,20}/)[A-Za-z0-9+/=]{41,}")
_SEED = re.compile(rb"BEGIN USER NKEY SEED-+\s+([A-Z2-7]+)\s+-")


class KeyFile:
    """A seed file, or a credentials file with user JWT and seed; read again at each dial, so rotation just works.

    nats-py would read a credentials file that lacks its JWT for ever, blocking the loop; here that is a ConfigError.
    """

    def __init__(self, path: Path, *, setting: str, has_jwt: bool | None = None) -> None:
        self.path = path
        self.setting = setting
        self.has_jwt = setting == "credentials_file" if has_jwt is None else has_jwt

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
        import nkeys  # type: ignore[import-untyped]  # noqa: PLC0415 - only those who sign need it

        seed = self._section(_SEED, "user seed") if self.has_jwt else self._read().strip()
        try:
            raw = base64.b32decode(seed + b"=" * (-len(seed) % 8))
            sound = nkeys.crc16(bytearray(raw[:-2])) == int.from_bytes(raw[-2:], "little")
            if not (seed.startswith(b"SU") and len(raw) == 36 and sound):
                raise nkeys.ErrInvalidSeed
            return nkeys.from_seed(bytearray(seed))
        except (binascii.Error, nkeys.NkeysError):
            raise ConfigError(
                f"{self.setting}: {self._where()} holds no valid user seed; expected a line of 58 characters that "
                f"begins with SU; create the file again with `nsc` or `nk`"
            ) from None

    def _section(self, pattern: re.Pattern[bytes], what: str) -> bytes:
        match = pattern.search(self._read())
        if match is None:
            raise ConfigError(
                f"{self.setting}: {self._where()} holds no {what}; "
                f"expected a credentials file as `nsc generate creds` writes it"
            )
        return match[1]

    def _where(self) -> str:
        return shown_path(self.path)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.setting}: cannot read {self._where()}: {error.strerror}") from None


class KeyVariable(KeyFile):
    """What a key file holds, in an environment variable."""

    def _where(self) -> str:
        return f"the environment variable {self.path}"

    def _read(self) -> bytes:
        return secret_variable(str(self.path), self.setting).encode()


def secret_variable(name: str, setting: str) -> str:
    """The value of an environment variable that must be set; `setting` names who asked for it."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"{setting}: the environment variable {name} is not set in this process; set it there "
            f"(on a cluster: on every executor, for example by spark.executorEnv.{name})"
        )
    return value


def shown_path(path: str | Path | None) -> str:
    """A path for an error message, unless it looks like the key itself, given in place of its file."""
    text = str(path)
    if text.isprintable() and not looks_like_key(text) and not _BASE64.fullmatch(text):
        return text
    return f"a path of {len(text)} characters (not shown, it may be the key itself)"


def tls_context(ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> ssl.SSLContext:
    """What TLS needs, from PEM files; ConfigError when one of them is unusable."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_ca: cannot use {shown_path(ca)}: {_one_line(error)}; expected PEM") from None
    if cert is not None:
        try:
            # Without a password callable OpenSSL asks on the terminal when the key is encrypted.
            context.load_cert_chain(cert, key, password=str)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_cert, tls_key: cannot use {shown_path(cert)} with {shown_path(key)}: {_one_line(error)}; "
                f"expected a PEM certificate and its unencrypted key"
            ) from None
    return context


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
