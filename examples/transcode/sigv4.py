"""AWS Signature Version 4, as S3 and its relatives ask for it. Pure: the time is an argument."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

EMPTY_SHA256 = hashlib.sha256().hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who signs, and for which region."""

    access_key: str
    secret_key: str = field(repr=False)
    region: str
    session_token: str = field(default="", repr=False)


def quote_path(path: str) -> str:
    """A path as it stands in the request and in the signature: S3 quotes it once, and leaves slashes alone."""
    return quote(path, safe="/-_.~")


def sign(
    credentials: Credentials,
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    payload_sha256: str,
    at: datetime,
) -> dict[str, str]:
    """The headers that are to be sent: those given, which must name the host, and those that prove who asks.

    `path` is as it is before quoting, `at` is in UTC. There is no query.
    """
    moment = f"{at:%Y%m%dT%H%M%SZ}"
    scope = f"{at:%Y%m%d}/{credentials.region}/s3/aws4_request"
    sent = {**headers, "x-amz-date": moment, "x-amz-content-sha256": payload_sha256}
    if credentials.session_token:
        sent["x-amz-security-token"] = credentials.session_token
    canonical = {name.lower(): " ".join(value.split()) for name, value in sent.items()}
    names = ";".join(sorted(canonical))
    request = "\n".join(
        [
            method,
            quote_path(path),
            "",
            *(f"{name}:{canonical[name]}" for name in sorted(canonical)),
            "",
            names,
            payload_sha256,
        ]
    )
    to_sign = "\n".join([_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    signature = hmac.new(_key(credentials, scope), to_sign.encode(), hashlib.sha256).hexdigest()
    proof = f"Credential={credentials.access_key}/{scope},SignedHeaders={names},Signature={signature}"
    return {**sent, "Authorization": f"{_ALGORITHM} {proof}"}


def _key(credentials: Credentials, scope: str) -> bytes:
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
