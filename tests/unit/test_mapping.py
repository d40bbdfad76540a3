"""Subject mappings: what they refuse, what they compute, and the partitions that come out of them."""

from __future__ import annotations

import pytest

from parti.errors import ConfigError, SubjectMismatch
from parti.model.mapping import SubjectMapping, stored_subjects
from parti.model.partition import Template

ORDERS = SubjectMapping("orders.*", "orders.{{wildcard(1)}}.{{partition(16,1)}}")


# What nats-server 2.15.1 stored for these; tests/integration/test_subject_mapping.py asks it again, for many more.
@pytest.mark.parametrize(
    ("source", "destination", "published", "stored"),
    [
        ("o.*", "o.{{wildcard(1)}}.{{partition(16,1)}}", "o.a", "o.a.12"),
        ("o.*", "o.$1.{{partition(16,1)}}", "o.a", "o.a.12"),
        ("o.*", "o.{{ Wildcard( 1 ) }}.{{Partition( 16 , 1 )}}", "o.a", "o.a.12"),
        ("o.*", "o.$1.{{partition(16)}}", "o.a", "o.a.3"),
        ("o.*", "o.$x.{{partition(4,1)}}", "o.a", "o.$x.0"),
        ("o.*", "o.{{partition(4,1,1)}}", "o.a", "o.3"),
        ("o.*.*", "o.{{partition(4,2,1)}}.$1", "o.a.b", "o.0.a"),
        ("o.*.*", "o.{{partition(4,1,2)}}.$2.$2", "o.a.b", "o.2.b.b"),
        ("o.*", "o.{{partition(4,1)}}.$1", "o.{{x}}", "o.3.{{x}}"),
        ("o.*", "o.{{partition(4,1)}}.$1", "o.$1", "o.2.$1"),
        ("o.*", "x.{{partition(1,1)}}", "o.é", "x.0"),
    ],
)
def test_a_subject_is_mapped_as_the_server_does(source: str, destination: str, published: str, stored: str) -> None:
    mapping = SubjectMapping(source, destination)
    assert mapping.apply(published) == stored
    assert str(mapping.partition_of(published)) in stored.split(".")


@pytest.mark.parametrize("subject", ["orders", "orders.a.b", "other.a", "orders.", "orders.*", "orders.>", ""])
def test_what_the_source_does_not_match_is_not_mapped(subject: str) -> None:
    assert ORDERS.apply(subject) is None
    with pytest.raises(SubjectMismatch, match=r"does not match the mapping's source 'orders\.\*'"):
        ORDERS.partition_of(subject)


@pytest.mark.parametrize(
    ("source", "destination", "problem"),
    [
        ("orders.*", "orders.{{foo(1)}}", "unknown function"),
        ("orders.*", "orders.{{PARTITION(4,1)}}", "unknown function"),
        ("orders.*", "orders.{{split(1,-)}}.{{partition(4,1)}}", "unknown function"),
        ("orders.*", "orders.{{wildcard(2)}}.{{partition(4,1)}}", "names wildcard 2, but the source has 1 to 1"),
        ("orders.*", "orders.{{wildcard(0)}}.{{partition(4,1)}}", "names wildcard 0"),
        ("orders.*", "orders.$0.{{partition(4,1)}}", "names wildcard 0"),
        ("orders.*", "orders.$-1.{{partition(4,1)}}", "names wildcard -1"),
        ("orders.*", "orders.$2.{{partition(4,1)}}", "names wildcard 2"),
        ("orders.*", "orders.{{partition(4,2)}}", "names wildcard 2"),
        ("orders.*", "orders.{{partition(0,1)}}", "asks for 0 partitions"),
        ("orders.*", "orders.{{partition(-1,1)}}", "asks for -1 partitions"),
        ("orders.*", "orders.{{partition(1000001,1)}}", "asks for 1000001 partitions"),
        ("orders.*", "orders.{{partition(99999999999,1)}}", "expected a number"),
        ("orders.*", "orders.{{partition(x,1)}}", "expected a number"),
        ("orders.*", "orders.{{partition(4,)}}", "expected a number"),
        ("orders.*", "orders.{{partition()}}", "expected a number"),
        ("orders.*", "orders.{{wildcard()}}.{{partition(4,1)}}", "expected a number"),
        ("orders.*", "orders.{{wildcard(1,1)}}.{{partition(4,1)}}", "2 arguments"),
        ("orders.*", "orders.*.{{partition(4,1)}}", "the wildcard '*'"),
        ("orders.*", "orders.{{partition(4,1)}}.>", "the wildcard '>'"),
        ("orders.*", "orders.x{{partition(4,1)}}", "not one function"),
        ("orders.*", "orders.{{}}.{{partition(4,1)}}", "not one function"),
        ("orders.*", "orders.{slot}", "not one function"),
        ("orders.*", "orders.{{wildcard(1)}}", "has 0 partition() functions"),
        ("orders.*", "{{partition(4,1)}}.{{partition(8,1)}}", "has 2 partition() functions"),
        ("orders.*", "orders. .{{partition(4,1)}}", "white space"),
        ("orders.*", "", "empty token"),
        ("", "orders.{{partition(4,1)}}", "empty token"),
        ("orders..*", "orders.{{partition(4,1)}}", "empty token"),
        ("orders.>", "orders.{{partition(4)}}", "no '>'"),
        ("orders", "orders.{{partition(4)}}", "at least one '*'"),
        ("orders.*.{{partition(4,1)}}", "orders.{{partition(4,1)}}", "functions belong into the destination"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused_in_one_line(source: str, destination: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SubjectMapping(source, destination)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert repr(source) in str(caught.value) or repr(destination) in str(caught.value)


def test_the_slots_are_partitions_of_the_template() -> None:
    assert ORDERS.partition_count == 16
    assert ORDERS.template == "orders.{w1}.{slot}"
    partitions = ORDERS.partitions()
    assert [p.id for p in partitions] == [f"*.{slot}" for slot in range(16)]
    assert [p.subject for p in partitions] == [f"orders.*.{slot}" for slot in range(16)]
    assert partitions[3].keys == {"w1": "*", "slot": "3"}


def test_the_slot_may_come_first_and_a_wildcard_twice() -> None:
    mapping = SubjectMapping("a.*.*", "{{partition(2,2)}}.$2.x.$1.$2")
    assert mapping.template == "{slot}.{w2}.x.{w1}.{w2_2}"
    assert mapping.pattern == Template(mapping.template).pattern == "*.*.x.*.*"
    assert [p.id for p in mapping.partitions()] == ["0.*.*.*", "1.*.*.*"]


def test_a_template_of_ones_own_names_the_keys() -> None:
    partition = ORDERS.partitions(Template("orders.{customer}.{bucket}"))[15]
    assert partition.keys == {"customer": "*", "bucket": "15"}


@pytest.mark.parametrize("template", ["orders.{customer}", "orders.x.{slot}", "sales.{customer}.{slot}"])
def test_a_template_that_does_not_fit_the_mapping_is_refused(template: str) -> None:
    with pytest.raises(SubjectMismatch, match=r"expected 'orders\.\{w1\}\.\{slot\}'"):
        ORDERS.partitions(Template(template))


def test_mappings_that_do_the_same_are_equal() -> None:
    again = SubjectMapping("orders.*", "orders.$1.{{ Partition(16, 1) }}")
    assert again == ORDERS
    assert hash(again) == hash(ORDERS)
    assert SubjectMapping("orders.*", "orders.$1.{{partition(17,1)}}") != ORDERS
    assert SubjectMapping("order.*", "orders.$1.{{partition(16,1)}}") != ORDERS


@pytest.mark.parametrize(
    ("subjects", "source", "destination", "stored"),
    [
        (("orders.*",), "orders.*", "orders.$1.{{partition(16, 1)}}", ("orders.*.*",)),
        (("orders.*", "more.*"), "orders.*", "o.{{wildcard(1)}}", ("o.*", "more.*")),
        (("orders.>",), "orders.*", "o.{{random(3)}}.$x", ("o.*.$x", "orders.>")),
        (("orders.eu",), "", "o.{{left(1,2)}}.>", ("o.*.>",)),
        (("orders.*",), "orders.*", "o.{{SplitFromLeft(1,2)}}.x", ("o.>",)),
        (("orders.*",), "sales.*", "o.$1", ("orders.*",)),
        (("orders.*",), "orders.*", "", ("orders.*",)),
    ],
)
def test_what_a_stream_stores_is_known_for_any_transform(
    subjects: tuple[str, ...], source: str, destination: str, stored: tuple[str, ...]
) -> None:
    assert stored_subjects(subjects, source, destination) == stored
