"""Round robin: neighbouring partitions go to different workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parti.strategies.interface import Slot
from parti.strategies.ordering import natural_order, roster


class RoundRobin:
    """Deal the sorted partitions out one by one, in rounds over the workers that have room.

    Partitions and workers are in natural order. Counts differ by at most one where capacities allow. Looks neither
    at the previous assignment nor at weights: when a worker comes or goes, most partitions move.
    """

    name = "round-robin"

    def assign(
        self,
        partitions: Sequence[str],
        workers: Sequence[Slot],
        previous: Mapping[str, str],
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, str]:
        """Map partitions to workers."""
        ordered = natural_order(partitions)
        able = roster(workers)
        assignment, start, rounds = dict[str, str](), 0, 0
        while start < len(ordered):
            able = [slot for slot in able if slot.capacity is None or slot.capacity > rounds]
            if not able:
                break
            dealt = ordered[start : start + len(able)]
            assignment.update(zip(dealt, (slot.worker for slot in able), strict=False))
            start, rounds = start + len(dealt), rounds + 1
        return assignment
