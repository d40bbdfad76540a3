"""Tracebacks of handlers, short enough for a log line and a dead letter."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

from parti.core.error_groups import errors_of
from parti.core.retry import Reject, Retry, describe, words_of
from parti.model.safe_text import many_lines

_MOST = 4_000
_FRAMES = 10
"""Innermost calls that are shown."""
_CHAIN = 3
"""Errors that are shown of those that led to one another."""
_OF_GROUP = 3
"""Errors that are shown of a group."""
_ERRORS = 10
"""Errors that are shown in all; groups may lie in one another without end."""
_MOST_WORDS = 2_000
"""What is shown of the text of an error that was not raised here."""


def traceback_of(error: BaseException) -> str:
    """Where an error of a handler was raised, and those that led to it; safe, bounded, without local variables.

    The errors of a group count among those that led to it, and so does the text in which another process sends its
    traceback. Empty for an error that only steers (`Reject`, `Retry`), unless another one led to it, and for one that
    nobody has raised.
    """
    try:
        shown = list(_led_to(error, _CHAIN, set()))
        if isinstance(error, Reject | Retry) and len(shown) == 1:
            return ""
        parts = [_one(each) or ("" if each is error else _told(each)) for each in shown]
    except Exception:  # an exception class of the app may do anything
        return ""
    return many_lines("\n".join(filter(None, parts)), _MOST)


def _led_to(error: BaseException, links: int, seen: set[int]) -> Iterator[BaseException]:
    """Yield what led to an error, and then the error; each once."""
    if id(error) in seen or len(seen) >= _ERRORS:
        return
    seen.add(id(error))
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    if cause is not None and links > 1:
        yield from _led_to(cause, links - 1, seen)
    for each in errors_of(error)[:_OF_GROUP]:
        yield from _led_to(each, links, seen)
    yield error


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


def _told(error: BaseException) -> str:
    """What an error says that was not raised here: text of another process may be its whole traceback."""
    words = words_of(error).strip()
    if len(words) > _MOST_WORDS:
        # The end names the error. The line that is cut goes: without its beginning, a password is not recognised.
        words = words[-_MOST_WORDS:].partition("\n")[2]
    return f"{type(error).__name__}: {words}" if "\n" in words else describe(error)


def _is_own(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith("parti.")
