"""The manifest: what was made of an upload, as JSON next to the results. It is written last."""

from __future__ import annotations

import msgspec


class Source(msgspec.Struct, frozen=True):
    """The uploaded object."""

    bucket: str
    key: str
    bytes: int
    sha256: str
    type: str
    width: int
    height: int
    duration_s: float


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """One resolution of it; times are seconds since 1970."""

    name: str
    key: str
    bytes: int
    width: int
    height: int
    slots: int = 0
    threads: int = 0
    asked_s: float = 0.0
    started_s: float = 0.0
    """When it had its slots; 0 for one that an earlier attempt had made."""
    finished_s: float = 0.0


class Manifest(msgspec.Struct, frozen=True):
    """All of it."""

    source: Source
    recipe: str
    job: str
    worker: str
    attempt: int
    results: list[Result]


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2)


def decode(data: bytes) -> Manifest:
    """The manifest in it."""
    return msgspec.json.decode(data, type=Manifest)
