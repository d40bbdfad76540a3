"""Quantiles of what a histogram has counted."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value that a share of the observations does not exceed, estimated within its bucket; 0 without any.

    `counts` has one more entry than `bounds`: what exceeds the last bound. For that the last bound is returned, so
    the answer is then too small.

    >>> quantile([1.0, 2.0], [5, 5, 0], 0.5), quantile([1.0, 2.0], [5, 5, 0], 0.75), quantile([1.0], [0, 3], 0.5)
    (1.0, 1.5, 1.0)
    """
    total = sum(counts)
    if not total:
        return 0.0
    wanted, below, lower = share * total, 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    return bounds[-1]
