"""Weighted: partitions' loads shared out by workers' weights, within bounds, with little movement."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, fsum, isfinite

from parti.errors import ConfigError
from parti.strategies.holdings import holdings
from parti.strategies.interface import Slot
from parti.strategies.ordering import natural_key, roster
from parti.strategies.shares import fair_shares

BOUND = Fraction(11, 10)
"""A worker's load is all right between its fair share over this and its fair share times this."""
MEAN_LOAD = 1 << 20
"""The mean load of a partition in the whole units that loads are counted in, so that sums do not depend on order."""
IDLE_LOAD = MEAN_LOAD // 100
"""Least load of a partition: even an idle one costs a subject and a lane, and idle ones must not pile up."""


class Weighted:
    """Share out the partitions' loads in proportion to the workers' weights.

    Loose partitions go, heaviest first, to the worker that is furthest below its share, so a first assignment
    puts nobody above its share by the load of a whole partition, capacities aside. After that a partition stays
    unless its worker is above `bound`, or another one is so far below its share that it needs more, and only if the
    move brings the two closer to their shares. Loads are relative; a partition without one has load 1, none has less
    than a hundredth of the mean. Raises `ConfigError` for a load that is negative or not finite.
    """

    name = "weighted"
    bound = BOUND
    reach = Fraction(1)
    """A partition moves from one worker to another only if its load is less than this part of what separates them."""
    few = False
    """Rather one heavy partition moves than many light ones, if that brings the two nearer."""

    def assign(
        self,
        partitions: Sequence[str],
        workers: Sequence[Slot],
        previous: Mapping[str, str],
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, str]:
        """Map partitions to workers."""
        slots = roster(workers)
        now = holdings(partitions, slots, previous)
        scales = _Scales(slots, now.held, relative_loads(partitions, weights), self)
        scales.place(now.loose + scales.shed())
        while scales.relieve() + scales.fill():
            pass
        return now.assignment(slots)


def relative_loads(partitions: Sequence[str], weights: Mapping[str, float] | None) -> dict[str, int]:
    """Return every partition's load in whole units, `MEAN_LOAD` on average, or a little more where some are idle."""
    if not weights:
        return dict.fromkeys(partitions, MEAN_LOAD)
    loads = {partition: weights.get(partition, 1.0) for partition in partitions}
    if not all(isfinite(load) and load >= 0 for load in loads.values()):
        wrong = min((p for p, load in loads.items() if not (isfinite(load) and load >= 0)), key=natural_key)
        raise ConfigError(
            f"partition {wrong!r} has the load {loads[wrong]}; "
            f"expected a finite number of at least 0: change its weight, or leave it out for 1"
        )
    heaviest = max(loads.values(), default=0.0)
    if not heaviest:
        return dict.fromkeys(partitions, MEAN_LOAD)
    # Against the heaviest one first: a sum of loads as such could be too large for a float.
    mean = fsum(load / heaviest for load in loads.values()) / len(loads)
    return {p: max(IDLE_LOAD, round(load / heaviest / mean * MEAN_LOAD)) for p, load in loads.items()}


class _Scales:
    """Loads of all workers while partitions are being placed; changes `held` in place.

    `_excess` is load minus fair share. A move from one worker to another is made only if the partition's load is
    less than the difference of their excesses, or than a part of it, `reach`: the sum of all squared excesses then
    shrinks with every move, so moving comes to an end, and does not start again when called with the outcome.
    """

    def __init__(
        self, slots: Sequence[Slot], held: list[list[str]], loads: Mapping[str, int], manner: Weighted
    ) -> None:
        self._held = held
        self._load_of = loads.__getitem__
        self._capacities = [len(loads) if slot.capacity is None else slot.capacity for slot in slots]
        mean = Fraction(sum(loads.values()), max(1, len(loads)))
        shares = [floor(share * mean) for share in fair_shares(len(loads), slots)]
        self._excess = [sum(map(self._load_of, mine)) - share for mine, share in zip(held, shares, strict=True)]
        self._most = [floor(share * manner.bound) - share for share in shares]
        self._least = [ceil(share / manner.bound) - share for share in shares]
        self._reach, self._few = manner.reach.as_integer_ratio(), manner.few
        self._sorted = set[int]()

    def shed(self) -> list[str]:
        """Take from workers what is above their capacity, such that what stays is close to their share."""
        away: list[str] = []
        for i, mine in enumerate(self._held):
            while (surplus := len(mine) - self._capacities[i]) > 0:
                wanted = -(-self._excess[i] // surplus)
                away.append(self._take(i, self._index(i, wanted, most=wanted)))
        return away

    def place(self, loose: list[str]) -> None:
        """Give each partition, heaviest first, to the worker with room that is furthest below its share."""
        loose.sort()
        loose.sort(key=self._load_of, reverse=True)
        takers = self._takers()
        for partition in loose:
            if not takers:
                return
            _, i = takers[0]
            self._give(i, partition)
            if self._has_room(i):
                heapq.heapreplace(takers, (self._excess[i], i))
            else:
                heapq.heappop(takers)

    def relieve(self) -> int:
        """Move load from workers above their bound to those furthest below their share; return the count of moves."""
        moves, takers = 0, self._takers()
        donors = [(-excess, i) for i, excess in enumerate(self._excess) if excess > self._most[i]]
        heapq.heapify(donors)
        while donors and takers:
            (excess, taker), (negative, donor) = takers[0], donors[0]
            if excess != self._excess[taker] or not self._has_room(taker):
                heapq.heappop(takers)
            elif -negative != self._excess[donor] or not self._move(donor, taker, -negative - self._most[donor]):
                heapq.heappop(donors)
            else:
                moves += 1
                for i in (donor, taker):
                    heapq.heappush(takers, (self._excess[i], i))
                    if self._excess[i] > self._most[i]:
                        heapq.heappush(donors, (-self._excess[i], i))
        return moves

    def fill(self) -> int:
        """Move load to workers far below their share from those furthest above theirs; return the count of moves."""
        moves, takers = 0, [entry for entry in self._takers() if entry[0] < self._least[entry[1]]]
        donors = [(-excess, i) for i, excess in enumerate(self._excess)]
        heapq.heapify(takers)
        heapq.heapify(donors)
        while donors and takers:
            (excess, taker), (negative, donor) = takers[0], donors[0]
            if excess != self._excess[taker] or not self._has_room(taker):
                heapq.heappop(takers)
            elif -negative != self._excess[donor] or not self._move(donor, taker, self._least[taker] - excess):
                # What cannot help the one that lacks most can help nobody else.
                heapq.heappop(donors)
            else:
                moves += 1
                for i in (donor, taker):
                    heapq.heappush(donors, (-self._excess[i], i))
                    if self._excess[i] < self._least[i]:
                        heapq.heappush(takers, (self._excess[i], i))
        return moves

    def _takers(self) -> list[tuple[int, int]]:
        """Return a heap of the workers with room, the one furthest below its share on top."""
        takers = [(excess, i) for i, excess in enumerate(self._excess) if self._has_room(i)]
        heapq.heapify(takers)
        return takers

    def _has_room(self, i: int) -> bool:
        return len(self._held[i]) < self._capacities[i]

    def _move(self, donor: int, taker: int, wanted: int) -> bool:
        """Move one partition of about the load wanted, if there is one that brings both closer to their shares."""
        difference = self._excess[donor] - self._excess[taker]
        # Up to half the difference the two do not change roles, so a hot partition rather stays than the light ones.
        index = self._index(donor, wanted, difference // 2)
        if self._few:
            index = self._heavier(donor, index, wanted, difference)
        if not self._held[donor] or not self._reaches(self._held[donor][index], difference):
            return False
        self._give(taker, self._take(donor, index))
        return True

    def _reaches(self, partition: str, difference: int) -> bool:
        part, whole = self._reach
        return self._load_of(partition) * whole < difference * part

    def _heavier(self, i: int, index: int, wanted: int, difference: int) -> int:
        """The next heavier partition, if the one found is not enough and that one would bring the two nearer."""
        mine = self._held[i]
        if index + 1 >= len(mine) or (light := self._load_of(mine[index])) >= wanted:
            return index
        nearer = 2 * self._load_of(mine[index + 1]) - difference < difference - 2 * light
        return index + 1 if nearer and self._reaches(mine[index + 1], difference) else index

    def _index(self, i: int, wanted: int, most: int) -> int:
        """Find the lightest one of at least the load wanted, else the heaviest; if it can be, none above `most`."""
        mine = self._held[i]
        if i not in self._sorted:
            mine.sort()
            mine.sort(key=self._load_of)
            self._sorted.add(i)
        end = max(1, bisect_right(mine, most, key=self._load_of))
        return min(bisect_left(mine, wanted, hi=end, key=self._load_of), end - 1) if mine else 0

    def _take(self, i: int, index: int) -> str:
        partition = self._held[i].pop(index)
        self._excess[i] -= self._load_of(partition)
        return partition

    def _give(self, i: int, partition: str) -> None:
        self._excess[i] += self._load_of(partition)
        if i in self._sorted:
            insort(self._held[i], partition, key=self._load_of)
        else:
            self._held[i].append(partition)
