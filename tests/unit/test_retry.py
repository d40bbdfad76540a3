"""What follows a failed attempt."""

from __future__ import annotations

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
