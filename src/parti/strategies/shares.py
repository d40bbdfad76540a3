"""How much each worker should get: exact arithmetic, so that no rounding depends on the order of the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from parti.strategies.interface import Slot


def fair_shares(total: int, slots: Sequence[Slot], *, weighted: bool = True) -> list[Fraction]:
    """Split `total` in proportion to the workers' weights, or evenly.

    Nobody's share is above its capacity; what it cannot take goes to the others in the same proportion. The shares
    sum up to `total`, or to all capacities together where those are less.
    """
    weights = [Fraction(slot.weight) if weighted else Fraction(1) for slot in slots]
    shares = [Fraction(0)] * len(slots)
    left, weight_left = Fraction(total), sum(weights, Fraction(0))
    limited = [(Fraction(slot.capacity) / weights[i], i) for i, slot in enumerate(slots) if slot.capacity is not None]
    full = set[int]()
    # Tightest first: each one that is full leaves more per weight to those after it, never less.
    for per_weight, i in sorted(limited):
        if per_weight * weight_left > left:
            break
        shares[i] = per_weight * weights[i]
        left -= shares[i]
        weight_left -= weights[i]
        full.add(i)
    for i, weight in enumerate(weights):
        if i not in full:
            shares[i] = left * weight / weight_left
    return shares


def whole_quotas(shares: Sequence[Fraction], rank: Callable[[int], Any]) -> list[int]:
    """Round shares up or down to whole numbers of the same sum; those with the lowest `rank` are rounded up."""
    quotas = [share.numerator // share.denominator for share in shares]
    left = int(sum(shares, Fraction(0))) - sum(quotas)
    broken = [i for i, share in enumerate(shares) if share.denominator > 1]
    for i in sorted(broken, key=rank)[:left]:
        quotas[i] += 1
    return quotas
