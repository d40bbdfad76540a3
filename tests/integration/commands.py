"""Commands typed in this process, beside a fleet that runs in it, too."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import TextIO

import pytest

from parti.cli.main import main


@dataclass(frozen=True, slots=True)
class Said:
    """Exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str


class _CommandsStderr(io.StringIO):
    """Stderr of a command in a thread of its own. What the thread of the event loop writes, the fleet's log among it,
    goes where it went before."""

    def __init__(self, before: TextIO) -> None:
        super().__init__()
        self._before = before
        self._thread_of_the_fleet = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread_of_the_fleet:
            return self._before.write(text)
        return super().write(text)


async def type_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    """Run a command; call it from the event loop that the fleet runs in."""
    capsys.readouterr()
    with redirect_stderr(_CommandsStderr(sys.stderr)) as err:
        code = await asyncio.to_thread(main, list(arguments))
    return Said(code, capsys.readouterr().out, err.getvalue())
