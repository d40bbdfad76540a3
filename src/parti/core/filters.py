"""Which subjects a worker's consumer carries, and what changes between two sets.

Guards: an empty set is never sent as a filter (the server reads it as "everything"), a set that is too large or
that overlaps itself is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parti.errors import OverlappingSubjects, TooManySubjects
from parti.model.partition import Partition
from parti.model.subjects import first_overlap, overlap, within


@dataclass(frozen=True, slots=True)
class FilterSet:
    """The subjects of a consumer, sorted and free of repetition, with the partition behind each."""

    partitions: dict[str, Partition]
    duplicates: int

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects in a stable order, so that equal sets give equal configurations."""
        return tuple(sorted(self.partitions))


@dataclass(frozen=True, slots=True)
class FilterDiff:
    """What an update adds and removes."""

    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing changes."""
        return not self.added and not self.removed


def build_filters(partitions: Iterable[Partition], *, max_subjects: int, shards: int = 1) -> FilterSet:
    """Deduplicate and check the subjects of the given partitions, for one worker with so many consumers.

    Raises `TooManySubjects` or `OverlappingSubjects`; nothing has changed then.
    """
    by_subject: dict[str, Partition] = {}
    total = 0
    for partition in partitions:
        total += 1
        by_subject.setdefault(partition.subject, partition)
    if len(by_subject) > max_subjects * shards:
        allowed = f"{max_subjects * shards} are allowed (max_subjects={max_subjects} x consumer_shards={shards})"
        raise TooManySubjects(
            f"{len(by_subject)} subjects for one worker, but at most {allowed}; nothing was changed: share the "
            f"partitions among more workers, use wildcards, or let the worker have more consumers (consumer_shards)"
        )
    pair = first_overlap(list(by_subject))
    if pair:
        raise OverlappingSubjects(
            f"subjects {pair[0]!r} and {pair[1]!r} overlap: a message could belong to both; nothing was changed: "
            f"remove one of them or make the wildcard narrower"
        )
    return FilterSet(by_subject, total - len(by_subject))


def find_unreadable(
    partitions: Sequence[Partition], stored: Sequence[str], *, max_subjects: int, shards: int = 1
) -> dict[str, str]:
    """Which of these a worker cannot read, by id, and why; of what is too much, the last ones.

    `stored`: what the messages of the stream lie under. `build_filters` takes all the others.
    """
    refused: dict[str, str] = {}
    subjects: dict[str, Partition] = {}
    for partition in partitions:
        if within(partition.subject, stored):
            subjects.setdefault(partition.subject, partition)
        else:
            refused[partition.id] = "they lie outside the stream; correct the template or the stream's subjects"
    if first_overlap(list(subjects)):
        for subject in _overlapping(subjects):
            refused[subjects.pop(subject).id] = "they overlap with others; remove one or make its wildcard narrower"
    room = max_subjects * shards
    for partition in list(subjects.values())[room:]:
        refused[partition.id] = (
            f"this worker takes {room} at most (max_subjects={max_subjects} x consumer_shards={shards}); "
            f"raise these, or start another worker"
        )
    return refused


def _overlapping(subjects: Iterable[str]) -> list[str]:
    """Those that overlap with one that comes before them and is none of these."""
    kept: list[str] = []
    found: list[str] = []
    for subject in subjects:
        (found if any(overlap(subject, other) for other in kept) else kept).append(subject)
    return found


def diff_filters(before: Iterable[str], after: Iterable[str]) -> FilterDiff:
    """Compare two sets of subjects."""
    old, new = set(before), set(after)
    return FilterDiff(tuple(sorted(new - old)), tuple(sorted(old - new)))
