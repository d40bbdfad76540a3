"""Who gets which partition: worked examples of every strategy, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest

import parti
from parti.errors import ConfigError
from parti.strategies import (
    DEFAULT_STRATEGY,
    STRATEGY_NAMES,
    Slot,
    Strategy,
    minimum_moves,
    natural_key,
    natural_order,
    strategy_named,
)
from parti.strategies.ring import hash_of
from parti.strategies.shares import fair_shares

SIXTEEN = [f"orders.{i}" for i in range(16)]
ALL = [strategy_named(name) for name in STRATEGY_NAMES]
CAREFUL = [strategy_named(name) for name in ("sticky", "hash", "weighted", "load")]
each_strategy = pytest.mark.parametrize("strategy", ALL, ids=lambda strategy: strategy.name)
each_careful_strategy = pytest.mark.parametrize("strategy", CAREFUL, ids=lambda strategy: strategy.name)


def fleet(count: int, capacity: int | None = None) -> list[Slot]:
    return [Slot(f"worker-{i}", capacity) for i in range(count)]


def by_worker(assignment: Mapping[str, str]) -> dict[str, list[str]]:
    """Turn an assignment around; the partitions of each worker in natural order, without their common prefix."""
    owned: dict[str, list[str]] = {}
    for partition in natural_order(assignment):
        owned.setdefault(assignment[partition], []).append(partition.rpartition(".")[2])
    return owned


def moved(before: Mapping[str, str], after: Mapping[str, str], workers: Sequence[Slot]) -> list[str]:
    """Return the partitions that left a worker that is still there."""
    living = {slot.worker for slot in workers}
    return natural_order(p for p, worker in before.items() if worker in living and after.get(p) != worker)


# ------------------------------------------------------------------ names


def test_strategies_are_found_by_name_and_sticky_is_the_default() -> None:
    assert STRATEGY_NAMES == ("sticky", "hash", "weighted", "load", "range", "round-robin")
    assert [strategy_named(name).name for name in STRATEGY_NAMES] == list(STRATEGY_NAMES)
    assert DEFAULT_STRATEGY == "sticky"


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        strategy_named("stikcy")
    assert str(caught.value) == (
        "unknown strategy 'stikcy'; expected one of sticky, hash, weighted, load, range, round-robin: "
        "choose one of them, sticky if in doubt"
    )


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_worker_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"worker 'worker-3' has the weight .*; expected a finite number above 0"):
        Slot("worker-3", weight=weight)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"worker 'worker-3' has the capacity -1; expected 0 or more"):
        Slot("worker-3", capacity=-1)


@each_strategy
def test_two_workers_of_one_name_are_refused(strategy: Strategy) -> None:
    with pytest.raises(ConfigError, match=r"worker 'worker-1' is listed more than once"):
        strategy.assign(SIXTEEN, [*fleet(3), Slot("worker-1", capacity=5)], {})


def test_digits_are_read_as_numbers() -> None:
    assert natural_order(["a.10", "a.9", "b", "a.10.1", "a", "a.09", "a.-", "a.b"]) == [
        "a",
        "a.-",
        "a.9",
        "a.09",
        "a.10",
        "a.10.1",
        "a.b",
        "b",
    ]
    assert natural_key("a.9") != natural_key("a.09")


# ------------------------------------------------------------------ all strategies


@each_strategy
def test_nothing_comes_of_no_workers_or_no_partitions(strategy: Strategy) -> None:
    assert strategy.assign(SIXTEEN, [], {"orders.1": "worker-0"}) == {}
    assert strategy.assign([], fleet(3), {"orders.1": "worker-0"}) == {}


@each_strategy
def test_the_first_worker_takes_all_and_a_second_one_halves_it(strategy: Strategy) -> None:
    alone = strategy.assign(SIXTEEN, fleet(1), {})
    assert alone == dict.fromkeys(SIXTEEN, "worker-0")
    both = strategy.assign(SIXTEEN, fleet(2), alone)
    assert all(7 <= count <= 9 for count in Counter(both.values()).values())
    assert len(both) == 16


@each_strategy
def test_a_partition_that_is_listed_twice_counts_once(strategy: Strategy) -> None:
    assert strategy.assign(SIXTEEN * 2, fleet(4), {}) == strategy.assign(SIXTEEN, fleet(4), {})


@each_strategy
def test_full_workers_leave_the_rest_without_owner(strategy: Strategy) -> None:
    workers = [Slot("worker-0", 3), Slot("worker-1", 0), Slot("worker-2", 5)]
    assignment = strategy.assign(SIXTEEN, workers, {})
    assert Counter(assignment.values()) == {"worker-0": 3, "worker-2": 5}


@each_careful_strategy
def test_owners_keep_what_they_have_when_all_are_full(strategy: Strategy) -> None:
    previous = {"orders.15": "worker-0", "orders.3": "worker-1", "orders.4": "gone"}
    assignment = strategy.assign(SIXTEEN, fleet(2, capacity=2), previous)
    assert assignment["orders.15"] == "worker-0"
    assert assignment["orders.3"] == "worker-1"
    assert len(assignment) == 4


@each_strategy
def test_a_capacity_that_shrank_is_kept_although_partitions_have_to_move(strategy: Strategy) -> None:
    before = strategy.assign(SIXTEEN, fleet(2), {})
    workers = [Slot("worker-0", 2), Slot("worker-1")]
    after = strategy.assign(SIXTEEN, workers, before)
    assert Counter(after.values()) == {"worker-0": 2, "worker-1": 14}


@each_careful_strategy
def test_a_replacement_takes_over_what_the_lost_one_had_and_nothing_else_moves(strategy: Strategy) -> None:
    before = strategy.assign(SIXTEEN, fleet(4), {})
    workers = [slot for slot in fleet(5) if slot.worker != "worker-2"]
    after = strategy.assign(SIXTEEN, workers, before)
    assert moved(before, after, workers) == []
    assert 3 <= Counter(after.values())["worker-4"] <= 4


# ------------------------------------------------------------------ range


def seed_range(total: int, instances: int, rank: int) -> list[str]:
    """The arithmetic as first written down, for one instance."""
    per_instance, remainder = total // instances, total % instances
    start = rank * per_instance
    end = start + per_instance
    if rank < remainder:
        start, end = start + rank, end + rank + 1
    else:
        start, end = start + remainder, end + remainder
    return [str(i) for i in range(start, end)]


@pytest.mark.parametrize("workers", range(1, 20))
def test_ranges_follow_the_arithmetic_per_instance(workers: int) -> None:
    owned = by_worker(strategy_named("range").assign(SIXTEEN, fleet(workers), {}))
    for rank in range(workers):
        assert owned.get(f"worker-{rank}", []) == seed_range(16, workers, rank)


def test_ranges_are_contiguous_in_the_order_that_people_read() -> None:
    owned = by_worker(strategy_named("range").assign(SIXTEEN[:12], fleet(11), {}))
    assert list(owned) == [f"worker-{i}" for i in range(11)]
    assert owned["worker-0"] == ["0", "1"]
    assert owned["worker-10"] == ["11"]


def test_what_a_range_cannot_take_is_spread_over_the_workers_with_room() -> None:
    workers = [Slot("worker-0", 1), Slot("worker-1"), Slot("worker-2", 2), Slot("worker-3")]
    owned = by_worker(strategy_named("range").assign(SIXTEEN[:10], workers, {}))
    assert owned == {
        "worker-0": ["0"],
        "worker-1": ["1", "2", "3", "4"],
        "worker-2": ["5", "6"],
        "worker-3": ["7", "8", "9"],
    }


# ------------------------------------------------------------------ round robin


def test_round_robin_deals_out_one_by_one() -> None:
    owned = by_worker(strategy_named("round-robin").assign(SIXTEEN[:12], fleet(5), {}))
    assert owned == {
        "worker-0": ["0", "5", "10"],
        "worker-1": ["1", "6", "11"],
        "worker-2": ["2", "7"],
        "worker-3": ["3", "8"],
        "worker-4": ["4", "9"],
    }


def test_round_robin_passes_over_full_workers() -> None:
    workers = [Slot("worker-0", 1), Slot("worker-1"), Slot("worker-2", 0), Slot("worker-10", 2)]
    owned = by_worker(strategy_named("round-robin").assign(SIXTEEN[:7], workers, {}))
    assert owned == {"worker-0": ["0"], "worker-1": ["1", "3", "5", "6"], "worker-10": ["2", "4"]}


# ------------------------------------------------------------------ sticky


def test_sticky_begins_with_even_ranges() -> None:
    assert strategy_named("sticky").assign(SIXTEEN, fleet(3), {}) == strategy_named("range").assign(
        SIXTEEN, fleet(3), {}
    )


def test_sticky_gives_a_newcomer_the_last_ones_of_those_that_have_most() -> None:
    sticky = strategy_named("sticky")
    before = sticky.assign(SIXTEEN, fleet(3), {})
    after = sticky.assign(SIXTEEN, fleet(4), before)
    assert by_worker(before)["worker-0"] == ["0", "1", "2", "3", "4", "5"]
    assert moved(before, after, fleet(4)) == ["orders.4", "orders.5", "orders.10", "orders.15"]
    assert Counter(after.values()) == dict.fromkeys(["worker-0", "worker-1", "worker-2", "worker-3"], 4)


def test_sticky_lets_the_ones_with_more_keep_the_larger_quota() -> None:
    previous = {"orders.0": "worker-1", "orders.1": "worker-1", "orders.2": "worker-1", "orders.3": "worker-0"}
    assignment = strategy_named("sticky").assign(SIXTEEN[:5], fleet(2), previous)
    assert by_worker(assignment) == {"worker-1": ["0", "1", "2"], "worker-0": ["3", "4"]}
    assert minimum_moves(SIXTEEN[:5], fleet(2), previous) == 0


def test_sticky_lets_the_one_with_most_keep_the_only_larger_quota() -> None:
    previous = dict.fromkeys(SIXTEEN[:3], "worker-0") | dict.fromkeys(SIXTEEN[3:7], "worker-1")
    assignment = strategy_named("sticky").assign(SIXTEEN[:7], fleet(3), previous)
    assert by_worker(assignment) == {"worker-0": ["0", "1"], "worker-1": ["3", "4", "5"], "worker-2": ["2", "6"]}


def test_sticky_shares_by_weight_with_the_largest_remainder() -> None:
    workers = [Slot("worker-0", weight=1), Slot("worker-1", weight=2), Slot("worker-2", weight=4)]
    assignment = strategy_named("sticky").assign(SIXTEEN, workers, {})
    # 16/7, 32/7 and 64/7: 2.29, 4.57 and 9.14.
    assert Counter(assignment.values()) == {"worker-0": 2, "worker-1": 5, "worker-2": 9}


def test_sticky_keeps_a_rounding_that_the_remainders_alone_would_change() -> None:
    workers = [Slot("worker-0", weight=1), Slot("worker-1", weight=1.001)]
    previous = {p: "worker-0" if i < 8 else "worker-1" for i, p in enumerate(SIXTEEN[:15])}
    assert strategy_named("sticky").assign(SIXTEEN[:15], workers, previous) == previous


def test_minimum_moves_counts_only_those_that_leave_a_living_worker() -> None:
    previous = dict.fromkeys(SIXTEEN[:8], "worker-0") | dict.fromkeys(SIXTEEN[8:12], "gone")
    assert minimum_moves(SIXTEEN, fleet(2), previous) == 0
    assert minimum_moves(SIXTEEN, fleet(3), previous) == 2
    assert minimum_moves(SIXTEEN, [Slot("worker-0", 1), Slot("worker-1")], previous) == 7
    assert minimum_moves(SIXTEEN, [], previous) == 0
    assert minimum_moves([], fleet(2), previous) == 0


# ------------------------------------------------------------------ hash


def test_hashes_and_places_never_change() -> None:
    """A release that changed them would move partitions in every fleet that is upgraded worker by worker."""
    assert hash_of("orders.1") == 14735093593075545055
    assert by_worker(strategy_named("hash").assign(SIXTEEN, fleet(3), {})) == {
        "worker-0": ["3", "7", "8", "11", "14"],
        "worker-1": ["1", "5", "10", "12", "13", "15"],
        "worker-2": ["0", "2", "4", "6", "9"],
    }


HUNDREDS = [f"tool-{i}.c{j}" for i in range(20) for j in range(25)]


def test_a_worker_that_comes_back_gets_back_most_of_what_it_had() -> None:
    hashed = strategy_named("hash")
    before = hashed.assign(HUNDREDS, fleet(10), {})
    without = hashed.assign(HUNDREDS, fleet(9), before)
    again = hashed.assign(HUNDREDS, fleet(10), without)
    had = {p for p, worker in before.items() if worker == "worker-9"}
    has = {p for p, worker in again.items() if worker == "worker-9"}
    assert moved(before, without, fleet(9)) == []
    assert len(had & has) >= 0.9 * len(had)


def test_a_fleet_that_lost_its_memory_finds_most_places_again() -> None:
    hashed = strategy_named("hash")
    before = hashed.assign(HUNDREDS, fleet(10), {})
    anew = hashed.assign(HUNDREDS, fleet(9), {})
    assert len(moved(before, anew, fleet(9))) <= 0.15 * len(HUNDREDS)


@pytest.mark.parametrize("crowded", ["worker-0", "worker-1", "worker-2"])
def test_a_crowded_worker_gives_away_what_is_not_at_home_there(crowded: str) -> None:
    hashed = strategy_named("hash")
    at_home = {p for p in HUNDREDS if hashed.assign([p], fleet(3), {}) == {p: crowded}}
    after = hashed.assign(HUNDREDS, fleet(3), dict.fromkeys(HUNDREDS, crowded))
    kept = {p for p, worker in after.items() if worker == crowded}
    assert len(kept & at_home) == min(len(kept), len(at_home))


def test_hash_shares_by_weight() -> None:
    workers = [Slot("worker-0", weight=3), Slot("worker-1")]
    counts = Counter(strategy_named("hash").assign(HUNDREDS, workers, {}).values())
    assert counts == {"worker-0": 375, "worker-1": 125}


# ------------------------------------------------------------------ weighted


def test_loads_are_shared_out_and_not_counts() -> None:
    loads = {"a": 6.0, "b": 3.0, "c": 2.0, "d": 1.0}
    assignment = strategy_named("weighted").assign(list("abcd"), fleet(2), {}, loads)
    assert assignment == {"a": "worker-0", "b": "worker-1", "c": "worker-1", "d": "worker-1"}


def test_weights_of_workers_set_their_share_of_the_load() -> None:
    workers = [Slot("worker-0", weight=3), Slot("worker-1", weight=1)]
    assignment = strategy_named("weighted").assign(SIXTEEN, workers, {}, dict.fromkeys(SIXTEEN, 7.5))
    assert Counter(assignment.values()) == {"worker-0": 12, "worker-1": 4}


def test_nothing_moves_within_the_bounds_and_as_little_as_needed_beyond_them() -> None:
    weighted = strategy_named("weighted")
    before = {p: "worker-0" if i < 10 else "worker-1" for i, p in enumerate(HUNDREDS[:20])}
    loads = dict.fromkeys(before, 1.0)
    hot = HUNDREDS[3]
    assert weighted.assign(list(before), fleet(2), before, loads | {hot: 3.0}) == before
    after = weighted.assign(list(before), fleet(2), before, loads | {hot: 5.0})
    # Loads of 14 and 10 against 13.2 at most: one of load 1 goes, the hot one stays.
    assert len(moved(before, after, fleet(2))) == 1
    assert after[hot] == "worker-0"


def test_a_partition_too_heavy_for_anybody_stays_and_the_light_ones_leave_it() -> None:
    weighted = strategy_named("weighted")
    before = {"hot": "worker-0", "a": "worker-0", "b": "worker-0", "c": "worker-1"}
    loads = {"hot": 100.0, "a": 1.0, "b": 1.0, "c": 1.0}
    after = weighted.assign(list(before), fleet(2), before, loads)
    assert after == {"hot": "worker-0", "a": "worker-1", "b": "worker-1", "c": "worker-1"}
    assert weighted.assign(list(before), fleet(2), after, loads) == after


def test_idle_partitions_do_not_pile_up() -> None:
    loads = dict.fromkeys(SIXTEEN, 0.0) | {"orders.0": 5.0, "orders.1": 5.0}
    counts = Counter(strategy_named("weighted").assign(SIXTEEN, fleet(2), {}, loads).values())
    assert counts == {"worker-0": 8, "worker-1": 8}
    counts = Counter(strategy_named("weighted").assign(SIXTEEN, fleet(2), {}, dict.fromkeys(SIXTEEN, 0.0)).values())
    assert counts == {"worker-0": 8, "worker-1": 8}


@pytest.mark.parametrize("load", [-0.5, float("nan"), float("inf")])
def test_a_load_that_is_no_load_is_refused(load: float) -> None:
    with pytest.raises(ConfigError, match=r"partition 'orders\.3' has the load .*; expected a finite number of at"):
        strategy_named("weighted").assign(SIXTEEN, fleet(2), {}, {"orders.3": load})


def test_loads_of_partitions_that_are_gone_do_not_matter() -> None:
    weighted = strategy_named("weighted")
    assert weighted.assign(SIXTEEN, fleet(3), {}, {"gone": -1.0}) == weighted.assign(SIXTEEN, fleet(3), {})


# ------------------------------------------------------------------ shares


def test_shares_are_exact_and_capacity_goes_first() -> None:
    workers = [Slot("a", 2, weight=1.0), Slot("b", weight=1.0), Slot("c", weight=2.0)]
    assert fair_shares(12, workers) == [2, Fraction(10, 3), Fraction(20, 3)]
    assert fair_shares(12, workers, weighted=False) == [2, 5, 5]
    assert fair_shares(12, [Slot("a", 2), Slot("b", 3)]) == [2, 3]
    assert fair_shares(3, [Slot("a", 2, weight=0.1), Slot("b", weight=0.2)]) == [1, 2]
    assert fair_shares(12, []) == []


def test_an_app_takes_a_strategy_by_name_or_as_an_object() -> None:
    for given in ("hash", strategy_named("hash")):
        assert parti.App(stream="S", subject="s.{p}", strategy=given).strategy is strategy_named("hash")
    with pytest.raises(ConfigError, match="unknown strategy 'best'"):
        parti.App(stream="S", subject="s.{p}", strategy="best")
