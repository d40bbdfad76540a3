"""Whether the new consumers see what the old ones do: one window at a time, partition by partition, against an SLO.

A window is a range of the stream. Before the switch, what the shadow consumers were given is compared with what the
stream stored in that range and with the old consumers' counters; after it, the fleet's positions and claims are. A
difference names its partition. An SLO that is broken in so many windows in a row calls for the way back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from parti.core.migration import ConsumerState


@dataclass(frozen=True, slots=True)
class Slo:
    """What a window may show at most."""

    lag_msgs: int = 10_000
    """Messages that wait, over all partitions."""
    redelivery_ratio: float = 0.05
    """Repeated deliveries, as a share of all."""
    breaches: int = 3
    """Windows in a row that break it before everything is taken back."""


@dataclass(frozen=True, slots=True)
class Side:
    """One way of reading, over a window."""

    deliveries: int = 0
    redelivered: int = 0
    lag_msgs: int = 0

    @property
    def redelivery_ratio(self) -> float:
        """Repeats as a share of all deliveries."""
        return self.redelivered / max(1, self.deliveries)


@dataclass(frozen=True, slots=True)
class Row:
    """One partition over a window."""

    partition: str
    stored: int = 0
    """Messages that the stream took in."""
    old_deliveries: int = 0
    old_lag_msgs: int = 0
    seen: int = 0
    """Of the stored ones, those that the new side was given."""
    repeated: int = 0
    """Deliveries to the new side beyond the first."""
    lag_msgs: int = 0
    """Messages that wait on the new side."""
    readers: tuple[str, ...] = ()
    """New consumers, or workers, that have it."""

    @property
    def missing(self) -> int:
        """Stored, and not given to the new side."""
        return self.stored - self.seen


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen."""

    number: int
    seconds: float
    first_seq: int
    last_seq: int
    rows: tuple[Row, ...]
    old: Side = field(default_factory=Side)
    new: Side = field(default_factory=Side)
    delivered: bool = True
    """Whether deliveries were compared; on work-queue and interest streams there is no second consumer to compare."""

    @property
    def unassigned(self) -> tuple[str, ...]:
        """Partitions that nobody has."""
        return tuple(row.partition for row in self.rows if not row.readers)

    @property
    def duplicated(self) -> tuple[str, ...]:
        """Partitions that several have, or whose messages came several times."""
        return tuple(row.partition for row in self.rows if len(row.readers) > 1 or row.repeated)

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Partitions that somebody has and not all of whose messages came."""
        return tuple(row.partition for row in self.rows if self.delivered and row.readers and row.missing)

    @property
    def same(self) -> bool:
        """Whether the new side is as the old one."""
        return not (self.unassigned or self.duplicated or self.incomplete)

    @property
    def stored(self) -> int:
        """Messages that the stream took in."""
        return sum(row.stored for row in self.rows)

    def breaches(self, slo: Slo) -> tuple[str, ...]:
        """What it breaks of an SLO, in words."""
        found = []
        if self.new.lag_msgs > slo.lag_msgs:
            found.append(f"{self.new.lag_msgs:,} messages wait, more than {slo.lag_msgs:,}")
        if self.new.redelivery_ratio > slo.redelivery_ratio:
            found.append(
                f"{self.new.redelivery_ratio:.1%} of the deliveries are repeats, more than {slo.redelivery_ratio:.1%}"
            )
        return tuple(found)


@dataclass(slots=True)
class Watchman:
    """Counts windows in a row that break an SLO."""

    slo: Slo
    in_a_row: int = 0

    def look(self, window: Window) -> bool:
        """Take in a window; True when it is time to take everything back."""
        self.in_a_row = self.in_a_row + 1 if window.breaches(self.slo) else 0
        return self.in_a_row >= self.slo.breaches


def compare(
    partitions: Iterable[str],
    *,
    stored: Mapping[str, Collection[int]],
    given: Mapping[str, Sequence[int]],
    readers: Mapping[str, Sequence[str]],
    before: Mapping[str, ConsumerState],
    after: Mapping[str, ConsumerState],
    lags: Mapping[str, int],
) -> tuple[Row, ...]:
    """A row for each partition, from the sequences that were stored and those that the new side was given.

    What was given and is not among the stored (it came after the window) does not count. `before` and `after` are the
    old consumers by partition.
    """
    rows = []
    for partition in partitions:
        want = set(stored.get(partition, ()))
        counts = Counter(seq for seq in given.get(partition, ()) if seq in want)
        earlier, later = before.get(partition), after.get(partition)
        rows.append(
            Row(
                partition,
                stored=len(want),
                old_deliveries=max(0, later.deliveries - earlier.deliveries) if earlier and later else 0,
                old_lag_msgs=later.lag_msgs if later else 0,
                seen=len(counts),
                repeated=sum(counts.values()) - len(counts),
                lag_msgs=lags.get(partition, 0),
                readers=tuple(readers.get(partition, ())),
            )
        )
    return tuple(rows)


def side_of(before: Mapping[str, ConsumerState], after: Mapping[str, ConsumerState]) -> Side:
    """What consumers did between two looks; those that were reset in between count from zero.

    The server tells how many messages in flight were delivered more than once, whenever that was. So of each consumer
    no more of them count than it has made deliveries since.
    """
    deliveries = redelivered = 0
    for name, later in after.items():
        earlier = before[name].deliveries if name in before else 0
        made = later.deliveries - earlier if later.deliveries >= earlier else later.deliveries
        deliveries += made
        redelivered += min(made, later.redelivered)
    return Side(
        deliveries=deliveries,
        redelivered=redelivered,
        lag_msgs=sum(state.lag_msgs for state in after.values()),
    )
