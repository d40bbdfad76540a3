"""What the demo's report shows beside what an audit's report shows anyway: the story, and how to check it again."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parti.cli.control import count
from parti.cli.demo.check import Findings
from parti.cli.demo.fleet import SETTINGS
from parti.cli.demo.story import Plan
from parti.cli.demo.traffic import STREAM, SUBJECT
from parti.core.invariants import Invariant
from parti.spark.plots import Moments
from parti.spark.promises import Check
from parti.spark.report_page import Move, Picture, Section
from parti.version import __version__

UNSTORED_S = 2.5
"""What a killed worker finished so long before may be repeated: positions are stored every half second, on a busy
machine later."""
SKEW_S = 0.005
_PARTITIONS = 50
"""Whose owners are drawn, as in an audit's report."""


@dataclass(frozen=True, slots=True)
class Tale:
    """What only the one who told the story knows; goes to Spark's process as JSON."""

    title: str
    facts: Mapping[str, str]
    lead: Sequence[str]
    marks: Sequence[tuple[float, str]]
    span: tuple[float, float]
    """From when to when something happened, in seconds since 1970."""
    killed_s: float
    drained_s: float
    waiting: Sequence[tuple[float, float]]
    notes: Sequence[Check]
    """What the handlers' notes say of each promise."""
    sections: Sequence[Section]

    def reason(self, move: Move) -> str:
        """Why a partition changed hands, in the words of the story."""
        if move.reason == "crash":
            return "SIGKILL"
        if move.at_s >= self.drained_s:
            return "drain"
        return "join" if move.at_s < self.killed_s else "evening out after the kill"


def finish(picture: Picture, tale: Tale, *, audited: bool) -> Picture:
    """Add the story to what an audit, or the check of the notes, has found."""
    lead = list(tale.lead)
    if audited:
        lead.append(
            f"The verdicts are those of an audit in Spark, told from the stored stream and the workers' ledger. Of "
            f"the messages that were handled again the ledger has {picture.seen['excused']:,} twice; for the others "
            f"the killed worker had no time left to store the row."
        )
        witness = Section(
            "The second witness",
            (
                "The handlers wrote down when each call began and ended, in a file for each process. The same "
                "promises, judged from these files and the stored stream in plain Python, without Spark and without "
                "the ledger:",
            ),
            checks=tale.notes,
        )
    else:
        witness = Section(
            "Where this comes from",
            (
                "The handlers wrote down when each call began and ended, in a file for each process. All of the "
                "above is told from these files and the stored stream, in plain Python. The audit in Spark, which "
                "tells it from the ledger, was left out of this run.",
            ),
        )
    return replace(
        picture,
        title=tale.title,
        facts=tale.facts,
        lead=lead,
        traffic=replace(picture.traffic, waiting=tale.waiting),
        moves=[replace(move, reason=tale.reason(move)) for move in picture.moves],
        when=Moments(marks=tale.marks, since=tale.span[0], span=tale.span),
        sections=(witness, *tale.sections),
    )


def pauses_by_reason(moves: Sequence[Move]) -> dict[str, list[float]]:
    """The pauses, those that came first first."""
    pauses_s: dict[str, list[float]] = {}
    for move in sorted(moves, key=lambda move: move.at_s):
        pauses_s.setdefault(move.reason, []).append(move.pause_s)
    return pauses_s


def picture_of(findings: Findings) -> Picture:
    """The report's values, from the notes alone."""
    return Picture(
        title="",
        facts={},
        checks=findings.checks,
        seen=findings.seen,
        traffic=findings.traffic,
        moves=findings.moves,
        owners=findings.owners[:_PARTITIONS],
    )


def lead_of(plan: Plan, findings: Findings, killed: str, drained: str) -> list[str]:
    """What happened, in a few sentences."""
    lost = next(check.count for check in findings.checks if check.name == Invariant.NO_LOSS)
    repeated = findings.seen["excused"]
    age = f", all finished by {killed} in the last {findings.oldest_repeat_s:.2f} s before" if repeated else ""
    return [
        f"In {plan.seconds:g} seconds {findings.seen['messages']:,} messages were published to "
        f"{count(findings.seen['partitions'], 'partition')}. {plan.workers} worker processes shared them, "
        f"{plan.joining} more joined, {killed} was killed with SIGKILL, {drained} was drained and stopped.",
        f"Lost: {lost:,}. Handled again after the kill: {repeated:,}{age}. "
        f"Changes of owner: {findings.seen['moves']:,}.",
    ]


def sections_of(data: Path, server: str, seed: int) -> list[Section]:
    """How to check it again, and where it was run."""
    store, report = data / "store", data.parent / "audit.html"
    return [
        Section(
            "Check it yourself",
            (
                f"The stream, the ledger and the handlers' notes of this run are still in {data}. Serve them in one "
                f"terminal, and audit them in another (Java 17, extra parti[spark]):",
            ),
            commands="\n".join(audit_commands(store, report)),
        ),
        Section("Settings, versions, machine", rows=_circumstances(server, seed)),
    ]


def audit_commands(store: Path, report: Path) -> list[str]:
    """The commands that run the same audit again on the data that is left."""
    # As it can be called from here: after `make demo` there is no `parti` on the path.
    called = Path(sys.argv[0])
    parti = os.path.relpath(called) if called.name == "parti" and shutil.which("parti") is None else "parti"
    return [
        f"{parti} dev server --port 4222 --store-dir {store}",
        f"{parti} audit --nats nats://127.0.0.1:4222 --stream {STREAM} --complete --template '{SUBJECT}' "
        f"--unstored {UNSTORED_S:g} --clock-skew {SKEW_S:g} --report {report}",
    ]


def _circumstances(server: str, seed: int) -> list[dict[str, str]]:
    settings = ", ".join(f"{name} = {value}" for name, value in SETTINGS.items())
    rows = {
        "settings of the workers": f"{settings}; all others as they are by default (leases of 5 s, for instance)",
        "seed": str(seed),
        "parti": __version__,
        "nats-server": server,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(["parti", *sys.argv[1:]]),
    }
    return [{"what": name, "value": value} for name, value in rows.items()]
