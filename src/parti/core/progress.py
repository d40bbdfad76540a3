"""Positions, and the record that keeps them.

`floor` says that every message of a covered partition with a lower sequence is finished. A partition that is
further than the floor, or that is not covered (never owned, or owned earlier), has its own entry. Together they
give `position(p)` for any partition, in a record whose size follows the work in flight and not the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from parti.model.subjects import covers


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker has finished, as stored in `progress.<worker>`."""

    stream: str
    stream_created: str
    """Creation time of the stream: sequences of a recreated stream mean nothing."""
    floor: int = 1
    covered: tuple[str, ...] = ()
    """Subjects that the floor speaks for."""
    positions: dict[str, int] = {}
    """Positions, by partition id, that differ from the floor or are not covered."""
    writer: str = ""
    """Who wrote the record: a process recognises its own write whose answer got lost."""

    @property
    def highest(self) -> int:
        """The furthest position; none can be more than one past the end of the stream."""
        return max(self.floor, *self.positions.values()) if self.positions else self.floor

    def raised(self, subjects: tuple[str, ...], ack_floor: int) -> Progress:
        """Take in what a consumer with these subjects has acknowledged: its ack floor is a position too.

        Only where it speaks of the same subjects; parti never moves a consumer past what is finished.
        """
        if not self.covered and not self.positions:
            return msgspec.structs.replace(self, floor=ack_floor + 1, covered=subjects)
        if set(self.covered) != set(subjects) or ack_floor < self.floor:
            return self
        floor = ack_floor + 1
        positions = {p: pos for p, pos in self.positions.items() if pos > floor}
        return msgspec.structs.replace(self, floor=floor, positions=positions)

    def position(self, partition_id: str, subject: str) -> int:
        """The position of a partition; 0 when nothing is known of it."""
        own = self.positions.get(partition_id)
        if own is not None:
            return own
        return self.floor if self.covers(subject) else 0

    def covers(self, subject: str) -> bool:
        """Whether the floor speaks for a subject."""
        return subject in self.covered or any(covers(c, subject) for c in self.covered)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Progress)


def encode_progress(progress: Progress) -> bytes:
    """Serialise a record."""
    return _encoder.encode(progress)


def decode_progress(data: bytes) -> Progress:
    """Read a record; raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return _decoder.decode(data)


def summarise(
    *,
    stream: str,
    stream_created: str,
    floor: int,
    covered: Iterable[str],
    lanes: Iterable[tuple[str, int]],
    retired: Mapping[str, int],
    writer: str = "",
) -> Progress:
    """Fold lanes (partition id, position) and retired partitions into a record."""
    ahead = {pid: position for pid, position in lanes if position > floor}
    return Progress(
        stream=stream,
        stream_created=stream_created,
        floor=floor,
        covered=tuple(covered),
        positions={**retired, **ahead},
        writer=writer,
    )
