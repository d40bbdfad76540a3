"""Who may write to a lake: one process for each table, and compaction only while nobody else is at work.

Locks of the operating system on files in the lake, so they end with the process that holds them, however it ends. On
file systems other than that of this machine there are none: whoever starts two writers there has to know.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from parti.errors import ConfigError
from parti.spark.lake import is_local, local_path

DIRECTORY = "_locks"


class LakeLock:
    """A share in a lake, which can be turned into the whole of it for a moment."""

    def __init__(self, shared: int | None) -> None:
        self._shared = shared

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Be alone in the lake, if nobody else is there; yields whether that is so."""
        if self._shared is None:
            yield True
            return
        try:
            fcntl.flock(self._shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The system gives up the share before it tries for more.
            fcntl.flock(self._shared, fcntl.LOCK_SH)
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._shared, fcntl.LOCK_SH)


@contextmanager
def writing(lake: str, tables: Sequence[str]) -> Iterator[LakeLock]:
    """Hold the tables for writing; raises ConfigError if another process writes to one, or compacts the lake."""
    if not is_local(lake):
        yield LakeLock(None)
        return
    with ExitStack() as held:
        shared = held.enter_context(_locked(lake, "lake", fcntl.LOCK_SH, "is compacting this lake; wait for it"))
        for table in tables:
            held.enter_context(
                _locked(lake, table, fcntl.LOCK_EX, f"writes to table {table}; stop it, or choose another lake")
            )
        yield LakeLock(shared)


@contextmanager
def compacting(lake: str) -> Iterator[None]:
    """Hold the whole lake; raises ConfigError if another process is at work on it."""
    if not is_local(lake):
        yield
        return
    why = "is at work on this lake; stop it first, or let it compact by itself with the setting compact_after"
    with _locked(lake, "lake", fcntl.LOCK_EX, why):
        yield


@contextmanager
def _locked(lake: str, name: str, kind: int, why: str) -> Iterator[int]:
    directory = local_path(lake) / DIRECTORY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(_file(directory, name), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"lake {lake} cannot be written: {error.strerror}; choose another directory") from None
    try:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"lake {lake}: another process {why}") from None
        yield file
    finally:
        os.close(file)


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name}.lock"
