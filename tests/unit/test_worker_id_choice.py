"""Which worker id a process takes, by what it finds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from parti.core.worker_ids import Applicant, Choice, choose_id
from parti.errors import NoFreeWorkerId
from parti.model.fleet import MemberRecord, MemberState

NAMES = ["worker-0", "worker-1", "worker-2"]


def held(token: str = "theirs", identity: str = "", state: MemberState = "active") -> MemberRecord:
    return MemberRecord(
        token=token, incarnation=1, identity=identity, state=state, started_at=datetime.now(UTC), ttl_seconds=5
    )


def test_the_lowest_free_id_is_tried_first() -> None:
    assert choose_id(Applicant("me"), {"worker-0": held()}, NAMES) == Choice(["worker-1", "worker-2"])


def test_the_id_that_it_had_a_moment_ago_comes_first() -> None:
    choice = choose_id(Applicant("me", preferred="worker-2"), {}, NAMES)
    assert choice.candidates == ["worker-2", "worker-0", "worker-1"]
    taken = choose_id(Applicant("me", preferred="worker-2"), {"worker-2": held()}, NAMES)
    assert taken.candidates == ["worker-0", "worker-1"]


def test_a_process_that_follows_in_the_same_slot_takes_over_at_once() -> None:
    ids = {"worker-0": held(), "worker-1": held(token="me")}
    assert choose_id(Applicant("me"), ids, NAMES) == Choice(["worker-1"])


def test_an_id_that_waits_for_its_identity_is_taken_by_it_and_by_nobody_else() -> None:
    ids = {"worker-0": held(token="", identity="pod-a", state="away")}
    assert choose_id(Applicant("me", identity="pod-a"), ids, NAMES) == Choice(["worker-0"])
    assert "worker-0" not in choose_id(Applicant("me", identity="pod-b"), ids, NAMES).candidates
    assert "worker-0" not in choose_id(Applicant("me"), ids, NAMES).candidates


def test_an_id_without_identity_is_nobodys_to_come_back_to() -> None:
    ids = {"worker-0": held(token="", identity="", state="away")}
    assert "worker-0" not in choose_id(Applicant("me"), ids, NAMES).candidates


def test_a_live_lease_of_the_same_identity_is_waited_for() -> None:
    ids = {"worker-1": held(identity="pod-a")}
    assert choose_id(Applicant("me", identity="pod-a"), ids, NAMES) == Choice(["worker-0", "worker-2"], "worker-1")


def test_who_insists_on_an_id_waits_for_it_and_gets_no_other() -> None:
    assert choose_id(Applicant("me", fixed="x"), {}, NAMES) == Choice(["x"])
    assert choose_id(Applicant("me", fixed="x"), {"x": held()}, NAMES) == Choice([], "x")
    away = {"x": held(token="", identity="pod-a", state="away")}
    assert choose_id(Applicant("me", fixed="x"), away, NAMES) == Choice(["x"])


def test_an_exhausted_range_says_so() -> None:
    with pytest.raises(NoFreeWorkerId, match=r"all 3 worker ids \(worker-0 to worker-2\).*max_workers"):
        choose_id(Applicant("me"), dict.fromkeys(NAMES, held()), NAMES)
