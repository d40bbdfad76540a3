"""Objectives, error budgets, latencies in buckets, and the arithmetic of advice."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.slo import (
    LATENCY,
    REDELIVERY,
    UPDATES,
    Verdict,
    advise_ack_wait,
    advise_max_ack_pending,
    advise_partitions,
    advise_workers,
    bucket_of,
    burn_rate,
    evaluate,
    evaluate_latency,
    quantile_bucket,
    upper_bound_s,
)


def counts_of(latencies_s: list[float]) -> Counter[int]:
    return Counter(bucket_of(each) for each in latencies_s)


@pytest.mark.parametrize(
    ("bad", "verdict", "remaining"),
    [(0, Verdict.MET, 10.0), (10, Verdict.MET, 0.0), (11, Verdict.MISSED, -1.0), (1000, Verdict.MISSED, -990.0)],
)
def test_a_target_leaves_a_budget_of_bad_ones(bad: int, verdict: Verdict, remaining: float) -> None:
    found = evaluate(LATENCY, 1000, bad)
    assert found.verdict is verdict
    assert found.value == pytest.approx(1 - bad / 1000)
    assert found.allowed == pytest.approx(10)
    assert found.remaining == pytest.approx(remaining)
    assert found.burn_rate == pytest.approx(bad / 10)


@pytest.mark.parametrize(("bad", "verdict"), [(2, Verdict.MET), (3, Verdict.MISSED)])
def test_less_than_3_percent_are_not_3_percent(bad: int, verdict: Verdict) -> None:
    assert evaluate(REDELIVERY, 100, bad).verdict is verdict


@pytest.mark.parametrize(("bad", "verdict"), [(1, Verdict.MET), (2, Verdict.MISSED)])
def test_999_of_1000_updates_are_enough(bad: int, verdict: Verdict) -> None:
    assert evaluate(UPDATES, 1000, bad).verdict is verdict


def test_nothing_counted_is_neither_met_nor_missed() -> None:
    found = evaluate(UPDATES, 0, 0)
    assert found.verdict is Verdict.UNKNOWN
    assert found.value is None
    assert found.burn_rate is None
    assert found.recent_burn_rate is None


def test_the_recent_burn_rate_tells_of_the_newest_part_only() -> None:
    found = evaluate(REDELIVERY, 10_000, 60, recent=(100, 60))
    assert found.burn_rate == pytest.approx(0.2)
    assert found.recent_burn_rate == pytest.approx(20)
    assert burn_rate(REDELIVERY, 100, 3) == pytest.approx(1)


@pytest.mark.parametrize("counts", [(1, 2), (-1, -1), (5, -1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= bad <= total"):
        evaluate(LATENCY, *counts)
    with pytest.raises(ValueError, match="expected 0 <= bad <= total"):
        evaluate(LATENCY, 10, 1, recent=counts)


@settings(deadline=None, max_examples=examples_of(200))
@given(st.floats(min_value=1e-6, max_value=1e6))
def test_a_bucket_bounds_its_latencies_within_2_2_percent(latency_s: float) -> None:
    bound = upper_bound_s(bucket_of(latency_s))
    assert latency_s <= bound * (1 + 1e-9)
    assert bound <= latency_s * 2 ** (1 / 32) * (1 + 1e-9)


def test_what_takes_no_time_is_in_the_first_bucket() -> None:
    assert [bucket_of(each) for each in (-1.0, 0.0, 1e-7, 1e-6)] == [0, 0, 0, 0]
    assert upper_bound_s(0) == pytest.approx(1e-6)


@settings(deadline=None, max_examples=examples_of(100))
@given(
    st.lists(st.floats(min_value=1e-5, max_value=100), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99])
)
def test_a_quantile_of_buckets_is_the_bucket_of_the_nearest_rank(latencies_s: list[float], share: float) -> None:
    exact = sorted(latencies_s)[math.ceil(share * len(latencies_s) - 1e-9) - 1]
    assert quantile_bucket(counts_of(latencies_s), share) == bucket_of(exact)


def test_nothing_has_no_quantile() -> None:
    assert quantile_bucket({}, 0.95) is None
    assert quantile_bucket({3: 0}, 0.95) is None


def test_counts_of_windows_can_be_added() -> None:
    chance = random.Random(1)
    parts = [[chance.expovariate(10) for _ in range(100)] for _ in range(5)]
    together = sum((counts_of(part) for part in parts), Counter())
    assert together == counts_of([each for part in parts for each in part])


def test_messages_slower_than_twice_the_p95_are_bad() -> None:
    latencies = [0.1] * 960 + [0.19] * 20 + [0.25] * 20
    found, limit_s = evaluate_latency(counts_of(latencies), {})
    assert limit_s == pytest.approx(0.2, rel=0.023)
    assert (found.total, found.bad) == (1000, 20)
    assert found.verdict is Verdict.MISSED
    assert evaluate_latency(counts_of([0.1] * 985 + [0.25] * 15), {})[0].bad == 15


def test_a_reference_notices_that_everything_became_slow() -> None:
    slow = counts_of([1.0] * 1000)
    assert evaluate_latency(slow, {})[0].verdict is Verdict.MET, "measured along, it follows the slowdown"
    found, limit_s = evaluate_latency(slow, slow, reference_p95_s=0.1)
    assert limit_s == pytest.approx(0.2, rel=0.023)
    assert found.verdict is Verdict.MISSED
    assert found.recent_burn_rate == pytest.approx(100)


def test_without_latencies_there_is_no_limit() -> None:
    found, limit_s = evaluate_latency({}, {})
    assert found.verdict is Verdict.UNKNOWN
    assert limit_s is None


def test_ack_wait_is_three_times_the_p95_but_at_least_a_second() -> None:
    long = advise_ack_wait(4.0)
    assert (long.setting, long.value) == ("ack_wait_s", 12.0)
    assert long.reason.startswith("3 x p95 handler latency of 4 s is 12 s:")
    short = advise_ack_wait(0.01)
    assert short.value == 1.0
    assert "is 0.03 s, but at least 1 s" in short.reason


def test_max_ack_pending_follows_littles_law() -> None:
    many = advise_max_ack_pending("w3", 2000.0, 0.05)
    assert (many.setting, many.about, many.value) == ("max_ack_pending", "w3", 200)
    assert "2,000 messages a second, each within 0.05 s (p95): 100 in flight" in many.reason
    few = advise_max_ack_pending("w3", 1.0, 0.05)
    assert few.value == 16
    assert few.reason.endswith("but at least 16")


def test_hot_partitions_are_told_with_their_share_the_hottest_first() -> None:
    busy_s = {f"etch{n:02}.c1": 1.0 for n in range(38)} | {"etch90.c1": 12.0, "etch91.c1": 50.0}
    first, second = advise_partitions(busy_s)
    assert (first.about, first.value, second.about, second.value) == ("etch91.c1", 0.5, "etch90.c1", 0.12)
    assert first.reason.startswith("it takes 50.0% of the handling time, 20.0 times the even share of 40 partitions")
    assert advise_partitions({"a": 3.0, "b": 1.0, "c": 0.0}) == [], "2.25 times the even share is not hot"
    assert advise_partitions({}) == []
    assert advise_partitions({"a": 0.0}) == []


def test_only_workers_far_from_the_even_share_are_told_of() -> None:
    found = advise_workers({"w0": 100.0, "w1": 40.0, "w2": 50.0, "w3": 10.0})
    assert [(each.about, each.value) for each in found] == [("w0", 0.5), ("w3", 0.05)]
    assert "2.00 times the even share of 4 workers" in found[0].reason
    assert found[0].reason.endswith("gets less")
    assert found[1].reason.endswith("gets more")
    assert advise_workers({"w0": 1.0, "w1": 1.1}) == []
    assert advise_workers({"w0": 0.0, "w1": 0.0}) == []
    assert advise_workers({}) == []
