"""Commands as a person sees them: on a terminal, of a certain size, with colours."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import IO

from tests.integration.processes import command, environment


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, code: str = "", stdout: IO[bytes] | None = None) -> None:
        """Run `parti` with these arguments, or a piece of Python. `stdout`: a file in place of the terminal."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code] if code else command(*arguments),
            stdin=slave,
            stdout=stdout or slave,
            stderr=slave,
            env=environment(TERM="xterm"),
        )
        os.close(slave)
        self.text = ""
        self._closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            self.text += os.read(self._master, 65_536).decode(errors="replace")
        except OSError:
            asyncio.get_running_loop().remove_reader(self._master)
            self._closed.set()

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._master, keys.encode())

    async def ends(self) -> int:
        """Wait for the exit code and the last words; nothing is left behind, not even when they do not come."""
        try:
            code = await asyncio.to_thread(self.process.wait, 30)
            async with asyncio.timeout(10):
                await self._closed.wait()
            return code
        finally:
            self.process.kill()
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
