"""Bookkeeping of the unordered mode."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.lane import Verdict
from parti.core.scatter import Scatter


def test_the_floor_is_the_lowest_message_that_is_not_finished() -> None:
    scatter = Scatter()
    for seq in (3, 5, 9):
        assert scatter.offer(seq) is Verdict.ACCEPTED
    assert scatter.floor(10) == 3
    scatter.finish(9)
    assert scatter.floor(10) == 3
    scatter.finish(3)
    assert scatter.floor(10) == 5
    scatter.finish(5)
    assert scatter.floor(10) == 10


def test_a_message_in_hand_is_a_duplicate_and_a_finished_one_is_finished() -> None:
    scatter = Scatter()
    scatter.offer(1)
    scatter.offer(2)
    assert scatter.offer(2) is Verdict.DUPLICATE
    scatter.finish(2)
    assert scatter.offer(2) is Verdict.FINISHED
    scatter.floor(3)
    assert scatter.offer(2) is Verdict.FINISHED


def test_a_message_that_was_given_back_holds_the_floor_and_is_taken_again() -> None:
    scatter = Scatter()
    scatter.offer(4)
    scatter.give_back(4)
    assert scatter.floor(9) == 4
    assert scatter.offer(4) is Verdict.ACCEPTED
    assert scatter.floor(9) == 4
    scatter.finish(4)
    assert scatter.floor(9) == 9


def test_what_is_no_longer_ours_does_not_hold_the_floor() -> None:
    scatter = Scatter()
    scatter.offer(1)
    scatter.offer(2)
    scatter.give_back(2)
    scatter.forget(1)
    scatter.forget(2)
    scatter.forget(7)
    assert scatter.floor(9) == 9


def test_a_redelivery_that_crossed_its_own_outcome_cannot_be_owed_and_done_at_once() -> None:
    scatter = Scatter()
    scatter.offer(1)
    scatter.give_back(1)
    scatter.offer(1)
    scatter.finish(1)
    assert scatter.floor(5) == 5
    assert scatter.offer(1) is Verdict.FINISHED
    assert scatter.offer(3) is Verdict.FINISHED
    assert scatter.offer(3, behind=True) is Verdict.ACCEPTED
    assert scatter.offer(5) is Verdict.ACCEPTED


@settings(deadline=None, max_examples=examples_of(100))
@given(st.lists(st.tuples(st.sampled_from(["offer", "finish", "give_back", "forget", "floor"]), st.integers(1, 8))))
def test_the_floor_agrees_with_a_plain_model(steps: list[tuple[str, int]]) -> None:
    scatter, state, seen = Scatter(), dict[int, str](), 0
    for step, seq in steps:
        if step == "offer" and seq >= scatter.floor(seen + 1):
            verdict = scatter.offer(seq)
            expected = {"active": Verdict.DUPLICATE, "done": Verdict.FINISHED}.get(state.get(seq, ""))
            assert verdict is (expected or Verdict.ACCEPTED)
            if verdict is Verdict.ACCEPTED:
                state[seq] = "active"
            seen = max(seen, seq)
        elif step in {"finish", "give_back", "forget"} and state.get(seq) == "active":
            getattr(scatter, step)(seq)
            state[seq] = {"finish": "done", "give_back": "owed", "forget": "gone"}[step]
        unfinished = [s for s, what in state.items() if what in {"active", "owed"}]
        assert scatter.floor(seen + 1) == min(unfinished, default=seen + 1)
