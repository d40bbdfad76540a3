"""What happens after an attempt: done, another attempt later, or the dead-letter stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan

from parti.core.error_groups import first_of
from parti.model.safe_text import one_line

_MOST_OF_GROUP = 240
"""Characters that are shown of what a group says, so that its first error has room."""

_MOST_DELAY_S = 30 * 86_400.0
"""Longest wait that a handler may ask for: the server takes nanoseconds in 64 bits, a timer takes a float."""


class Retry(Exception):  # noqa: N818 - it steers, it is not an error
    """Raise in a handler to try the message again after `delay` seconds, at most thirty days.

    Counts as an attempt, so a message that always asks for another one ends in the dead-letter stream.
    """

    delay: float | None = None  # a subclass may leave out the constructor

    def __init__(self, delay: float | None = None, reason: str = "handler asked for a retry") -> None:
        super().__init__(reason)
        if delay is not None and not 0 <= delay < inf:
            raise ValueError(f"Retry delay must be a number of seconds from 0 on, got {delay}")
        self.delay = delay


class Reject(Exception):  # noqa: N818 - it steers, it is not an error
    """Raise in a handler to send the message to the dead-letter stream at once, with `reason`."""

    def __init__(self, reason: str = "handler rejected the message") -> None:
        super().__init__(reason)


class HandlerTimeout(Exception):  # noqa: N818 - named for what it tells
    """A handler ran longer than `handler_timeout_s`."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a failing message is tried."""

    attempts: int = 3
    backoff_s: Sequence[float] = (2.0, 5.0, 15.0)

    def delay_s(self, attempt: int) -> float:
        """The wait after the given failed attempt (1 is the first); the last entry repeats."""
        return self.backoff_s[min(attempt - 1, len(self.backoff_s) - 1)]


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Keep the message at the head of its lane and start it again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Dead-letter the message; `outcome` is the label of the metric."""

    outcome: str
    reason: str


def after_failure(policy: RetryPolicy, attempt: int, error: BaseException) -> TryAgain | GiveUp:
    """Decide what follows a failed attempt (1 is the first)."""
    if isinstance(error, Reject):
        return GiveUp("reject", _text(error) or type(error).__name__)
    if attempt >= policy.attempts:
        return GiveUp("dead_letter", describe(error))
    delay_s = asked_delay_s(error) if isinstance(error, Retry) else None
    return TryAgain(policy.delay_s(attempt) if delay_s is None else delay_s)


def asked_delay_s(error: Retry) -> float | None:
    """The wait that a handler asks for, at most thirty days; None when it asks for none, or for what is no number."""
    try:
        if error.delay is None:
            return None
        # Bounded before it is converted: an int may be too large for a float.
        delay_s = float(min(max(error.delay, 0), _MOST_DELAY_S))
    except Exception:  # a subclass may put anything there
        return None
    return None if isnan(delay_s) else delay_s


def describe(error: BaseException) -> str:
    """One line for headers, records and logs: type and text, safe and bounded (`parti.model.safe_text`).

    Of a group, its first error as well: the group itself says only how many there are.
    """
    first = first_of(error)
    if first is None:
        return one_line(_type_and_words(error))
    return one_line(f"{one_line(_type_and_words(error), _MOST_OF_GROUP)}: first: {_type_and_words(first)}")


def _type_and_words(error: BaseException) -> str:
    words = words_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _text(error: BaseException) -> str:
    """The error's own words on one line."""
    return one_line(words_of(error))


def words_of(error: BaseException) -> str:
    """What an error says; an exception of a handler may fail to find any words."""
    try:
        return str(error)
    except Exception:
        return ""
