"""Loads: how many seconds of handler work a partition takes a second, learned where it is handled.

    lanes ──> Effort ──> Learning ──> noticed ──> load.<worker>      at each worker
    load.* ──> LoadBook ──> weights ──> strategy ──> Patience        at the rebalancer

Noise is kept from moving anything at four places: figures are smoothed; one that is published stays until it is
clearly wrong; a plan that changes nobody's load by much is left alone; and what it was made for has to last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from parti.model.fleet import LoadRecord

IDLE_LOAD = 1e-4
"""What a partition counts that has nothing to do: it costs a subject and a lane, and idle ones must not pile up."""
_CATCH_UP_S = 10.0
"""What waits in a lane counts as if it was to be done within this time, beside what arrives."""
_KNOWN_AFTER = 1 / 3
"""Of a half-life: a partition that was watched for less has no figure yet."""
_NOTICEABLE, _SLIGHT = 0.15, 0.05
"""A figure is wrong that is off by more than this part of itself, and of the mean of its worker; so is their sum."""
_GIANT = 1.5
"""Shares of its worker: what is more than that by itself is no matter of balance."""
_REST = 10
"""Windows that a partition stays for after it has moved."""


# ── learning, at the owner ────────────────────────────────────────────────────────────────────────────────────────


class Effort:
    """What the handlers of one partition took since somebody looked; counted up by whoever calls them."""

    __slots__ = ("ahead_s", "calls", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of calls that have ended."""
        self.calls = 0
        """Messages that were handled."""
        self.ahead_s = 0.0
        """What was counted before of calls that still ran."""

    def take(self, running_s: float = 0.0) -> tuple[float, int]:
        """Seconds and calls since the last time; `running_s`: of calls that run at this moment, so far.

        So a call of a minute counts while it runs, and not for the first time when it is over.
        """
        seconds, calls = self.seconds + running_s - self.ahead_s, self.calls
        self.ahead_s, self.calls = running_s, 0
        # A call that was seen running may not have been reported yet; what is missing now comes with the next look.
        self.seconds = min(0.0, seconds)
        return max(0.0, seconds), calls


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen of a partition since the last look."""

    seconds: float = 0.0
    calls: int = 0
    waiting: int = 0
    """Messages that wait in its lane."""


class _Average:
    """Exponentially weighted averages of one partition, from the first sample on.

    All that was seen so far is what is averaged: the first value is not held against a zero that nobody measured.
    """

    __slots__ = ("_rate", "_waiting", "_weight", "_work", "watched_s")

    def __init__(self) -> None:
        self.watched_s = 0.0
        self._work = self._rate = self._waiting = self._weight = 0.0

    def add(self, sample: Sample, elapsed_s: float, half_life_s: float) -> None:
        keep = 0.5 ** (elapsed_s / half_life_s)
        new = 1.0 - keep
        self._work = keep * self._work + new * sample.seconds / elapsed_s
        self._rate = keep * self._rate + new * sample.calls / elapsed_s
        self._waiting = keep * self._waiting + new * sample.waiting
        self._weight = keep * self._weight + new
        self.watched_s += elapsed_s

    @property
    def load(self) -> float:
        """Seconds of work a second: what was done, and what waits if it were to be caught up with."""
        each_s = self._work / self._rate if self._rate else 0.0
        return (self._work + self._waiting * each_s / _CATCH_UP_S) / self._weight


class Learning:
    """What a worker has learned of the partitions that it has."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._averages: dict[str, _Average] = {}

    def observe(self, samples: Mapping[str, Sample], elapsed_s: float) -> None:
        """Take in a look at all partitions that the worker has; others are forgotten."""
        if elapsed_s <= 0.0:
            return
        self._averages = {p: self._averages.get(p) or _Average() for p in samples}
        for partition, sample in samples.items():
            self._averages[partition].add(sample, elapsed_s, self._half_life_s)

    def loads(self) -> dict[str, float]:
        """The partitions that have been watched for long enough, and their loads."""
        enough_s = self._half_life_s * _KNOWN_AFTER
        return {p: average.load for p, average in self._averages.items() if average.watched_s >= enough_s}


def noticed(published: dict[str, float], learned: Mapping[str, float]) -> dict[str, float]:
    """What is to be published: what was published before, until it is noticeably wrong; then everything anew."""
    slight = _SLIGHT * sum(learned.values()) / len(learned) if learned else 0.0

    def is_right(partition: str, load: float) -> bool:
        before = published[partition]
        return abs(load - before) <= max(_NOTICEABLE * before, slight, IDLE_LOAD)

    if published.keys() == learned.keys() and all(is_right(p, load) for p, load in learned.items()):
        more = sum(learned.values()) - sum(published.values())
        if abs(more) <= max(_SLIGHT * sum(published.values()), IDLE_LOAD * len(published)):
            return published
    return {partition: float(f"{load:.3g}") for partition, load in learned.items()}


# ── sharing out, at the rebalancer ────────────────────────────────────────────────────────────────────────────────


class LoadBook:
    """The loads of all partitions, as their owners say, and before those know, as the last ones that knew said.

    What a worker said that is gone counts for the partitions it had until their new owners have figures of their own.
    """

    def __init__(self) -> None:
        self._records: dict[str, LoadRecord] = {}
        self._known: dict[str, float] = {}

    def take(self, worker: str, record: LoadRecord | None) -> None:
        """Take in the newest record of a worker; None: it has none any more."""
        if record is None:
            self._records.pop(worker, None)
        else:
            self._records[worker] = record

    def weights(
        self, owners: Mapping[str, str], given: Mapping[str, float] | None = None
    ) -> Mapping[str, float] | None:
        """Return the load of every partition, given who owns it (empty: nobody).

        Those that nobody has measured count as the mean of the others; in the proportions of `given`, if the
        application says something of them. With nothing measured at all, what is given is all there is.
        """
        known: dict[str, float] = {}
        unknown: list[str] = []
        for partition, owner in owners.items():
            record = self._records.get(owner)
            load = record.loads.get(partition) if record else None
            if load is None and (load := self._known.get(partition)) is None:
                unknown.append(partition)
            else:
                known[partition] = load
        known |= self._left_behind(unknown)
        self._known = known
        if not known:
            return given
        given = given or {}
        parts = sum(given.get(partition, 1.0) for partition in known)
        unit = sum(known.values()) / parts if parts else 0.0
        return {p: IDLE_LOAD + (known[p] if p in known else unit * given.get(p, 1.0)) for p in owners}

    def _left_behind(self, partitions: Iterable[str]) -> dict[str, float]:
        """What others say of partitions that are not, or no longer, theirs; the newest word counts."""
        wanted = frozenset(partitions)
        found: dict[str, float] = {}
        if wanted:
            for record in sorted(self._records.values(), key=lambda record: record.at):
                found |= {p: load for p, load in record.loads.items() if p in wanted}
        return found


def is_worth(
    moves: Iterable[tuple[str, str, float]],
    held: Collection[tuple[str, float]],
    weights: Mapping[str, float],
    hysteresis: float,
) -> bool:
    """Whether moves (from, to, load) bring some worker clearly nearer to its fair share of all loads.

    Clearly: by more than the hysteresis, as a part of what it has before or after. `held` is who has which load, and
    `weights` are the workers'. A giant, which is much more than a share by itself, does not count to what its worker
    has: it will stay, and beside it the rest would look like nothing.
    """
    per_weight = sum(load for _, load in held) / sum(weights.values()) if weights else 0.0
    excess = {worker: -per_weight * weight for worker, weight in weights.items()}
    movable = dict.fromkeys(weights, 0.0)
    shifts = dict.fromkeys(weights, 0.0)
    for worker, load in held:
        if worker in weights:
            excess[worker] += load
            movable[worker] += load if load <= _GIANT * per_weight * weights[worker] else 0.0
    for source, target, load in moves:
        for worker, shift in ((source, -load), (target, load)):
            if worker in shifts:
                shifts[worker] += shift
    for worker, shift in shifts.items():
        nearer = abs(excess[worker]) - abs(excess[worker] + shift)
        if nearer > hysteresis * max(movable[worker], movable[worker] + shift):
            return True
    return False


class Patience:
    """Whether something has lasted, at every look for the length of a window; and who has moved only just.

    What has moved for the sake of loads stays where it is for ten windows, however these change: nothing goes to and
    fro.
    """

    def __init__(self, window_s: float) -> None:
        self.since_s: float | None = None
        """Since when it has been so; None: it is not."""
        self._window_s = window_s
        self._rests: dict[str, float] = {}

    @property
    def ends_s(self) -> float:
        """When it will have lasted."""
        return (self.since_s or 0.0) + self._window_s

    def reset(self) -> None:
        """It is not so, or something was done about it."""
        self.since_s = None

    def is_over(self, now_s: float) -> bool:
        """It is so now: True when it has been for long enough."""
        if self.since_s is None:
            self.since_s = now_s
        return now_s >= self.ends_s

    def rest(self, partitions: Iterable[str], now_s: float) -> None:
        """These move now."""
        self._rests = {p: until_s for p, until_s in self._rests.items() if until_s > now_s}
        self._rests |= dict.fromkeys(partitions, now_s + _REST * self._window_s)

    def rests(self, partition: str, now_s: float) -> bool:
        """Whether a partition has moved too lately to move again."""
        return self._rests.get(partition, now_s) > now_s
