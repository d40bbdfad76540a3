"""The record of a state, and the names of its chunks."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.model.fleet import decode, encode
from parti.model.state import (
    SnapshotName,
    StatePointer,
    chunk_subject,
    parse_chunk_subject,
    state_key,
    token_of,
)

POINTER = StatePointer(
    partition="etch1.c3",
    fence=7,
    position=1200,
    stream_created="2026-11-16T05:51:58.1Z",
    size=300_000,
    chunks=2,
    digest="ab" * 32,
    stream="parti-state",
    subject="parti.state.etch1=2Ec3.7-1200-0a1b2c3d4e5f",
    worker="worker-2",
    at=datetime(2026, 11, 16, 6, 0, tzinfo=UTC),
)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_a_pointer_is_stored_in_camel_case_and_comes_back_as_it_was() -> None:
    stored = encode(POINTER)
    assert json.loads(stored)["streamCreated"] == POINTER.stream_created
    assert decode(stored, StatePointer) == POINTER


def test_a_pointer_without_a_snapshot_holds_no_state_but_one_with_an_empty_snapshot_does() -> None:
    assert not StatePointer(partition="a", fence=3, at=POINTER.at).holds_state
    assert StatePointer(partition="a", subject="s", at=POINTER.at).holds_state


@pytest.mark.parametrize(
    ("partition", "key"),
    [("etch1.c3", "state.etch1.c3"), ("*", "state.=2A"), ("a b", "state.a=20b")],
)
def test_the_key_of_a_pointer_is_one_that_a_bucket_takes(partition: str, key: str) -> None:
    assert state_key(partition) == key


def test_no_partition_lies_under_the_pattern_of_another() -> None:
    assert token_of("a.b") == "a=2Eb"
    assert token_of("a") != token_of("a.b").split(".")[0]


@given(ids)
def test_any_partition_is_one_token(partition: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=\-]+", token_of(partition))


@given(ids, st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 10**6))
def test_a_chunk_tells_which_snapshot_it_belongs_to(partition: str, fence: int, position: int, number: int) -> None:
    name = SnapshotName("x.state", partition, fence, position, "0a1b2c3d4e5f")
    assert parse_chunk_subject(chunk_subject(name.subject, number), "x.state") == name


@pytest.mark.parametrize(
    "subject",
    [
        "x.state.a.1-2-3.0.0",
        "x.state.a.1-2-3",
        "x.state.a.1-2.0",
        "x.state.a.b-2-3.0",
        "x.state.a.1-2-3.last",
        "y.state.a.1-2-3.0",
        "x.state",
    ],
)
def test_what_is_no_chunk_of_ours_is_told_apart(subject: str) -> None:
    assert parse_chunk_subject(subject, "x.state") is None
