"""Questions to somebody at a terminal, asked in the middle of what an event loop does."""

from __future__ import annotations

import asyncio
import os
import sys

import typer

from parti.model.safe_text import escape_line

_YES, _NO = {"y", "yes"}, {"", "n", "no"}
_MOST_TYPED = 4096


def can_ask() -> bool:
    """Whether there is a terminal that somebody may answer at; a pipe and a closed stdin are none."""
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # it was closed
        return False


async def confirmed(question: str, *, err: bool = False) -> bool:
    """Ask a question that is answered with yes or no; no is what an empty line means.

    The event loop goes on meanwhile: connections stay alive and Ctrl-C is heard. A thread that reads would keep the
    process from ending until somebody presses Enter. Raises `typer.Abort` at the end of the input. `err`: ask on
    stderr. Ask `can_ask` first.
    """
    while True:
        typer.echo(f"{escape_line(question)} [y/N]: ", nl=False, err=err)
        try:
            answer = (await _line()).strip().lower()
        except asyncio.CancelledError:
            typer.echo(err=err)  # what the shell says next begins a line of its own
            raise
        if answer in _YES | _NO:
            return answer in _YES
        typer.echo("Please answer y or n.", err=err)


async def _line() -> str:
    """Read one line. Nothing here blocks: half a line, ended with Ctrl-D, would keep a `readline` waiting."""
    typed = b""
    while not typed.endswith(b"\n") and len(typed) < _MOST_TYPED:
        more = await _typed()
        if not more:
            if typed:
                break
            raise typer.Abort
        typed += more
    return typed.partition(b"\n")[0].decode(errors="replace")


async def _typed() -> bytes:
    """Wait until there is something to read: a terminal has nothing before Enter. Empty: the end of the input."""
    loop, file, readable = asyncio.get_running_loop(), sys.stdin.fileno(), asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)
    try:
        return os.read(file, _MOST_TYPED)
    except OSError:  # the terminal is gone
        return b""
