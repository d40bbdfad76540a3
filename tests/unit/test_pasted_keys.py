"""A private key that is given in place of its file is refused where that shows, and never printed."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from parti.config import load_settings
from parti.errors import ConfigError
from parti.jetstream.credentials import KeyFile, tls_context
from parti.spark.options import read_target

PKCS8, SEC1, OPENSSH = PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL, PrivateFormat.OpenSSH
ED25519 = ed25519.Ed25519PrivateKey.generate()
P256 = ec.generate_private_key(ec.SECP256R1())
KEYS = {
    "ed25519": ED25519.private_bytes(Encoding.PEM, PKCS8, NoEncryption()),
    "ed25519 encrypted": ED25519.private_bytes(Encoding.PEM, PKCS8, BestAvailableEncryption(b"pw")),
    "ed25519 openssh": ED25519.private_bytes(Encoding.PEM, OPENSSH, NoEncryption()),
    "ed448": ed448.Ed448PrivateKey.generate().private_bytes(Encoding.PEM, PKCS8, NoEncryption()),
    "x25519": x25519.X25519PrivateKey.generate().private_bytes(Encoding.PEM, PKCS8, NoEncryption()),
    "p-256": P256.private_bytes(Encoding.PEM, PKCS8, NoEncryption()),
    "p-256 sec1": P256.private_bytes(Encoding.PEM, SEC1, NoEncryption()),
    "p-384": ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PKCS8, NoEncryption()),
    "p-521 sec1": ec.generate_private_key(ec.SECP521R1()).private_bytes(Encoding.PEM, SEC1, NoEncryption()),
    "rsa": rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PKCS8, NoEncryption()),
}


def pasted(pem: bytes) -> dict[str, str]:
    """Ways in which a key arrives in a setting."""
    first, *lines, last = pem.decode().strip().splitlines()
    return {
        "whole": pem.decode(),
        "in a line": " ".join((first, *lines, last)),
        "escaped": "\\n".join((first, *lines, last)),
        "without BEGIN": "\n".join((*lines, last)),
        "without BEGIN, in a line": " ".join(lines),
        "joined": "".join(lines),
        "first line": lines[0],
        "quoted": f'"{"".join(lines)}"',
        "half of BEGIN": " ".join((first[4:], *lines)),
        "base64 of it": base64.b64encode(pem).decode(),
    }


WAYS = [pytest.param(text, id=f"{name} {way}") for name, pem in KEYS.items() for way, text in pasted(pem).items()]


@pytest.mark.parametrize("text", WAYS)
def test_a_pasted_key_is_refused_and_not_shown(text: str) -> None:
    for option in ("tlsKey", "tlsCert", "credentialsFile"):
        with pytest.raises(ConfigError, match=f"^{option}: this is no name of a file") as caught:
            read_target({option: text})
        assert_not_shown(text, str(caught.value))
    with pytest.raises(ConfigError, match=r"tls_key=\(hidden\)") as caught:
        load_settings({"tls_cert": __file__, "tls_key": text})
    assert_not_shown(text, str(caught.value))


@pytest.mark.parametrize(
    "text",
    [
        *WAYS,
        pytest.param("UACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY", id="most of a seed"),
        pytest.param("X/0F+I8rkGqvvI9pALsOMWMAgTUZqJIqBpI8tqgtQLuaGVsbG8gd29ybGQ0=", id="a later line"),
    ],
)
def test_what_cannot_be_used_as_a_file_is_shown_only_if_it_looks_like_one(text: str, tmp_path: Path) -> None:
    for ca, cert, key in ((text, None, None), (None, text, "k"), (None, "c", text)):
        with pytest.raises(ConfigError, match="not shown") as caught:
            tls_context(ca, cert, key)
        assert_not_shown(text, str(caught.value))
    with pytest.raises(ConfigError, match=r"^nkey_seed_file: .*not shown") as caught:
        KeyFile(Path(text), setting="nkey_seed_file").check()
    assert_not_shown(text, str(caught.value))


@pytest.mark.parametrize(
    "path",
    [
        *("/no/such", "certs/tls.key", "key", "C:\\certs\\tls.key", "Münch en/key"),
        "/var/run/secrets/production/cluster/servers/certificates/private/key",
        "MIRRORS/production/cluster-7/servers/certificates/private/key.pem",
        "certs/5d41402abc4b2a76b9719d911017c5925d41402abc4b2a76b9719d911017c592.pem",
    ],
)
def test_the_path_of_a_file_that_does_not_exist_is_shown(path: str, tmp_path: Path) -> None:
    assert read_target({"tlsKey": path}).tls_key == path
    with pytest.raises(ConfigError) as caught:
        tls_context(None, path, path)
    assert f"cannot use {path} with {path}: " in str(caught.value)


def assert_not_shown(text: str, shown: str) -> None:
    """No piece of 12 characters of a key is in what is shown."""
    shown = shown.replace("\\n", "")
    for line in text.replace("\\n", "\n").split():
        assert not any(line[at : at + 12] in shown for at in range(max(1, len(line) - 11)))
