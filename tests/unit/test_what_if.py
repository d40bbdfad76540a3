"""What would move if workers came or went, against what the planner then really does with a model of the fleet."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scenarios.fleet_model import FleetModel
from tests.trials import examples_of

from parti.core.fleet_view import FleetState, MemberView, Policy
from parti.core.what_if import Change, Fleet, Outlook, foresee
from parti.model.fleet import Claim, ClaimState, MemberState, Orders
from parti.strategies import STRATEGY_NAMES, Sticky, strategy_named

POLICY = Policy(cold_start_window_s=1.0, scale_window_s=3.0, min_rebalance_interval_s=5.0, takeover_grace_s=2.0)
INCARNATION = 7


def member(state: MemberState = "active", capacity: int = 500) -> MemberView:
    return MemberView(INCARNATION, state, capacity)


def claim(owner: str, state: ClaimState = "owned", next: str = "", awaits: int = 0) -> Claim:
    return Claim(
        owner=owner,
        incarnation=INCARNATION,
        claimed_at=datetime(2026, 1, 1, tzinfo=UTC),
        ttl_seconds=5,
        state=state,
        next=next,
        awaits=awaits,
        term=1,
        reason="balance",
    )


def fleet_of(shares: dict[str, int], *, settled: bool = True, capacity: int = 500) -> Fleet:
    """Workers that own so many partitions each."""
    names = [worker for worker, share in shares.items() for _ in range(share)]
    claims = {f"p{n}": claim(worker) for n, worker in enumerate(names)}
    return Fleet({worker: member(capacity=capacity) for worker in shares}, claims, settled=settled)


def what_if(fleet: Fleet, *, joins: dict[str, MemberView] | None = None, leaves: tuple[str, ...] = ()) -> Outlook:
    return foresee(fleet, Change(joins or {}, leaves), Sticky(), POLICY)


def test_a_join_moves_the_least_possible_to_the_new_one_after_the_window() -> None:
    outlook = what_if(fleet_of({"a": 6, "b": 6}), joins={"c": member()})
    assert outlook.count("moved") == outlook.minimum == len(outlook.moves) == 4
    assert {(move.target, move.after_s) for move in outlook.moves} == {("c", 3.0)}
    assert outlook.before == {"a": 6, "b": 6}
    assert outlook.after == {"a": 4, "b": 4, "c": 4}
    assert outlook.unowned == ()
    assert outlook.state is FleetState.STABLE
    assert {move.reason for move in outlook.moves} == {"balance (a has more)", "balance (b has more)"}


def test_what_a_leaver_owned_is_given_away_at_once_and_nothing_else_moves() -> None:
    outlook = what_if(fleet_of({"a": 4, "b": 4, "c": 4}), leaves=("b",))
    assert outlook.count("given") == len(outlook.moves) == 4
    assert outlook.minimum == 0
    assert {(move.source, move.after_s, move.reason) for move in outlook.moves} == {("b", 0.0, "b left")}
    assert outlook.after == {"a": 6, "c": 6}


def test_a_replacement_takes_what_the_leaver_had() -> None:
    outlook = what_if(fleet_of({"a": 4, "b": 4}), joins={"c": member()}, leaves=("b",))
    assert outlook.count("given") == 4
    assert outlook.after == {"a": 4, "c": 4}


def test_without_anybody_left_all_is_unowned() -> None:
    outlook = what_if(fleet_of({"a": 2, "b": 1}), leaves=("a", "b"))
    assert outlook.unowned == ("p0", "p1", "p2")
    assert outlook.moves == ()
    assert outlook.state is FleetState.WAITING


def test_full_workers_leave_partitions_unowned() -> None:
    outlook = what_if(fleet_of({"a": 4, "b": 4}, capacity=5), leaves=("b",))
    assert len(outlook.unowned) == 3
    assert outlook.after == {"a": 5}
    assert outlook.state is FleetState.DEGRADED


def test_a_settled_fleet_leaves_a_small_imbalance_alone() -> None:
    outlook = what_if(fleet_of({"a": 31, "b": 29}))
    assert outlook.moves == ()
    assert outlook.minimum == 1


def test_a_settled_fleet_does_not_leave_a_large_imbalance_alone() -> None:
    outlook = what_if(fleet_of({"a": 40, "b": 20}))
    assert outlook.count("moved") == outlook.minimum == 10
    assert {move.after_s for move in outlook.moves} == {0.0}


def test_a_fleet_that_is_not_settled_yet_evens_out_a_small_imbalance_too() -> None:
    outlook = what_if(fleet_of({"a": 31, "b": 29}, settled=False))
    assert outlook.count("moved") == 1
    assert outlook.after == {"a": 30, "b": 30}


def test_nothing_moves_in_a_balanced_fleet() -> None:
    for settled in (True, False):
        assert what_if(fleet_of({"a": 5, "b": 5}, settled=settled)).moves == ()


def test_what_a_gone_worker_still_owns_is_given_away() -> None:
    fleet = fleet_of({"a": 3, "b": 3})
    outlook = what_if(Fleet({"a": member()}, fleet.claims))
    assert outlook.count("given") == 3
    assert {move.reason for move in outlook.moves} == {"b is lost"}
    assert outlook.before == {"a": 3, "b": 3}
    assert outlook.after == {"a": 6}


def test_partitions_of_a_worker_that_is_away_wait_for_it() -> None:
    fleet = fleet_of({"a": 4, "b": 4})
    outlook = what_if(Fleet({**fleet.members, "b": member("away")}, fleet.claims), joins={"c": member()})
    assert {move.source for move in outlook.moves} == {"a"}
    assert outlook.count("moved") == outlook.minimum == 1
    assert outlook.after == {"a": 3, "b": 4, "c": 1}


def test_a_draining_worker_gives_all_away_before_any_window_ends() -> None:
    fleet = fleet_of({"a": 4, "b": 4})
    outlook = what_if(Fleet({**fleet.members, "b": member("draining")}, fleet.claims, settled=False))
    assert outlook.count("moved") == outlook.minimum == 4
    assert outlook.after == {"a": 8}
    assert {(move.reason, move.after_s) for move in outlook.moves} == {("b is draining", 0.0)}


@pytest.mark.parametrize("state", ["preparing", "moving"])
def test_a_move_that_is_under_way_is_told_apart(state: ClaimState) -> None:
    fleet = fleet_of({"a": 4, "b": 2})
    claims = {**fleet.claims, "p3": claim("a", state, "b", awaits=12)}
    outlook = what_if(Fleet(fleet.members, claims))
    assert [(m.partition, m.source, m.target, m.kind) for m in outlook.moves] == [("p3", "a", "b", "begun")]
    assert outlook.minimum == 0
    assert outlook.after == {"a": 3, "b": 3}


@pytest.mark.parametrize("state", ["preparing", "moving"])
def test_a_move_whose_taker_leaves_is_called_off(state: ClaimState) -> None:
    fleet = fleet_of({"a": 4, "b": 2})
    claims = {**fleet.claims, "p3": claim("a", state, "c", awaits=12)}
    outlook = what_if(Fleet({**fleet.members, "c": member()}, claims), leaves=("c",))
    owners = Counter(move.target for move in outlook.moves)
    assert "c" not in owners
    assert outlook.after == {"a": 3, "b": 3}


def test_partitions_that_are_no_longer_wanted_do_not_count() -> None:
    fleet = fleet_of({"a": 2, "b": 2})
    claims = {**fleet.claims, "old": claim("", "free"), "going": claim("a", "moving", "", awaits=3)}
    outlook = what_if(Fleet(fleet.members, claims))
    assert outlook.partitions == 4
    assert outlook.moves == ()


def test_a_fleet_that_starts_again_under_the_same_ids_keeps_everything() -> None:
    fleet = fleet_of({"a": 3, "b": 3})
    outlook = what_if(Fleet({}, fleet.claims), joins={"a": MemberView(8), "b": MemberView(9)})
    assert outlook.count("kept") == len(outlook.moves) == 6
    assert outlook.after == {"a": 3, "b": 3}


def test_a_cold_start_waits_for_its_window() -> None:
    outlook = what_if(Fleet({}, fleet_of({"a": 3}).claims, settled=False), joins={"x": member(), "y": member()})
    assert outlook.count("given") == 3
    assert {move.after_s for move in outlook.moves} == {1.0}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_limit_on_moves_at_once_changes_nothing_but_the_time(overlap: bool) -> None:
    policy = replace(POLICY, moves_at_once=2, overlap=overlap)
    outlook = foresee(fleet_of({"a": 300}), Change({"b": member()}), Sticky(), policy)
    assert outlook.count("moved") == outlook.minimum == 150
    assert outlook.after == {"a": 150, "b": 150}
    assert outlook.state is FleetState.STABLE


def test_a_strategy_that_moves_more_than_needed_is_shown_as_such() -> None:
    outlook = foresee(fleet_of({"a": 6, "b": 6}), Change({"_": member()}), strategy_named("range"), POLICY)
    assert (outlook.count("moved"), outlook.minimum) == (6, 4)


# ── orders that stand ─────────────────────────────────────────────────────────────────────────────────────────────


def ordered(shares: dict[str, int], **orders: Any) -> Fleet:
    return replace(fleet_of(shares), orders=Orders(**orders))


def test_a_worker_that_is_to_be_drained_gives_all_away() -> None:
    outlook = what_if(ordered({"a": 4, "b": 4, "c": 4}, drained=("b",)))
    assert outlook.count("moved") == outlook.minimum == len(outlook.moves) == 4
    assert outlook.after == {"a": 6, "c": 6}


def test_a_drained_worker_gets_nothing_of_what_a_leaver_had() -> None:
    outlook = what_if(ordered({"a": 6, "b": 0, "c": 6}, drained=("b",)), leaves=("c",))
    assert outlook.after == {"a": 12}
    assert {move.kind for move in outlook.moves} == {"given"}


def test_a_drained_worker_leaves_a_settled_fleet_settled() -> None:
    outlook = what_if(ordered({"a": 6, "b": 0, "c": 6}, drained=("b",)))
    assert (outlook.moves, outlook.minimum) == ((), 0)


def test_a_partition_goes_where_an_operator_wants_it() -> None:
    outlook = what_if(ordered({"a": 6, "b": 6}, placed={"p0": "b"}))
    there = [(move.partition, move.target, move.reason) for move in outlook.moves if move.target == "b"]
    assert there == [("p0", "b", "placed by an operator")]


def test_while_moves_are_paused_a_new_worker_gets_nothing() -> None:
    outlook = what_if(ordered({"a": 6, "b": 6}, hold_moves=True), joins={"c": member()})
    assert (outlook.moves, outlook.minimum) == ((), 4)
    assert "moves are paused" in outlook.reason


def test_a_paused_partition_does_not_count_whether_its_owner_has_let_go_or_not() -> None:
    held = ordered({"a": 6, "b": 6}, paused=("p0",))
    for fleet in (held, replace(held, claims={**held.claims, "p0": claim("", "free")})):
        outlook = what_if(fleet)
        assert (outlook.partitions, outlook.moves, outlook.unowned) == (11, (), ())


def test_the_fleet_that_was_asked_about_is_left_as_it_was() -> None:
    fleet = fleet_of({"a": 6, "b": 6})
    claims, members = dict(fleet.claims), dict(fleet.members)
    what_if(fleet, joins={"c": member()}, leaves=("a",))
    assert (fleet.claims, fleet.members) == (claims, members)


def settle(model: FleetModel) -> None:
    """Let every worker do at once what it is told, until nothing is left to do."""
    for _ in range(100):
        decision, _ = model.step()
        for worker, process in model.members.items():
            if process.state != "away":
                model.apply(worker)
        if decision.commands:
            model.now_s += 0.1
        elif decision.wake_at_s is not None:
            model.now_s = decision.wake_at_s
        else:
            return
    pytest.fail("the model does not come to rest")


@settings(max_examples=examples_of(150), deadline=None)
@given(
    strategy=st.sampled_from(STRATEGY_NAMES),
    partitions=st.integers(0, 60),
    workers=st.integers(1, 6),
    joins=st.integers(0, 3),
    leaving=st.sets(st.integers(0, 5), max_size=4),
    capacity=st.integers(8, 80),
)
def test_the_fleet_then_does_what_was_foreseen(
    strategy: str, partitions: int, workers: int, joins: int, leaving: set[int], capacity: int
) -> None:
    # What was never claimed, because all are full, cannot be foreseen.
    claimed = min(partitions, workers * capacity)
    model = FleetModel(strategy_named(strategy), POLICY, [f"p{n}" for n in range(claimed)])
    for n in range(workers):
        model.join(f"w{n}", capacity=capacity)
    settle(model)
    leaves = [f"w{n}" for n in leaving if n < workers]
    view = model.view()
    members = {f"n{n}": MemberView(0, capacity=capacity) for n in range(joins)}
    outlook = foresee(Fleet(view.members, view.claims), Change(members, leaves), model.strategy, POLICY)

    before = {p: c.owner for p, c in model.claims.items()}
    model.now_s += 100
    for worker in leaves:
        model.leave(worker)
    for n in range(joins):
        model.join(f"n{n}", capacity=capacity)
    settle(model)
    after = {p: c.owner for p, c in model.claims.items() if c.owner in model.members}
    planned = before | {move.partition: move.target for move in outlook.moves}
    assert {p: w for p, w in planned.items() if w in model.members and p not in outlook.unowned} == after
    assert outlook.after == Counter(after.values())
    assert set(outlook.unowned) == before.keys() - after.keys()


# ── measured loads ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_by_measured_load_says_what_the_workers_have_to_do_before_and_after() -> None:
    loads = {f"p{n}": 4.0 if n < 2 else 1.0 for n in range(8)}
    fleet = replace(fleet_of({"worker-0": 4, "worker-1": 4}), loads=loads)
    outlook = foresee(fleet, Change(), strategy_named("load"), replace(POLICY, load_window_s=30.0))
    assert outlook.load_before == {"worker-0": 10.0, "worker-1": 4.0}
    assert {move.after_s for move in outlook.moves} == {30.0}
    assert outlook.load_after == {"worker-0": 7.0, "worker-1": 7.0}


def test_without_measured_loads_a_plan_says_nothing_of_them() -> None:
    outlook = what_if(fleet_of({"worker-0": 4, "worker-1": 4}))
    assert outlook.load_before == outlook.load_after == {}
