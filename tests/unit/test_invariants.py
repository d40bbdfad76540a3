"""The named invariants: each is broken by one short history and kept by its neighbour."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from parti.core.invariants import Abort, Death, Event, Finish, Invariant, Lapse, Start, check_history

STORED = {"a": [1, 2, 5]}


def call(seq: int, at_s: float, *, process: str = "p1", fence: int = 1, takes_s: float = 0.1) -> list[Event]:
    """A handler call from start to finish."""
    return [
        Start("a", seq, f"w-{process}", fence, process, at_s),
        Finish("a", seq, f"w-{process}", fence, process, at_s + takes_s),
    ]


def begin(seq: int, at_s: float, *, process: str = "p1", fence: int = 1) -> list[Event]:
    """A handler call that never returns."""
    return [Start("a", seq, f"w-{process}", fence, process, at_s)]


def names(events: Iterable[Event], **options: object) -> list[str]:
    return [violation.invariant.value for violation in check_history(STORED, events, **options)]  # type: ignore[arg-type]


GOOD = [*call(1, 1), *call(2, 2), *call(5, 3)]


def test_a_run_in_order_has_no_violation() -> None:
    assert check_history(STORED, GOOD) == []


def test_events_may_come_in_any_order() -> None:
    assert check_history(STORED, reversed(GOOD)) == []


def test_what_was_stored_and_never_finished_is_lost() -> None:
    (violation,) = check_history(STORED, GOOD[:-1])
    assert (violation.invariant, violation.seq) == (Invariant.NO_LOSS, 5)
    assert "NoLoss" in str(violation)
    assert "message 5" in str(violation)


def test_what_is_ahead_of_the_position_is_not_lost() -> None:
    assert names(GOOD[:4], positions={"a": 5}) == []
    assert names(GOOD[:4], positions={"a": 6}) == ["NoLoss"]


def test_a_whole_partition_that_nobody_handled_is_lost() -> None:
    assert [v.seq for v in check_history({"b": [3, 4]}, [])] == [3, 4]


def test_a_skipped_message_breaks_the_order() -> None:
    assert names([*call(1, 1), *call(5, 2), *call(2, 3)]) == ["Order", "Order"]


def test_a_message_must_not_start_before_the_one_before_it_has_finished() -> None:
    died = [*begin(1, 1), Death("p1", 1.5)]
    rest = [
        *call(1, 3, process="p2", fence=2),
        *call(2, 4, process="p2", fence=2),
        *call(5, 5, process="p2", fence=2),
    ]
    assert names([*died, *rest]) == []
    assert names([*died, *begin(2, 2, process="p3", fence=2)])[0] == "Order"


def test_another_attempt_after_a_failure_is_no_repeat() -> None:
    assert names([*begin(1, 0.1), *begin(1, 0.5), *GOOD]) == []


def test_a_stale_owner_must_not_start_after_its_successor() -> None:
    lapse = Lapse("p1", 1.5)
    events = [*call(1, 1), lapse, *call(2, 2, process="p2", fence=2), *call(5, 3)]
    assert names(events) == ["OneOwner"]


def test_a_fence_token_must_not_come_again() -> None:
    assert names([*call(1, 1), *call(2, 2, process="p2"), *call(5, 3, process="p2")]) == ["EpochGrows", "OneOwner"]


def test_a_fence_token_must_not_decrease() -> None:
    assert names([*call(1, 1, fence=7), *call(2, 2, process="p2", fence=6), *call(5, 3, process="p3", fence=8)]) == [
        "EpochGrows"
    ]


def test_a_worker_on_its_own_has_no_fence_tokens() -> None:
    assert names([*call(1, 1, fence=0), *call(2, 2, process="p2", fence=0), *call(5, 3, process="p3", fence=0)]) == []


def test_two_owners_must_not_handle_at_once() -> None:
    running = call(1, 1, takes_s=2)
    events = [*running, *call(2, 4, process="p2", fence=2), *call(5, 5, process="p2", fence=2)]
    assert names(events) == []
    early = [*running, *begin(1, 1.5, process="p2", fence=2), *events[2:]]
    assert names(early) == ["OneOwner"]


def test_a_call_that_raised_is_over() -> None:
    raised = [*begin(1, 1), Abort("a", 1, "w-p1", 1, "p1", 1.1)]
    rest = [
        *call(1, 2, process="p2", fence=2),
        *call(2, 3, process="p2", fence=2),
        *call(5, 4, process="p2", fence=2),
    ]
    assert names([*raised, *rest]) == []
    assert names([*raised[:1], *rest])[0] == "OneOwner"


@pytest.mark.parametrize("trouble", [Death("p1", 1.2), Lapse("p1", 1.2)])
def test_a_call_of_a_worker_that_died_or_was_cut_off_may_still_run(trouble: Event) -> None:
    again = [*call(1, 1.5, process="p2", fence=2), *call(2, 4, process="p2", fence=2)]
    assert names([*begin(1, 1), trouble, *again, *call(5, 5, process="p2", fence=2)]) == []


def test_a_planned_move_repeats_nothing() -> None:
    moved = [
        *call(1, 2, process="p2", fence=2),
        *call(2, 3, process="p2", fence=2),
        *call(5, 4, process="p2", fence=2),
    ]
    assert names([*call(1, 1), *moved]) == ["NoRepeatOnPlannedMove"]
    assert names([*call(1, 1), Death("p1", 1.5), *moved]) == []


def test_a_crash_repeats_only_what_was_finished_shortly_before() -> None:
    before = [*call(1, 1), *call(2, 9), Death("p1", 10)]
    again = [*call(2, 11, process="p2", fence=2), *call(5, 12, process="p2", fence=2)]
    assert names([*before, *again], unstored_s=2) == []
    assert names([*before, *call(1, 10.5, process="p2", fence=2), *again], unstored_s=2) == ["BoundedRepeatOnCrash"]


def test_a_lapse_excuses_repeats_only_of_its_own_time() -> None:
    lapse = Lapse("p1", 1.0, until_s=2.0)
    again = [
        *call(1, 6, process="p2", fence=2),
        *call(2, 7, process="p2", fence=2),
        *call(5, 8, process="p2", fence=2),
    ]
    assert names([lapse, *call(1, 1.5), *again], unstored_s=1) == []
    assert names([lapse, *call(1, 4.0), *again], unstored_s=1) == ["BoundedRepeatOnCrash"]


def test_messages_of_an_unknown_partition_are_checked_too() -> None:
    events: list[Event] = [
        Start("z", 4, "w", 1, "p", 1.0),
        Finish("z", 4, "w", 1, "p", 1.1),
        Start("z", 4, "w", 1, "p", 2.0),
    ]
    assert [v.invariant for v in check_history({}, events)] == [Invariant.NO_REPEAT_ON_PLANNED_MOVE]
