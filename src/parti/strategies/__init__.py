"""Pure assignment functions: who should own which partition.

    sticky        balanced counts, the smallest possible movement; the default
    hash          consistent hashing with bounded load: places follow from names, little movement
    weighted      loads of partitions shared out by weights of workers, little movement
    load          the same with loads that the workers measure
    range         even contiguous ranges: neighbours stay together
    round-robin   one by one: neighbours are spread

May import `parti.model`, `parti.errors` and pure modules of the standard library: no clock, no chance, no asyncio,
no nats. Guards MinimalMovement (a plan moves no more than its strategy promises, and the same input again moves
nothing), and that nobody gets more than its capacity.
"""

from __future__ import annotations

from parti.errors import ConfigError
from parti.strategies.even_range import EvenRange
from parti.strategies.hashing import ConsistentHash
from parti.strategies.interface import Slot, Strategy, learns_loads
from parti.strategies.measured import MeasuredLoad
from parti.strategies.ordering import natural_key, natural_order
from parti.strategies.round_robin import RoundRobin
from parti.strategies.sticky import Sticky, minimum_moves
from parti.strategies.weighted import Weighted

__all__ = [
    "DEFAULT_STRATEGY",
    "STRATEGY_NAMES",
    "ConsistentHash",
    "EvenRange",
    "MeasuredLoad",
    "RoundRobin",
    "Slot",
    "Sticky",
    "Strategy",
    "Weighted",
    "learns_loads",
    "minimum_moves",
    "natural_key",
    "natural_order",
    "strategy_named",
]

_STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (Sticky(), ConsistentHash(), Weighted(), MeasuredLoad(), EvenRange(), RoundRobin())
}
STRATEGY_NAMES = tuple(_STRATEGIES)
DEFAULT_STRATEGY = Sticky.name


def strategy_named(name: str) -> Strategy:
    """Return the strategy of that name; raises `ConfigError` when there is none."""
    strategy = _STRATEGIES.get(name)
    if strategy is None:
        raise ConfigError(
            f"unknown strategy {name!r}; expected one of {', '.join(STRATEGY_NAMES)}: "
            f"choose one of them, {DEFAULT_STRATEGY} if in doubt"
        )
    return strategy
