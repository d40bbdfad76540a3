"""What holds for every strategy and every fleet, and how much each strategy moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import ceil, floor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.strategies import STRATEGY_NAMES, Slot, Strategy, minimum_moves, natural_key, strategy_named, weighted
from parti.strategies.shares import fair_shares
from parti.strategies.weighted import relative_loads

ALL = [strategy_named(name) for name in STRATEGY_NAMES]
STICKY, HASH, WEIGHTED = (strategy_named(name) for name in ("sticky", "hash", "weighted"))
each_strategy = pytest.mark.parametrize("strategy", ALL, ids=lambda strategy: strategy.name)


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    partitions: list[str]
    workers: list[Slot]
    previous: dict[str, str]
    loads: dict[str, float] | None

    def assign(self, strategy: Strategy, previous: Mapping[str, str] | None = None) -> dict[str, str]:
        before = self.previous if previous is None else previous
        return strategy.assign(self.partitions, self.workers, before, self.loads)

    def room(self) -> float:
        return sum(float("inf") if slot.capacity is None else slot.capacity for slot in self.workers)


def make_case(seed: int, partitions: int, workers: int, owners: int, plain: bool) -> Case:
    """Partitions, workers, and a previous assignment in which some of both are gone and some are new.

    Few owners make crowded workers, many make even ones. Plain: no capacities, weights or loads. Sizes shrink;
    the rest comes from the seed, since drawing it piece by piece takes ten times as long as the strategies.
    """
    random = Random(seed)
    numbers = random.sample(range(100), partitions)

    def capacity() -> int | None:
        return None if plain or random.random() < 0.5 else random.randint(0, 12)

    def weight() -> float:
        return 1.0 if plain else random.choice([1.0, 1.0, 2.0, 0.5, random.uniform(0.01, 100)])

    def load() -> float:
        return random.choice([0.0, 1.0, 1.0, float(random.randint(0, 9)), random.paretovariate(0.8)])

    slots = [Slot(f"worker-{i}", capacity(), weight()) for i in random.sample(range(16), workers)]
    pool = random.sample(range(16), owners)
    known = [i for i in range(100) if random.random() < 0.8]
    previous = {f"p.{i}": f"worker-{random.choice(pool)}" for i in known if pool}
    loads = {f"p.{i}": load() for i in known}
    return Case([f"p.{i}" for i in numbers], slots, previous, None if plain or seed % 3 == 0 else loads)


def cases(*, plain: st.SearchStrategy[bool] | None = None) -> st.SearchStrategy[Case]:
    return st.builds(
        make_case,
        seed=st.integers(0, 1 << 32),
        partitions=st.integers(0, 100),
        workers=st.integers(0, 12),
        owners=st.integers(0, 16),
        plain=st.booleans() if plain is None else plain,
    )


def moves(before: Mapping[str, str], after: Mapping[str, str], workers: Sequence[Slot]) -> int:
    """Count the partitions that left a worker that is still there."""
    living = {slot.worker for slot in workers}
    return sum(1 for p, worker in before.items() if worker in living and after.get(p) != worker)


def moves_of(case: Case, after: Mapping[str, str]) -> int:
    listed = set(case.partitions)
    return moves({p: w for p, w in case.previous.items() if p in listed}, after, case.workers)


# ------------------------------------------------------------------ every strategy


@each_strategy
@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases())
def test_every_partition_has_one_living_worker_unless_all_are_full(strategy: Strategy, case: Case) -> None:
    result = case.assign(strategy)
    assert set(result) <= set(case.partitions)
    assert len(result) == min(len(case.partitions), case.room())
    counts = Counter(result.values())
    assert set(counts) <= {slot.worker for slot in case.workers}
    for slot in case.workers:
        assert slot.capacity is None or counts[slot.worker] <= slot.capacity


@each_strategy
@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases(), random=st.integers().map(Random))
def test_the_order_of_the_arguments_does_not_matter(strategy: Strategy, case: Case, random: Random) -> None:
    other = Case(
        random.sample(case.partitions, len(case.partitions)),
        random.sample(case.workers, len(case.workers)),
        dict(random.sample(list(case.previous.items()), len(case.previous))),
        case.loads and dict(random.sample(list(case.loads.items()), len(case.loads))),
    )
    assert other.assign(strategy) == case.assign(strategy)


@each_strategy
@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases())
def test_the_same_again_moves_nothing(strategy: Strategy, case: Case) -> None:
    result = case.assign(strategy)
    assert case.assign(strategy, previous=result) == result


@each_strategy
@settings(deadline=None, max_examples=examples_of(50))
@given(case=cases())
def test_arguments_are_left_alone(strategy: Strategy, case: Case) -> None:
    copy = Case(list(case.partitions), list(case.workers), dict(case.previous), case.loads and dict(case.loads))
    case.assign(strategy)
    assert case == copy


# ------------------------------------------------------------------ shares and the minimum


@settings(deadline=None, max_examples=examples_of(300))
@given(total=st.integers(0, 200), case=cases())
def test_shares_are_in_proportion_except_where_capacity_ends(total: int, case: Case) -> None:
    slots = case.workers
    shares = fair_shares(total, slots)
    assert sum(shares) == (min(total, case.room()) if slots else 0)
    per_weight = [share / Fraction(slot.weight) for share, slot in zip(shares, slots, strict=True)]
    for share, slot, mine in zip(shares, slots, per_weight, strict=True):
        assert share >= 0
        assert slot.capacity is None or share <= slot.capacity
        assert mine == max(per_weight) or share == slot.capacity


def balanced_counts(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to hand out `total` such that nobody has two more than somebody with room."""
    for counts in product(*(range(min(total, limit) + 1) for limit in limits)):
        open_ones = [count for count, limit in zip(counts, limits, strict=True) if count < limit]
        complete = sum(counts) == min(total, sum(limits))
        if complete and max(counts, default=0) - min(open_ones, default=max(counts, default=0)) <= 1:
            yield counts


@settings(deadline=None, max_examples=examples_of(300))
@given(
    held=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    loose=st.integers(0, 3),
    data=st.data(),
)
def test_the_minimum_is_that_of_all_balanced_assignments(held: list[int], loose: int, data: st.DataObject) -> None:
    total = sum(held) + loose
    limits = [data.draw(st.none() | st.integers(0, 5)) for _ in held]
    workers = [Slot(f"worker-{i}", limit) for i, limit in enumerate(limits)]
    previous = {f"p.{i}.{k}": f"worker-{i}" for i, count in enumerate(held) for k in range(count)}
    partitions = [*previous, *(f"new.{i}" for i in range(loose))]
    fits = [total if limit is None else limit for limit in limits]
    least = min(
        sum(max(0, had - has) for had, has in zip(held, counts, strict=True))
        for counts in balanced_counts(total, fits)
    )
    assert minimum_moves(partitions, workers, previous) == least
    result = STICKY.assign(partitions, workers, previous)
    assert moves(previous, result, workers) == least
    counts = Counter(result.values())
    assert tuple(counts[slot.worker] for slot in workers) in set(balanced_counts(total, fits))


@pytest.mark.parametrize("strategy", [STICKY, HASH], ids=lambda strategy: strategy.name)
@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases())
def test_everybody_gets_its_share_with_the_least_movement(strategy: Strategy, case: Case) -> None:
    result = case.assign(strategy)
    counts = Counter(result.values())
    for slot, share in zip(case.workers, fair_shares(len(case.partitions), case.workers), strict=True):
        assert floor(share) <= counts[slot.worker] <= ceil(share)
    assert moves_of(case, result) == minimum_moves(case.partitions, case.workers, case.previous)


# ------------------------------------------------------------------ joining and leaving


@pytest.mark.parametrize("strategy", [STICKY, HASH, WEIGHTED], ids=lambda strategy: strategy.name)
@settings(deadline=None, max_examples=examples_of(100))
@given(
    count=st.integers(1, 300),
    start=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=1, max_size=12),
)
def test_one_worker_that_joins_or_leaves_moves_little_more_than_it_must(
    strategy: Strategy, count: int, start: int, steps: list[tuple[bool, int]]
) -> None:
    partitions = [f"p.{i}" for i in range(count)]
    workers = [Slot(f"worker-{i}") for i in range(start)]
    current = strategy.assign(partitions, workers, {})
    for number, (joins, which) in enumerate(steps):
        if joins or len(workers) == 1:
            workers = [*workers, Slot(f"worker-{start + number}")]
            must = ceil(count / len(workers))
        else:
            workers = [slot for i, slot in enumerate(workers) if i != which % len(workers)]
            must = 0
        after = strategy.assign(partitions, workers, current)
        moved = moves(current, after, workers)
        assert moved <= minimum_moves(partitions, workers, current) * 1.05 + 1
        assert moved <= must
        current = after


# ------------------------------------------------------------------ weighted


def spread(case: Case, result: Mapping[str, str]) -> dict[str, tuple[Fraction, int, list[int]]]:
    """Return fair share, load and the partitions' loads of each worker."""
    units = relative_loads(case.partitions, case.loads)
    mean = Fraction(sum(units.values()), max(1, len(units)))
    shares = fair_shares(len(units), case.workers)
    owned: dict[str, list[int]] = {slot.worker: [] for slot in case.workers}
    for partition, worker in result.items():
        owned[worker].append(units[partition])
    return {
        slot.worker: (share * mean, sum(owned[slot.worker]), owned[slot.worker])
        for slot, share in zip(case.workers, shares, strict=True)
    }


@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases())
def test_a_first_weighted_assignment_exceeds_no_share_by_a_whole_partition(case: Case) -> None:
    case = replace(case, workers=[replace(slot, capacity=None) for slot in case.workers])
    for share, load, parts in spread(case, case.assign(WEIGHTED, previous={})).values():
        assert not parts or load - floor(share) <= max(parts)


@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases())
def test_a_weighted_worker_out_of_bounds_has_no_move_left_that_would_help(case: Case) -> None:
    result = case.assign(WEIGHTED)
    scales = spread(case, result)
    capacity = {slot.worker: slot.capacity for slot in case.workers}
    for taker, (share, load, parts) in scales.items():
        limit = capacity[taker]
        if limit is not None and len(parts) >= limit:
            continue
        for donor, (other_share, other_load, other_parts) in scales.items():
            out = other_load > other_share * weighted.BOUND or load < floor(floor(share) / weighted.BOUND)
            if donor != taker and out and other_parts:
                # Shares are rounded down to whole units, hence the 1.
                difference = (other_load - other_share) - (load - share)
                assert min(other_parts) >= difference - 1


@settings(deadline=None, max_examples=examples_of(100))
@given(case=cases(), random=st.integers().map(Random))
def test_weighted_keeps_everything_while_loads_drift_within_bounds(case: Case, random: Random) -> None:
    before = case.assign(WEIGHTED)
    was = case.loads or {}
    now = {p: was.get(p, 1.0) * random.uniform(0.96, 1.04) for p in case.partitions}
    drifted = replace(case, previous=before, loads=now)
    # Loads and shares are whole units, hence the 2.
    within = all(
        share / weighted.BOUND + 2 < load < share * weighted.BOUND - 2
        for share, load, _ in spread(drifted, before).values()
    )
    after = drifted.assign(WEIGHTED)
    assert after == before or not within


@settings(deadline=None, max_examples=examples_of(300))
@given(case=cases(plain=st.just(True)))
def test_weighted_with_equal_loads_moves_no_more_than_the_minimum(case: Case) -> None:
    assert moves_of(case, case.assign(WEIGHTED)) <= minimum_moves(case.partitions, case.workers, case.previous)


# ------------------------------------------------------------------ order of names


names = st.lists(st.sampled_from(["a", "b", "-", ".", "0", "1", "2", "10", "007", "99"]), max_size=6).map("".join)


@settings(deadline=None, max_examples=examples_of(500))
@given(prefix=names, first=st.integers(0, 10**30), second=st.integers(0, 10**30), suffix=names)
def test_names_that_differ_in_a_number_are_ordered_by_it(prefix: str, first: int, second: int, suffix: str) -> None:
    prefix, suffix = prefix.rstrip("0123456789"), suffix.lstrip("0123456789")
    a, b = f"{prefix}{first}{suffix}", f"{prefix}{second}{suffix}"
    assert (natural_key(a) < natural_key(b)) == (first < second)


@settings(deadline=None, max_examples=examples_of(500))
@given(first=names, second=names)
def test_different_names_have_different_keys_and_names_without_digits_sort_as_usual(first: str, second: str) -> None:
    assert (natural_key(first) == natural_key(second)) == (first == second)
    if not re.search("[0-9]", first + second):
        assert (natural_key(first) < natural_key(second)) == (first < second)
