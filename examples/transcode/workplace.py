"""Temporary files: a directory for each worker process, which is removed also when that process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "transcode-"
_LOCK = ".lock"


class Workplace:
    """A directory below `parent` for one process; use it as a context manager.

    The kernel holds its lock for as long as the process lives, however that ends. Who makes a workplace first removes
    those that nobody holds any more.
    """

    def __init__(self, parent: Path) -> None:
        for left in parent.glob(f"{_PREFIX}*"):
            _remove_if_free(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unseen = self.path / ".new"
        self._lock = os.open(unseen, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unseen.rename(self.path / _LOCK)  # only now can others find it, locked

    def __enter__(self) -> Workplace:
        """Give the directory."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_if_free(directory: Path) -> None:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return  # none of ours, or just being made
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass  # its process lives
    finally:
        os.close(lock)
