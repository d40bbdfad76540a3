"""Judges the demo by the stored stream and the handlers' notes, in plain Python: the first witness.

The rules are those of `parti.core.invariants`; nothing of what parti says of itself is asked. Pure: values in, values
out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parti.cli.demo.notes import Call
from parti.cli.demo.traffic import SUBJECT, Stored
from parti.core.invariants import Death, Event, Finish, Invariant, Start, check_history
from parti.model.partition import Template
from parti.spark.promises import Check
from parti.spark.report_page import POINTS, Move, Traffic, quantile, rates_by_worker

_EXAMPLES = 10


@dataclass(slots=True)
class Holding:
    """A partition in the hands of one process under one fence token."""

    process: str
    worker: str
    fence: int
    start_ns: int
    last: Call
    """Its call that ended last, or that runs."""

    @property
    def end_ns(self) -> int:
        """When it had finished what it has finished so far."""
        return self.last.end_ns or self.last.start_ns


@dataclass(slots=True)
class Owners:
    """Who had each partition, told from the calls in the order in which they started."""

    died_ns: Mapping[str, int] = field(default_factory=dict)
    """Processes that were killed, and when."""
    holdings: dict[str, list[Holding]] = field(default_factory=dict)

    def take(self, call: Call) -> Move | None:
        """Take in a call; returns the change of owner, if it is one."""
        known = self.holdings.setdefault(call.partition, [])
        if known and (known[-1].process, known[-1].fence) == (call.process, call.fence):
            known[-1].last = call
            return None
        before = known[-1] if known else None
        known.append(Holding(call.process, call.worker, call.fence, call.start_ns, call))
        if before is None:
            return None
        # A pause counts only while there was something to do.
        there_ns = max(before.end_ns, call.stored_ns)
        return Move(
            partition=call.partition,
            at_s=call.start_ns / 1e9,
            before=before.worker,
            after=call.worker,
            reason="crash" if self.died_ns.get(before.process, call.start_ns) < call.start_ns else "planned",
            pause_s=max(0, call.start_ns - there_ns) / 1e9,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """What the notes tell."""

    checks: tuple[Check, ...]
    seen: Mapping[str, int]
    moves: tuple[Move, ...]
    owners: tuple[tuple[str, tuple[tuple[float, float, str, int], ...]], ...]
    """As `parti.spark.report_page.Picture` has them."""
    traffic: Traffic
    oldest_repeat_s: float
    """Of the messages that were repeated after a kill: how long before it the oldest had been finished."""

    @property
    def broken(self) -> tuple[str, ...]:
        """The promises that were not kept."""
        return tuple(check.name for check in self.checks if not check.held)


def judge(
    acknowledged: int, stored: Sequence[Stored], calls: Iterable[Call], died_ns: Mapping[str, int], unstored_s: float
) -> Findings:
    """Judge a run.

    Everything stored must be finished, with the right content, and everything acknowledged must be stored. A process
    that was killed excuses the repetition of what it finished in the `unstored_s` before.
    """
    ordered = sorted(calls, key=lambda call: call.start_ns)
    template = Template(SUBJECT)
    of_stream = {message.seq: message for message in stored}
    by_partition: dict[str, list[int]] = defaultdict(list)
    for message in stored:
        by_partition[template.parse(message.subject).id].append(message.seq)
    base_ns = ordered[0].start_ns if ordered else 0
    known = [call for call in ordered if call.seq in of_stream]
    events = [*_events(known, of_stream, base_ns), *_deaths(died_ns, base_ns)]
    counts: Counter[str] = Counter()
    examples: dict[str, list[Mapping[str, object]]] = defaultdict(list)
    for found in check_history(by_partition, events, unstored_s=unstored_s):
        counts[found.invariant] += 1
        examples[found.invariant].append({"partition": found.partition, "seq": found.seq, "detail": found.detail})
    if acknowledged > len(stored):
        counts[Invariant.NO_LOSS] += acknowledged - len(stored)
        examples[Invariant.NO_LOSS].append(
            {"detail": f"{acknowledged:,} acknowledged, {len(stored):,} in the stream"}
        )
    for call in (call for call in ordered if call.seq not in of_stream):
        counts[Invariant.NO_REPEAT_ON_PLANNED_MOVE] += 1
        examples[Invariant.NO_REPEAT_ON_PLANNED_MOVE].append(
            {"partition": call.partition, "seq": call.seq, "detail": "handled, and the stream has no such message"}
        )
    owners = Owners(died_ns)
    moves = tuple(move for call in known if (move := owners.take(call)))
    repeated, oldest_s = _repeats(known, died_ns)
    return Findings(
        checks=tuple(Check(name.value, counts[name], 0, tuple(examples[name][:_EXAMPLES])) for name in Invariant),
        seen={
            "messages": len(stored),
            "calls": len(ordered),
            "partitions": len(by_partition),
            "holdings": sum(map(len, owners.holdings.values())),
            "moves": len(moves),
            "excused": repeated,
        },
        moves=moves,
        owners=tuple(
            (partition, tuple((h.start_ns / 1e9, h.end_ns / 1e9, h.worker, h.fence) for h in holdings))
            for partition, holdings in sorted(owners.holdings.items())
        ),
        traffic=_measure(known),
        oldest_repeat_s=oldest_s,
    )


def _events(calls: Iterable[Call], stored: Mapping[int, Stored], base_ns: int) -> Iterator[Event]:
    # Seconds since the first call: a float of the wall clock's seconds could not tell one microsecond from the next.
    for call in calls:
        about = (call.partition, call.seq, call.worker, call.fence, call.process)
        yield Start(*about, (call.start_ns - base_ns) / 1e9)
        if call.end_ns and call.fingerprint == stored[call.seq].fingerprint:
            yield Finish(*about, (call.end_ns - base_ns) / 1e9)


def _deaths(died_ns: Mapping[str, int], base_ns: int) -> Iterator[Event]:
    for process, at_ns in died_ns.items():
        yield Death(process, (at_ns - base_ns) / 1e9)


def _repeats(calls: Iterable[Call], died_ns: Mapping[str, int]) -> tuple[int, float]:
    """How many messages were finished and then started again, and the age of the oldest at the kill."""
    before: dict[int, Call] = {}
    repeated, oldest_s = 0, 0.0
    for call in calls:
        if (earlier := before.get(call.seq)) and earlier.end_ns:
            repeated += 1
            if (killed_ns := died_ns.get(earlier.process)) is not None:
                oldest_s = max(oldest_s, (killed_ns - earlier.end_ns) / 1e9)
        before[call.seq] = call
    return repeated, oldest_s


def _measure(calls: Sequence[Call]) -> Traffic:
    """Rates, latencies and the number of waiting messages over time."""
    ended = sorted((call for call in calls if call.end_ns), key=lambda call: call.end_ns)
    if len(ended) < 2:
        return Traffic()
    first_us, last_us = min(call.stored_ns for call in calls) // 1000, ended[-1].end_ns // 1000
    step_us = max(1_000, -(-(last_us - first_us) // POINTS))
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    took_s: dict[int, list[float]] = defaultdict(list)
    finished: dict[int, int] = {}
    for call in ended:
        step = (call.end_ns // 1000 - first_us) // step_us
        counts[call.worker][step] += 1
        took_s[step].append(max(1e-6, (call.end_ns - call.stored_ns) / 1e9))
        finished.setdefault(call.seq, step)
    change = Counter((call.stored_ns // 1000 - first_us) // step_us for call in {c.seq: c for c in calls}.values())
    change.subtract(Counter(finished.values()))
    waiting, points = 0, []
    for step in range((last_us - first_us) // step_us + 1):
        waiting += change[step]
        points.append(((first_us + (step + 1) * step_us) / 1e6, float(waiting)))
    middles = [((first_us + (step + 0.5) * step_us) / 1e6, values) for step, values in sorted(took_s.items())]
    return Traffic(
        step_s=step_us / 1e6,
        by_worker=rates_by_worker(counts, first_us, last_us, step_us),
        latencies={
            name: [(at_s, quantile(values, part)) for at_s, values in middles]
            for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        },
        waiting=points,
        latency_from="stored",
    )
