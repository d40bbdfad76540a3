"""How a command that runs Spark ends when it is told to: with one line, and without a word of Java's."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Never

import typer

from parti.app.signals import Asked, exit_at_once, leave_event
from parti.spark.session import kill_jvm


def exit_with_spark(number: signal.Signals) -> Never:
    """End this process and its JVM without any tidying up and without a word; see `exit_at_once`."""
    kill_jvm()
    exit_at_once(number)


@contextmanager
def stopped_by_signals(what: str) -> Iterator[Asked]:
    """A block that may be cut off: what it raises after SIGTERM or SIGINT becomes one line and 128 + the signal.

    The event is for `interrupted_by`. `what` completes the line: what was stopped, and what to do now. A second
    signal ends the process at once.
    """
    with leave_event(exit_with_spark) as asked:
        try:
            yield asked
        except Exception:
            if asked.number is None:
                raise
        else:
            return
    typer.echo(f"parti: {asked.number.name} stopped {what}", err=True)
    raise typer.Exit(128 + asked.number)
