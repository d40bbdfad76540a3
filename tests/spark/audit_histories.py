"""Random histories of a few partitions, told both as events for the core and as rows for the audit."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from parti.core.invariants import Death, Event, Finish, Lapse, Start, Violation, check_history

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
BASE_US = int(EPOCH.timestamp()) * 1_000_000
UNSTORED_US = 6
FOREVER_US = 4_000_000_000_000_000_000


@dataclass(frozen=True)
class Call:
    partition: str
    seq: int
    process: str
    fence: int
    started_us: int
    finished_us: int

    @property
    def order(self) -> tuple[int, int, str, int, int]:
        return (self.started_us, self.seq, self.process, self.fence, self.finished_us)


@dataclass
class History:
    """Times are microseconds since `EPOCH`."""

    stored: dict[str, list[int]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    deaths: dict[str, int] = field(default_factory=dict)
    lapses: list[tuple[str, int, int]] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)

    def events(self) -> list[Event]:
        """In the order in which those of one moment count: finishes, then starts by sequence."""
        keyed: list[tuple[tuple[object, ...], Event]] = []
        for call in self.calls:
            who = (call.partition, call.seq, f"w-{call.process}", call.fence, call.process)
            at_once = call.started_us == call.finished_us
            keyed.append(((call.started_us, 1, call.order, 0), Start(*who, float(call.started_us))))
            keyed.append(((call.finished_us, int(at_once), call.order, 1), Finish(*who, float(call.finished_us))))
        events = [event for _, event in sorted(keyed, key=lambda pair: pair[0])]
        events += [Death(process, float(at_us)) for process, at_us in self.deaths.items()]
        return [*events, *(Lapse(process, float(since), float(until)) for process, since, until in self.lapses)]

    def judge(self) -> list[Violation]:
        """What the core says; its seconds are our microseconds, so that nothing is rounded."""
        return check_history(self.stored, self.events(), positions=self.positions, unstored_s=float(UNSTORED_US))


def make_history(seed: int) -> History:
    """A fleet that works well at first, and what a few random faults make of it."""
    rng = random.Random(seed)
    history = History()
    for number in range(rng.randint(1, 2)):
        partition = f"h{seed}.p{number}"
        sequences = sorted(rng.sample(range(1, 40), rng.randint(3, 12)))
        history.stored[partition] = sequences
        history.calls += _work(rng, partition, f"h{seed}", sequences, history)
        history.positions[partition] = rng.choice([0, sequences[-1] + 1, rng.randint(1, 40), 100])
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        rng.choice([_lose, _repeat, _swap, _overlap, _go_back, _stray])(rng, history)
    if rng.random() < 0.3:
        _cut_off(rng, history)
    history.calls = _one_at_a_time(history.calls)
    return history


def _work(rng: random.Random, partition: str, name: str, sequences: list[int], history: History) -> list[Call]:
    now, fence, process, calls = rng.randint(0, 10), rng.choice([0, 1, 5]), f"{name}-a", []
    waiting, moves = list(sequences), 0
    while waiting:
        seq = waiting.pop(0)
        took = rng.choice([0, 1, 1, 2, 5])
        calls.append(Call(partition, seq, process, fence, now, now + took))
        now += took + rng.choice([0, 0, 1, 3])
        if moves < 4 and rng.random() < 0.25:
            moves += 1
            if rng.random() < 0.4:
                history.deaths.setdefault(process, now)
                back = rng.choice([0, 1, 1, 2, 5])
                waiting = sequences[max(0, sequences.index(seq) + 1 - back) :]
                now += rng.randint(0, 4)
            fence += 1 if fence else 0
            process = f"{name}-{'bcde'[moves - 1]}"
    return calls


def _pick(rng: random.Random, history: History) -> int:
    return rng.randrange(len(history.calls))


def _lose(rng: random.Random, history: History) -> None:
    if len(history.calls) > 1:
        del history.calls[_pick(rng, history)]


def _repeat(rng: random.Random, history: History) -> None:
    call = history.calls[_pick(rng, history)]
    other = history.calls[_pick(rng, history)]
    at_us = call.finished_us + rng.choice([0, 1, 10, 30])
    history.calls.append(
        replace(call, process=other.process, fence=other.fence, started_us=at_us, finished_us=at_us + 2)
    )


def _swap(rng: random.Random, history: History) -> None:
    one, other = _pick(rng, history), _pick(rng, history)
    a, b = history.calls[one], history.calls[other]
    if a.partition == b.partition:
        history.calls[one], history.calls[other] = replace(a, seq=b.seq), replace(b, seq=a.seq)


def _overlap(rng: random.Random, history: History) -> None:
    place = _pick(rng, history)
    call = history.calls[place]
    history.calls[place] = replace(call, finished_us=call.finished_us + rng.randint(1, 12))


def _go_back(rng: random.Random, history: History) -> None:
    place = _pick(rng, history)
    call = history.calls[place]
    history.calls[place] = replace(call, fence=max(1, call.fence + rng.choice([-2, -1, 1, 3])))


def _stray(rng: random.Random, history: History) -> None:
    place = _pick(rng, history)
    call = history.calls[place]
    history.calls[place] = replace(
        call, process=f"{call.process}-x", fence=call.fence + rng.choice([-1, 0, 1]) * bool(call.fence)
    )


def _cut_off(rng: random.Random, history: History) -> None:
    call = history.calls[_pick(rng, history)]
    since = call.started_us + rng.randint(-3, 5)
    history.lapses.append((call.process, since, rng.choice([since + 4, since + 20, FOREVER_US])))


def _one_at_a_time(calls: list[Call]) -> list[Call]:
    """A process handles one message of a partition at a time."""
    by_lane: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        by_lane[call.partition, call.process].append(call)
    kept: dict[tuple[object, ...], Call] = {}
    for lane in by_lane.values():
        lane.sort(key=lambda call: call.order)
        for call, after in zip(lane, [*lane[1:], None], strict=True):
            end_us = call.finished_us if after is None else min(call.finished_us, after.started_us)
            done = replace(call, finished_us=max(call.started_us, end_us))
            # The same call told twice is one call.
            kept[done.partition, done.seq, done.process, done.started_us, done.finished_us] = done
    return list(kept.values())


def moment(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)
