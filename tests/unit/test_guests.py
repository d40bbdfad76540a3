"""Guests in the records: what older versions wrote is still read, and shares count to whoever lends."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from parti.core.guests import home_after, share_of
from parti.model.fleet import Claim, MemberRecord, decode, encode

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CLAIM = Claim(owner="worker-0", claimed_at=NOW, ttl_seconds=5.0, term=1)
GUESTS = {"replay-a"}


def claim(**changes: str) -> Claim:
    return msgspec.structs.replace(CLAIM, **changes)


def test_records_of_fleets_without_guests_are_as_they_were() -> None:
    member = MemberRecord(token="t", incarnation=1, started_at=NOW, ttl_seconds=5.0)
    assert b"guest" not in encode(member)
    assert b"home" not in encode(CLAIM)
    assert not decode(encode(member), MemberRecord).guest
    assert decode(encode(CLAIM), Claim).home == ""


def test_a_guest_says_that_it_is_one() -> None:
    member = MemberRecord(token="t", incarnation=1, started_at=NOW, ttl_seconds=5.0, guest=True)
    assert decode(encode(member), MemberRecord).guest


@pytest.mark.parametrize(
    ("found", "owner", "home"),
    [
        (None, "replay-a", ""),
        (CLAIM, "replay-a", "worker-0"),
        (CLAIM, "worker-1", ""),
        (claim(owner="replay-a", home="worker-0"), "replay-a", "worker-0"),
        (claim(owner="replay-a", home="worker-0"), "worker-0", ""),
    ],
)
def test_the_home_is_whoever_had_it_before_the_guest(found: Claim | None, owner: str, home: str) -> None:
    assert home_after(found, owner, GUESTS) == home


@pytest.mark.parametrize(
    ("found", "whose"),
    [
        (CLAIM, "worker-0"),
        (claim(next="worker-1"), "worker-1"),
        (claim(next="replay-a"), "worker-0"),
        (claim(owner="replay-a", home="worker-0"), "worker-0"),
        (claim(owner="replay-a", home="worker-0", next="worker-1"), "worker-1"),
        (claim(owner="replay-a"), ""),
    ],
)
def test_a_partition_counts_to_whoever_lends_it(found: Claim, whose: str) -> None:
    assert share_of(found, GUESTS) == whose
