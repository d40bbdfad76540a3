"""The types of single settings: how each is parsed, what it accepts, and what may be shown of it.

Every check states what is expected and never repeats the value, so that secrets cannot leak through it.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _server_url(value: str) -> str:
    if "://" not in value:
        if "@" in value:
            raise ValueError("a server with credentials must start with nats:// or tls://")
        value = f"nats://{value}"
    if not value.startswith(("nats://", "tls://")):
        raise ValueError("must start with nats:// or tls://")
    try:
        parts = urlsplit(value)
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    # What urlsplit takes for a path or a query is most often the rest of an unescaped password.
    if not valid or parts.path.strip("/") or parts.query or parts.fragment or re.search(r"[\s,]", value):
        raise ValueError(
            "must be nats://host:port or tls://host:port (write special characters of a password as %XX)"
        )
    return value.rstrip("/")


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise ValueError("must be letters, digits, '-' and '_' only, because it becomes part of names in JetStream")
    return value


def is_stream_name(value: str) -> bool:
    """Whether a stream can have this name."""
    return re.fullmatch(r"[^\s.*>/\\]+", value) is not None


def _stream_name(value: str) -> str:
    if not is_stream_name(value):
        raise ValueError("must be a stream name: no spaces and none of . * > / \\")
    return value


def _subject(value: str) -> str:
    if not re.fullmatch(r"[^\s.*>]+(\.[^\s.*>]+)*", value):
        raise ValueError("must be a subject without wildcards (* or >), spaces or empty tokens")
    return value


def _existing_file(value: Path) -> Path:
    try:
        found = value.expanduser().is_file()
    except (OSError, RuntimeError):
        found = False
    if not found:
        raise ValueError("must be the path of an existing file")
    return value.expanduser()


def _network(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value, strict=False))
    except ValueError:
        raise ValueError("must be an address or a network, such as 10.0.0.7 or 10.0.0.0/8") from None


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


ServerUrls = Annotated[
    tuple[Annotated[str, AfterValidator(_server_url)], ...],
    NoDecode,
    BeforeValidator(_split),
    Field(min_length=1),
]
Waits = Annotated[tuple[Annotated[float, Field(gt=0)], ...], NoDecode, BeforeValidator(_split), Field(min_length=1)]
Networks = Annotated[tuple[Annotated[str, AfterValidator(_network)], ...], NoDecode, BeforeValidator(_split)]
StreamName = Annotated[str, AfterValidator(_stream_name)]
Subject = Annotated[str, AfterValidator(_subject)]
Name = Annotated[str, Field(max_length=128), AfterValidator(_name)]
ExistingFile = Annotated[Path, AfterValidator(_existing_file)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)]
