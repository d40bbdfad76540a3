"""Sticky: balanced counts with the smallest possible movement. The default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from parti.strategies.holdings import holdings
from parti.strategies.interface import Slot
from parti.strategies.ordering import natural_key, roster
from parti.strategies.shares import fair_shares, whole_quotas


class Sticky:
    """Give every worker its share and move no partition that need not move.

    A worker's quota is its share by weight and capacity, rounded up or down; with equal weights and room enough,
    counts differ by at most one. Those that hold more than the lower number are rounded up first, then those with
    the largest remainder. A partition moves only if its worker is gone or above its quota (the last ones in natural
    order leave), so the count of moves is `minimum_moves`. Without a previous assignment the result is even
    ranges. Loads of partitions do not matter.
    """

    name = "sticky"

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
        quotas = _quotas(slots, [len(mine) for mine in now.held], len(now.loose))
        for mine, quota in zip(now.held, quotas, strict=True):
            if len(mine) > quota:
                mine.sort(key=natural_key)
                now.loose.extend(mine[quota:])
                del mine[quota:]
        now.loose.sort(key=natural_key)
        start = 0
        for mine, quota in zip(now.held, quotas, strict=True):
            room = quota - len(mine)
            mine.extend(now.loose[start : start + room])
            start += room
        return now.assignment(slots)


def minimum_moves(partitions: Sequence[str], workers: Sequence[Slot], previous: Mapping[str, str]) -> int:
    """Return how many partitions at least must leave a living worker for a balanced assignment.

    Balanced: everybody has its share by weight and capacity, rounded up or down. Partitions whose worker is gone,
    or that had none, are not counted: they need a worker in any case.
    """
    slots = roster(workers)
    now = holdings(partitions, slots, previous)
    counts = [len(mine) for mine in now.held]
    quotas = _quotas(slots, counts, len(now.loose))
    return sum(max(0, count - quota) for count, quota in zip(counts, quotas, strict=True))


def _quotas(slots: Sequence[Slot], counts: Sequence[int], loose: int) -> list[int]:
    """Round the fair shares such that as few as possible of those that hold `counts` have to give any up."""
    shares = fair_shares(sum(counts) + loose, slots)

    def rank(i: int) -> tuple[bool, Fraction, int, int]:
        lower, above = divmod(shares[i], 1)
        # A worker above the lower number saves one move when it is rounded up, whatever its remainder.
        return counts[i] <= lower, -above, -counts[i], i

    return whole_quotas(shares, rank)
