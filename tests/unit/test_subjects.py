"""Subjects: validity, containment and overlap."""

from __future__ import annotations

import pytest

from parti.errors import SubjectMismatch
from parti.model.subjects import covers, first_overlap, has_wildcard, overlap, tokens_of, within


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a.\tb", "a.b\r\n", ">.a", "a.>.b"])
def test_what_a_server_would_refuse_is_refused(subject: str) -> None:
    with pytest.raises(SubjectMismatch, match="subject"):
        tokens_of(subject)


@pytest.mark.parametrize("subject", ["a", "a.b", "a.*", "a.>", ">", "*", "a.*.>", "a*.b>"])
def test_valid_subjects_are_split_into_tokens(subject: str) -> None:
    assert tokens_of(subject) == subject.split(".")


@pytest.mark.parametrize(
    ("subject", "expected"),
    [("a.b", False), ("a*", False), ("a>.b", False), ("*", True), ("a.*", True), ("a.>", True)],
)
def test_only_whole_tokens_are_wildcards(subject: str, expected: bool) -> None:
    assert has_wildcard(subject) is expected


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.*", "a.>", False),
        ("a.*", "a.*", True),
        ("a.b", "a.*", False),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.>", True),
        ("a.>", "a.*", True),
        (">", "a.>", True),
        ("*.>", ">", False),
        ("a.*.>", "a.b", False),
    ],
)
def test_containment(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "*.b", True),
        ("a.*", "b.*", False),
        ("a.>", "a", False),
        ("a.>", "*.b.c", True),
        ("a.*", "a.b.c", False),
        ("a.*.>", "a.b", False),
        (">", "x", True),
    ],
)
def test_overlap_in_both_directions(left: str, right: str, expected: bool) -> None:
    assert overlap(left, right) is expected
    assert overlap(right, left) is expected


def test_the_first_overlap_names_both_subjects_in_their_order() -> None:
    assert first_overlap(["a.b", "c.d", "a.*"]) == ("a.b", "a.*")
    assert first_overlap(["a.*", "c.d", "a.b"]) == ("a.*", "a.b")


def test_equal_entries_do_not_count_as_an_overlap() -> None:
    assert first_overlap(["a.*", "a.*"]) is None
    assert first_overlap(["a.b", "a.b", "a.c"]) is None


def test_within_needs_one_pattern_that_takes_in_everything() -> None:
    assert within("a.*", ["x.>", "a.>"])
    assert not within("*.b", ["a.>", "b.>"])
    assert not within("a", [])
