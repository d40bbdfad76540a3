"""Even contiguous ranges: neighbouring partitions stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parti.strategies.interface import Slot
from parti.strategies.ordering import natural_order, roster
from parti.strategies.shares import fair_shares, whole_quotas


class EvenRange:
    """Cut the sorted partitions into one run per worker.

    Partitions and workers are in natural order. With n partitions and w workers each gets n // w, the first n % w
    one more. A worker whose capacity is less is full, and its rest is spread evenly over those with room. Looks
    neither at the previous assignment nor at weights: when a worker comes or goes, the borders of all runs shift.
    """

    name = "range"

    def assign(
        self,
        partitions: Sequence[str],
        workers: Sequence[Slot],
        previous: Mapping[str, str],
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, str]:
        """Map partitions to workers."""
        slots, ordered = roster(workers), natural_order(partitions)
        quotas = whole_quotas(fair_shares(len(ordered), slots, weighted=False), rank=lambda i: i)
        assignment, start = dict[str, str](), 0
        for slot, quota in zip(slots, quotas, strict=True):
            assignment.update(dict.fromkeys(ordered[start : start + quota], slot.worker))
            start += quota
        return assignment
