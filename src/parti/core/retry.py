"""What happens after an attempt: done, another attempt later, or the dead-letter stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from parti.model.safe_text import one_line


class Retry(Exception):  # noqa: N818 - it steers, it is not an error
    """Raise in a handler to try the message again after `delay` seconds.

    Counts as an attempt, so a message that always asks for another one ends in the dead-letter stream.
    """

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
    if isinstance(error, Retry) and error.delay is not None:
        return TryAgain(error.delay)
    return TryAgain(policy.delay_s(attempt))


def describe(error: BaseException) -> str:
    """One line for headers, records and logs: type and text, safe and bounded (`parti.model.safe_text`)."""
    text = _words(error)
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _text(error: BaseException) -> str:
    """The error's own words on one line."""
    return one_line(_words(error))


def _words(error: BaseException) -> str:
    """What an error says; an exception of a handler may fail to find any words."""
    try:
        return str(error)
    except Exception:
        return ""
