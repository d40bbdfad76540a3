"""Weighted admission: order, clamping, look-ahead and its bounds, priorities, cancelling."""

from __future__ import annotations

from math import inf

import pytest

from parti.core.admission import STRICT, Admission, LookAhead, Stage, Ticket


def ask(admission: Admission, *costs: int, now_s: float = 0.0) -> list[Ticket]:
    return [admission.ask(cost, now_s=now_s) for cost in costs]


def test_a_cost_above_the_capacity_takes_all_slots() -> None:
    admission = Admission(14)
    (large,) = ask(admission, 64)
    assert admission.admit(0.0) == [large]
    assert (large.cost, large.slots, admission.used, admission.free) == (64, 14, 14, 0)


@pytest.mark.parametrize("cost", [0, -1, 1.5, True, "2"])
def test_a_cost_must_be_a_whole_number_from_1_on(cost: object) -> None:
    with pytest.raises(ValueError, match="cost must be a whole number of slots, at least 1"):
        Admission(14).ask(cost, now_s=0.0)  # type: ignore[arg-type]


def test_a_capacity_below_1_and_a_negative_bound_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        Admission(0)
    with pytest.raises(ValueError, match="must not be negative"):
        LookAhead(window=-1)
    with pytest.raises(ValueError, match="must not be negative"):
        LookAhead(patience_s=float("nan"))


def test_fourteen_small_ones_run_at_once_and_the_next_waits() -> None:
    admission = Admission(14)
    tickets = ask(admission, *[1] * 15)
    assert admission.admit(0.0) == tickets[:14]
    admission.release(tickets[3])
    assert admission.admit(1.0) == tickets[14:]


def test_in_strict_order_nothing_overtakes_a_large_one_that_waits() -> None:
    admission = Admission(14, STRICT)
    small, large, *others = ask(admission, 1, 14, 1, 1)
    assert admission.admit(0.0) == [small]
    admission.release(small)
    assert admission.admit(1.0) == [large]
    admission.release(large)
    assert admission.admit(2.0) == others


def test_small_ones_use_slots_that_a_large_one_cannot_use_yet_but_only_so_often() -> None:
    admission = Admission(4, LookAhead(window=10, overtakings=3))
    (first,) = ask(admission, 1)
    assert admission.admit(0.0) == [first]
    (large,) = ask(admission, 4)
    small = ask(admission, *[1] * 6)
    assert admission.admit(0.0) == small[:3]
    assert large.overtaken == 3
    for ticket in (first, *small[:3]):
        assert admission.admit(1.0) == []  # slots that become free are kept for the large one
        admission.release(ticket)
    assert admission.admit(1.0) == [large]


def test_nothing_overtakes_one_that_has_waited_for_long() -> None:
    admission = Admission(4, LookAhead(patience_s=60))
    ask(admission, 1)
    admission.admit(0.0)
    ask(admission, 4)
    (early,) = ask(admission, 1, now_s=59.0)
    assert admission.admit(59.0) == [early]
    ask(admission, 1, now_s=60.0)
    assert admission.admit(60.0) == []


def test_the_look_ahead_ends_at_its_window() -> None:
    admission = Admission(4, LookAhead(window=2))
    ask(admission, 1)
    admission.admit(0.0)
    ask(admission, 4, 4, 4, 1)
    assert admission.admit(0.0) == []
    assert Admission(4, LookAhead(window=10, overtakings=0)).look_ahead.reach == 0


def test_of_several_that_fit_the_largest_goes_first() -> None:
    admission = Admission(14)
    one, eight, four = ask(admission, 1, 8, 4)
    assert admission.admit(0.0) == [eight, four, one]


def test_higher_priorities_go_first_and_keep_their_order() -> None:
    admission = Admission(1)
    tickets = [admission.ask(1, priority, now_s=0.0) for priority in (0, 5, 5, 9)]
    order = []
    for _ in tickets:
        (ticket,) = admission.admit(0.0)
        order.append(ticket)
        admission.release(ticket)
    assert order == [tickets[3], tickets[1], tickets[2], tickets[0]]


def test_a_large_one_of_low_priority_does_not_go_before_a_small_one_of_high_priority() -> None:
    admission = Admission(4)
    low, high = admission.ask(4, 0, now_s=0.0), admission.ask(1, 1, now_s=0.0)
    assert admission.admit(0.0) == [high]
    assert low.stage is Stage.WAITING


def test_a_low_priority_is_due_when_its_patience_ends() -> None:
    admission = Admission(1, LookAhead(patience_s=10))
    low = admission.ask(1, 0, now_s=0.0)
    for now_s in range(1, 10):
        ticket = admission.ask(1, 9, now_s=float(now_s))
        assert admission.admit(float(now_s)) == [ticket]
        admission.release(ticket)
    admission.ask(1, 9, now_s=10.0)
    assert admission.admit(10.0) == [low]


def test_cancelling_gives_back_what_there_is_and_may_be_repeated() -> None:
    admission = Admission(2)
    running, waiting = ask(admission, 2, 1)
    admission.admit(0.0)
    assert not admission.cancel(waiting)
    assert admission.cancel(running)
    assert not admission.cancel(running)
    assert (admission.used, admission.waiting, admission.granted) == (0, 0, 0)
    with pytest.raises(AssertionError, match="has no slots to release"):
        admission.release(running)


def test_a_cancelled_large_one_lets_those_behind_it_through() -> None:
    admission = Admission(4, LookAhead(0, 0, inf))
    _, large, small = ask(admission, 2, 4, 1)
    admission.admit(0.0)
    admission.cancel(large)
    assert admission.admit(0.0) == [small]
    assert [ticket.number for ticket in admission.tickets()] == []
