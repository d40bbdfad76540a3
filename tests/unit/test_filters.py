"""Which subjects a consumer carries."""

from __future__ import annotations

import pytest

from parti.core.filters import build_filters, diff_filters
from parti.errors import OverlappingSubjects, TooManySubjects
from parti.model.partition import Partition, Template

TEMPLATE = Template("dc.{tool}.{chamber}")


def partitions(*ids: str) -> list[Partition]:
    return TEMPLATE.partitions(ids)


def test_subjects_are_sorted_free_of_repetition_and_the_repetition_is_counted() -> None:
    filters = build_filters(partitions("b.1", "a.1", "b.1", "b.1"), max_subjects=10)
    assert filters.subjects == ("dc.a.1", "dc.b.1")
    assert filters.duplicates == 2
    assert filters.partitions["dc.b.1"].id == "b.1"


def test_equal_sets_give_equal_subjects_whatever_their_order() -> None:
    one = build_filters(partitions("a.1", "b.1", "c.1"), max_subjects=3)
    other = build_filters(partitions("c.1", "a.1", "b.1"), max_subjects=3)
    assert one.subjects == other.subjects


def test_the_cap_counts_different_subjects_and_names_both_numbers() -> None:
    many = [f"t{i}.1" for i in range(501)]
    assert len(build_filters(partitions(*many[:500], *many[:500]), max_subjects=500).subjects) == 500
    with pytest.raises(TooManySubjects, match=r"501 .*500"):
        build_filters(partitions(*many), max_subjects=500)


def test_an_overlap_is_refused_with_both_names() -> None:
    with pytest.raises(OverlappingSubjects) as caught:
        build_filters(partitions("a.1", "b.1", "a.*"), max_subjects=10)
    assert "'dc.a.1'" in str(caught.value)
    assert "'dc.a.*'" in str(caught.value)


def test_nothing_is_a_set_too() -> None:
    filters = build_filters([], max_subjects=1)
    assert (filters.subjects, filters.duplicates) == ((), 0)


def test_a_diff_says_what_comes_and_what_goes() -> None:
    diff = diff_filters(["a", "b", "c"], ["c", "e", "d", "d"])
    assert (diff.added, diff.removed, diff.empty) == (("d", "e"), ("a", "b"), False)
    assert diff_filters(["a", "b"], ("b", "a")).empty
    assert not diff_filters(["a"], []).empty
    assert not diff_filters([], ["a"]).empty
