"""Throw-away identities for tests: a certificate authority, and NATS operator, account and user keys with JWTs."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import nkeys  # type: ignore[import-untyped]
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Pair:
    """A PEM certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority that lives in one directory."""

    def __init__(self, directory: Path, name: str = "parti test authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        cert = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / "ca.pem"
        self.path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))

    def issue(self, common_name: str, *hosts: str, expired: bool = False) -> Pair:
        """Issue a certificate for host names and IP addresses; without hosts it is a client's."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(common_name), self._name, key.public_key()).add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        if expired:
            ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
            builder = _between(_name(common_name), self._name, key.public_key(), ended)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), False)
        cert = builder.sign(self._key, hashes.SHA256())
        pair = Pair(self._directory / f"{common_name}.pem", self._directory / f"{common_name}.key")
        pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return _between(subject, issuer, public_key, datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1))


def _between(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - datetime.timedelta(days=1, minutes=5))
        .not_valid_after(until)
    )


class Key:
    """An NKEY of one kind: operator, account or user."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seed: str = nkeys.encode_seed(os.urandom(32), getattr(nkeys, f"PREFIX_BYTE_{kind.upper()}")).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public: str = self._pair.public_key.decode()

    def claim(self, subject: Key, more: Mapping[str, Any] = MappingProxyType({}), **nats: Any) -> str:
        """Sign a JWT (version 2) that says something about `subject`."""
        claims: dict[str, Any] = {
            "iat": int(time.time()),
            "iss": self.public,
            "name": subject.kind,
            "sub": subject.public,
            "nats": {"type": subject.kind, "version": 2, **nats},
            **more,
        }
        digest = hashlib.sha512(_json(claims)).digest()[:32]
        claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
        text = b".".join(_b64(_json(part)) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims))
        return b".".join((text, _b64(self._pair.sign(text)))).decode()


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A server configuration in operator mode, and the credentials of its one user."""

    config: str
    account: Key
    user: Key

    @property
    def credentials(self) -> str:
        """Text of a credentials file that does not expire."""
        return self.credentials_for(seconds=None)

    def credentials_for(self, *, seconds: int | None) -> str:
        """Text of a credentials file that expires so many seconds from now."""
        expiry = {} if seconds is None else {"exp": int(time.time()) + seconds}
        jwt = self.account.claim(self.user, expiry, subs=-1, data=-1, payload=-1)
        return credentials(jwt, self.user.seed)


def tenancy() -> Tenancy:
    """Make operator, account and user, as `nsc` would."""
    operator, account, user = Key("operator"), Key("account"), Key("user")
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    account_jwt = operator.claim(account, limits={**limits, "wildcards": True})
    config = (
        f"operator: {operator.claim(operator)}\n"
        f"resolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {account_jwt} }}\n"
    )
    return Tenancy(config, account, user)


def credentials(jwt: str, seed: str) -> str:
    """Text of a credentials file."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"************************* IMPORTANT *************************\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
