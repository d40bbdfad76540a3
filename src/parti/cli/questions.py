"""Questions to somebody at a terminal, asked in the middle of what an event loop does."""

from __future__ import annotations

import asyncio
import sys

import typer

_YES, _NO = {"y", "yes"}, {"", "n", "no"}


async def confirmed(question: str) -> bool:
    """Ask a question that is answered with yes or no; no is what an empty line means.

    The event loop goes on meanwhile: connections stay alive and Ctrl-C is heard. A thread that reads would keep the
    process from ending until somebody presses Enter. Raises `typer.Abort` at the end of the input.
    """
    while True:
        typer.echo(f"{question} [y/N]: ", nl=False)
        await _typed()
        line = sys.stdin.readline()
        if not line:
            raise typer.Abort
        answer = line.strip().lower()
        if answer in _YES | _NO:
            return answer in _YES
        typer.echo("Please answer y or n.")


async def _typed() -> None:
    """Wait until there is a line: a terminal has nothing to read before Enter."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sys.stdin)
