"""What to read of a stream, and what was read: a range of sequences, and messages as parallel lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

_T = TypeVar("_T")
Range = tuple[int, int]
"""First sequence, and the one behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to read: `[start, end)` of a stream, and which subjects of it (none given: all)."""

    stream: str
    created: str
    start: int
    end: int
    subjects: tuple[str, ...] = ()
    payload: bool = True
    """False: payloads are left out of what is returned."""


@dataclass(slots=True)
class Chunk:
    """Consecutive messages as parallel lists.

    Sequence and time stand in `replies`, the acknowledgement subjects of the consumer, or, for direct gets, in
    `seqs` and `stamps_us`.
    """

    subjects: list[bytes] = field(default_factory=list)
    headers: list[bytes | None] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    stamps_us: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.subjects)

    def keep(self, wanted: Callable[[bytes], bool]) -> Chunk:
        """Only the messages of these subjects."""
        known: dict[bytes, bool] = {}
        chosen = []
        for index, subject in enumerate(self.subjects):
            good = known.get(subject)
            if good is None:
                good = known[subject] = wanted(subject)
            if good:
                chosen.append(index)
        if len(chosen) == len(self.subjects):
            return self
        return Chunk(
            _pick(self.subjects, chosen),
            _pick(self.headers, chosen),
            _pick(self.payloads, chosen),
            _pick(self.replies, chosen),
            _pick(self.seqs, chosen),
            _pick(self.stamps_us, chosen),
        )


def _pick(values: list[_T], chosen: list[int]) -> list[_T]:
    return [values[index] for index in chosen] if values else []


def sequence_of(reply: bytes) -> int:
    """The stream sequence in an acknowledgement subject."""
    tokens = reply.split(b".")
    return int(tokens[5 if len(tokens) == 9 else 7])
