"""Which partitions of an assignment a worker cannot read."""

from __future__ import annotations

from parti.core.filters import build_filters, find_unreadable
from parti.model.partition import Partition, Template

ORDERS = Template("orders.{p}")


def partitions(*names: str) -> list[Partition]:
    return ORDERS.partitions(names)


def test_nothing_is_refused_that_fits() -> None:
    assert find_unreadable(partitions("a", "b"), ["orders.>"], max_subjects=2) == {}


def test_of_too_many_the_last_ones_are_refused_with_what_to_do() -> None:
    refused = find_unreadable(partitions("c", "a", "b", "d"), ["orders.>"], max_subjects=1, shards=2)
    assert list(refused) == ["b", "d"]
    assert refused["b"] == (
        "this worker takes 2 at most (max_subjects=1 x consumer_shards=2); raise these, or start another worker"
    )


def test_one_outside_the_stream_takes_nobodys_room() -> None:
    given = partitions("a", "b", "c")
    refused = find_unreadable(given, ["orders.a", "orders.c"], max_subjects=2)
    assert list(refused) == ["b"]
    assert "outside the stream" in refused["b"]


def test_of_two_that_overlap_the_later_one_is_refused_and_the_rest_can_be_built() -> None:
    given = partitions("a", "*", "b")
    refused = find_unreadable(given, ["orders.>"], max_subjects=5)
    assert list(refused) == ["*"]
    build_filters([p for p in given if p.id not in refused], max_subjects=5)
