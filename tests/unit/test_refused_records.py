"""What readers do about records that they cannot read: nobody takes them for "there is nothing"."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import structlog

from parti.coordination import membership as membership_module
from parti.coordination.assignments import Assignments
from parti.coordination.claims import ClaimStore
from parti.coordination.election import Office
from parti.coordination.membership import Membership
from parti.coordination.records import Records
from parti.coordination.repairs import repair_of, unreadable_among
from parti.coordination.standing_orders import StandingOrders
from parti.core.lease import LeaseTerms
from parti.core.retention import INTEREST, LIMITS
from parti.errors import DecodeError
from parti.jetstream.kv import Bucket, Entry
from parti.model.fleet import (
    Assignment,
    Claim,
    Grant,
    HealthRecord,
    MemberRecord,
    Orders,
    encode,
)
from parti.telemetry.metrics import Metrics
from parti.telemetry.refusals import Refusals

AT = datetime(2026, 11, 18, 2, 30, tzinfo=UTC)
SPOILT = b'{"stream":"S","seq":4}'
CLAIM = Claim(owner="a", incarnation=7, fence_token=8, claimed_at=AT, ttl_seconds=5.0, position=40, term=9)
TOLD = Assignment(version=3, term=9, incarnation=7, stream_created="t0", partitions={"p1": Grant(8, 40, 50, 44, 1)})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("w")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(membership_module, "clock", clock)
    return clock


@pytest.fixture
def refusals(metrics: Metrics, clock: Clock) -> Refusals:
    return Refusals(metrics.records_refused, clock)


class Told(Bucket):
    """A bucket that answers with what a test has put there."""

    def __init__(self, **entries: Entry) -> None:
        self.entries = entries

    async def get(self, key: str) -> Entry | None:
        return self.entries.get(key.partition(".")[2])


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_value_counts_once_and_each_key_is_told_once_in_a_while(
    metrics: Metrics, refusals: Refusals, clock: Clock
) -> None:
    with structlog.testing.capture_logs() as lines:
        for revision in (1, 1, 1, 2, 3, 3):
            refusals.note("claims.p1", revision, DecodeError("no"), "it is written again")
        refusals.note("strange.key", 1, DecodeError("no"))
        assert [line["key"] for line in lines] == ["claims.p1", "strange.key"]
        clock.now_s += 61
        refusals.note("claims.p1", 3, DecodeError("no"))
        assert len(lines) == 2, "it is still the same value"
        refusals.note("claims.p1", 4, DecodeError("no"))
    assert lines[0]["event"] == "a record is unreadable; it is written again"
    assert [line["key"] for line in lines[2:]] == ["claims.p1"]
    assert metrics.records_refused.child("claims").value == 4
    assert metrics.records_refused.child("other").value == 1
    assert "strange" not in metrics.records_refused.values


def test_views_name_the_key_and_the_repair_until_it_is_readable_again() -> None:
    records = Records.of({"claims.p1": Entry(encode(CLAIM), 1)})
    records.take("claims.p1", Entry(SPOILT, 2))
    records.take("claims.p1", Entry(SPOILT, 2))
    assert records.claims == {}
    assert list(records.unreadable) == ["claims.p1"]
    assert records.trouble.startswith("unreadable record claims.p1: a running fleet writes it again")
    records.take("claims.p1", Entry(encode(CLAIM), 3))
    assert (records.claims, records.trouble) == ({"p1": CLAIM}, "")


def test_every_kind_of_key_has_a_repair() -> None:
    entries = {
        key: Entry(SPOILT, 1)
        for key in ("orders", "fleet", "mirror", "migrator", "migration", "migration.p1", "progress.w", "state.p1")
    }
    assert unreadable_among({**entries, "partitions": Entry(b"[1]", 1)}).keys() == entries.keys()
    assert all(f"parti doctor --repair {key}" in repair_of(key) for key in entries)


# ── members ───────────────────────────────────────────────────────────────────────────────────────────────────────


def member(**fields: Any) -> Entry:
    given = {"token": "t", "incarnation": 7, "started_at": AT, "ttl_seconds": 5.0, **fields}
    return Entry(encode(MemberRecord(**given)), 1)


async def test_a_member_whose_record_is_unreadable_counts_until_its_lease_is_over(
    refusals: Refusals, clock: Clock
) -> None:
    membership = Membership(Told(a=Entry(SPOILT, 2)), refusals=refusals)
    membership.entry("ids.a", member())
    clock.now_s += 1.0
    assert not membership.entry("ids.a", Entry(SPOILT, 2))
    assert not await membership.verify()
    assert "a" in membership.members, "it cannot have been replaced, and may still be working"
    clock.now_s += 5.5
    assert await membership.verify()
    assert membership.members == {}
    assert not membership.in_doubt("a", ttl_s=5.0), "its lease is over, whatever the record says"


async def test_a_worker_that_nobody_could_ever_read_is_no_member_and_not_yet_gone(
    refusals: Refusals, clock: Clock
) -> None:
    membership = Membership(Told(), refusals=refusals)
    membership.entry("ids.a", Entry(SPOILT, 2))
    assert membership.members == {}
    assert membership.in_doubt("a", ttl_s=5.0)
    clock.now_s += 6.5
    assert not membership.in_doubt("a", ttl_s=5.0)


def test_a_worker_that_can_be_read_again_is_not_in_doubt(refusals: Refusals) -> None:
    membership = Membership(Told(), refusals=refusals)
    membership.entry("ids.a", Entry(SPOILT, 1))
    membership.entry("ids.a", Entry(member().value, 2))
    assert "a" in membership.members
    assert not membership.in_doubt("a", ttl_s=5.0)


# ── claims ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def claims(refusals: Refusals) -> ClaimStore:
    bucket = Told()
    office = Office(bucket, LeaseTerms(5.0, 0.75), "rebalancer", "w", "t")
    return ClaimStore(bucket, office, ttl_s=5.0, refusals=refusals)


@pytest.mark.parametrize("value", [SPOILT, b""])
def test_a_claim_that_was_readable_stands(claims: ClaimStore, value: bytes) -> None:
    claims.load({"claims.p1": Entry(encode(CLAIM), 1)})
    claims.load({"claims.p1": Entry(value, 2)})
    assert claims.claims == claims.recovered == {"p1": CLAIM}
    assert claims.revision("p1") == 2, "it is written over what is there, and over nothing else"


def test_a_claim_that_was_never_readable_is_what_its_owner_was_told(claims: ClaimStore) -> None:
    older = Assignment(version=1, term=1, incarnation=1, partitions={"p1": Grant(2, 3)})
    claims.load({"claims.p1": Entry(SPOILT, 2)}, {"gone": older, "a": TOLD, "late": older})
    found = claims.recovered["p1"]
    assert (found.owner, found.incarnation, found.fence_token, found.position) == ("a", 7, 8, 40)
    assert (found.stream_created, found.careful_to, found.suspect, found.deaths) == ("t0", 50, 44, 1)
    assert claims.unknown == set()
    assert claims.next_fence() > 8


def test_a_claim_that_nobody_was_told_of_is_in_doubt(claims: ClaimStore) -> None:
    claims.load({"claims.p1": Entry(SPOILT, 2), "claims.p2": Entry(encode(CLAIM), 3)}, {})
    assert claims.claims.keys() == {"p2"}
    assert claims.unknown == {"p1"}


@pytest.mark.parametrize("above", [2**41, 2**53 - 2])
def test_a_fence_token_that_no_fleet_has_given_out_is_refused(claims: ClaimStore, above: int) -> None:
    """After it there would be no larger one that can be read."""
    claims.load({"claims.p1": Entry(encode(CLAIM), 1)})
    claims.load({"claims.p1": Entry(encode(msgspec.structs.replace(CLAIM, fence_token=above)), 2)})
    assert claims.recovered == {"p1": CLAIM}
    told = msgspec.structs.replace(TOLD, partitions={"p2": Grant(above, 0)})
    claims.load({"claims.p2": Entry(SPOILT, 3)}, {"a": told})
    assert "p2" not in claims.recovered
    assert claims.next_fence() < 2**40


def test_a_claim_that_no_partition_can_have_is_left_alone(refusals: Refusals) -> None:
    office = Office(Told(), LeaseTerms(5.0, 0.75), "rebalancer", "w", "t")
    claims = ClaimStore(Told(), office, ttl_s=5.0, refusals=refusals, fits=lambda partition: "." not in partition)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            claims.load({"claims.p1": Entry(encode(CLAIM), 1), "claims.p1.extra": Entry(encode(CLAIM), 2)})
    assert claims.claims == {"p1": CLAIM}
    assert claims.recovered == {}
    assert [line["key"] for line in lines] == ["claims.p1.extra"]


# ── assignments ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unreadable_assignment_is_written_again_under_a_version_that_was_never_told(refusals: Refusals) -> None:
    assignments = Assignments(overlap=True, refusals=refusals)
    assignments.load({"assignment.a": Entry(encode(TOLD), 1)})
    assignments.load({"assignment.a": Entry(SPOILT, 2)})
    assert assignments.next_version("a", None) == 4

    unaware = Assignments(overlap=True, refusals=refusals)
    unaware.load({"assignment.a": Entry(SPOILT, 2)})
    said = HealthRecord(incarnation=7, applied=3, ready=3, at=AT)
    assert unaware.next_version("a", said) > 100, "the worker may have been told more than it has reported"
    assert unaware.told == {}


def test_a_version_that_no_fleet_has_reached_is_not_counted_on_from(refusals: Refusals) -> None:
    assignments = Assignments(overlap=True, refusals=refusals)
    assignments.load({"assignment.a": Entry(encode(msgspec.structs.replace(TOLD, version=2**53 - 1)), 1)})
    said = HealthRecord(incarnation=7, applied=2**53 - 1, ready=3, at=AT)
    assert assignments.next_version("a", said) < 2**40
    assert assignments.told == {}


# ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("last", [Orders(paused=("p1",), drained=("a",)), Orders()])
def test_unreadable_orders_leave_the_last_ones_standing(refusals: Refusals, last: Orders) -> None:
    orders = StandingOrders(LIMITS, refusals)
    orders.take(Entry(encode(last), 1))
    orders.take(Entry(SPOILT, 2))
    assert orders.now(["p1", "p2"], {}) == last
    orders.take(Entry.of(b"", 3, {}))
    assert orders.now(["p1", "p2"], {}) == last, "an empty body is no deletion"
    orders.take(Entry.of(b"", 4, {"KV-Operation": "DEL"}))
    assert orders.now(["p1", "p2"], {}) == Orders()


def test_whoever_has_never_seen_the_orders_moves_nothing_and_lets_rest_what_has_no_owner(refusals: Refusals) -> None:
    orders = StandingOrders(LIMITS, refusals)
    orders.take(Entry(SPOILT, 2))
    free = Claim(claimed_at=AT, ttl_seconds=5.0, state="free", term=1)
    assert orders.now(["p1", "p2", "p3"], {"p1": CLAIM, "p2": free}) == Orders(hold_moves=True, withheld=("p2", "p3"))
    assert [orders.rests(p, c) for p, c in (("p1", CLAIM), ("p2", free), ("p3", None))] == [False, True, True]


def test_no_orders_at_all_are_no_orders(refusals: Refusals) -> None:
    orders = StandingOrders(LIMITS, refusals)
    orders.take(Entry(b"", 0))
    orders.take(Entry(SPOILT, 2))
    assert orders.now(["p1"], {}) == Orders()


def test_an_interest_stream_is_not_paused(refusals: Refusals) -> None:
    orders = StandingOrders(INTEREST, refusals)
    orders.take(Entry(encode(Orders(paused=("p1",), drained=("a",))), 1))
    assert orders.now(["p1"], {}) == Orders(drained=("a",))
