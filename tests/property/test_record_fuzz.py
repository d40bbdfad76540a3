"""Every kind of record, read from bytes that nobody of ours has written: it is a record or a `DecodeError`."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.dead_letter import Letter
from parti.core.progress import Progress
from parti.core.replay import Answer, decode_answer, decode_ask
from parti.errors import ConfigError, DecodeError
from parti.model.fleet import (
    Assignment,
    Claim,
    FleetRecord,
    Grant,
    HealthRecord,
    LeaderRecord,
    LoadRecord,
    MemberRecord,
    MirrorRecord,
    Orders,
    StandbyRecord,
)
from parti.model.history import HistoryRecord
from parti.model.job import JobRecord, JobState, parse_key
from parti.model.letter_mark import LetterMark
from parti.model.migration import MigrationRecord, MigratorLease, OldConsumer, PhaseNote
from parti.model.records import decode, encode
from parti.model.state import StatePointer, parse_chunk_subject

AT = datetime(2026, 11, 18, 2, 30, tzinfo=UTC)
RECORDS: list[msgspec.Struct] = [
    FleetRecord(prefix="p", stream="S", template="t.{key}", stream_created="t0", first_seq=7),
    MemberRecord(token="t", incarnation=7, capacity=3, weight=0.5, started_at=AT, ttl_seconds=5.0),
    StandbyRecord(worker="w", rank=1, since=AT, ttl_seconds=5.0),
    HealthRecord(incarnation=7, busy=("p1",), rate=2.5, failing={"p": "no"}, problems=("ill",), at=AT),
    LoadRecord(incarnation=7, loads={"p1": 0.5}, at=AT),
    LeaderRecord(holder="w", token="t", term=9, since=AT, ttl_seconds=5.0),
    Claim(owner="w", incarnation=7, fence_token=8, claimed_at=AT, ttl_seconds=5.0, position=4, term=9),
    Orders(placed={"p1": "w"}, drained=("v",), paused=("p2",), hold_moves=True),
    MirrorRecord(stream_created="t0", trim=4, room=5, remaking=True),
    Assignment(version=3, term=9, incarnation=7, partitions={"p1": Grant(8, 4)}, incoming={"p2": 1}),
    Progress(stream="S", stream_created="t0", floor=4, covered=("t.a",), ahead={"a": 9}, behind={"b": 2}),
    HistoryRecord(partition="p1", step="given", source="v", target="w", took_s=0.5, at=AT),
    MigrationRecord(
        stream="S",
        stream_created="t0",
        retention="limits",
        template="t.{key}",
        prefix="p",
        consumers="old-*",
        workers=2,
        shares={"w": ("p1",)},
        notes=(PhaseNote(action="shadow", at=AT, by="me", phase="shadow", text="done"),),
    ),
    MigratorLease(token="t", by="me"),
    OldConsumer(partition="p1", subject="t.p1", config={"durable_name": "old"}, position=3, at=AT),
    StatePointer(partition="p1", fence=8, position=4, size=10, chunks=1, at=AT),
    LetterMark(state="sent", letters_created="t0", sent_as=4, at=AT),
    JobRecord(
        stream="S", seq=4, subject="t.a", published_ns=1_790_000_000_000_000_000, state=JobState.RUNNING, percent=4.5
    ),
]
every_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)

DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no UTF-8": b'{"kind":"\xff\xfe"}',
    "a lone byte": b"\xff",
    "nested lists": b"[" * 1000 + b"]" * 1000,
    "deeply nested lists": DEEP,
    "a publish ack": b'{"stream":"S","seq":4}',
    "an object": b"{}",
    "null": b"null",
    "NaN": b"NaN",
    "half": b'{"kind":',
}


def refused_or(kind: type[msgspec.Struct], data: bytes) -> Any:
    """The record, or None when it was refused in the one way in which it may be."""
    found = None
    with contextlib.suppress(DecodeError):
        found = decode(data, kind)
    if found is not None:
        assert isinstance(found, kind)
        look_at(found)
    return found


def look_at(record: Any) -> None:
    """Do with a record what its readers do: compare its times, turn them into UTC, write it again."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, datetime):
            assert datetime.now(UTC) - value < timedelta(days=100_000)
            value.astimezone(UTC).isoformat()
    encode(record)


@every_record
def test_a_record_names_its_kind_and_is_read_again(record: msgspec.Struct) -> None:
    assert json.loads(encode(record))["kind"] == record.__struct_config__.tag
    assert decode(encode(record), type(record)) == record


def test_a_refusal_is_one_short_line_whatever_was_written() -> None:
    with pytest.raises(DecodeError) as refused:
        decode(b'{"kind":"' + b"\\n\\u001b[31m" * 500 + b'"}', Orders)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def test_no_two_kinds_have_the_same_name() -> None:
    assert len({record.__struct_config__.tag for record in RECORDS}) == len(RECORDS)


@every_record
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_refused(record: msgspec.Struct, data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data, type(record))


@every_record
def test_records_of_other_kinds_are_refused(record: msgspec.Struct) -> None:
    for other in RECORDS:
        if type(other) is not type(record):
            with pytest.raises(DecodeError):
                decode(encode(other), type(record))


@every_record
def test_a_record_without_its_kind_is_refused(record: msgspec.Struct) -> None:
    fields = json.loads(encode(record))
    del fields["kind"]
    with pytest.raises(DecodeError):
        decode(json.dumps(fields).encode(), type(record))


@every_record
def test_fields_of_a_newer_version_are_ignored(record: msgspec.Struct) -> None:
    fields = {**json.loads(encode(record)), "colour": ["red"]}
    assert decode(json.dumps(fields).encode(), type(record)) == record


BAD_VALUES = [
    *(b"9" * 5000, b"-" + b"9" * 400, b"1e999", b"-1e400", b"NaN", b"Infinity", b"18446744073709551616"),
    *(b'"\xff"', b'"\\ud800"', b"null", b"[]", b"{}", b"true", b'""', DEEP),
    *(b'"2026-11-18T02:30:00"', b'"9999-12-31T23:59:59-23:59"', b'"0001-01-01T00:00:00+23:59"'),
]


@every_record
def test_a_bad_value_in_any_field_is_refused_or_harmless(record: msgspec.Struct) -> None:
    """Each field of a record in turn, with each of the values."""
    fields = {name: msgspec.json.encode(value) for name, value in json.loads(encode(record)).items()}
    for name in [*fields, "unknown"]:
        for bad in BAD_VALUES:
            changed = {**fields, name: bad}
            data = b"{" + b",".join(msgspec.json.encode(n) + b":" + v for n, v in changed.items()) + b"}"
            refused_or(type(record), data)


def test_numbers_without_end_and_times_without_a_zone_are_refused() -> None:
    claim = encode(RECORDS[6])
    for old, bad in (
        (b'"fenceToken":8', b'"fenceToken":' + b"9" * 5000),
        (b'"fenceToken":8', b'"fenceToken":9007199254740992'),
        (b'"fenceToken":8', b'"fenceToken":-1'),
        (b'"ttlSeconds":5.0', b'"ttlSeconds":1e999'),
        (b"2026-11-18T02:30:00Z", b"2026-11-18T02:30:00"),
        (b"2026-11-18T02:30:00Z", b"9999-12-31T23:59:59-23:59"),
    ):
        assert old in claim
        with pytest.raises(DecodeError):
            decode(claim.replace(old, bad), Claim)


@pytest.mark.parametrize(
    ("kind", "field", "bad"),
    [
        (LoadRecord, "loads", {"p0": -0.9999}),
        (LoadRecord, "loads", {"p0": 1e300}),
        (MemberRecord, "weight", 0),
        (MemberRecord, "weight", -1.0),
        (MemberRecord, "weight", 1e-300),
        (MemberRecord, "capacity", -1),
    ],
)
def test_what_no_strategy_could_share_out_is_refused(kind: type[msgspec.Struct], field: str, bad: object) -> None:
    """Found by `make fuzz`: a negative load ended every turn of the rebalancer with a ConfigError."""
    record = next(r for r in RECORDS if type(r) is kind)
    with pytest.raises(DecodeError):
        decode(msgspec.json.encode({**msgspec.json.decode(encode(record)), field: bad}), kind)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
@settings(max_examples=examples_of(2000), deadline=None)
def test_whatever_lies_under_a_key_is_a_record_or_refused(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(RECORDS))
    refused_or(type(record), data.draw(hostile_bytes(record)))


def hostile_bytes(record: msgspec.Struct) -> st.SearchStrategy[bytes]:
    """Anything; the record with some of it replaced; its fields with other values; JSON of its own kind."""
    valid = encode(record)
    fields = json.loads(valid)
    spliced = st.builds(
        lambda start, length, piece: valid[:start] + piece + valid[start + length :],
        st.integers(0, len(valid)),
        st.integers(0, 12),
        st.binary(max_size=12),
    )
    replaced = st.builds(
        lambda changes: json.dumps({**fields, **changes}).encode(),
        st.dictionaries(st.sampled_from(sorted(fields)), json_values, max_size=4),
    )
    own = st.builds(lambda value: json.dumps({"kind": fields["kind"], "x": value}).encode(), json_values)
    return st.binary(max_size=64) | spliced | replaced | own


@pytest.mark.parametrize("data", [*HOSTILE.values(), b"9" * 5000, b'{"task":1}'])
def test_a_question_of_a_replay_is_read_or_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_ask(data)
    with contextlib.suppress(DecodeError):
        assert decode_answer(data) == Answer(), "an answer that says nothing allows nothing"


@given(st.binary(max_size=64))
@settings(max_examples=examples_of(400))
def test_any_question_of_a_replay_is_read_or_refused(data: bytes) -> None:
    for read in (decode_ask, decode_answer):
        try:
            read(data)
        except DecodeError:
            continue


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "", "x", "1e5", "٣" * 5000, "²"])
def test_a_dead_letter_with_an_impossible_number_has_none(text: str) -> None:
    letter = Letter(1, AT, {"Parti-Sequence": text, "Parti-Attempts": text})
    assert (letter.origin_seq, letter.attempts) == (0, 0)


@pytest.mark.parametrize("text", ["9" * 5000, "x", "", "²"])
def test_a_job_with_an_impossible_number_is_no_job(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_key(f"jobs.parti-jobs.{text}")


def test_a_chunk_with_an_impossible_number_is_not_ours() -> None:
    assert parse_chunk_subject(f"root.p.{'9' * 5000}-1-a.0", "root") is None
