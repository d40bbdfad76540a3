"""Stdin, stdout and stderr of a command whose other ends may be closed, or full, before it begins or while it runs.

A command whose stdout nobody reads any more ends as Ctrl-C would end it, quietly, with the exit code that a shell
gives for SIGPIPE. One whose stdout takes no more, as on a full disk, ends in the same way, says so in a line and has
the exit code 1. Services, such as workers, have better things to do: they go on, and what they would write is
dropped. So are lines for a stderr that nobody reads or that takes no more.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any, TextIO

BROKEN_PIPE = 128 + 13
"""What a shell gives for SIGPIPE, on systems that have none as well."""
UNWRITTEN = 1
"""What a command ends with whose output found no room."""
_GONE = frozenset({errno.EPIPE, errno.EIO, errno.ECONNRESET})
_SERVICES: dict[str, Collection[str]] = {
    "worker": (),
    "console": (),
    "jobs": ("run",),
    "pipeline": ("run",),
    "dev": ("server",),
}


def is_service(words: Collection[str]) -> bool:
    """Whether a command line, without its options, asks for something that goes on without readers."""
    first, second = [*words, "", ""][:2]
    return first in _SERVICES and (not _SERVICES[first] or second in _SERVICES[first])


class Streams:
    """The streams of this process; `broken` once stdout was closed by its reader, `failed` once it took no more."""

    def __init__(self, *, service: bool) -> None:
        self.broken = False
        self.failed = False
        self._ending = False
        self._service = service

    def install(self) -> None:
        """Put streams into place that bear closed ends. What is closed already is opened to nowhere.

        Otherwise the next socket would get the number of, say, stdout, and receive what is printed.
        """
        for number in (0, 1, 2):
            _keep_open(number)
        if sys.stdin is None:
            sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        sys.stdout = _outlet(sys.stdout, 1, self._lost_stdout, self._failed_stdout)
        sys.stderr = _outlet(sys.stderr, 2, lambda: None, lambda error: None)

    def finish(self, code: int) -> int:
        """Write what waits, and return the exit code: this one, unless stdout is closed or took no more."""
        self._ending = True
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if self._service:
            return code
        return BROKEN_PIPE if self.broken else UNWRITTEN if self.failed else code

    def _lost_stdout(self) -> None:
        self.broken = True
        self._end_command()

    def _failed_stdout(self, error: OSError) -> None:
        if self.failed:
            return
        self.failed = True
        reason = error.strerror or error
        sys.stderr.write(f"parti: cannot write to stdout: {reason}; make room there, or send the output elsewhere\n")
        sys.stderr.flush()
        self._end_command()

    def _end_command(self) -> None:
        if not self._service and not self._ending:
            _lead_nowhere(2)  # nobody has interrupted it: there is nothing to say about that
            signal.raise_signal(signal.SIGINT)


def _keep_open(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        _lead_nowhere(number)


def _lead_nowhere(number: int) -> None:
    """Make a file of this process swallow what is written to it, and be empty for who reads."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(nowhere, True)  # as the standard streams are
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def _outlet(
    stream: TextIO | None, number: int, on_lost: Callable[[], None], on_failed: Callable[[OSError], None]
) -> TextIO:
    """The same as a stream of this process, except that an end that is closed or full is no error."""
    raw: Any = _Outlet(number, on_lost, on_failed)
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Outlet(io.FileIO):
    """Writes to a file of this process until its other end is gone, and then to nowhere.

    What finds no room is dropped; what comes later may find some.
    """

    def __init__(self, number: int, on_lost: Callable[[], None], on_failed: Callable[[OSError], None]) -> None:
        super().__init__(number, "wb", closefd=False)
        self._on_lost = on_lost
        self._on_failed = on_failed

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                _lead_nowhere(self.fileno())  # also what is written past this object, and by child processes
                self._on_lost()
            else:
                self._on_failed(error)
        return memoryview(data).nbytes
