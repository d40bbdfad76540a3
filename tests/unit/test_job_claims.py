"""What follows from a delivery and the record that is found: start, skip, cancel, leave it to another, condemn."""

from __future__ import annotations

from typing import Any

import pytest

from parti.core.job_claims import Cancel, Claimant, Condemn, Elsewhere, Skip, Start, Verdict, judge
from parti.errors import ConfigError
from parti.model.job import JobRecord, JobState, cancel_key, decode_job, encode_job, job_id, parse_key, record_key

ME = Claimant("me", ack_wait_s=100.0, crash_limit=3)


def record(**values: Any) -> JobRecord:
    given = {"stream": "S", "seq": 7, "subject": "s", "published_ns": 5, "state": JobState.RUNNING, **values}
    return JobRecord(**given)


def verdict(found: JobRecord | None, *, now_s: float = 1000.0, cancelled: bool = False) -> Verdict:
    return judge(found, 5, ME, cancelled=cancelled, now_s=now_s)


def test_a_job_without_a_record_is_started() -> None:
    assert verdict(None) == Start(1, 0, 0)
    assert verdict(None, cancelled=True) == Cancel()


def test_the_record_of_another_stream_with_the_same_sequence_does_not_count() -> None:
    assert verdict(record(published_ns=4, state=JobState.DONE)) == Start(1, 0, 0)


@pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED, JobState.CANCELLED])
def test_what_has_ended_is_not_started_again(state: JobState) -> None:
    assert verdict(record(state=state, worker="w", incarnation="other", seen_s=999)) == Skip(state)
    assert verdict(record(state=state), cancelled=True) == Skip(state)


def test_a_job_whose_worker_was_heard_of_just_now_is_left_to_it() -> None:
    running = record(worker="w", incarnation="other", seen_s=980)
    assert verdict(running) == Elsewhere("w", 80)
    assert verdict(running, cancelled=True) == Elsewhere("w", 80)  # that one will hear of it
    assert verdict(running, now_s=970) == Elsewhere("w", 100)  # clocks that differ


def test_a_sign_of_life_from_far_in_the_future_keeps_no_job_waiting() -> None:
    assert verdict(record(worker="w", incarnation="other", seen_s=1e9)) == Start(2, 0, 1)


def test_a_job_whose_worker_is_silent_is_taken_over_and_its_death_counted() -> None:
    assert verdict(record(worker="w", incarnation="other", seen_s=900)) == Start(2, 0, 1)
    waiting = record(worker="w", incarnation="other", seen_s=900, state=JobState.WAITING)
    assert verdict(waiting) == Start(1, 0, 0)  # it did nothing, so it has killed nobody


def test_a_job_that_was_given_back_is_started_at_once_with_its_failures() -> None:
    assert verdict(record(state=JobState.WAITING, failures=1, crashes=1, seen_s=999)) == Start(3, 1, 1)


def test_ones_own_record_is_no_hindrance() -> None:
    assert verdict(record(worker="w", incarnation="me", seen_s=999, failures=1)) == Start(2, 1, 0)


def test_a_job_that_one_more_death_would_condemn_is_tried_alone_and_then_condemned() -> None:
    found = verdict(record(worker="w", incarnation="other", crashes=1))
    assert found == Start(3, 0, 2, alone=True)
    assert verdict(record(worker="", crashes=2)) == Start(3, 0, 2, alone=True)
    condemned = verdict(record(worker="w", incarnation="other", crashes=2))
    assert isinstance(condemned, Condemn)
    assert condemned.crashes == 3
    assert "died 3 times" in condemned.reason


def test_records_keys_and_ids() -> None:
    one = record(percent=12.5, phrase="x", worker="w")
    assert decode_job(encode_job(one)) == one
    assert decode_job(b"{}") is None
    assert decode_job(b"\xff") is None
    assert parse_key(record_key("parti-jobs", 7)) == parse_key(cancel_key("parti-jobs", 7)) == ("parti-jobs", 7)
    assert parse_key(job_id("parti-jobs", 7)) == ("parti-jobs", 7)
    with pytest.raises(ConfigError, match=r"'x\.y' is no id of a job"):
        parse_key("x.y")
