"""What a strategy is: a pure function from partitions, workers and the previous assignment to the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from parti.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker as a strategy sees it.

    Raises `ConfigError` for a capacity below 0, and for a weight that is not a finite number above 0: a worker that
    shall get nothing has capacity 0.
    """

    worker: str
    capacity: int | None = None
    """Most partitions that it takes; None for no limit, 0 for none at all."""
    weight: float = 1.0
    """Its share of the load, against the others."""

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 0:
            raise ConfigError(
                f"worker {self.worker!r} has the capacity {self.capacity}; "
                f"expected 0 or more, or none for no limit: change its capacity"
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(
                f"worker {self.worker!r} has the weight {self.weight}; "
                f"expected a finite number above 0: change its weight, or set its capacity to 0 to give it nothing"
            )


class Strategy(Protocol):
    """Decides who should own what.

    Pure and deterministic: the result depends on the arguments' contents only, not on the order of partitions or
    workers. Every partition gets a worker unless all are full; nobody gets more than its capacity. The result as
    `previous` of the same call again gives the same result.
    """

    name: str

    def assign(
        self,
        partitions: Sequence[str],
        workers: Sequence[Slot],
        previous: Mapping[str, str],
        weights: Mapping[str, float] | None = None,
    ) -> dict[str, str]:
        """Map partitions to workers; `previous` may name workers that are gone and partitions that are gone.

        A partition that is listed twice counts once; a partition that found no room is not in the result, whose
        entries come in no particular order. `weights` are the partitions' loads, for strategies that look at them.
        Raises `ConfigError` when two workers have one name.
        """
        ...


def learns_loads(strategy: Strategy) -> bool:
    """Whether a strategy wants the loads that workers measure as weights: it has `learns_loads = True`."""
    return bool(getattr(strategy, "learns_loads", False))
