"""Permissions of tasks in a replay: one at a time for each partition, never beyond the lease, positions as facts."""

from __future__ import annotations

import pytest

from parti.core.replay import Answer, Ask, Holdings, decode_answer, decode_ask, encode
from parti.errors import DecodeError
from parti.model.fleet import Grant

LEASE_S = 10.0


def holding(*partitions: str, position: int = 1) -> Holdings:
    holdings = Holdings()
    holdings.grant({p: Grant(100 + n, position) for n, p in enumerate(partitions)})
    return holdings


def test_a_task_gets_what_is_held_and_no_longer_than_the_lease() -> None:
    holdings = holding("a", "b")
    number = holdings.begin_round(["a", "b"], 50)
    answer = holdings.answer(Ask("t1", number, ("a", "c")), 3.0, LEASE_S)
    assert answer == Answer(7.0, {"a": 1}, ())
    assert holdings.answer(Ask("t1", number, ("a",)), LEASE_S, LEASE_S) == Answer()


def test_another_attempt_waits_for_the_first_and_goes_on_where_it_was() -> None:
    holdings = holding("a")
    number = holdings.begin_round(["a"], 50)
    holdings.answer(Ask("t1", number, ("a",)), 0.0, 5.0)
    holdings.answer(Ask("t1", number, ("a",), {"a": 20}, handled=19), 1.0, 5.0)
    assert holdings.answer(Ask("t2", number, ("a",)), 2.0, LEASE_S) == Answer(8.0, {}, ("a",))
    assert holdings.answer(Ask("t2", number, ("a",)), 5.0, LEASE_S) == Answer(5.0, {"a": 20}, ())
    # What the first one says now counts no more: the other one has begun.
    late = holdings.answer(Ask("t1", number, ("a",), {"a": 30}), 6.0, LEASE_S)
    assert late == Answer(4.0, {}, ("a",))
    assert holdings.held["a"].position == 20


def test_a_task_that_is_done_frees_its_partitions_at_once() -> None:
    holdings = holding("a")
    number = holdings.begin_round(["a"], 50)
    holdings.answer(Ask("t1", number, ("a",)), 0.0, LEASE_S)
    holdings.answer(Ask("t1", number, (), {"a": 50}, handled=7, dead_lettered=1), 1.0, LEASE_S)
    assert holdings.free_at_s() == float("-inf")
    assert (holdings.positions, holdings.handled, holdings.dead_lettered) == ({"a": 50}, 7, 1)


def test_a_complete_round_advances_what_no_task_asked_for_and_nothing_else() -> None:
    holdings = holding("a", "b", "c")
    number = holdings.begin_round(["a", "b"], 50)
    # Refused, because the lease has ended: it has messages, and they are not handled.
    assert holdings.answer(Ask("t1", number, ("a",)), 11.0, LEASE_S) == Answer()
    holdings.end_round(complete=True)
    assert holdings.positions == {"a": 1, "b": 50, "c": 1}


def test_a_round_that_failed_advances_nothing_by_itself() -> None:
    holdings = holding("a", "b")
    number = holdings.begin_round(["a", "b"], 50)
    holdings.answer(Ask("t1", number, ("a",)), 0.0, LEASE_S)
    holdings.answer(Ask("t1", number, ("a",), {"a": 9}), 1.0, LEASE_S)
    holdings.end_round(complete=False)
    assert holdings.positions == {"a": 9, "b": 1}
    assert holdings.free_at_s() == LEASE_S
    assert holdings.answer(Ask("t1", number, ("a",)), 2.0, LEASE_S).keep == {}


def test_a_partition_that_comes_back_under_another_fence_is_not_for_this_round() -> None:
    holdings = holding("a")
    number = holdings.begin_round(["a"], 50)
    holdings.answer(Ask("t1", number, ("a",)), 0.0, LEASE_S)
    holdings.lose()
    holdings.grant({"a": Grant(200, 5)})
    assert holdings.answer(Ask("t1", number, ("a",), {"a": 30}), 1.0, LEASE_S).keep == {}
    holdings.end_round(complete=True)
    assert holdings.positions == {"a": 5}


def test_what_is_let_go_is_busy_until_its_task_has_stopped() -> None:
    holdings = holding("a", "b")
    number = holdings.begin_round(["a", "b"], 50)
    holdings.answer(Ask("t1", number, ("a", "b")), 0.0, LEASE_S)
    holdings.grant({"b": Grant(101, 1)})
    assert holdings.busy(1.0) == ("a",)
    assert holdings.answer(Ask("t1", number, ("a", "b"), {"a": 8}), 1.0, LEASE_S).keep == {"b": 1}
    assert holdings.busy(2.0) == ("a",)
    holdings.answer(Ask("t1", number, ("b",), {"a": 9}), 2.0, LEASE_S)
    assert holdings.busy(2.0) == ()
    assert holdings.positions["a"] == 9


def test_what_is_let_go_by_a_task_that_is_silent_is_busy_until_its_permission_ends() -> None:
    holdings = holding("a")
    number = holdings.begin_round(["a"], 50)
    holdings.answer(Ask("t1", number, ("a",)), 0.0, LEASE_S)
    holdings.grant({})
    assert holdings.busy(9.9) == ("a",)
    assert holdings.busy(10.0) == ()


def test_positions_never_go_back() -> None:
    holdings = holding("a", position=40)
    holdings.grant({})
    holdings.grant({"a": Grant(300, 7)})
    assert holdings.held["a"].position == 40


@pytest.mark.parametrize("ask", [Ask("t", 3, ("a", "b"), {"a": 5}, 2, 1), Ask("t", 1)])
def test_questions_survive_the_wire(ask: Ask) -> None:
    assert decode_ask(encode(ask)) == ask


def test_answers_survive_the_wire() -> None:
    answer = Answer(1.5, {"a": 2}, ("b",))
    assert decode_answer(encode(answer)) == answer
    with pytest.raises(DecodeError):
        decode_answer(b'{"for_s": -1}')


def test_what_an_earlier_run_has_stored_is_not_forgotten() -> None:
    holdings = Holdings()
    holdings.know({"a": 30, "b": 12})
    holdings.grant({"a": Grant(1, 20)})
    assert holdings.held["a"].position == 30
    assert holdings.positions == {"a": 30, "b": 12}


def test_a_task_that_is_refused_keeps_its_partition_until_it_says_that_it_has_ended() -> None:
    holdings = holding("a")
    number = holdings.begin_round(["a"], 50)
    holdings.answer(Ask("t1", number, ("a",)), 0.0, LEASE_S)
    assert holdings.answer(Ask("t1", number, ("a",), {"a": 7}), 1.0, float("-inf")) == Answer()
    assert holdings.free_at_s() == LEASE_S
    holdings.answer(Ask("t1", number, (), {"a": 8}), 2.0, float("-inf"))
    assert holdings.positions == {"a": 8}
    assert holdings.free_at_s() == float("-inf")
