"""Chunks of messages as Arrow batches: numbers, times, headers and keys."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.errors import SubjectMismatch
from parti.jetstream.ranges import Chunk, sequence_of
from parti.model.headers import parse_all_headers, parse_headers, parse_reply
from parti.model.partition import Template
from parti.spark.rows import BatchMaker, Layout

NS = 1_794_853_160_537_583_999
AT = datetime(2026, 11, 16, 18, 19, 20, 537_583, tzinfo=UTC)
FORMS = {
    9: "$JS.ACK.{stream}.c1.1.{seq}.7.{ns}.0",
    11: "$JS.ACK.hub.ACCHASH.{stream}.c1.1.{seq}.7.{ns}.0",
    12: "$JS.ACK._.ACCHASH.{stream}.c1.1.{seq}.7.{ns}.0.rAnDom",
}


def chunk_of(subjects: list[bytes], headers: list[bytes | None] | None = None, form: int = 9) -> Chunk:
    count = len(subjects)
    replies = [FORMS[form].format(stream="S", seq=i + 1, ns=NS + i * 1000).encode() for i in range(count)]
    return Chunk(subjects, headers or [None] * count, [b"%d" % i for i in range(count)], replies)


def rows_of(chunk: Chunk, **layout: Any) -> list[dict[str, Any]]:
    batch = BatchMaker(Layout("S", **layout)).make(chunk)
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", FORMS)
def test_acknowledgement_subjects_of_every_form(form: int) -> None:
    chunk = chunk_of([b"a.b", b"a.c"], form=form)
    assert rows_of(chunk) == [
        {"stream": "S", "seq": 1, "subject": "a.b", "timestamp": AT, "payload": b"0"},
        {"stream": "S", "seq": 2, "subject": "a.c", "timestamp": AT + timedelta(microseconds=1), "payload": b"1"},
    ]
    assert [sequence_of(reply) for reply in chunk.replies] == [1, 2]
    assert [parse_reply(reply).stream_seq for reply in chunk.replies] == [1, 2]
    assert parse_reply(chunk.replies[0]).timestamp_ns == NS


@settings(deadline=None, max_examples=examples_of(50))
@given(
    st.sampled_from(sorted(FORMS)),
    st.text(st.characters(blacklist_characters=". *>/\\", blacklist_categories=("Z", "C")), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 2**63 - 1), st.integers(10**18, 9 * 10**18)), min_size=1, max_size=20),
)
def test_numbers_survive_any_name_of_a_stream(form: int, stream: str, numbers: list[tuple[int, int]]) -> None:
    replies = [FORMS[form].format(stream=stream, seq=seq, ns=ns).encode() for seq, ns in numbers]
    count = len(numbers)
    batch = BatchMaker(Layout(stream)).make(Chunk([b"a"] * count, [None] * count, [b""] * count, replies))
    assert batch.column("seq").to_pylist() == [seq for seq, _ in numbers]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [ns // 1000 for _, ns in numbers]
    assert [sequence_of(reply) for reply in replies] == [seq for seq, _ in numbers]


def test_chunks_of_direct_gets_carry_their_numbers() -> None:
    chunk = Chunk([b"a"], [None], [b"x"], seqs=[5], stamps_us=[NS // 1000])
    assert rows_of(chunk) == [{"stream": "S", "seq": 5, "subject": "a", "timestamp": AT, "payload": b"x"}]


def test_large_chunks_are_one_batch() -> None:
    """More text than Arrow's reader takes at once."""
    count = 60_000
    batch = BatchMaker(Layout("S")).make(chunk_of([b"a"] * count))
    assert batch.column("seq").to_pylist() == list(range(1, count + 1))


def test_an_empty_chunk_has_the_same_columns() -> None:
    for layout in (Layout("S"), Layout("S", "raw", True, "a.{k}"), Layout("S", "parsed", False, None)):
        empty = BatchMaker(layout).make(Chunk())
        assert empty.num_rows == 0
        assert empty.schema == BatchMaker(layout).make(chunk_of([b"a.b"])).schema
        assert [part.split()[0].strip("`") for part in _columns(layout.ddl)] == empty.schema.names


def _columns(ddl: str) -> list[str]:
    return ddl.replace("map<string, array<string>>", "map").split(", ")


# ── subjects and payloads ─────────────────────────────────────────────────────────────────────────────────────────


def test_subjects_that_are_not_utf8_show_their_bytes_as_everywhere_else() -> None:
    rows = rows_of(chunk_of(["a.ü".encode(), b"a.\xff\xfe", b"a.b"]), template="a.{k}")
    assert [row["subject"] for row in rows] == ["a.ü", "a.\\xff\\xfe", "a.b"]
    assert [row["k"] for row in rows] == ["ü", "\\xff\\xfe", "b"]


def test_payloads_are_any_bytes_and_can_be_left_out() -> None:
    chunk = chunk_of([b"a", b"a"])
    chunk.payloads = [b"", bytes(range(256))]
    assert [row["payload"] for row in rows_of(chunk)] == [b"", bytes(range(256))]
    assert "payload" not in rows_of(chunk, payload=False)[0]


# ── headers ───────────────────────────────────────────────────────────────────────────────────────────────────────

BLOCKS: list[bytes | None] = [
    None,
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0\r\nA: 1\r\nB: 2\r\nA: 3\r\na: 4\r\n\r\n",
    b"NATS/1.0\r\nno colon\r\n: no name\r\n  : blank\r\nEmpty:\r\nTight:x\r\nUrl: http://a:1\r\n\r\n",
    b"NATS/1.0\r\nBin: \xff\xc3\r\n\xff: x\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"",
]


def test_headers_as_they_are() -> None:
    rows = rows_of(chunk_of([b"a"] * len(BLOCKS), BLOCKS), headers="raw")
    assert [row["headers"] for row in rows] == BLOCKS


def test_headers_parsed() -> None:
    rows = rows_of(chunk_of([b"a"] * len(BLOCKS), BLOCKS), headers="parsed")
    assert [dict(row["headers"]) for row in rows] == [
        {},
        {},
        {"A": ["1", "3"], "B": ["2"], "a": ["4"]},
        {"Empty": [""], "Tight": ["x"], "Url": ["http://a:1"]},
        {"Bin": ["\ufffd\ufffd"], "\ufffd": ["x"]},
        {},
        {},
    ]


@settings(deadline=None, max_examples=examples_of(50))
@given(st.binary(max_size=200))
def test_no_block_is_too_broken_to_be_read(junk: bytes) -> None:
    every, first = parse_all_headers(junk), parse_headers(junk)
    assert first == {name: values[0] for name, values in every.items()}
    assert all(name for name in every)
    for form in ("raw", "parsed"):
        assert len(rows_of(chunk_of([b"a"], [junk]), headers=form)) == 1


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_keys_of_a_template() -> None:
    subjects = [
        b"dc.e1.c1.done",
        b"dc.e2.c9.done",
        b"dc.e1.c1.done",
        b"dc.e1.done",
        b"dc.e1.c1.done.x",
        b"xx.e1.c1.done",
    ]
    rows = rows_of(chunk_of(subjects), template="dc.{tool}.{chamber}.done")
    assert [(row["tool"], row["chamber"]) for row in rows] == [
        ("e1", "c1"),
        ("e2", "c9"),
        ("e1", "c1"),
        (None, None),
        (None, None),
        (None, None),
    ]


@settings(deadline=None, max_examples=examples_of(50))
@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "{", "x y", "*"]), min_size=1, max_size=4), min_size=1, max_size=9)
)
def test_keys_are_those_of_the_template_or_null(tokens: list[list[str]]) -> None:
    subjects = [".".join(one) for one in tokens]
    template = Template("a.{k}.{l}")
    for subject, row in zip(
        subjects, rows_of(chunk_of([s.encode() for s in subjects]), template=template.text), strict=True
    ):
        try:
            expected: tuple[str | None, ...] = tuple(template.parse(subject).keys.values())
        except SubjectMismatch:
            expected = (None, None)
        assert (row["k"], row["l"]) == expected


def test_schema_text() -> None:
    assert Layout("S").ddl == "stream string, seq bigint, subject string, timestamp timestamp, payload binary"
    assert Layout("S", "raw", False, "a.{select}").ddl == (
        "stream string, seq bigint, subject string, timestamp timestamp, headers binary, `select` string"
    )
    assert "headers map<string, array<string>>" in Layout("S", "parsed").ddl
