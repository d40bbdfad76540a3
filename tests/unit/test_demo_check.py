"""The demo's first witness: notes are read as they grow, each fault in them is found, moves and pauses measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from parti.cli.demo.check import Findings, judge
from parti.cli.demo.notes import SUFFIX, Call, Notes
from parti.cli.demo.proof import missing
from parti.cli.demo.traffic import SUBJECT, Stored, make_messages, partition_names
from parti.model.partition import Template

MS = 1_000_000
BASE = 1_790_000_000 * 1_000_000_000
STORED = [Stored(seq, f"dc.etch01.{'c1' if seq % 2 else 'c2'}.completion", 100 + seq) for seq in range(1, 7)]


def call(seq: int, at_ms: int, process: str = "a", fence: int = 1, took_ms: int = 2) -> Call:
    """A call of the message as it is stored; it was stored one millisecond before the first ones began."""
    start = BASE + at_ms * MS
    end = start + took_ms * MS if took_ms else 0
    partition = f"etch01.{'c1' if seq % 2 else 'c2'}"
    return Call(process, partition, seq, fence, f"worker-{process}", BASE - MS, 100 + seq, start, end)


CLEAN = [call(seq, 10 * seq) for seq in range(1, 7)]


def judged(calls: Sequence[Call], died_ms: int | None = None, acknowledged: int = len(STORED)) -> Findings:
    died = {} if died_ms is None else {"a": BASE + died_ms * MS}
    return judge(acknowledged, STORED, calls, died, unstored_s=0.02)


def found(findings: Findings) -> dict[str, int]:
    return {check.name: check.count for check in findings.checks if check.count}


def test_all_finished_once_and_in_the_order_of_their_partition_keeps_every_promise() -> None:
    # Two partitions may overtake each other.
    findings = judged([*CLEAN[1:], replace(CLEAN[0], start_ns=BASE, end_ns=BASE + MS)])
    assert found(findings) == {}
    assert findings.broken == ()
    assert findings.seen["messages"] == findings.seen["calls"] == 6
    assert (findings.seen["partitions"], findings.seen["moves"], findings.seen["excused"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("calls", "broken"),
    [
        (CLEAN[:5], {"NoLoss": 1}),
        ([*CLEAN[:5], replace(CLEAN[5], end_ns=0)], {"NoLoss": 1}),
        ([*CLEAN[:5], replace(CLEAN[5], fingerprint=7)], {"NoLoss": 1}),
        ([*CLEAN, call(6, 90, "b", fence=2)], {"NoRepeatOnPlannedMove": 1}),
        ([*CLEAN, replace(call(9, 90), seq=9)], {"NoRepeatOnPlannedMove": 1}),
        ([*CLEAN[:3], call(6, 40), call(5, 50), call(4, 60)], {"Order": 2}),
        ([*CLEAN[:3], call(4, 40, took_ms=50), call(5, 50), call(6, 60, "b", fence=2)], {"OneOwner": 1, "Order": 1}),
        ([*CLEAN[:5], call(6, 60, "b", fence=1), call(6, 70, "c", fence=1)], {"NoRepeatOnPlannedMove": 1}),
    ],
    ids=["lost", "never ended", "wrong content", "repeated", "unknown", "order", "two at once", "again"],
)
def test_each_fault_is_found(calls: list[Call], broken: dict[str, int]) -> None:
    findings = judged(calls)
    assert found(findings).items() >= broken.items()
    assert set(findings.broken) >= set(broken)


def test_what_was_acknowledged_and_is_not_in_the_stream_is_lost() -> None:
    assert found(judged(CLEAN, acknowledged=8)) == {"NoLoss": 2}


def test_a_kill_excuses_what_was_finished_just_before_and_nothing_older() -> None:
    again = [call(6, 90, "b", fence=2), call(5, 91, "b", fence=2)]
    excused = judged([*CLEAN, *again], died_ms=70)
    assert found(excused) == {}
    assert excused.seen["excused"] == 2
    assert excused.oldest_repeat_s == pytest.approx(0.018)
    assert found(judged([*CLEAN, *again], died_ms=78)) == {"BoundedRepeatOnCrash": 1}


def test_a_pause_counts_from_when_there_was_something_to_do() -> None:
    late = replace(call(6, 60, "b", fence=2), stored_ns=BASE + 55 * MS)
    findings = judged([*CLEAN[:4], call(5, 90, "b", fence=2), late], died_ms=80)
    by_partition = {move.partition: move for move in findings.moves}
    # The last of c1 ended at 32 ms, the next was there; that of c2 was stored later than the last one ended.
    assert by_partition["etch01.c1"].pause_s == pytest.approx(0.058)
    assert by_partition["etch01.c2"].pause_s == pytest.approx(0.005)
    # What had moved before its owner died did not move because of that.
    assert (by_partition["etch01.c1"].reason, by_partition["etch01.c2"].reason) == ("crash", "planned")
    assert dict(findings.owners)["etch01.c1"][0][2:] == ("worker-a", 1)


def test_traffic_ends_with_nothing_waiting() -> None:
    traffic = judged(CLEAN).traffic
    assert traffic.waiting[-1][1] == 0
    assert max(number for _, number in traffic.waiting) == 6
    finished = sum(rate for _, rate in traffic.by_worker["worker-a"]) * traffic.step_s
    assert finished == pytest.approx(6)


def test_notes_are_read_as_they_grow_and_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    notes, file = Notes(tmp_path), tmp_path / f"one{SUFFIX}"
    file.write_text("S 5 etch01.c1 1 7 worker-0 3 99\nE 6 1\nS 8 etch01.c1 2 7 wor")
    assert [call.seq for call in notes.poll()] == [1]
    assert (notes.calls[0].end_ns, notes.finished["one"], notes.done) == (6, 1, {1})
    with file.open("a") as more:
        more.write("ker-0 4 98\n")
    assert [(call.seq, call.worker, call.end_ns) for call in notes.poll()] == [(2, "worker-0", 0)]
    assert notes.poll() == []


def test_messages_reach_every_partition_and_are_the_same_for_a_seed() -> None:
    made = list(islice(make_messages(30, seed=3), 300))
    assert made == list(islice(make_messages(30, seed=3), 300))
    assert made != list(islice(make_messages(30, seed=4), 300))
    template = Template(SUBJECT)
    reached = {template.parse(message.subject.decode()).id for message in made[:30]}
    assert reached == set(partition_names(30))


def test_without_java_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "install a Java 17 runtime" in missing()
    assert "\n" not in missing()
