"""Orders of operators, as the planner takes them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.core.fleet_view import FleetView, MemberView
from parti.core.orders import honour, obey, placements
from parti.model.fleet import Claim, MemberState, Orders
from parti.strategies import STRATEGY_NAMES, Slot, strategy_named

PARTITIONS = tuple(f"p{n}" for n in range(12))
WORKERS = ("a", "b", "c", "d")
CLAIM = Claim(owner="a", claimed_at=datetime(2026, 1, 1, tzinfo=UTC), ttl_seconds=5, term=1)


def view(orders: Orders, **states: MemberState) -> FleetView:
    members = {worker: MemberView(1, state) for worker, state in states.items()}
    return FleetView(0.0, members, PARTITIONS, {"p1": CLAIM}, orders=orders)


def slots(**capacities: int) -> list[Slot]:
    return [Slot(worker, capacity, 1.0) for worker, capacity in capacities.items()]


# ── obey ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_orders_the_fleet_is_as_it_is() -> None:
    seen = view(Orders(placed={"p1": "b"}, hold_moves=True), a="active", b="draining")
    assert obey(seen) is seen


def test_drained_workers_drain() -> None:
    seen = obey(view(Orders(drained=("a", "nobody")), a="active", b="active"))
    assert {worker: member.state for worker, member in seen.members.items()} == {"a": "draining", "b": "active"}


@pytest.mark.parametrize("state", ["draining", "away"])
def test_whoever_is_going_already_is_left_to_it(state: MemberState) -> None:
    """A worker that is away cannot let go of anything: its partitions wait until it is back, and drain then."""
    assert obey(view(Orders(drained=("a",)), a=state)).members["a"].state == state


def test_paused_partitions_are_not_wanted_but_their_claims_are_seen() -> None:
    seen = obey(view(Orders(paused=("p1", "p7", "unheard-of")), a="active"))
    assert seen.partitions == tuple(p for p in PARTITIONS if p not in {"p1", "p7"})
    assert seen.claims == {"p1": CLAIM}


# ── placements ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_partitions_are_placed_on_workers_that_are_there() -> None:
    orders = Orders(placed={"p1": "a", "p2": "gone", "p3": "b"})
    assert placements(orders, slots(a=5, b=5), PARTITIONS) == {"p1": "a", "p3": "b"}


def test_no_more_is_placed_than_there_is_room_for() -> None:
    orders = Orders(placed={"p5": "a", "p1": "a", "p3": "a", "p2": "b"})
    assert placements(orders, slots(a=2, b=0), PARTITIONS) == {"p5": "a", "p1": "a"}


def test_partitions_that_nobody_wants_take_no_room() -> None:
    orders = Orders(placed={"old": "a", "p1": "a"})
    assert placements(orders, slots(a=1), PARTITIONS) == {"p1": "a"}


# ── honour ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_placements_the_strategy_has_its_way() -> None:
    target = {"p0": "a", "p1": "b"}
    assert honour({}, target, {"p0": "b"}) == target


def test_what_is_placed_where_it_belongs_anyway_changes_nothing() -> None:
    target = {"p0": "a", "p1": "b"}
    assert honour({"p0": "a"}, target, {}) == target


def test_a_placed_partition_changes_places_with_the_last_one_of_its_worker() -> None:
    target = {"p0": "a", "p9": "a", "p10": "a", "p2": "b"}
    assert honour({"p2": "a"}, target, {}) == {"p0": "a", "p9": "a", "p10": "b", "p2": "a"}


def test_it_changes_places_with_one_that_need_not_move_for_it() -> None:
    target = {"p0": "a", "p9": "a", "p10": "a", "p2": "b"}
    assert honour({"p2": "a"}, target, {"p9": "b"})["p9"] == "b"


def test_placed_partitions_do_not_make_room_for_each_other() -> None:
    target = {"p0": "a", "p1": "a", "p2": "b"}
    assert honour({"p0": "a", "p1": "a", "p2": "a"}, target, {}) == dict.fromkeys(target, "a")


def test_placed_partitions_that_change_places_concern_nobody_else() -> None:
    target = {"p0": "a", "p1": "b", "p2": "b"}
    assert honour({"p0": "b", "p1": "a"}, target, {}) == {"p0": "b", "p1": "a", "p2": "b"}


def test_what_the_strategy_has_no_room_for_is_not_placed() -> None:
    assert honour({"p2": "a"}, {"p0": "a", "p1": "b"}, {}) == {"p0": "a", "p1": "b"}


assignments = st.dictionaries(st.sampled_from(PARTITIONS), st.sampled_from(WORKERS))


@given(
    strategy=st.sampled_from(STRATEGY_NAMES),
    capacities=st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 8), min_size=1),
    placed=assignments,
    claimed=assignments,
)
def test_any_strategy_keeps_to_capacities_and_to_orders(
    strategy: str, capacities: dict[str, int], placed: dict[str, str], claimed: dict[str, str]
) -> None:
    workers = slots(**capacities)
    accepted = placements(Orders(placed=placed), workers, PARTITIONS)
    previous = claimed | accepted
    wanted = strategy_named(strategy).assign(PARTITIONS, workers, previous, None)
    target = honour(accepted, wanted, previous)
    assert target.keys() == wanted.keys()
    assert all(target[p] == w for p, w in accepted.items() if p in wanted)
    counts = Counter(target.values())
    assert all(counts[w] <= capacities[w] for w in counts), "more than a worker takes"
    again = strategy_named(strategy).assign(PARTITIONS, workers, target | accepted, None)
    assert honour(accepted, again, target | accepted) == target, "it does not come to rest"
