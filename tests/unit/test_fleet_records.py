"""Records of the control plane: what lies in the bucket, and under which key."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import DecodeError
from parti.model.fleet import (
    Assignment,
    Claim,
    Grant,
    HealthRecord,
    LeaderRecord,
    MemberRecord,
    Orders,
    StandbyRecord,
    decode,
    encode,
    is_key,
    key_of,
    name_of,
)

AT = datetime(2026, 11, 16, 2, 30, 0, 123456, tzinfo=UTC)
CLAIM = Claim(
    owner="worker-5",
    incarnation=1_700_000_000_000_123,
    fence_token=1_700_000_000_000_456,
    claimed_at=AT,
    ttl_seconds=60,
    state="moving",
    position=4711,
    next="worker-6",
    awaits=12,
    term=1_700_000_000_000_001,
    reason="balance",
)
ASSIGNMENT = Assignment(
    version=3,
    term=9,
    incarnation=7,
    partitions={"dc.e7.2": Grant(11, 4711), "ü": Grant(12, 0, careful_to=90, suspect=80, deaths=2)},
    incoming={"dc.e7.3": 4000},
)
RECORDS: list[msgspec.Struct] = [
    CLAIM,
    Claim(claimed_at=AT, ttl_seconds=1.5, term=1),
    MemberRecord(
        token="t",
        incarnation=7,
        state="away",
        identity="pod-1",
        host="h",
        pid=12,
        version="0.1",
        capacity=0,
        weight=0.25,
        service="S",
        client="N/12",
        started_at=AT,
        ttl_seconds=5.0,
    ),
    HealthRecord(
        incarnation=7,
        applied=3,
        busy=("p1", "p*ü"),
        ready=4,
        state="stable",
        pulling=True,
        problems=("no stream",),
        at=AT,
    ),
    StandbyRecord(worker="both", rank=1, host="h", pid=12, version="0.1", since=AT, ttl_seconds=5.0),
    LeaderRecord(holder="worker-0", token="t", term=9, state="stable", reason="", since=AT, ttl_seconds=5.0),
    ASSIGNMENT,
    Assignment(version=1, term=9, incarnation=7),
    Orders(placed={"dc.e7.2": "worker-1"}, drained=("worker-2",), paused=("ü",), hold_moves=True),
    Orders(),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_read_as_it_was_written(record: msgspec.Struct) -> None:
    assert decode(encode(record), type(record)) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_names_in_the_bucket_are_camel_case(record: msgspec.Struct) -> None:
    fields: dict[str, Any] = json.loads(encode(record))
    assert all(re.fullmatch(r"[a-z]+([A-Z][a-z]+)*", name) for name in fields)


def test_a_claim_has_the_promised_names() -> None:
    fields = json.loads(encode(CLAIM))
    assert fields["kind"] == "claim"
    assert {
        name: fields[name] for name in ("owner", "fenceToken", "claimedAt", "ttlSeconds", "state", "position")
    } == {
        "owner": "worker-5",
        "fenceToken": 1_700_000_000_000_456,
        "claimedAt": "2026-11-16T02:30:00.123456Z",
        "ttlSeconds": 60.0,
        "state": "moving",
        "position": 4711,
    }
    assert {"next", "awaits", "term", "reason", "incarnation"} <= fields.keys()


def test_large_epochs_survive() -> None:
    """They are microseconds since 1970, which fit into what JSON readers keep of a number (2^53)."""
    assert json.loads(encode(CLAIM))["incarnation"] == CLAIM.incarnation < 2**53


def test_a_grant_is_numbers_without_names() -> None:
    assert json.loads(encode(ASSIGNMENT))["partitions"]["dc.e7.2"] == [11, 4711, 0, 0, 0, 0, 0]


def test_a_grant_of_an_older_version_is_read() -> None:
    assert decode(b"[11,4711]", Grant) == Grant(11, 4711)


@pytest.mark.parametrize("state", ["owned", "preparing", "moving", "free"])
def test_a_claim_is_in_one_of_four_states(state: str) -> None:
    data = json.dumps({**json.loads(encode(CLAIM)), "state": state}).encode()
    assert decode(data, Claim).state == state


def test_orders_say_nothing_by_default() -> None:
    """Whoever finds no record of orders acts as if it were empty."""
    assert encode(Orders()) == b'{"kind":"orders"}'
    assert decode(b'{"kind":"orders"}', Orders) == Orders()


def test_a_field_of_a_newer_version_is_ignored() -> None:
    data = json.dumps({**json.loads(encode(CLAIM)), "colour": "red"}).encode()
    assert decode(data, Claim) == CLAIM


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"kind":"claim","owner":"w","claimedAt":"yesterday","ttlSeconds":5,"term":1}',
        b'{"kind":"claim","owner":5,"claimedAt":"2026-11-16T02:30:00Z","ttlSeconds":5,"term":1}',
        b'{"kind":"claim","owner":"w","claimedAt":"2026-11-16T02:30:00Z","ttlSeconds":5,"term":1,"state":"lost"}',
        b'{"owner":"w","claimedAt":"2026-11-16T02:30:00Z","ttlSeconds":5,"term":1}',
        b'{"kind":"orders","owner":"w","claimedAt":"2026-11-16T02:30:00Z","ttlSeconds":5,"term":1}',
        b'{"kind":"claim","owner":"w","claimedAt":"2026-11-16T02:30:00","ttlSeconds":5,"term":1}',
        b'{"kind":"claim","owner":"w","claimedAt":"9999-12-31T23:59:59-23:59","ttlSeconds":5,"term":1}',
        b'{"kind":"claim","owner":"w","fenceToken":1.5,"claimedAt":"2026-11-16T02:30:00Z","ttlSeconds":5,"term":1}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data, Claim)


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────

KEY = re.compile(r"[-_=./a-zA-Z0-9]+")
"""What the server's key-value clients allow in a key."""


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("worker-0", "ids.worker-0"),
        ("e7.2", "ids.e7.2"),
        ("a_b-c.9", "ids.a_b-c.9"),
        ("a*b", "ids.a=2Ab"),
        (">", "ids.=3E"),
        ("a=b", "ids.a=3Db"),
        ("=2A", "ids.=3D2A"),
        ("a b", "ids.a=20b"),
        ("a/b:c", "ids.a=2Fb=3Ac"),
        ("ü", "ids.=C3=BC"),
        ("ü€*", "ids.=C3=BC=E2=82=AC=2A"),
        ("$KV", "ids.=24KV"),
        ("a\nb", "ids.a=0Ab"),
    ],
)
def test_the_key_of_a_name_and_back(name: str, key: str) -> None:
    assert key_of("ids", name) == key
    assert name_of(key) == name


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_name_makes_a_key_and_comes_back(name: str) -> None:
    key = key_of("claims", name)
    assert name_of(key) == name
    assert is_key(key)
    assert KEY.fullmatch(key)
    assert key.startswith("claims.")


@given(st.text("a=*ü.3D", max_size=8), st.text("a=*ü.3D", max_size=8))
def test_different_names_have_different_keys(one: str, other: str) -> None:
    assert (key_of("claims", one) == key_of("claims", other)) == (one == other)


@pytest.mark.parametrize(
    "key", ["claims.p9/x", "claims.p=30", "assignment.worker=2D0", "ids.a=FF", "ids.\udcff", "ids.="]
)
def test_a_key_that_no_name_makes_is_told_from_the_others(key: str) -> None:
    assert not is_key(key)


@pytest.mark.parametrize("key", ["orders", "claims.p0.extra", "ids.worker-0", "ids.a=2Ab", "leader.rebalancer"])
def test_a_key_that_a_name_makes_is_one(key: str) -> None:
    assert is_key(key)
