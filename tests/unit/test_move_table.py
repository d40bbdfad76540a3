"""The table of a move: what must hold for each step, whatever is known of the owner and of its heir.

What the planner makes of a step is in `tests/scenarios`; here is the table alone, row by row.
"""

from __future__ import annotations

from itertools import product

import pytest

from parti.core.move import TABLE, Heir, Owner, Step, next_step
from parti.model.fleet import ClaimState

STATES: tuple[ClaimState, ...] = ("preparing", "moving")
ABLE = {Heir.READY, Heir.COMING, Heir.LATE}


def steps(*, state: ClaimState | None = None, owner: Owner | None = None, heir: Heir | None = None) -> set[Step]:
    """All steps of these rows and columns."""
    return {
        step for (s, o, h), step in TABLE.items() if state in {None, s} and owner in {None, o} and heir in {None, h}
    }


def test_there_is_a_step_for_every_case() -> None:
    assert TABLE.keys() == set(product(STATES, Owner, Heir))


def test_an_owner_is_told_to_let_go_only_when_it_handles_and_the_heir_is_ready() -> None:
    told = [case for case, step in TABLE.items() if step is Step.RELEASE]
    assert told == [("preparing", Owner.HANDLES, Heir.READY)]


def test_nothing_is_given_to_the_heir_before_the_owner_has_let_go() -> None:
    given = {case for case, step in TABLE.items() if step in {Step.GIVE, Step.GIVE_ELSEWHERE}}
    assert {(state, owner) for state, owner, _ in given} == {("moving", Owner.LET_GO), ("moving", Owner.AWAY)}


def test_an_owner_that_handles_is_never_counted_as_gone() -> None:
    assert steps(owner=Owner.HANDLES).isdisjoint({Step.GIVE, Step.GIVE_ELSEWHERE, Step.ORPHAN})


def test_while_preparing_an_owner_that_handles_is_not_interrupted_but_by_a_release() -> None:
    assert steps(state="preparing", owner=Owner.HANDLES) == {Step.RELEASE, Step.WAIT, Step.KEEP}


def test_a_dead_owner_is_not_waited_for() -> None:
    assert steps(owner=Owner.GONE) == {Step.ORPHAN}


def test_an_owner_that_may_be_gone_is_waited_for() -> None:
    assert steps(owner=Owner.UNSURE) == {Step.WAIT}


def test_a_live_owner_is_waited_for_as_long_as_its_handler_runs() -> None:
    assert {next_step("moving", Owner.HANDLES, heir) for heir in ABLE} == {Step.WAIT}


@pytest.mark.parametrize("heir", [Heir.LATE, Heir.UNABLE])
def test_a_heir_that_does_not_get_ready_costs_the_owner_nothing(heir: Heir) -> None:
    assert next_step("preparing", Owner.HANDLES, heir) is Step.KEEP


def test_after_the_release_a_heir_gets_it_even_if_it_is_no_longer_ready() -> None:
    """Nobody handles it any more: it is better off with a slow owner than with none."""
    for owner in (Owner.LET_GO, Owner.AWAY):
        assert {next_step("moving", owner, heir) for heir in ABLE} == {Step.GIVE}


def test_without_a_heir_a_partition_goes_back_to_an_owner_that_is_there() -> None:
    assert next_step("moving", Owner.HANDLES, Heir.UNABLE) is Step.GIVE_BACK
    assert next_step("moving", Owner.AWAY, Heir.UNABLE) is Step.ORPHAN


def test_an_owner_that_left_for_a_moment_keeps_what_nobody_was_told_to_take() -> None:
    assert steps(state="preparing", owner=Owner.AWAY) == {Step.KEEP}


def test_a_new_process_of_the_owner_is_given_its_partitions_anew() -> None:
    assert steps(state="preparing", owner=Owner.LET_GO) == {Step.GIVE_BACK}


def test_a_heir_that_may_be_gone_is_waited_for_unless_nobody_handles_the_partition_for_sure() -> None:
    waiting = {(state, owner): step for (state, owner, heir), step in TABLE.items() if heir is Heir.UNSURE}
    assert {case for case, step in waiting.items() if step is not Step.WAIT} == {
        ("preparing", Owner.LET_GO),
        ("preparing", Owner.AWAY),
        ("preparing", Owner.GONE),
        ("moving", Owner.GONE),
    }
