"""The private directory of one embedded server, and the removal of those whose owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "parti-nats-"
_LOCK = "owner.lock"


class RunDir:
    """A temporary directory, readable by this user only, that is locked for as long as this process lives.

    The lock is the kernel's, so it is gone with the process however that ended, and it holds across containers that
    share /tmp, where process ids would not tell. Making a RunDir first removes those that nobody locks any more.
    """

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked under another name first: a sweep looks only at owner.lock, so it never sees it unlocked.
        unnamed = self.path / "new.lock"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def write_private(self, name: str, text: str) -> Path:
        """Write a file that only this user can read; server configuration may hold passwords."""
        path = self.path / name
        with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def remove(self) -> None:
        """Delete the directory with all it holds; a second call does nothing."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def sweep() -> None:
    """Remove run directories of this user whose owner is gone; what cannot be removed is left alone."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if directory.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            # Still locked: its owner lives.
            pass
        finally:
            os.close(lock)
