"""What happens in a run, all of it decided by the seed: the fleet, the traffic, the faults and when they come."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace

RETENTIONS = ("limits", "interest", "workqueue")

SAFETY_S = 5.0
"""Length of the phase with faults."""
_SETTLE_S = 25.0
"""What a fleet without faults may take to settle, besides the wait for what the server delivers again."""


class FaultKind(enum.StrEnum):
    """What can happen to a fleet."""

    JOIN = "join"
    LEAVE = "leave"
    MOVE = "move"
    DRAIN = "drain"
    HALT = "halt"
    CRASH = "crash"
    PAUSE = "pause"
    CUT = "cut"
    SLOW = "slow"
    LOSS = "loss"
    CLOCK = "clock"
    SERVER = "server"
    LEADER = "leader"


PLANNED = (FaultKind.JOIN, FaultKind.LEAVE, FaultKind.MOVE, FaultKind.DRAIN, FaultKind.HALT)
"""What operators do in the course of a day; none of it may repeat a message."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens at `at_s` to the worker in slot `slot` (or to all), for `lasts_s`.

    An operator's orders name `partition` and the worker with the number of the slot.
    """

    kind: FaultKind
    at_s: float
    slot: int
    lasts_s: float
    partition: str = ""
    size: float = 0.0
    """Seconds of added latency or of a clock's jump, share of lost messages, seconds of lost acknowledgements."""


@dataclass(frozen=True, slots=True)
class Publish:
    """One message: when, where, how long its handler takes, how many attempts fail, how many processes it kills."""

    at_s: float
    partition: str
    takes_s: float
    fails: int = 0
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """The settings that differ from run to run."""

    lease_ttl_s: float
    leader_ttl_s: float
    scale_window_s: float
    cold_start_window_s: float
    min_rebalance_interval_s: float
    progress_interval_s: float
    update_min_interval_s: float
    ack_wait_s: float
    pull_batch: int
    max_ack_pending: int
    identities: bool
    rejoin_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    seed: int
    retention: str
    slots: int
    """Workers at the beginning; each slot holds at most one process at a time."""
    partitions: tuple[str, ...]
    timing: Timing
    latency_s: float
    publishes: tuple[Publish, ...]
    faults: tuple[Fault, ...]
    all_roles: bool
    """Whether somebody monitors and cleans up, too."""

    @property
    def liveness_s(self) -> float:
        """Within so long after the faults, everything must be finished and every partition have exactly one owner.

        A delivery that was lost with the last fault comes again only when its acknowledgement is overdue.
        """
        return self.timing.ack_wait_s + _SETTLE_S


def make_scenario(seed: int, *, retention: str | None = None) -> Scenario:
    """Decide everything from the seed; `retention` only replaces the one that the seed would choose."""
    chance = random.Random(f"parti-{seed}")
    chosen = chance.choice(RETENTIONS)
    slots = chance.choice((2, 2, 3, 3, 4))
    partitions = tuple(f"p{n}" for n in range(chance.randint(3, 8)))
    timing = _timing(chance)
    latency_s = chance.choice((0.0005, 0.002, 0.01))
    publishes = _traffic(chance, partitions)
    faults = _faults(chance, slots, partitions, timing)
    all_roles = chance.random() < 0.2
    return Scenario(seed, retention or chosen, slots, partitions, timing, latency_s, publishes, faults, all_roles)


def _timing(chance: random.Random) -> Timing:
    lease_ttl_s = chance.choice((1.0, 2.0, 2.0))
    return Timing(
        lease_ttl_s=lease_ttl_s,
        leader_ttl_s=chance.choice((1.0, 2.0)),
        scale_window_s=chance.choice((0.1, 0.3)),
        cold_start_window_s=chance.choice((0.0, 0.2)),
        min_rebalance_interval_s=chance.choice((0.0, 0.3, 1.0)),
        progress_interval_s=chance.choice((0.1, 0.3)),
        update_min_interval_s=chance.choice((0.0, 0.1)),
        ack_wait_s=chance.choice((1.0, 5.0, 30.0)),
        pull_batch=chance.choice((2, 10)),
        max_ack_pending=chance.choice((20, 100)),
        identities=chance.random() < 0.3,
        rejoin_s=chance.choice((0.0, 1.0, 2.0)),
    )


def _traffic(chance: random.Random, partitions: tuple[str, ...]) -> tuple[Publish, ...]:
    """Messages spread over the safety phase: steady, in bursts, and some partitions busier than others."""
    count = chance.randint(40, 100)
    slow = chance.choice((0.0, 0.05, 0.1, 0.4))
    failing = chance.choice((0.0, 0.0, 0.03))
    killers = set(chance.sample(range(count), chance.choice((1, 2)))) if chance.random() < 0.1 else set()
    weights = [chance.choice((1.0, 1.0, 4.0)) for _ in partitions]
    bursts = [chance.uniform(0.0, SAFETY_S * 0.9) for _ in range(4)]
    publishes = []
    for number in range(count):
        at_s = (
            chance.uniform(0.0, SAFETY_S) if chance.random() < 0.5 else chance.choice(bursts) + 0.01 * chance.random()
        )
        takes_s = 0.0 if chance.random() < 0.3 else chance.uniform(0.001, 0.02)
        if chance.random() < slow:
            takes_s = chance.uniform(0.05, 0.5)
        fails = 0
        if chance.random() < failing:
            fails = chance.choice((1, 1, 99))
        (partition,) = chance.choices(partitions, weights)
        kills = chance.choice((1, 99)) if number in killers else 0
        publishes.append(Publish(at_s, partition, takes_s, fails, kills))
    return tuple(sorted(publishes, key=lambda publish: publish.at_s))


_MOODS: tuple[tuple[FaultKind, ...], ...] = (
    PLANNED,
    (FaultKind.CRASH, FaultKind.CRASH, FaultKind.JOIN),
    (FaultKind.PAUSE, FaultKind.CUT, FaultKind.SLOW),
    (FaultKind.SERVER, FaultKind.LEADER, FaultKind.LOSS),
    tuple(FaultKind),
    tuple(FaultKind),
)
"""What kinds of faults may meet in one run: a mix of everything hides what two of them do together."""


def _faults(chance: random.Random, slots: int, partitions: tuple[str, ...], timing: Timing) -> tuple[Fault, ...]:
    mood = chance.choice(_MOODS)
    faults = []
    for _ in range(chance.randint(1, 5)):
        kind = chance.choice(mood)
        at_s = chance.uniform(0.2, SAFETY_S)
        slot = chance.randrange(slots)
        faults.append(_fault(chance, Fault(kind, at_s, slot, 0.0, chance.choice(partitions)), timing))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(chance: random.Random, fault: Fault, timing: Timing) -> Fault:
    """Decide how long it lasts and how bad it is."""
    ttl_s, kind = timing.lease_ttl_s, fault.kind
    lasts_s = chance.choice((chance.uniform(0.05, 0.5), chance.uniform(0.5, 1.2) * ttl_s, 3 * ttl_s))
    size = 0.0
    if kind in {FaultKind.CRASH, FaultKind.LEAVE, FaultKind.JOIN}:
        # How long the slot stays empty, or how long the additional worker stays.
        lasts_s = chance.choice((0.01, chance.uniform(0.1, 2 * ttl_s), SAFETY_S))
    elif kind in {FaultKind.MOVE, FaultKind.DRAIN, FaultKind.HALT}:
        lasts_s = chance.uniform(0.1, 3.0)
    elif kind is FaultKind.SLOW:
        lasts_s, size = chance.uniform(0.5, 3.0), chance.uniform(0.02, 0.4)
    elif kind is FaultKind.LOSS:
        lasts_s, size = chance.uniform(0.3, 2.0), chance.uniform(0.02, 0.3)
    elif kind is FaultKind.CLOCK:
        lasts_s, size = 0.0, chance.choice((-3600.0, -5.0, 0.5, 5.0, 3600.0))
    elif kind is FaultKind.SERVER:
        size = chance.choice((0.0, 0.05, 0.2))
    elif kind is FaultKind.LEADER:
        lasts_s = chance.choice((0.0, chance.uniform(0.02, 0.3), chance.uniform(0.5, 3.0)))
    return replace(fault, lasts_s=lasts_s, size=size)
