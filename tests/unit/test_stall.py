"""When a worker counts as stalled, and what follows, step by step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
import structlog
from tests.pace import unhindered_s

from parti.core.confirmed_floor import SETTLE_S, ConfirmedFloor
from parti.core.fleet_report import report_fleet
from parti.core.stall import Escalation, Look, Stall, StallDetector, StallKind, Step
from parti.model.fleet import MemberRecord, StallRecord
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.watchdog import Watchdog, Watched

HANDLERS = (StallKind.HANDLERS, "p1")
PULLS = (StallKind.PULLS, "c")
STALL = Stall(StallKind.PULLS, "c", 0.0)

# ── what counts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_does_not_change_for_too_long_is_a_stall() -> None:
    detector = StallDetector(10.0)
    assert detector.see(0.0, {PULLS: 1}) is None
    assert detector.see(9.9, {PULLS: 1}) is None
    assert detector.see(10.0, {PULLS: 1}) == Stall(StallKind.PULLS, "c", 0.0)


def test_each_bit_of_progress_counts_anew() -> None:
    detector = StallDetector(10.0)
    for second in range(0, 100, 9):
        assert detector.see(second, {PULLS: second}) is None


def test_what_is_not_due_for_a_moment_counts_anew() -> None:
    """A worker without its lease, or without a connection, is not stalled: it may not go on."""
    detector = StallDetector(10.0)
    detector.see(0.0, {HANDLERS: 7})
    detector.see(8.0, {})
    assert detector.see(12.0, {HANDLERS: 7}) is None
    assert detector.see(22.0, {HANDLERS: 7}) == Stall(StallKind.HANDLERS, "p1", 12.0)


def test_the_progress_of_one_thing_does_not_hide_the_stall_of_another() -> None:
    detector = StallDetector(10.0)
    values: list[Look] = [{HANDLERS: 7, PULLS: second} for second in range(11)]
    assert [detector.see(float(at), look) for at, look in enumerate(values)][-1] == Stall(
        StallKind.HANDLERS, "p1", 0.0
    )


# ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stall_is_told_once_and_ends_with_leaving() -> None:
    escalation = Escalation(grace_s=5.0, hold_s=10.0)
    steps = [escalation.step(float(at), STALL) for at in range(8)]
    assert steps == [Step.TELL, *[Step.NOTHING] * 4, Step.LEAVE, Step.NOTHING, Step.NOTHING]


def test_a_restart_that_helps_ends_the_stall_after_a_while() -> None:
    escalation = Escalation(grace_s=5.0, hold_s=3.0)
    assert escalation.step(0.0, STALL) is Step.TELL
    assert [escalation.step(float(at), None) for at in range(1, 5)] == [*[Step.NOTHING] * 3, Step.RECOVERED]
    assert escalation.step(5.0, STALL) is Step.TELL


def test_a_stall_that_comes_back_at_once_is_the_same() -> None:
    escalation = Escalation(grace_s=5.0, hold_s=3.0)
    escalation.step(0.0, STALL)
    escalation.step(2.0, None)
    assert escalation.step(4.0, STALL) is Step.NOTHING
    assert escalation.step(5.0, STALL) is Step.LEAVE


# ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Patient:
    """Something that is watched, and what was done to it."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self.restarts: list[Stall] = []
        self.told: list[str] = []
        self.tells_for_s = 0.0
        self.recovered = threading.Event()
        self.left = threading.Event()
        self.metrics = Metrics("w0")
        self.health = Health()
        watched = Watched(
            look=look,
            story=lambda: {"lanes": {"ready": 1}},
            restart=self.restarts.append,
            leave=lambda stall, reason: self.left.set(),
            tell=self._tell,
            recovered=lambda stall, reason: self.recovered.set(),
        )
        self.watchdog = Watchdog(watched, self.metrics, self.health, stall_after_s=0.5, grace_s=0.5)

    def _tell(self, stall: Stall, reason: str) -> None:
        self.told.append(reason)
        time.sleep(self.tells_for_s)

    async def until(self, event: threading.Event) -> None:
        assert await asyncio.to_thread(event.wait, 20)
        self.watchdog.stop()


async def test_what_stands_still_is_told_restarted_and_left() -> None:
    patient = Patient(lambda: {PULLS: 1})
    patient.watchdog.start()
    await patient.until(patient.left)
    assert [stall.kind for stall in patient.restarts] == [StallKind.PULLS]
    assert patient.metrics.stalled.value == 1
    assert "neither answered nor refused" in patient.health.reasons["stall"]
    assert len(patient.told) == 1


async def test_what_moves_again_after_the_restart_is_well() -> None:
    sign: Hashable = 0

    def look() -> Look:
        return {PULLS: time.monotonic() if patient.restarts else sign}

    patient = Patient(look)
    patient.watchdog.start()
    await patient.until(patient.recovered)
    assert not patient.left.is_set()
    assert patient.health.healthy
    assert patient.metrics.stalled.value == 0


async def test_an_event_loop_that_is_blocked_is_a_stall_and_the_line_that_blocks_is_named() -> None:
    patient = Patient(dict)
    patient.watchdog.start()
    await asyncio.sleep(0)
    until_s = unhindered_s() + 20
    while not patient.told and unhindered_s() < until_s:
        time.sleep(0.01)  # noqa: ASYNC251 - this is the fault
    patient.watchdog.stop()
    assert "event loop has not turned" in patient.told[0]
    assert "test_stall.py" in patient.told[0]
    assert not patient.restarts


async def test_a_note_that_takes_long_is_not_taken_for_a_standstill_of_the_process() -> None:
    patient = Patient(lambda: {PULLS: 1})
    with structlog.testing.capture_logs() as lines:
        patient.tells_for_s = 2.0
        patient.watchdog.start()
        await patient.until(patient.left)
    assert patient.told
    assert not [line for line in lines if line["event"] == "the whole process stood still"]


async def test_a_look_that_fails_does_not_end_the_watch() -> None:
    looks = 0

    def look() -> Look:
        nonlocal looks
        looks += 1
        if looks < 4:
            raise RuntimeError("dictionary changed size during iteration")
        return {PULLS: 1}

    patient = Patient(look)
    patient.watchdog.start()
    await patient.until(patient.left)
    assert looks > 4


# ── what people see ─────────────────────────────────────────────────────────────────────────────────────────────────


def stall_note(ended: Literal["", "recovered", "left"]) -> StallRecord:
    at = datetime(2026, 11, 18, 16, 30, tzinfo=UTC)
    return StallRecord(stall="loop", reason="stalled: blocked", host="h", pid=7, at=at, ended=ended)


def member(started_at: datetime) -> MemberRecord:
    return MemberRecord(token="t", incarnation=1, started_at=started_at, ttl_seconds=10.0)


def test_a_stall_is_a_problem_of_the_fleet_until_it_has_recovered() -> None:
    """Also when its worker is gone: `parti status`, `parti top` and the console take it from here."""
    lasts, left, over = (
        report_fleet({}, {}, {}, None, stalls={"worker-2": stall_note(ended)}) for ended in ("", "left", "recovered")
    )
    assert "worker-2 (h:7) at 16:30:00 UTC: stalled: blocked" in lasts.problems
    assert "worker-2 (h:7) at 16:30:00 UTC: stalled: blocked; it left" in left.problems
    assert over.problems == ("there is no rebalancer",)
    assert over.recoveries == ("worker-2 stood still at 16:30:00 UTC and recovered: stalled: blocked",)


@pytest.mark.parametrize("ended", ["", "left"])
def test_a_stall_is_no_problem_any_more_once_another_process_has_the_id(ended: Literal["", "left"]) -> None:
    note = stall_note(ended)
    before, after = (
        report_fleet({"worker-2": member(note.at + timedelta(seconds=s))}, {}, {}, None, stalls={"worker-2": note})
        for s in (-60, 60)
    )
    assert any("stalled: blocked" in problem for problem in before.problems)
    assert not before.recoveries
    assert after.problems == ("there is no rebalancer",)
    assert after.recoveries == (
        "worker-2 stood still at 16:30:00 UTC and was followed by another process: stalled: blocked",
    )


# ── acknowledgements ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_session_that_ends_early_confirms_nothing() -> None:
    """Killed again and again within seconds, the worker goes back to where the first session began."""
    floor = ConfirmedFloor()
    assert floor.begin(10) == 10
    for session in range(1, 5):
        at_s = session * SETTLE_S
        floor.note(at_s, 10 + 100 * session)
        floor.note(at_s + SETTLE_S * 0.9, 90 + 100 * session)
        assert floor.begin(95 + 100 * session) == 10


def test_a_session_that_lasts_confirms_what_was_acknowledged_some_time_ago() -> None:
    floor = ConfirmedFloor()
    floor.begin(10)
    for second in range(20):
        floor.note(float(second), 100 + second)
    assert floor.begin(119) == 100 + 19 - SETTLE_S


def test_what_is_gained_below_the_floor_is_gone_back_for() -> None:
    floor = ConfirmedFloor()
    floor.begin(100)
    floor.note(0.0, 200)
    floor.note(SETTLE_S, 300)
    assert floor.begin(50) == 50
    floor.note(SETTLE_S + 1, 400)
    assert floor.begin(400) == 50
