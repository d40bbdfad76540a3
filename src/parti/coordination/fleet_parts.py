"""What a worker's manager is made of, and what it remembers while it comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parti.config import Settings
from parti.coordination.sources import PartitionSource
from parti.core.lease import NEVER_S
from parti.core.retention import Retention
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.model.partition import Template
from parti.strategies.interface import Strategy
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class FleetParts:
    """What the manager works with."""

    connection: Connection
    api: JetStreamApi
    settings: Settings
    stream: str
    retention: Retention
    template: Template
    source: PartitionSource
    strategy: Strategy
    weights: Callable[[], Mapping[str, float] | None]
    metrics: Metrics
    health: Health


@dataclass(slots=True)
class Memory:
    """What a process knows that may no longer be in the bucket."""

    floor: int = 0
    """The largest incarnation, term or fence token that it knows of."""
    was_reset: bool = False
    """Whether the bucket was deleted or made anew under it."""
    lapsed_s: float = NEVER_S
    """When its own lease ended last without being renewed."""

    def knows(self, *epochs: int) -> None:
        """Remember the largest of these."""
        self.floor = max(self.floor, *epochs)
