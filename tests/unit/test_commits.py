"""What the commits of a lake table mean: ranges, names, schemas, which are live and which to put together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import ConfigError
from parti.spark.commits import (
    Commit,
    as_range,
    dead,
    decode,
    encode,
    live,
    merge_meta,
    merge_schema,
    plan_compaction,
    plan_reading,
    range_of,
    replaced,
    type_text,
)


def field(name: str, kind: Any = "string") -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def chain(*sizes: int) -> list[Commit]:
    """One commit for each size, of one batch each."""
    return [Commit(n, n, rows=size, bytes=size) for n, size in enumerate(sizes)]


def test_a_name_carries_the_batches_and_sorts_like_them() -> None:
    commits = [Commit(0, 8), Commit(9, 9), Commit(10, 120)]
    assert commits[2].directory == "commit=000000000010-000000000120"
    assert sorted(c.directory for c in commits) == [c.directory for c in commits]
    assert [range_of(c.directory) for c in commits] == [(0, 8), (9, 9), (10, 120)]
    assert [range_of(name) for name in ("_staging", "commit=1-2", "commit=000000000010-000000000120.x")] == [None] * 3


def test_a_batch_is_a_range_of_one() -> None:
    assert as_range(7) == (7, 7)
    assert as_range((3, 9)) == (3, 9)
    for bad in (-1, (5, 4), 10**12):
        with pytest.raises(ConfigError, match="no range"):
            as_range(bad)


def test_what_lies_in_a_larger_commit_does_not_count() -> None:
    large, small, alone = Commit(0, 5), [Commit(0, 2), Commit(3, 5)], Commit(6, 6)
    everything = [alone, *small, large]
    assert live("t", everything) == (large, alone)
    assert dead(everything, live("t", everything)) == tuple(small)


def test_commits_that_overlap_in_part_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        live("t", [Commit(0, 5), Commit(4, 8)])


def test_a_new_commit_replaces_what_it_covers_and_tears_nothing_apart() -> None:
    there = [Commit(0, 3), Commit(4, 4), Commit(5, 5)]
    assert replaced("t", there, Commit(4, 4)) == (there[1],)
    assert replaced("t", there, Commit(4, 9)) == (there[1], there[2])
    assert replaced("t", there, Commit(6, 6)) == ()
    with pytest.raises(ConfigError, match="part of commit"):
        replaced("t", there, Commit(2, 2))


def test_a_meta_file_reads_back_as_it_was_written() -> None:
    commit = Commit(
        3, 5, rows=7, files=2, bytes=99, schema=(field("a"),), written_at="now", written_by="me",
        merged=((3, 4, 5), (5, 5, 2)), meta={"offsets": {"start": None, "end": {"next": 8}}},
    )  # fmt: skip
    read = decode(encode(commit), "here")
    assert read == commit
    assert (read.schema, read.meta) == (commit.schema, commit.meta)


DAMAGED = [
    "",
    "[]",
    '{"format": 1}',
    '{"format": 1, "first": "x"}',
    "[" * 5000 + "]" * 5000,
    '{"format": 1, "first": 1e999}',
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_meta_file_says_where_it_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"lake/bronze/x/_meta\.json cannot be read"):
        decode(text, "lake/bronze/x/_meta.json")


def test_a_meta_file_of_a_later_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="use a newer parti"):
        decode(encode(Commit(0, 0)).replace('"format": 1', '"format": 2'), "here")


def test_a_writer_cannot_overwrite_what_the_table_notes() -> None:
    with pytest.raises(ConfigError, match="may not contain rows"):
        encode(Commit(0, 0, meta={"rows": 1}))


def test_metas_are_put_together_by_what_they_mean() -> None:
    notes: list[dict[str, Any]] = [
        {"offsets": {"start": None, "end": 5}, "seq_min": 1, "seq_max": 4, "counts": {"late": 1}, "watermark_us": 10},
        {"offsets": {"start": 5, "end": 9}, "seq_min": None, "seq_max": None, "counts": {"type": 2}},
        {"offsets": {"start": 9, "end": 12}, "seq_min": 9, "seq_max": 11, "counts": {"late": 2}, "watermark_us": 30},
    ]
    assert merge_meta([Commit(n, n, meta=note) for n, note in enumerate(notes)]) == {
        "offsets": {"start": None, "end": 12},
        "seq_min": 1,
        "seq_max": 11,
        "counts": {"late": 3, "type": 2},
        "watermark_us": 30,
    }
    ranges: list[dict[str, Any]] = [{"source": {"table": "bronze", "first": n, "last": n}} for n in (4, 5, 6)]
    assert merge_meta([Commit(n, n, meta=note) for n, note in enumerate(ranges)])["source"] == {
        "table": "bronze",
        "first": 4,
        "last": 6,
    }


def test_columns_can_be_added_but_not_removed_or_retyped() -> None:
    old = (field("a"), field("b", "integer"))
    assert [c["name"] for c in merge_schema("t", old, (field("c"), field("b", "integer"), field("a")))] == [*"abc"]
    with pytest.raises(ConfigError, match="column 'b' that is now missing"):
        merge_schema("t", old, (field("a"),))
    with pytest.raises(ConfigError, match="column 'b' is int and cannot become bigint"):
        merge_schema("t", old, (field("a"), field("b", "long")))


def test_whether_a_column_may_be_null_is_no_difference() -> None:
    nested = {"type": "array", "elementType": "double", "containsNull": True}
    strict = {"name": "a", "type": {**nested, "containsNull": False}, "nullable": False, "metadata": {}}
    assert merge_schema("t", (field("a", nested),), (strict,)) == (field("a", nested),)


def test_types_are_shown_as_people_write_them() -> None:
    inner = {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True}
    kind = {"type": "struct", "fields": [field("x", "double"), field("y", {"type": "array", "elementType": inner})]}
    assert type_text(kind) == "struct<x:double,y:array<map<string,bigint>>>"


def test_small_commits_are_put_together_up_to_the_target_and_the_newest_stays() -> None:
    commits = chain(40, 40, 40, 100, 10, 10, 10)
    groups = plan_compaction(commits, 100)
    assert [[c.first for c in group] for group in groups] == [[0, 1], [4, 5]]


def test_nothing_is_put_together_across_what_somebody_has_read() -> None:
    groups = plan_compaction(chain(1, 1, 1, 1, 1, 1), 100, boundaries=[2])
    assert [[c.first for c in group] for group in groups] == [[0, 1, 2], [3, 4]]


@given(
    sizes=st.lists(st.integers(0, 60), max_size=30),
    target=st.integers(1, 100),
    boundaries=st.lists(st.integers(-1, 30), max_size=3),
)
def test_a_plan_never_breaks_its_rules(sizes: list[int], target: int, boundaries: list[int]) -> None:
    commits = chain(*sizes)
    groups = plan_compaction(commits, target, boundaries)
    taken = [c for group in groups for c in group]
    assert taken == sorted(taken, key=lambda c: c.first)
    assert len({c.first for c in taken}) == len(taken)
    assert not commits or commits[-1] not in taken
    for group in groups:
        assert len(group) > 1
        assert sum(c.bytes for c in group) <= target
        assert not any(group[0].first <= b < group[-1].last for b in boundaries)
        assert [c.first for c in group] == list(range(group[0].first, group[-1].last + 1))
    # Nothing more could be put together: two neighbours that both fit would be in one group.
    for left, right in itertools.pairwise(groups):
        if left[-1].last + 1 == right[0].first and left[-1].last not in boundaries:
            assert sum(c.bytes for c in left) + right[0].bytes > target


def test_what_comes_after_a_batch_is_read_in_portions() -> None:
    groups = plan_reading(chain(5, 5, 5, 20, 1), after=0, most_rows=10)
    assert [[c.first for c in group] for group in groups] == [[1, 2], [3], [4]]
    assert plan_reading(chain(5, 5), after=1, most_rows=10) == []
