"""Restarts of supervised processes: patience grows while a slot fails, and bad input is not tried again."""

from __future__ import annotations

import signal

import pytest

from parti.core.restarts import (
    DEFAULT_POLICY,
    GiveUp,
    Restart,
    RestartPolicy,
    Slot,
    after_exit,
    after_start,
    fleet_exit_code,
    signal_name,
)


def delays(lives_s: list[float], exit_code: int = 1, policy: RestartPolicy = DEFAULT_POLICY) -> list[float]:
    """The delay after each of the given lives of a slot's processes, one after the other."""
    slot, now_s, seen = Slot(), 1000.0, []
    for life_s in lives_s:
        slot = after_start(slot, now_s=now_s)
        now_s += life_s
        slot, decision = after_exit(policy, slot, exit_code, now_s=now_s)
        assert isinstance(decision, Restart)
        seen.append(decision.delay_s)
        now_s += decision.delay_s
    return seen


def test_the_delay_doubles_from_half_a_second_to_half_a_minute() -> None:
    assert delays([0.1] * 9) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_process_that_lived_for_a_minute_starts_a_new_series() -> None:
    assert delays([1, 1, 1, 60, 1, 1]) == [0.5, 1, 2, 0.5, 1, 2]
    assert delays([1, 1, 1, 59.9, 1]) == [0.5, 1, 2, 4, 8]


def test_a_slot_may_fail_for_weeks() -> None:
    assert delays([0.1] * 50_000)[-1] == 30


def test_the_first_delay_is_bounded_too() -> None:
    assert delays([0, 0], policy=RestartPolicy(first_delay_s=5, longest_delay_s=3)) == [3, 3]


@pytest.mark.parametrize("exit_code", [0, 1, 3, 143, -signal.SIGKILL, -signal.SIGSEGV])
def test_every_other_end_is_followed_by_a_restart(exit_code: int) -> None:
    assert delays([0.1, 0.1], exit_code) == [0.5, 1]


def test_a_first_process_that_could_not_start_ends_everything() -> None:
    slot = after_start(Slot(), now_s=5)
    assert after_exit(DEFAULT_POLICY, slot, 2, now_s=6) == (slot, GiveUp(2))


def test_a_later_process_that_could_not_start_is_tried_again() -> None:
    slot = after_start(Slot(), now_s=5)
    slot, _ = after_exit(DEFAULT_POLICY, slot, -signal.SIGKILL, now_s=6)
    for delay_s in (1.0, 2.0, 4.0):
        slot, decision = after_exit(DEFAULT_POLICY, after_start(slot, now_s=7), 2, now_s=8)
        assert decision == Restart(delay_s)


def test_a_first_process_that_worked_for_long_had_started_whatever_its_exit_code() -> None:
    _, decision = after_exit(DEFAULT_POLICY, after_start(Slot(), now_s=0), 2, now_s=3600)
    assert decision == Restart(0.5)


@pytest.mark.parametrize(
    ("last_exits", "code"),
    [
        ([0, 0, 0], 0),
        ([], 0),
        ([0, 1, 0], 1),
        ([0, 2], 1),
        ([0, 143], 1),
        ([0, -signal.SIGKILL], 1),
        ([0, -signal.SIGTERM], 0),
    ],
)
def test_all_left_in_order_or_not(last_exits: list[int], code: int) -> None:
    assert fleet_exit_code(last_exits) == code


def test_signals_have_names() -> None:
    assert signal_name(-9) == "SIGKILL"
    assert signal_name(-40) == "signal 40"
