"""Judges a run by what was published and what handlers noted, and by nothing that parti says of itself.

The rules are the named invariants of `parti.core.invariants`. A process that was killed, stopped or cut off is
excused for what it had in flight at that moment: those messages, and no others, may be handled again by the next
owner, and a call that could not be taken back may overlap with one of the next owner. Starting is never excused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from chaos.notes import Call, Notes
from parti.core.invariants import Death, Event, Finish, Invariant, Lapse, Start, check_history

EXAMPLES = 5
IN_FLIGHT_SLACK_S = 1.0
"""How much later than its interval a write of positions may be on a busy machine."""
CUT_SHORT = "CutShort"
"""A call never ended although nothing happened to its process."""
UNNOTED = "Unnoted"
"""An end was noted without a start: the notes themselves are broken."""
RULES: tuple[str, ...] = (*Invariant, CUT_SHORT, UNNOTED)


EVERYBODY = "*"


@dataclass(frozen=True, slots=True)
class Interruption:
    """A process could not store what it had finished: it died, was stopped or was cut off."""

    process: str
    """Its name, or `EVERYBODY`."""
    from_ns: int
    until_ns: float = math.inf
    """When it could again; never after a death."""


@dataclass(frozen=True, slots=True)
class Broken:
    """One breach of a rule."""

    rule: str
    partition: str
    text: str


@dataclass(slots=True)
class Findings:
    """How often each rule was broken, with the first examples of each."""

    messages: int = 0
    """Acknowledged to their publishers."""
    calls: int = 0
    repeated: int = 0
    """Calls of a message that had been started before, excused or not."""
    oldest_repeat_s: float = 0.0
    """Longest time between the end of a call and the interruption after which it was repeated."""
    unconfirmed: int = 0
    """Handled, but never acknowledged to a publisher: the stream had stored it, and the answer was lost."""
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[Broken] = field(default_factory=list)

    def add(self, rule: str, partition: str, text: str) -> None:
        """Note a breach."""
        self.counts[rule] += 1
        if self.counts[rule] <= EXAMPLES:
            self.examples.append(Broken(rule, partition, text))

    @property
    def clean(self) -> bool:
        """Whether every rule held."""
        return not self.counts


def check(notes: Notes, interruptions: Iterable[Interruption] = (), *, in_flight_s: float) -> Findings:
    """Look at every partition; `in_flight_s` is how late the position after a finished message may be stored."""
    findings = Findings()
    by_process: dict[int, list[Interruption]] = {}
    for interruption in interruptions:
        everybody = interruption.process == EVERYBODY
        for index in range(len(notes.processes)) if everybody else [notes.process_index(interruption.process)]:
            by_process.setdefault(index, []).append(interruption)
    for partition in sorted({*notes.calls, *notes.sent}):
        calls = notes.calls[partition].by_start() if partition in notes.calls else []
        _check_partition(partition, calls, notes, by_process, in_flight_s, findings)
    if notes.stray:
        findings.add(UNNOTED, "", f"{notes.stray} times")
    return findings


def _check_partition(
    partition: str,
    calls: Sequence[Call],
    notes: Notes,
    interruptions: Mapping[int, Sequence[Interruption]],
    in_flight_s: float,
    findings: Findings,
) -> None:
    confirmed, handled = notes.sent.get(partition, {}).keys(), {call.seq for call in calls}
    findings.messages += len(confirmed)
    findings.calls += len(calls)
    findings.unconfirmed += len(handled - confirmed)
    _count_repeats(calls, interruptions, findings)
    for call in calls:
        if not call.end_ns and call.process not in interruptions:
            findings.add(CUT_SHORT, partition, _told(call, notes))
    # Seconds since the first call: a float of the wall clock's seconds could not tell one microsecond from the next.
    base_ns = calls[0].start_ns if calls else 0
    events = [*_events(partition, calls, notes, base_ns)]
    for index in {call.process for call in calls} & interruptions.keys():
        events += _troubles(notes.processes[index].name, interruptions[index], base_ns)
    for broken in check_history({partition: sorted(confirmed | handled)}, events, unstored_s=in_flight_s):
        # A handler that raises while its partition is released has finished nothing: the next owner tries again. That
        # each such message is one dead letter is looked at elsewhere.
        if broken.invariant is Invariant.NO_REPEAT_ON_PLANNED_MOVE and broken.seq in notes.raised:
            continue
        findings.add(broken.invariant, partition, f"{broken} (0 s is {base_ns})")


def _events(partition: str, calls: Sequence[Call], notes: Notes, base_ns: int) -> Iterator[Event]:
    for call in calls:
        process = notes.processes[call.process]
        about = (partition, call.seq, f"pid {process.pid}", call.fence, process.name)
        yield Start(*about, (call.start_ns - base_ns) / 1e9)
        if call.end_ns:
            yield Finish(*about, (call.end_ns - base_ns) / 1e9)


def _troubles(process: str, interruptions: Iterable[Interruption], base_ns: int) -> Iterator[Event]:
    for interruption in interruptions:
        at_s = (interruption.from_ns - base_ns) / 1e9
        if math.isinf(interruption.until_ns):
            yield Death(process, at_s)
        else:
            yield Lapse(process, at_s, (interruption.until_ns - base_ns) / 1e9)


def _count_repeats(
    calls: Sequence[Call], interruptions: Mapping[int, Sequence[Interruption]], findings: Findings
) -> None:
    before: dict[int, Call] = {}
    for call in calls:
        if earlier := before.get(call.seq):
            findings.repeated += 1
            past = [i.from_ns for i in interruptions.get(earlier.process, ()) if i.from_ns <= call.start_ns]
            if past and earlier.end_ns:
                age_s = (min(past, key=lambda ns: abs(ns - earlier.end_ns)) - earlier.end_ns) / 1e9
                findings.oldest_repeat_s = max(findings.oldest_repeat_s, round(age_s, 3))
        before[call.seq] = call


def _told(call: Call, notes: Notes) -> str:
    process = notes.processes[call.process]
    return f"seq {call.seq} fence {call.fence} by {process.name} (pid {process.pid}) at {call.start_ns}"
