"""The checker finds every kind of violation that is planted, and excuses only what a fault explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from chaos.checker import CUT_SHORT, EVERYBODY, UNNOTED, Findings, Interruption, check
from chaos.notes import Notes

from parti.core.invariants import Invariant

BASE_NS = 1_794_800_000_000_000_000
"""A time of day as the wall clock has it: floats of seconds would not tell its microseconds apart."""
S = 1_000_000_000
IN_FLIGHT_S = 1.0


class Written:
    """Notes as handlers and a publisher would have left them; times are seconds since `BASE_NS`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def publish(self, *seqs: int, partition: str = "p") -> Written:
        with (self._directory / "pub.published").open("a") as file:
            file.writelines(f"{seq} {partition} {BASE_NS} {BASE_NS + 1}\n" for seq in seqs)
        return self

    def start(self, process: str, at_s: float, seq: int, *, fence: int = 1, partition: str = "p") -> Written:
        return self._note("S", process, at_s, seq, fence, partition)

    def end(self, process: str, at_s: float, seq: int, *, fence: int = 1, partition: str = "p") -> Written:
        return self._note("E", process, at_s, seq, fence, partition)

    def fail(self, process: str, at_s: float, seq: int, *, fence: int = 1, partition: str = "p") -> Written:
        return self._note("R", process, at_s, seq, fence, partition)

    def handle(self, process: str, calls: Mapping[int, float], *, fence: int = 1) -> Written:
        """Whole calls: the sequence, and the second in which it started; each takes 0.1 s."""
        for seq, at_s in calls.items():
            self.start(process, at_s, seq, fence=fence).end(process, at_s + 0.1, seq, fence=fence)
        return self

    def check(self, interruptions: Iterable[Interruption] = ()) -> Findings:
        notes = Notes(self._directory)
        notes.poll(everything=True)
        notes.close()
        return check(notes, interruptions, in_flight_s=IN_FLIGHT_S)

    def _note(self, what: str, process: str, at_s: float, seq: int, fence: int, partition: str) -> Written:
        ns = BASE_NS + round(at_s * S)
        with (self._directory / f"{process}.notes").open("a") as file:
            file.write(f"{what} {ns} {partition} {seq} {fence} worker-{process} 77\n")
        return self


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def interrupted(process: str, at_s: float, until_s: float | None = None) -> Interruption:
    from_ns = BASE_NS + round(at_s * S)
    return (
        Interruption(process, from_ns) if until_s is None else Interruption(process, from_ns, BASE_NS + until_s * S)
    )


def test_a_planned_move_is_clean(written: Written) -> None:
    written.publish(1, 2, 3, 5).handle("a", {1: 1, 2: 2}).handle("b", {3: 3, 5: 4}, fence=2)
    found = written.check()
    assert found.clean
    assert (found.messages, found.calls, found.repeated, found.unconfirmed) == (4, 4, 0, 0)


def test_a_message_that_nobody_handled_is_lost(written: Written) -> None:
    assert written.publish(1, 2).handle("a", {1: 1}).check().counts == {Invariant.NO_LOSS: 1}


def test_a_partition_that_nobody_touched_is_lost(written: Written) -> None:
    assert written.publish(1, 2, 3).check().counts == {Invariant.NO_LOSS: 3}


def test_a_call_that_died_is_no_handling(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1}).start("a", 2, 2)
    assert written.check([interrupted("a", 2.05)]).counts == {Invariant.NO_LOSS: 1}


def test_a_message_skipped_and_handled_later_is_out_of_order(written: Written) -> None:
    found = written.publish(1, 2, 3).handle("a", {1: 1, 3: 2, 2: 3}).check()
    assert found.counts[Invariant.ORDER] > 0
    assert not found.counts[Invariant.NO_LOSS]


def test_a_new_owner_that_begins_too_far_is_out_of_order(written: Written) -> None:
    found = written.publish(1, 2, 3, 4).handle("a", {1: 1}).handle("b", {3: 3, 4: 4}, fence=2).check()
    assert found.counts[Invariant.NO_LOSS] == 1
    assert found.counts[Invariant.ORDER] > 0


def test_a_repeat_without_a_fault_is_found(written: Written) -> None:
    found = written.publish(1, 2).handle("a", {1: 1, 2: 2}).handle("b", {2: 3}, fence=2).check()
    assert found.counts == {Invariant.NO_REPEAT_ON_PLANNED_MOVE: 1}
    assert found.repeated == 1


def test_a_call_that_failed_while_its_partition_was_released_may_be_tried_again(written: Written) -> None:
    found = written.publish(1).start("a", 1.0, 1).fail("a", 1.1, 1).handle("b", {1: 2}, fence=2).check()
    assert found.clean
    assert found.repeated == 1


def test_a_repeat_of_what_was_in_flight_is_excused_by_a_kill(written: Written) -> None:
    written.publish(1, 2, 3).handle("a", {1: 1, 2: 2}).start("a", 2.5, 3).handle("b", {2: 8, 3: 9}, fence=2)
    found = written.check([interrupted("a", 2.6)])
    assert found.clean
    assert found.repeated == 2
    assert found.oldest_repeat_s == pytest.approx(0.5)


def test_a_repeat_of_what_was_finished_long_before_a_kill_is_not_excused(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1, 2: 2}).handle("b", {1: 8, 2: 9}, fence=2)
    assert written.check([interrupted("a", 2.6)]).counts == {Invariant.BOUNDED_REPEAT_ON_CRASH: 1}


def test_the_kill_of_another_process_excuses_nothing(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1, 2: 2}).handle("b", {2: 3}, fence=2).handle("c", {}, fence=3)
    assert written.check([interrupted("c", 2.1)]).counts == {Invariant.NO_REPEAT_ON_PLANNED_MOVE: 1}


def test_what_stops_everybody_excuses_everybody(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1, 2: 2}).handle("b", {2: 3}, fence=2)
    assert written.check([interrupted(EVERYBODY, 2.05, 2.9)]).clean


def test_two_handlers_of_a_partition_at_once_are_found(written: Written) -> None:
    written.publish(1, 2).start("a", 1, 1).start("b", 1.5, 2, fence=2).end("b", 1.6, 2, fence=2).end("a", 2, 1)
    assert written.check().counts[Invariant.ONE_OWNER] == 1


def test_half_a_microsecond_of_overlap_is_found(written: Written) -> None:
    written.publish(1, 2).start("a", 1, 1).end("a", 2, 1).start("b", 2 - 5e-7, 2, fence=2).end("b", 3, 2, fence=2)
    assert written.check().counts[Invariant.ONE_OWNER] == 1


def test_two_handlers_at_once_in_one_process_are_found(written: Written) -> None:
    written.publish(1, 2).start("a", 1, 1).start("a", 1.5, 2).end("a", 1.6, 2).end("a", 2, 1)
    assert written.check().counts[Invariant.ORDER] == 1


def test_a_call_that_a_stopped_process_had_begun_may_overlap(written: Written) -> None:
    written.publish(1, 2).start("a", 1, 1).handle("b", {1: 4, 2: 5}, fence=2).end("a", 9, 1)
    assert written.check([interrupted("a", 1.05, 8)]).clean


def test_a_stopped_process_that_starts_a_handler_when_it_wakes_is_found(written: Written) -> None:
    written.publish(1, 2, 3, 4).start("a", 1, 1).handle("b", {1: 4, 2: 5, 3: 6}, fence=2).end("a", 9, 1)
    written.handle("a", {2: 9.1}).handle("b", {4: 10}, fence=2)
    assert written.check([interrupted("a", 1.05, 8)]).counts[Invariant.ONE_OWNER] >= 1


def test_a_new_owner_with_an_older_token_is_found(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1}, fence=7).handle("b", {2: 3}, fence=6)
    assert written.check().counts == {Invariant.EPOCH_GROWS: 1}


def test_two_processes_under_one_token_are_found(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1}, fence=7).handle("b", {2: 3}, fence=7)
    assert written.check().counts == {Invariant.EPOCH_GROWS: 1}


def test_a_call_that_never_ends_in_a_process_that_lives_is_found(written: Written) -> None:
    written.publish(1).start("a", 1, 1).handle("b", {1: 3}, fence=2)
    assert written.check().counts[CUT_SHORT] == 1


def test_an_end_without_a_start_is_found(written: Written) -> None:
    written.publish(1, 2).handle("a", {1: 1, 2: 2}).end("a", 3, 2)
    assert written.check().counts == {UNNOTED: 1}


def test_what_was_stored_without_an_answer_is_counted_and_keeps_its_place(written: Written) -> None:
    clean = written.publish(1, 3).handle("a", {1: 1, 2: 2, 3: 3}).check()
    assert clean.clean
    assert clean.unconfirmed == 1


def test_partitions_are_judged_apart(written: Written) -> None:
    written.publish(1, 3).publish(2, partition="q").handle("a", {1: 1, 3: 2})
    written.start("b", 1.01, 2, partition="q").end("b", 1.05, 2, partition="q")
    assert written.check().clean


def test_only_some_examples_are_kept(written: Written) -> None:
    found = written.publish(*range(1, 101)).check()
    assert found.counts[Invariant.NO_LOSS] == 100
    assert len(found.examples) == 5
