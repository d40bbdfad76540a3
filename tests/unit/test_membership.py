"""Membership as a watch tells it: joins, leaves, losses, returns, suspicions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from parti.coordination.membership import MemberEvent, Membership
from parti.jetstream.kv import Bucket, Entry
from parti.model.fleet import MemberRecord, encode


class Seen:
    """A membership and the events that it told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.membership = Membership(Bucket.__new__(Bucket), self._note)
        self._revision = 0

    def _note(self, event: MemberEvent) -> None:
        self.events.append((event.kind, event.worker))

    def tell(self, worker: str, **fields: Any) -> bool:
        self._revision += 1
        value = encode(
            MemberRecord(
                **{"token": "t", "incarnation": 1, "started_at": datetime.now(UTC), "ttl_seconds": 5.0, **fields}
            )
        )
        return self.membership.entry(f"ids.{worker}", Entry(value, self._revision))

    def gone(self, worker: str) -> bool:
        self._revision += 1
        return self.membership.entry(f"ids.{worker}", Entry(b"", self._revision))


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_a_heartbeat_is_no_news(seen: Seen) -> None:
    assert seen.tell("worker-0")
    assert not seen.tell("worker-0")
    assert seen.events == [("joined", "worker-0")]


def test_who_says_so_has_left_and_who_does_not_is_lost(seen: Seen) -> None:
    seen.tell("worker-0")
    seen.tell("worker-1")
    assert seen.tell("worker-0", state="left", token="")
    assert seen.gone("worker-1")
    assert not seen.gone("worker-0"), "the record of a worker that left goes away unnoticed"
    assert seen.events[2:] == [("left", "worker-0"), ("lost", "worker-1")]
    assert seen.membership.left == {"worker-0"}
    assert not seen.membership.members


def test_a_new_process_under_the_same_id_has_returned(seen: Seen) -> None:
    seen.tell("worker-0", incarnation=1)
    assert seen.tell("worker-0", incarnation=2)
    assert seen.events[-1] == ("returned", "worker-0")
    assert seen.membership.view()["worker-0"].incarnation == 2


def test_who_is_expected_back_stays_a_member(seen: Seen) -> None:
    seen.tell("worker-0", identity="a")
    assert seen.tell("worker-0", identity="a", state="away", token="")
    assert seen.events[-1] == ("away", "worker-0")
    assert seen.membership.view()["worker-0"].state == "away"
    assert seen.gone("worker-0")
    assert seen.events[-1] == ("lost", "worker-0")


def test_a_broken_connection_makes_suspected_and_a_heartbeat_clears_it(seen: Seen) -> None:
    seen.tell("worker-0", client="S1/7")
    assert seen.membership.suspect("S1/8") is None
    assert seen.membership.suspect("S1/7") == "worker-0"
    assert seen.membership.suspect("S1/7") is None, "told once"
    assert "worker-0" in seen.membership.members, "it may still be working"
    seen.tell("worker-0", client="S1/7")
    assert seen.membership.suspected, "that heartbeat was sent before the connection broke"
    seen.tell("worker-0", client="S1/9")
    assert not seen.membership.suspected
    assert seen.events == [("joined", "worker-0"), ("suspected", "worker-0")]


def test_old_news_is_ignored(seen: Seen) -> None:
    seen.tell("worker-0", incarnation=2)
    late = encode(MemberRecord(token="t", incarnation=1, started_at=datetime.now(UTC), ttl_seconds=5.0))
    assert not seen.membership.entry("ids.worker-0", Entry(late, 0 + 1))
    assert seen.membership.members["worker-0"].incarnation == 2


def test_an_unreadable_record_changes_nothing(seen: Seen) -> None:
    seen.tell("worker-0")
    assert not seen.membership.entry("ids.worker-0", Entry(b"{", 99))
    assert "worker-0" in seen.membership.members
