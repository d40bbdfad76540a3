"""A ring of hashed worker names: which worker comes first after a partition."""

from __future__ import annotations

import struct
from bisect import bisect
from collections.abc import Container, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from math import ceil, floor

from parti.strategies.interface import Slot

POINTS = 64
"""Points on the ring of a worker of average weight."""
_POINTS_PER_DIGEST = struct.Struct(">8Q")


@dataclass(frozen=True, slots=True)
class Ring:
    """Points of all workers in order; workers are known by their place in the roster."""

    points: list[int]
    owners: list[int]

    def narrowed_to(self, homes: Container[int]) -> Ring:
        """Return a ring with the same homes for them and wrong ones for others, that is quicker to search."""
        ours = [owner in homes for owner in self.owners]
        # The last point before one of theirs stays, as the border of what is theirs.
        kept = [i for i, (mine, before) in enumerate(zip(ours, [*ours[1:], ours[0]], strict=True)) if mine or before]
        return Ring([self.points[i] for i in kept], [self.owners[i] for i in kept])

    def place_of(self, point: int) -> int:
        """Return the place on the ring where the way from a point to a worker begins."""
        place = bisect(self.points, point)
        return place if place < len(self.points) else 0

    def home_of(self, point: int) -> int:
        """Return the first worker after a point."""
        return self.owners[self.place_of(point)]

    def first_open(self, point: int, is_open: Sequence[bool], steps: list[int]) -> int:
        """Return the first worker after a point that is open; at least one must be.

        `steps` leads from each place to the next and is changed, to remember the way past closed workers: without
        that, the last ones to find room would walk over half the ring. It holds as long as no worker opens again.
        """
        passed, place = list[int](), self.place_of(point)
        while not is_open[self.owners[place]]:
            passed.append(place)
            place = steps[place]
        for step in passed:
            steps[step] = place
        return self.owners[place]

    def steps(self) -> list[int]:
        """Return the way around the ring."""
        return [*range(1, len(self.points)), 0]


def hash_of(text: str) -> int:
    """Return a number of 64 bits that is the same on every machine, unlike Python's own hash."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def make_ring(slots: Sequence[Slot]) -> Ring:
    """Give every worker points in proportion to its weight; the same on every machine."""
    total = sum((Fraction(slot.weight) for slot in slots), Fraction(0))
    shift = len(slots).bit_length()
    packed: list[int] = []
    for i, slot in enumerate(slots):
        count = max(1, floor(POINTS * len(slots) * Fraction(slot.weight) / total + Fraction(1, 2)))
        packed.extend(point << shift | i for point in _points_of(slot.worker, count))
    packed.sort()
    return Ring([value >> shift for value in packed], [value & ((1 << shift) - 1) for value in packed])


def _points_of(worker: str, count: int) -> list[int]:
    points: list[int] = []
    for number in range(ceil(count / 8)):
        digest = blake2b(f"{worker}\n{number}".encode()).digest()
        points.extend(_POINTS_PER_DIGEST.unpack(digest))
    return points[:count]
