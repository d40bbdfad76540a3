"""Templates and the partitions they name."""

from __future__ import annotations

from typing import Any

import pytest

from parti.errors import SubjectMismatch
from parti.model.partition import Partition, Template

TEXT = "dc.{tool}.{chamber}.completion"


def test_a_partition_is_the_same_however_its_values_are_given() -> None:
    template = Template(TEXT)
    expected = template.partition({"tool": "etch1", "chamber": "c3"})
    assert (expected.id, expected.subject) == ("etch1.c3", "dc.etch1.c3.completion")
    assert dict(expected.keys) == {"tool": "etch1", "chamber": "c3"}
    for values in ({"chamber": "c3", "tool": "etch1"}, ["etch1", "c3"], ("etch1", "c3"), "etch1.c3", expected):
        built = template.partition(values)
        assert (built, dict(built.keys)) == (expected, dict(expected.keys))
    assert template.parse("dc.etch1.c3.completion") == expected
    assert hash(template.parse(expected.subject)) == hash(expected)
    assert str(expected) == "etch1.c3"


def test_keys_cannot_be_changed() -> None:
    keys: Any = Template(TEXT).partition("a.b").keys
    with pytest.raises(TypeError):
        keys["tool"] = "x"


@pytest.mark.parametrize(
    "values",
    [
        "etch1",
        "etch1.c3.x",
        "",
        [],
        ["a"],
        ["a", "b", "c"],
        {"tool": "a"},
        {"tool": "a", "chamber": "b", "extra": "c"},
        ["a.b", "c"],
        ["a", ""],
        ["a", ">"],
        ["a", "b c"],
        ["a", "b\n"],
    ],
)
def test_values_that_do_not_fit_are_refused_with_the_template_in_the_text(values: Any) -> None:
    with pytest.raises(SubjectMismatch) as caught:
        Template(TEXT).partition(values)
    assert TEXT in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("dc.*.x", "dc.>", "dc.a{tool}", "dc.{tool}b", "dc.{}", "dc.{a-b}", "dc.{a!r}", "dc.{a:x}", "dc.{{a}}"),
        *("dc.}{", "dc.{a}.{a}", "dc..{a}", "", "dc.{a b}", "{a.b}", "dc.{", "dc.}"),
    ],
)
def test_a_template_whose_keys_could_not_be_found_again_is_refused(text: str) -> None:
    with pytest.raises(SubjectMismatch):
        Template(text)


@pytest.mark.parametrize(
    "subject",
    ["dc.etch1.completion", "dc.a.b.other", "xx.a.b.completion", "dc.a.b.completion.more", "dc..b.completion"],
)
def test_a_foreign_subject_is_not_parsed(subject: str) -> None:
    with pytest.raises(SubjectMismatch):
        Template(TEXT).parse(subject)


def test_the_pattern_takes_in_every_subject_of_the_template() -> None:
    assert Template(TEXT).pattern == "dc.*.*.completion"
    assert Template("{a}").pattern == "*"
    assert Template(TEXT).keys == ("tool", "chamber")


def test_a_wildcard_value_makes_a_partition_of_several_subjects() -> None:
    wide = Template(TEXT).partition({"tool": "etch1", "chamber": "*"})
    assert (wide.id, wide.subject) == ("etch1.*", "dc.etch1.*.completion")


def test_a_template_without_keys_has_one_partition() -> None:
    template = Template("orders.all")
    only = template.partition("orders.all")
    assert (only.id, only.subject, dict(only.keys)) == ("orders.all", "orders.all", {})
    assert template.parse("orders.all") == only
    assert template.partition({}) == template.partition([]) == template.partition(only) == only
    with pytest.raises(SubjectMismatch, match=r"orders\.all"):
        template.partition("orders.other")


def test_a_partition_of_another_template_is_refused_where_there_are_no_keys() -> None:
    with pytest.raises(SubjectMismatch, match=r"orders\.all"):
        Template("orders.all").partition(Partition("x", "elsewhere.x", {}))


def test_a_partition_of_another_template_is_rebuilt_from_its_keys() -> None:
    foreign = Template("old.{tool}.{chamber}").partition("a.b")
    assert Template(TEXT).partition(foreign).subject == "dc.a.b.completion"


def test_lists_keep_order_and_repetition() -> None:
    assert [p.id for p in Template(TEXT).partitions(["b.x", "a.x", "b.x"])] == ["b.x", "a.x", "b.x"]
