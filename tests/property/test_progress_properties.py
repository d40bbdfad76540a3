"""Progress records: the round trip, and that they say of each partition what its lane says."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.progress import Progress, decode_progress, encode_progress, summarise
from parti.model.records import MOST

ids = st.sampled_from("abcdefgh")
positions = st.dictionaries(ids, st.integers(0, 50))
seqs = st.integers(1, 50)


@settings(deadline=None, max_examples=examples_of(150))
@given(
    st.builds(
        Progress,
        stream=st.text(),
        stream_created=st.text(),
        floor=st.integers(0, MOST),
        covered=st.lists(st.text()).map(tuple),
        ahead=st.dictionaries(st.text(), st.integers(0, MOST)),
        behind=st.dictionaries(st.text(), st.integers(0, MOST)),
        writer=st.text(),
    )
)
def test_a_record_survives_the_wire(progress: Progress) -> None:
    assert decode_progress(encode_progress(progress)) == progress


def fold(floor: int, lanes: dict[str, int], behind: dict[str, int], quiet: set[str]) -> Progress:
    covered = sorted(f"dc.{p}" for p in lanes.keys() | quiet)
    return summarise(
        stream="DC", stream_created="t", floor=floor, covered=covered, positions=lanes.items(), behind=behind
    )


@settings(deadline=None, max_examples=examples_of(300))
@given(floor=seqs, lanes=positions, behind=positions, quiet=st.sets(ids))
def test_every_partition_has_the_position_that_its_lane_and_the_floor_give_it(
    floor: int, lanes: dict[str, int], behind: dict[str, int], quiet: set[str]
) -> None:
    progress = decode_progress(encode_progress(fold(floor, lanes, behind, quiet)))
    for p in "abcdefgh":
        if p in behind:
            expected = behind[p]
        elif p in lanes or p in quiet:
            expected = max(floor, lanes.get(p, 0))
        else:
            expected = 0
        assert progress.position(p, f"dc.{p}") == expected
    assert progress.highest >= max(progress.position(p, f"dc.{p}") for p in "abcdefgh")


@settings(deadline=None, max_examples=examples_of(300))
@given(
    floor=seqs,
    lanes=positions,
    behind=positions,
    ack_floor=st.integers(0, 60),
    same=st.booleans(),
    other=st.sets(ids),
)
def test_an_ack_floor_never_takes_a_position_back_nor_past_the_ack_floor_nor_touches_what_is_behind(
    floor: int, lanes: dict[str, int], behind: dict[str, int], ack_floor: int, same: bool, other: set[str]
) -> None:
    before = fold(floor, lanes, behind, set())
    subjects = before.covered if same else tuple(f"dc.{p}" for p in sorted(other))
    after = before.raised(subjects, ack_floor)
    for p in "abcdefgh":
        old, new = before.position(p, f"dc.{p}"), after.position(p, f"dc.{p}")
        assert new >= old
        assert new <= max(old, ack_floor + 1)
        if p in behind:
            assert new == old
        if new > old:
            assert f"dc.{p}" in subjects


@settings(deadline=None, max_examples=examples_of(200))
@given(floor=seqs, lanes=positions, behind=positions, known=positions)
def test_what_is_known_beyond_the_floor_moves_a_position_just_there_and_touches_nothing_that_is_behind(
    floor: int, lanes: dict[str, int], behind: dict[str, int], known: dict[str, int]
) -> None:
    before = fold(floor, lanes, behind, set("abcdefgh"))
    after = before.advanced(known)
    for p in "abcdefgh":
        old, new = before.position(p, f"dc.{p}"), after.position(p, f"dc.{p}")
        assert new == (old if p in behind else max(old, known.get(p, 0)))
