"""What the rebalancer sees of the fleet, what it may want, and what it may decide: the values of the planner."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from parti.model.fleet import Claim, HealthRecord, MemberState, Orders


class FleetState(enum.StrEnum):
    """What a worker, or the fleet as the rebalancer sees it, is doing."""

    INIT = "init"
    CLAIMING_ID = "claiming id"
    STANDBY = "standby"
    ELECTION = "election"
    WAITING = "waiting"
    STABLE = "stable"
    SCALING = "scaling"
    REBALANCING = "rebalancing"
    EMERGENCY = "emergency"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class MemberView:
    """A worker whose lease has not ended."""

    incarnation: int
    state: MemberState = "active"
    capacity: int = 500
    weight: float = 1.0
    guest: bool = False
    """It gets nothing but what is placed on it."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything that a decision is based on, at one moment."""

    now_s: float
    members: Mapping[str, MemberView]
    partitions: Sequence[str]
    claims: Mapping[str, Claim]
    health: Mapping[str, HealthRecord] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    """Workers that are gone and said so; others that are gone are lost."""
    weights: Mapping[str, float] | None = None
    """Load of each partition, if known."""
    orders: Orders = field(default_factory=Orders)


@dataclass(frozen=True, slots=True)
class Policy:
    """Windows and limits, all in seconds unless said otherwise."""

    cold_start_window_s: float = 1.0
    """With nobody owning anything: wait so long after the last join, for others to show up."""
    scale_window_s: float = 3.0
    """Before moves between live workers: wait so long after the last join or leave."""
    min_rebalance_interval_s: float = 5.0
    takeover_grace_s: float = 2.0
    """A new rebalancer does not count anybody as gone before this."""
    hysteresis: float = 0.1
    """Imbalance that is not worth moving for, as a share of the mean number of partitions per worker."""
    retry_s: float = 1.0
    """A claim that could not be written is left alone for so long."""
    overlap: bool = True
    """Whether the next owner can get ready while the last one still handles; not on work-queue streams."""
    ready_within_s: float = 5.0
    """A next owner that is not ready by then does not get the partition."""
    moves_at_once: int = 200
    """Most partitions that are on their way at the same time."""
    load_window_s: float = 0.0
    """Loads are measured: an imbalance of them has to last so long. 0: they are not, and it need not."""


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Give:
    """Make `owner` the owner, with a larger fence token, at the position where the last one stopped."""

    partition: str
    owner: str
    reason: str
    cause: str = ""
    """The reason in a word (`parti.core.causes`), here and below."""


@dataclass(frozen=True, slots=True)
class BeginMove:
    """Move a partition to `next` (or to nobody, when it is no longer wanted).

    `next` gets ready first, where that is possible; otherwise the owner is told to let go at once.
    """

    partition: str
    next: str
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody owns the partition from now on; its position is kept."""

    partition: str
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """The next owner is ready: tell the owner to let go."""

    partition: str
    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """The next owner did not get ready: the owner, who never stopped, keeps the partition."""

    partition: str
    reason: str
    cause: str = ""


Command: TypeAlias = Give | BeginMove | Release | Keep | Free


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, what the fleet is doing, why, and when to look again without being asked."""

    commands: tuple[Command, ...]
    state: FleetState
    reason: str
    wake_at_s: float | None = None


_NAMED = 10
"""Most partitions that a sentence names."""


def names_of(partitions: Sequence[str]) -> str:
    """The partitions by name, or the first ones of many."""
    more = len(partitions) - _NAMED
    return ", ".join(partitions[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def count_of(number: int, what: str = "partition") -> str:
    """A number of things, in words."""
    return f"{number} {what}{'s' * (number != 1)}"
