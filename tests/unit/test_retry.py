"""What follows a failed attempt."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from parti.core.retry import (
    GiveUp,
    HandlerTimeout,
    Reject,
    Retry,
    RetryPolicy,
    TryAgain,
    after_failure,
    describe,
)

POLICY = RetryPolicy(attempts=3, backoff_s=(2.0, 5.0, 15.0))


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_attempts_are_spaced_by_the_backoff_and_the_last_one_gives_up() -> None:
    decisions = [after_failure(POLICY, attempt, ValueError("bad")) for attempt in (1, 2, 3)]
    assert decisions == [TryAgain(2.0), TryAgain(5.0), GiveUp("dead_letter", "ValueError: bad")]


def test_the_last_backoff_repeats() -> None:
    patient = RetryPolicy(attempts=10, backoff_s=(1.0, 4.0))
    assert [patient.delay_s(attempt) for attempt in (1, 2, 3, 9)] == [1.0, 4.0, 4.0, 4.0]


def test_one_attempt_means_no_retry() -> None:
    assert isinstance(after_failure(RetryPolicy(attempts=1), 1, ValueError()), GiveUp)


def test_retry_chooses_its_own_delay() -> None:
    assert after_failure(POLICY, 1, Retry(0.5)) == TryAgain(0.5)
    assert after_failure(POLICY, 1, Retry(0)) == TryAgain(0)
    assert after_failure(POLICY, 2, Retry()) == TryAgain(5.0)


def test_a_message_that_always_asks_for_a_retry_ends_in_the_dead_letter_stream() -> None:
    assert after_failure(POLICY, 3, Retry(0.5, "again")) == GiveUp("dead_letter", "Retry: again")


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_reject_gives_up_at_once(attempt: int) -> None:
    assert after_failure(POLICY, attempt, Reject("not for us")) == GiveUp("reject", "not for us")


def test_a_rejection_without_a_reason_still_has_a_text() -> None:
    for error in (Reject(), Reject("")):
        decision = after_failure(POLICY, 1, error)
        assert isinstance(decision, GiveUp)
        assert decision.reason


@pytest.mark.parametrize("delay", [-1, -0.001, float("nan"), float("inf")])
def test_a_delay_that_no_clock_can_wait_for_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match="delay"):
        Retry(delay)


@pytest.mark.parametrize(
    ("delay", "wait_s"),
    [
        (10**400, 2_592_000.0),
        (2_592_001, 2_592_000.0),
        (1e300, 2_592_000.0),
        (Decimal("0.5"), 0.5),
        (Decimal("1e400"), 2_592_000.0),
        (True, 1.0),
    ],
    ids=["huge int", "more than thirty days", "huge", "Decimal", "huge Decimal", "bool"],
)
def test_the_delay_of_a_retry_is_a_float_of_at_most_a_day(delay: Any, wait_s: float) -> None:
    decision = after_failure(POLICY, 1, Retry(delay))
    assert isinstance(decision, TryAgain)
    assert (decision.delay_s, type(decision.delay_s)) == (wait_s, float)


class OwnRetry(Retry):
    def __init__(self, **fields: Any) -> None:  # without a call of the base class
        self.__dict__.update(fields)


class BrokenRetry(Retry):
    @property
    def delay(self) -> float:
        raise RuntimeError("no delay")

    @delay.setter
    def delay(self, value: float) -> None:
        """Take anything."""


@pytest.mark.parametrize(
    "error",
    [
        OwnRetry(),
        OwnRetry(delay=None),
        OwnRetry(delay=float("nan")),
        OwnRetry(delay=Decimal("NaN")),
        OwnRetry(delay=Decimal("sNaN")),
        OwnRetry(delay="soon"),
        OwnRetry(delay=1j),
        OwnRetry(delay=[1]),
        BrokenRetry(),
    ],
)
def test_a_retry_whose_delay_is_no_number_waits_as_long_as_any_failure(error: Retry) -> None:
    assert after_failure(POLICY, 2, error) == TryAgain(5.0)


@pytest.mark.parametrize(
    ("delay", "wait_s"),
    [(-1, 0.0), (-(10**400), 0.0), (float("inf"), 2_592_000.0)],
    ids=["negative", "huge negative", "infinite"],
)
def test_a_delay_that_was_not_checked_is_kept_within_bounds(delay: float, wait_s: float) -> None:
    assert after_failure(POLICY, 1, OwnRetry(delay=delay)) == TryAgain(wait_s)


def test_a_timeout_is_a_failure_like_others() -> None:
    assert after_failure(POLICY, 1, HandlerTimeout("too long")) == TryAgain(2.0)


def test_descriptions_are_one_bounded_line() -> None:
    assert describe(ValueError("a\r\nb\tc")) == "ValueError: a b c"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 10_000))) == 500


def test_a_reason_fits_into_a_header_however_long_it_is() -> None:
    decision = after_failure(POLICY, 1, Reject("long\r\n" * 10_000))
    assert isinstance(decision, GiveUp)
    assert len(decision.reason) <= 500
    assert "\n" not in decision.reason


def test_an_exception_that_cannot_describe_itself_is_described_by_its_type() -> None:
    assert describe(SpeechlessError()) == "SpeechlessError"
