"""Compares a stream with the notes that a handler took."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NOTE = struct.Struct("<QIdd")
NOTE_BYTES = _NOTE.size


class Note(NamedTuple):
    """What the handler writes down of one call."""

    seq: int
    digest: int
    stored_s: float
    handled_s: float

    def pack(self) -> bytes:
        """The note as it is kept in the file."""
        return _NOTE.pack(*self)


class Stored(NamedTuple):
    """One message as the stream holds it."""

    seq: int
    subject: str
    digest: int


def digest(subject: str, data: bytes) -> int:
    """Fingerprint by which a message in the stream and a note of it are recognised as the same."""
    return zlib.crc32(data, zlib.crc32(subject.encode()))


def read_notes(data: bytes) -> list[Note]:
    """Unpack the notes in the order in which they were taken; a half-written last one is left out."""
    whole = len(data) - len(data) % NOTE_BYTES
    return [Note(*fields) for fields in _NOTE.iter_unpack(data[:whole])]


@dataclass(frozen=True, slots=True)
class Findings:
    """What the comparison found."""

    published: int
    handled: int
    lost: int
    repeated: int
    out_of_order: int
    partitions: int

    @property
    def flawless(self) -> bool:
        """Every message handled once and in order."""
        return not (self.lost or self.repeated or self.out_of_order)


def compare(published: int, stream: Iterable[Stored], notes: Sequence[Note]) -> Findings:
    """Check `notes` against the stream.

    A message counts as handled only if its content was right too. A note that repeats another one, or that fits
    nothing in the stream, counts as repeated. Order is checked within each subject.
    """
    stored = {message.seq: message for message in stream}
    seen: set[int] = set()
    newest: dict[str, int] = {}
    out_of_order = 0
    for note in notes:
        message = stored.get(note.seq)
        if message is None or message.digest != note.digest or note.seq in seen:
            continue
        seen.add(note.seq)
        out_of_order += note.seq < newest.get(message.subject, 0)
        newest[message.subject] = max(note.seq, newest.get(message.subject, 0))
    return Findings(
        published=published,
        handled=len(seen),
        lost=max(published, len(stored)) - len(seen),
        repeated=len(notes) - len(seen),
        out_of_order=out_of_order,
        partitions=len(newest),
    )


def percentiles(values: Sequence[float], wanted: Sequence[int]) -> Mapping[int, float]:
    """Return the wanted percentiles (nearest rank); empty when there are no values."""
    ordered = sorted(values)
    return {p: ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in wanted} if ordered else {}
