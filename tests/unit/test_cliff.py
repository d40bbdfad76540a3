"""One wide filter instead of many: the narrowest pattern, and when it is the cheaper way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.core.cliff import Guard, Lag, cover, search_us
from parti.model.subjects import covers

HALF = Lag(now_s=100.0, behind=50_000, pending=25_000, subjects=2_000, filters=1_000)
TOKENS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("subjects", "pattern"),
    [
        (["a.b"], "a.b"),
        (["dc.t1.a", "dc.t1.b"], "dc.t1.*"),
        (["dc.t1.a", "dc.t2.a"], "dc.*.a"),
        (["dc.a", "dc.b.c"], "dc.>"),
        (["a", "b.c"], ">"),
        (["dc.*.a", "dc.x.b"], "dc.*.*"),
    ],
)
def test_the_cover_is_the_narrowest_pattern(subjects: list[str], pattern: str) -> None:
    assert cover(subjects) == pattern


@given(st.lists(TOKENS, min_size=1, max_size=6))
def test_the_cover_matches_each_of_them(subjects: list[str]) -> None:
    assert all(covers(cover(subjects), subject) for subject in subjects)


def test_nothing_has_no_cover() -> None:
    with pytest.raises(ValueError, match="nothing to cover"):
        cover([])


def test_the_cost_of_searching_is_what_was_measured() -> None:
    """20 subjects about 50,000 msg/s, 200 about 19,000, 2,000 about 2,200 on the machine of the figures."""
    assert 1e6 / search_us(20) == pytest.approx(50_000, rel=0.1)
    assert 1e6 / search_us(200) == pytest.approx(18_000, rel=0.1)
    assert 1e6 / search_us(2_000) == pytest.approx(2_200, rel=0.1)


def test_a_lag_that_lasts_is_met_with_a_wide_filter_when_many_of_the_messages_are_ours() -> None:
    guard = Guard()
    assert not guard.widen(HALF, wide=False)[0]
    wide, why = guard.widen(replace(HALF, now_s=101.5), wide=False)
    assert wide
    assert "50000 messages behind on a file stream of 2000 subjects, 25000 of them for this worker" in why


@pytest.mark.parametrize(
    "dear",
    [{"pending": 2_000}, {"behind": 1_500, "pending": 700}, {"filters": 1}],
    ids=["few are ours", "hardly behind", "one filter"],
)
def test_its_own_filters_stay_where_they_are_cheaper(dear: dict[str, int]) -> None:
    guard = Guard()
    for second in range(10):
        assert not guard.widen(replace(HALF, now_s=100.0 + second, **dear), wide=False)[0]  # type: ignore[arg-type]


def test_it_comes_back_when_it_has_caught_up_and_not_before() -> None:
    guard, near = Guard(), replace(HALF, behind=500)
    assert guard.widen(replace(HALF, now_s=110), wide=True)[0]
    assert guard.widen(replace(near, now_s=111), wide=True)[0]
    assert guard.widen(replace(HALF, now_s=112), wide=True)[0], "behind again"
    assert guard.widen(replace(near, now_s=113), wide=True)[0]
    assert not guard.widen(replace(near, now_s=115.5), wide=True)[0]


def test_a_pattern_that_matches_nobody_elses_subjects_is_always_good() -> None:
    caught_up = replace(HALF, behind=0, pending=0, alone=True)
    assert Guard().widen(caught_up, wide=False)[0]
    assert Guard().widen(caught_up, wide=True)[0]
    assert not Guard().widen(replace(caught_up, subjects=20), wide=False)[0], "not worth a session"
