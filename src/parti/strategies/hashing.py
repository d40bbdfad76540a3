"""Consistent hashing with bounded load: a partition's place follows from names more than from history."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from math import ceil, floor

from parti.strategies.holdings import holdings
from parti.strategies.interface import Slot
from parti.strategies.ordering import roster
from parti.strategies.ring import Ring, hash_of, make_ring
from parti.strategies.shares import fair_shares


class ConsistentHash:
    """Place partitions on a ring of hashed worker names, bounded by everybody's fair share.

    A worker holds its share by weight and capacity, rounded up or down. A partition's home is the first worker after
    it on the ring; it goes to the first one with room, mostly its home, so a fleet that has lost its memory finds
    most places again. After that it stays as long as its worker lives and is within bounds: a worker that leaves
    moves nothing but its own partitions, one that joins gets its homes first, and one that comes back gets back most
    of what it had. The count of moves is `minimum_moves`. Loads of partitions do not matter.
    """

    name = "hash"

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
        table = _Table(slots, now.held, len(now.loose))
        table.place(now.loose)
        table.pull_homes()
        table.place(table.shed())
        table.pull_from_the_fullest()
        return now.assignment(slots)


class _Table:
    """Counts and bounds of all workers while partitions are being placed; changes `held` in place."""

    def __init__(self, slots: Sequence[Slot], held: list[list[str]], loose: int) -> None:
        self._slots = slots
        self._held = held
        shares = fair_shares(sum(map(len, held)) + loose, slots)
        self._lower = [floor(share) for share in shares]
        self._upper = [ceil(share) for share in shares]

    @cached_property
    def _ring(self) -> Ring:
        """Made when it is needed: mostly nothing has changed."""
        return make_ring(self._slots)

    def place(self, loose: Iterable[str]) -> None:
        """Give each partition to the first worker with room, but first of all as many as they lack to those in need.

        In need: below the lower bound. As long as there are more partitions than they lack, all with room are open.
        """
        ordered = sorted((hash_of(partition), partition) for partition in loose)
        lacking, limits, is_open = sum(self._lacking().values()), self._upper, list[bool]()
        open_count, steps = 0, self._ring.steps() if ordered else []
        for left, (point, partition) in zip(range(len(ordered), 0, -1), ordered, strict=True):
            if not is_open or (limits is self._upper and left <= lacking):
                limits = self._lower if left <= lacking else self._upper
                is_open = [len(mine) < limit for mine, limit in zip(self._held, limits, strict=True)]
                open_count = sum(is_open)
            if not open_count:
                return
            i = self._ring.first_open(point, is_open, steps)
            lacking -= len(self._held[i]) < self._lower[i]
            self._held[i].append(partition)
            if len(self._held[i]) >= limits[i]:
                is_open[i] = False
                open_count -= 1

    def pull_homes(self) -> None:
        """Bring those in need up to the lower bound with partitions that are at home there.

        Workers above the upper bound give first of all: what they have too many goes to those in need anyway, so
        workers within bounds give only what is lacking beyond that.
        """
        lacking = self._lacking()
        if not lacking:
            return
        surplus = sum(max(0, len(mine) - upper) for mine, upper in zip(self._held, self._upper, strict=True))
        beyond = sum(lacking.values()) - surplus
        gone: dict[int, set[str]] = {}
        for partition, donor, home in self._found_away(lacking):
            left = len(self._held[donor]) - len(gone.get(donor, ()))
            above = left > self._upper[donor]
            if lacking[home] and (above or (left > self._lower[donor] and beyond > 0)):
                gone.setdefault(donor, set()).add(partition)
                self._held[home].append(partition)
                lacking[home] -= 1
                beyond -= not above
        for donor, given in gone.items():
            self._held[donor][:] = [partition for partition in self._held[donor] if partition not in given]

    def shed(self) -> list[str]:
        """Take from workers what is above their upper bound."""
        away: list[str] = []
        for i, mine in enumerate(self._held):
            if len(mine) > self._upper[i]:
                self._sort_by_attachment(i)
                away.extend(mine[self._upper[i] :])
                del mine[self._upper[i] :]
        return away

    def pull_from_the_fullest(self) -> None:
        """Bring those in need up to the lower bound with what others can spare."""
        fullest = [
            (lower - len(mine), i) for i, (lower, mine) in enumerate(zip(self._lower, self._held, strict=True))
        ]
        heapq.heapify(fullest)
        seen = set[int]()
        for i, lacking in self._lacking().items():
            for _ in range(lacking):
                # As long as one is below its share another one is above its own, and so above its lower bound.
                below, donor = fullest[0]
                if donor not in seen:
                    self._sort_by_attachment(donor)
                    seen.add(donor)
                self._held[i].append(self._held[donor].pop())
                heapq.heapreplace(fullest, (below + 1, donor))

    def _lacking(self) -> dict[int, int]:
        """Return who is below the lower bound, and by how much."""
        lacking = {i: lower - len(mine) for i, (lower, mine) in enumerate(zip(self._lower, self._held, strict=True))}
        return {i: count for i, count in lacking.items() if count > 0}

    def _found_away(self, homes: Container[int]) -> list[tuple[str, int, int]]:
        """Return the partitions at home with one of `homes` that others hold and could spare, by point."""
        found: list[tuple[int, str, int, int]] = []
        ring = self._ring.narrowed_to(homes)
        for donor, mine in enumerate(self._held):
            if len(mine) > self._lower[donor]:
                for partition in mine:
                    point = hash_of(partition)
                    home = ring.home_of(point)
                    if home in homes:
                        found.append((point, partition, donor, home))
        return [(partition, donor, home) for _, partition, donor, home in sorted(found)]

    def _sort_by_attachment(self, i: int) -> None:
        """Put those first that are at home, then by their points."""

        def key(partition: str) -> tuple[bool, int, str]:
            point = hash_of(partition)
            return self._ring.home_of(point) != i, point, partition

        self._held[i].sort(key=key)
