"""Arithmetic of sequence ranges, and what filters of a query spare the server."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.model.subjects import covers
from parti.spark.planning import bounds, count, earlier, lost, ranges_of, split, thins_by_design
from parti.spark.pushdown import Narrowing

SEQS = st.integers(1, 10**12)


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=examples_of(100))
@given(SEQS, st.integers(-5, 10_000), st.integers(1, 40), st.integers(1, 500))
def test_split_gives_every_sequence_once_in_order(start: int, size: int, parts: int, most: int) -> None:
    pieces = split(start, start + size, parts=parts, most=most)
    if size <= 0:
        assert pieces == []
        return
    assert pieces[0][0] == start
    assert pieces[-1][1] == start + size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(pieces))
    sizes = [end - begin for begin, end in pieces]
    assert min(sizes) >= 1
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(pieces) >= min(parts, size)


def test_split_makes_no_more_pieces_than_asked_for() -> None:
    assert split(1, 11, parts=1, most=500) == [(1, 11)]
    assert split(1, 11, parts=3, most=500) == [(1, 4), (4, 7), (7, 11)]
    assert split(1, 11, parts=1, most=5) == [(1, 6), (6, 11)]
    assert split(1, 3, parts=8, most=500) == [(1, 2), (2, 3)]


@settings(deadline=None, max_examples=examples_of(100))
@given(st.sets(st.integers(1, 200)))
def test_ranges_hold_exactly_the_sequences(seqs: set[int]) -> None:
    found = ranges_of(sorted(seqs))
    assert [seq for start, end in found for seq in range(start, end)] == sorted(seqs)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(found))
    assert count(found) == len(seqs)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"first_seq": 5, "last_seq": 9, "messages": 3}, (5, 9)),
        ({"first_seq": 0, "last_seq": 0, "messages": 0}, (1, 0)),
        ({"first_seq": 10, "last_seq": 9, "messages": 0}, (10, 9)),
        # A stream whose messages were deleted one by one keeps its first sequence.
        ({"first_seq": 1, "last_seq": 9, "messages": 0}, (10, 9)),
    ],
)
def test_bounds(state: dict[str, int], expected: tuple[int, int]) -> None:
    assert bounds({"state": state}) == expected


@pytest.mark.parametrize(
    ("config", "thins"),
    [
        ({}, False),
        ({"retention": "limits", "max_msgs_per_subject": -1, "max_age": 10**9}, False),
        ({"retention": "workqueue"}, True),
        ({"retention": "interest"}, True),
        ({"retention": "limits", "max_msgs_per_subject": 1}, True),
        ({"retention": "limits", "allow_msg_ttl": True}, True),
    ],
)
def test_streams_that_lose_messages_by_design(config: dict[str, Any], thins: bool) -> None:
    assert thins_by_design(config) is thins


def test_losses_are_told_in_one_line() -> None:
    one = str(lost("DC", [(5, 6)], filtered=False))
    assert one == (
        "1 messages of stream 'DC' are gone (purged, deleted or expired): 5; set failOnDataLoss=false to go on "
        "without them"
    )
    many = str(lost("DC", [(10 * i, 10 * i + 3) for i in range(1, 9)], filtered=True))
    assert "24 messages" in many
    assert "10-12, 20-22, 30-32, 40-42, 50-52 and 3 more ranges" in many
    assert "some may be of subjects that were not asked for" in many


def test_margins_of_time() -> None:
    moment = datetime(2026, 11, 16, 8, tzinfo=UTC)
    assert earlier(moment, 5) == moment - timedelta(seconds=5)
    assert earlier(moment.replace(tzinfo=None), -5) == moment + timedelta(seconds=5)


# ── filters ───────────────────────────────────────────────────────────────────────────────────────────────────────

COMPARISONS: dict[str, Any] = {
    "EqualTo": lambda a, b: a == b,
    "GreaterThan": lambda a, b: a > b,
    "GreaterThanOrEqual": lambda a, b: a >= b,
    "LessThan": lambda a, b: a < b,
    "LessThanOrEqual": lambda a, b: a <= b,
}


@settings(deadline=None, max_examples=examples_of(100))
@given(st.lists(st.tuples(st.sampled_from(sorted(COMPARISONS)), st.integers(-5, 60)), max_size=5))
def test_filters_on_sequences_are_answered_exactly(filters: list[tuple[str, int]]) -> None:
    narrowing = Narrowing()
    for kind, value in filters:
        narrowing, exact = narrowing.take(kind, ("seq",), value)
        assert exact
    wanted = [seq for seq in range(1, 55) if all(COMPARISONS[kind](seq, value) for kind, value in filters)]
    last = 54 if narrowing.last is None else min(54, narrowing.last)
    assert list(range(narrowing.first, last + 1)) == wanted


@settings(deadline=None, max_examples=examples_of(100))
@given(st.lists(st.tuples(st.sampled_from(sorted(COMPARISONS)), st.integers(-5, 60)), max_size=5))
def test_filters_on_times_keep_everything_that_fits(filters: list[tuple[str, int]]) -> None:
    base = datetime(2026, 11, 16, tzinfo=UTC)
    narrowing = Narrowing()
    for kind, value in filters:
        narrowing, exact = narrowing.take(kind, ("timestamp",), base + timedelta(seconds=value))
        assert not exact
    for second in range(55):
        moment = base + timedelta(seconds=second)
        if all(COMPARISONS[kind](second, value) for kind, value in filters):
            assert narrowing.since is None or moment >= narrowing.since
            assert narrowing.until is None or moment <= narrowing.until


TOKENS = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=4)


@settings(deadline=None, max_examples=examples_of(100))
@given(TOKENS.map(".".join), st.text("ab.", max_size=6))
def test_filters_on_beginnings_of_subjects_keep_everything_that_fits(subject: str, beginning: str) -> None:
    narrowing, exact = Narrowing().take("StringStartsWith", ("subject",), beginning)
    assert not exact
    if subject.startswith(beginning):
        assert not narrowing.subjects or any(covers(pattern, subject) for pattern in narrowing.subjects)


@pytest.mark.parametrize(
    ("kind", "value", "subjects"),
    [
        ("EqualTo", "dc.a", ("dc.a",)),
        ("EqualTo", "dc.*", ()),
        ("EqualTo", "dc.>", ()),
        ("EqualTo", "dc..a", ()),
        ("EqualTo", "dc a", ()),
        ("EqualTo", "", ()),
        ("EqualTo", None, ()),
        ("In", ("dc.a", "dc.b", "dc.a"), ("dc.a", "dc.b")),
        ("In", ("dc.a", None), ()),
        ("In", ("dc.a", "*"), ()),
        ("In", tuple(f"dc.{i}" for i in range(21)), ()),
        ("StringStartsWith", "dc.etch", ("dc.>",)),
        ("StringStartsWith", "dc.etch.", ("dc.etch.>",)),
        ("StringStartsWith", "dc", ()),
        ("StringStartsWith", "*.a", ()),
        ("StringEndsWith", ".x", ()),
        ("StringContains", "a", ()),
        ("IsNotNull", None, ()),
    ],
)
def test_filters_on_subjects(kind: str, value: Any, subjects: tuple[str, ...]) -> None:
    narrowing, exact = Narrowing().take(kind, ("subject",), value)
    assert (narrowing.subjects, exact) == (subjects, False)


def test_a_second_condition_on_the_subject_is_left_to_spark() -> None:
    narrowing, _ = Narrowing().take("EqualTo", ("subject",), "dc.a")
    assert narrowing.take("EqualTo", ("subject",), "dc.b")[0].subjects == ("dc.a",)


@pytest.mark.parametrize("attribute", [("payload",), ("seq", "x"), (), ("stream",), ("headers",)])
def test_filters_on_other_columns_change_nothing(attribute: tuple[str, ...]) -> None:
    assert Narrowing().take("EqualTo", attribute, 5) == (Narrowing(), False)
    assert Narrowing().take("IsNotNull", ("seq",), None) == (Narrowing(), False)
    assert Narrowing().take("EqualTo", ("seq",), None) == (Narrowing(), False)
