"""What faults excuse, and what a report says when something did not hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

from benchmarks.fleet import Place
from benchmarks.verdicts import Verdict
from chaos.checker import EVERYBODY
from chaos.faults import Faults
from chaos.handler_options import HandlerOptions
from chaos.outcome import Outcome, report
from chaos.workers import Workers

S = 1_000_000_000


def faults_in(directory: Path) -> Faults:
    options = HandlerOptions(stream="S", template="s.{p}", partitions=("p",), notes=str(directory))
    return Faults(Workers(directory, Place("nats://127.0.0.1:1", "S", "s.{p}"), "nats://127.0.0.1:1", options, {}))


def test_what_does_not_interrupt_excuses_nothing(tmp_path: Path) -> None:
    faults = faults_in(tmp_path)
    faults.note("terminate", "w0-1")
    faults.outage("server kill", "server").undone()
    assert faults.interruptions() == []
    assert faults.counts() == {"terminate": 1, "server kill": 1}


def test_a_death_is_for_ever_and_a_stop_has_an_end(tmp_path: Path) -> None:
    faults = faults_in(tmp_path)
    faults.note("kill", "w0-1", interrupts=True)
    faults.note("stop", "w1-1", interrupts=True).undone()
    killed, stopped = faults.interruptions()
    assert (killed.process, stopped.process) == ("w0-1", "w1-1")
    assert math.isinf(killed.until_ns)
    assert stopped.from_ns <= stopped.until_ns < math.inf


def test_who_dies_soon_after_an_outage_could_not_store_anything_since_it_began(tmp_path: Path) -> None:
    faults = faults_in(tmp_path)
    outage = faults.outage("server kill", "server")
    outage.undone()
    death = faults.note("kill", "w0-1", interrupts=True)
    late = faults.note("kill", "w1-1", interrupts=True)
    death.at_ns, late.at_ns = outage.at_ns + S, outage.at_ns + 60 * S
    found = [(i.process, i.from_ns, math.isinf(i.until_ns)) for i in faults.interruptions()]
    assert found == [("w0-1", death.at_ns, True), ("w0-1", outage.at_ns, False), ("w1-1", late.at_ns, True)]


def test_the_loss_of_leases_excuses_everybody(tmp_path: Path) -> None:
    faults = faults_in(tmp_path)
    faults.outage("node kill", "n1", leases=True).undone()
    (found,) = faults.interruptions()
    assert found.process == EVERYBODY
    assert not math.isinf(found.until_ns)


def test_a_report_ends_with_1_when_something_did_not_hold(tmp_path: Path) -> None:
    good, bad = Verdict("lost", "0 of 9", True), Verdict("out of order", "3", False)
    assert report(Outcome("good", {"seed": 7}, [good], {"messages": 9}), tmp_path) == 0
    assert report(Outcome("bad", {"seed": 7}, [good, bad], {"messages": 9}), tmp_path) == 1
    written = json.loads((tmp_path / "bad.json").read_text())
    assert written["passed"] is False
    assert written["settings"] == {"seed": 7}
    assert written["machine"]["cpu_count"]
