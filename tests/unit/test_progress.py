"""The record that keeps positions."""

from __future__ import annotations

import msgspec
import pytest

from parti.core.progress import Progress, decode_progress, encode_progress, summarise
from parti.errors import DecodeError


def record(**fields: object) -> Progress:
    return msgspec.convert({"kind": "progress", "stream": "DC", "stream_created": "t0", **fields}, Progress)


def test_a_partition_is_at_the_floor_unless_it_has_an_entry() -> None:
    progress = record(floor=10, covered=["dc.a", "dc.b"], ahead={"b": 25}, behind={"c": 4, "a": 7})
    assert progress.position("b", "dc.b") == 25
    assert progress.position("c", "dc.c") == 4
    assert progress.position("a", "dc.a") == 7
    assert progress.position("d", "dc.d") == 0
    assert record(floor=10, covered=["dc.a"]).position("a", "dc.a") == 10


def test_a_wildcard_covers_its_subjects() -> None:
    progress = record(floor=10, covered=["dc.*"])
    assert progress.position("a", "dc.a") == 10
    assert progress.position("a.b", "dc.a.b") == 0


def test_an_old_entry_that_the_floor_has_passed_does_not_pull_a_partition_back() -> None:
    assert record(floor=10, covered=["dc.a"], ahead={"a": 5}).position("a", "dc.a") == 10


def test_the_highest_position() -> None:
    assert record().highest == 1
    assert record(floor=9).highest == 9
    assert record(floor=9, ahead={"a": 12}).highest == 12
    assert record(floor=9, behind={"a": 13}).highest == 13


def test_summarise_keeps_only_what_the_floor_does_not_say() -> None:
    progress = summarise(
        stream="DC",
        stream_created="t0",
        floor=10,
        covered=iter(["dc.a", "dc.b", "dc.p"]),
        positions=iter([("a", 10), ("b", 14), ("p", 12)]),
        behind={"p": 3, "gone": 30},
        writer="me",
    )
    assert (progress.floor, progress.covered, progress.writer) == (10, ("dc.a", "dc.b", "dc.p"), "me")
    assert progress.ahead == {"b": 14}
    assert progress.behind == {"p": 3, "gone": 30}


def test_a_fresh_record_takes_over_the_ack_floor_of_a_consumer() -> None:
    assert record().fresh
    raised = record().raised(("dc.a",), 41)
    assert (raised.floor, raised.covered) == (42, ("dc.a",))
    assert raised.position("a", "dc.a") == 42


def test_an_ack_floor_of_the_same_subjects_raises_the_floor_but_never_what_is_behind() -> None:
    progress = record(floor=10, covered=["dc.a", "dc.b"], ahead={"a": 15, "b": 90}, behind={"gone": 3, "far": 70})
    raised = progress.raised(("dc.b", "dc.a"), 50)
    assert (raised.floor, raised.ahead) == (51, {"b": 90})
    assert raised.behind == {"gone": 3, "far": 70}


@pytest.mark.parametrize(
    ("subjects", "ack_floor"), [(("dc.a", "dc.b"), 50), ((), 50), (("dc.x",), 50), (("dc.a",), 8), (("dc.a",), 9)]
)
def test_an_ack_floor_that_speaks_of_something_else_or_is_lower_changes_nothing(
    subjects: tuple[str, ...], ack_floor: int
) -> None:
    progress = record(floor=10, covered=["dc.a"])
    assert progress.raised(subjects, ack_floor) == progress


def test_partitions_that_are_known_to_be_further_are_ahead_and_none_goes_back() -> None:
    progress = record(floor=10, covered=["dc.a", "dc.b", "dc.c"], ahead={"a": 15}, behind={"far": 3})
    advanced = progress.advanced({"a": 12, "b": 30, "c": 10, "far": 40})
    assert [advanced.position(p, f"dc.{p}") for p in ("a", "b", "c", "far")] == [15, 30, 10, 3]
    assert advanced.floor == 10


def test_a_record_survives_the_wire() -> None:
    progress = record(floor=10, covered=["dc.a"], ahead={"a": 15}, behind={"b": 2}, failed={"b": (2, 1)}, writer="me")
    assert decode_progress(encode_progress(progress)) == progress


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[1]", b'{"stream":1,"stream_created":"x"}', b"\xff"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_progress(data)
