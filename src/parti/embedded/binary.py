"""Which nats-server binary to run, and whether it is new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parti.errors import EmbeddedServerError, ServerTooOld

MIN_SERVER_VERSION: Final = (2, 14)
"""Oldest (major, minor) of nats-server that parti runs against."""

BINARY_VARIABLE: Final = "PARTI_NATS_SERVER"
"""Environment variable that names the binary to run."""

_ADVICE = "install one with: pip install 'parti[embedded]'"
_VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Binary:
    """An executable nats-server and the version it reported."""

    path: Path
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        """The version as people write it, for example `2.15.1`."""
        return ".".join(map(str, self.version))

    @property
    def new_enough(self) -> bool:
        """Whether parti can work with this server."""
        return self.version[:2] >= MIN_SERVER_VERSION


def find_binary(binary: str | os.PathLike[str] | None = None) -> Binary:
    """Choose the nats-server to run.

    The first of these that is set: the argument, the variable PARTI_NATS_SERVER. A binary named in this way is used
    or refused, never replaced by another. When nothing is named: `nats-server` on PATH if it is new enough, else the
    one that `parti[embedded]` installed beside this Python.

    Raises EmbeddedServerError when there is no binary or it does not run, ServerTooOld when the one found is too old.
    """
    if binary is not None:
        return _named(Path(binary), "argument 'binary'")
    if from_environment := os.environ.get(BINARY_VARIABLE):
        return _named(Path(from_environment), BINARY_VARIABLE)
    too_old: Binary | None = None
    for candidate in _unnamed_candidates():
        try:
            found = _inspect(candidate)
        except EmbeddedServerError:
            # A broken binary that nobody asked for is no reason to refuse the next one.
            continue
        if found.new_enough:
            return found
        too_old = too_old or found
    if too_old is not None:
        raise ServerTooOld(f"{_age_complaint(too_old)}; {_ADVICE}")
    raise EmbeddedServerError(
        f"no nats-server found: expected one on PATH or beside this Python; {_ADVICE}, or set {BINARY_VARIABLE}"
    )


def _named(path: Path, source: str) -> Binary:
    if not path.is_file():
        raise EmbeddedServerError(
            f"no nats-server at {str(path)!r} ({source}): expected the path of its binary; correct it, or {_ADVICE}"
        )
    found = _inspect(path.absolute())
    if not found.new_enough:
        raise ServerTooOld(f"{_age_complaint(found)} ({source}); name a newer one, or {_ADVICE}")
    return found


def _unnamed_candidates() -> list[Path]:
    on_path = shutil.which("nats-server")
    beside_python = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    return [Path(place).absolute() for place in (on_path, beside_python) if place is not None]


def _inspect(path: Path) -> Binary:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else type(cause).__name__
        raise EmbeddedServerError(
            f"{str(path)!r} could not be run ({reason}): expected an executable nats-server; {_ADVICE}"
        ) from cause
    # Pre-releases print v2.15.0-RC.1: the numbers decide.
    match = re.search(r"nats-server: v(\d+)\.(\d+)\.(\d+)", done.stdout)
    if done.returncode != 0 or match is None:
        raise EmbeddedServerError(
            f"{str(path)!r} is not a nats-server: expected 'nats-server: vX.Y.Z' from --version; {_ADVICE}"
        )
    major, minor, patch = match.groups()
    return Binary(path, (int(major), int(minor), int(patch)))


def _age_complaint(found: Binary) -> str:
    wanted = ".".join(map(str, MIN_SERVER_VERSION))
    return f"{str(found.path)!r} is nats-server {found.version_text}: expected {wanted} or newer"
