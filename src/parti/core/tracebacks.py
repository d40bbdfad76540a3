"""Tracebacks of handlers, short enough for a log line and a dead letter."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

from parti.core.retry import Reject, Retry, describe
from parti.model.safe_text import many_lines

_MOST = 4_000
_FRAMES = 10
"""Innermost calls that are shown."""
_CHAIN = 3
"""Errors that are shown of those that led to one another."""


def traceback_of(error: BaseException) -> str:
    """Where an error of a handler was raised, and those that led to it; safe, bounded, without local variables.

    Empty for an error that only steers (`Reject`, `Retry`), unless another one led to it, and for one that nobody
    has raised.
    """
    try:
        chain = list(_chain(error))
        if isinstance(error, Reject | Retry) and len(chain) == 1:
            return ""
        parts = [part for each in reversed(chain) if (part := _one(each))]
    except Exception:  # an exception class of the app may do anything
        return ""
    return many_lines("\n".join(parts), _MOST)


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    for _ in range(_CHAIN):
        if following is None:
            return
        yield following
        context = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or context


def _one(error: BaseException) -> str:
    calls = list(traceback.walk_tb(error.__traceback__))
    # parti's own calls come first, and lead to the handler every time.
    begin = next((at for at, (frame, _) in enumerate(calls) if not _is_own(frame)), 0)
    calls = calls[begin:][-_FRAMES:]
    if not calls:
        return ""
    # One call after the other, with the lines of the source.
    lines = traceback.StackSummary.extract(iter(calls)).format()
    return f"Traceback (most recent call last):\n{''.join(lines)}{describe(error)}"


def _is_own(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith("parti.")
