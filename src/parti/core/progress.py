"""Positions, and the record that keeps them.

`floor` says that every message of a covered partition with a lower sequence is finished. A partition that is
further has an entry in `ahead`. One that the floor does not speak for, because it is parked or because it was
released, has an entry in `behind`. Together they give `position(p)` for any partition, in a record whose size
follows the work in flight and not the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec

from parti.model.records import TAG, Count, decode, encode
from parti.model.subjects import covers, has_wildcard


class Progress(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True, tag_field=TAG, tag="progress"
):
    """What a worker has finished, as stored in `progress.<worker>`."""

    stream: str
    stream_created: str
    """Creation time of the stream: sequences of a recreated stream mean nothing."""
    floor: Count = 1
    covered: tuple[str, ...] = ()
    """Subjects that the floor speaks for."""
    ahead: dict[str, Count] = {}
    """Positions above the floor, by partition id."""
    behind: dict[str, Count] = {}
    """Positions that stand whatever the floor says, by partition id."""
    trying: dict[str, Count] = {}
    """Messages that were about to be started when this was written, by partition id; only after a crash."""
    failed: dict[str, tuple[Count, Count]] = {}
    """Heads that failed and are to be tried again, by partition id: sequence, and attempts made."""
    incarnation: Count = 0
    """The holding of the worker id under which it was written; 0 for a worker on its own."""
    needs: Count = 0
    """The lowest sequence that a consumer may still have to deliver, where that is below the floor."""
    closed: bool = False
    """The worker stopped in good order: no handler was interrupted."""
    writer: str = ""
    """Who wrote the record: a process recognises its own write whose answer got lost."""

    @property
    def fresh(self) -> bool:
        """Whether nothing is known at all."""
        return not self.covered and not self.behind

    @property
    def highest(self) -> int:
        """The furthest position; none can be more than one past the end of the stream."""
        return max(self.floor, *self.ahead.values(), *self.behind.values(), 1)

    @property
    def need(self) -> int:
        """The lowest sequence that a consumer may still have to deliver."""
        return self.needs or self.floor

    def position(self, partition_id: str, subject: str) -> int:
        """The position of a partition; 0 when nothing is known of it."""
        own = self.behind.get(partition_id)
        if own is not None:
            return own
        if not self.covers(subject):
            return 0
        return max(self.floor, self.ahead.get(partition_id, 0))

    def covers(self, subject: str) -> bool:
        """Whether the floor speaks for a subject."""
        return subject in self._literals or any(covers(c, subject) for c in self._patterns)

    # The rebalancer asks for thousands of partitions in one go: a walk through all subjects for each of them would
    # hold up the event loop for seconds.

    @cached_property
    def _literals(self) -> frozenset[str]:
        return frozenset(self.covered)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(c for c in self.covered if has_wildcard(c))

    def raised(self, subjects: tuple[str, ...], ack_floor: int) -> Progress:
        """Take in what a consumer with these subjects has acknowledged: its ack floor is a position too.

        Only where it speaks of the same subjects, and never for partitions in `behind`: there the consumer has
        let go of messages that are not finished.
        """
        if self.fresh:
            return msgspec.structs.replace(self, floor=ack_floor + 1, covered=subjects)
        if set(self.covered) != set(subjects) or ack_floor < self.floor:
            return self
        floor = ack_floor + 1
        return msgspec.structs.replace(self, floor=floor, ahead={p: a for p, a in self.ahead.items() if a > floor})

    def advanced(self, positions: Mapping[str, int]) -> Progress:
        """Take in how far partitions are known to have got, by id; none goes back by it."""
        ahead = {p: max(at, self.ahead.get(p, 0)) for p, at in positions.items() if at > self.floor}
        return msgspec.structs.replace(self, ahead={**self.ahead, **ahead})


def encode_progress(progress: Progress) -> bytes:
    """Serialise a record."""
    return encode(progress)


def decode_progress(data: bytes) -> Progress:
    """Read a record; raises `DecodeError` on anything else."""
    return decode(data, Progress)


def summarise(
    *,
    stream: str,
    stream_created: str,
    floor: int,
    covered: Iterable[str],
    positions: Iterable[tuple[str, int]],
    behind: Mapping[str, int],
    needs: int = 0,
    trying: Mapping[str, int] | None = None,
    failed: Mapping[str, tuple[int, int]] | None = None,
    writer: str = "",
) -> Progress:
    """Fold the positions of lanes (partition id, position) and of those behind into a record."""
    return Progress(
        stream=stream,
        stream_created=stream_created,
        floor=floor,
        covered=tuple(covered),
        ahead={p: position for p, position in positions if position > floor and p not in behind},
        behind=dict(behind),
        needs=needs if needs < floor else 0,
        trying=dict(trying or {}),
        failed=dict(failed or {}),
        writer=writer,
    )
