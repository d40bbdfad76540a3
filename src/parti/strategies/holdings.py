"""Who holds what before a change: the previous assignment, cut down to the partitions and workers that exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parti.strategies.interface import Slot


@dataclass(frozen=True, slots=True)
class Holdings:
    """What each worker holds, by its place in the roster, and what nobody holds."""

    held: list[list[str]]
    loose: list[str]

    def assignment(self, slots: Sequence[Slot]) -> dict[str, str]:
        """Turn what is held into a mapping from partition to worker."""
        return {p: slot.worker for slot, mine in zip(slots, self.held, strict=True) for p in mine}


def holdings(partitions: Iterable[str], slots: Sequence[Slot], previous: Mapping[str, str]) -> Holdings:
    """Sort partitions by their previous worker; those whose worker is gone, or that had none, are loose."""
    held: list[list[str]] = [[] for _ in slots]
    loose: list[str] = []
    place: dict[str | None, list[str]] = {slot.worker: mine for slot, mine in zip(slots, held, strict=True)}
    for partition in dict.fromkeys(partitions):
        place.get(previous.get(partition), loose).append(partition)
    return Holdings(held, loose)
