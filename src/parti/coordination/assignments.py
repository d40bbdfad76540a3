"""Assignments: what each worker is told, worked out from the claims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parti.errors import DecodeError
from parti.jetstream.kv import Entry, Write
from parti.model.fleet import (
    Assignment,
    Claim,
    Grant,
    HealthRecord,
    MemberRecord,
    decode,
    encode,
    key_of,
    name_of,
)
from parti.telemetry.refusals import Refusals

_HIGHEST = 2**47
"""A version above it is nobody's: versions grow by one with each assignment."""
_SKIPPED = 1000
"""Versions that are left out after one that nobody can read: the worker may know a newer one than it has reported."""


@dataclass(slots=True)
class _Known:
    """An assignment as last read or written."""

    revision: int = 0
    assignment: Assignment | None = None
    floor: int = 0
    """A version that the worker was told, when the record of it is unreadable."""
    gap: int = 0
    """Versions to leave out: the worker may have been told more than is known."""


@dataclass(slots=True)
class _Wanted:
    """What the claims say that a worker should be told."""

    partitions: dict[str, Grant] = field(default_factory=dict)
    incoming: dict[str, int] = field(default_factory=dict)
    at_least: int = 0
    """Version that a claim waits for: a worker may have to let go of what it was never told of, and has to say so."""


class Assignments:
    """All assignments, as last read or written; they can be made anew from the claims at any time."""

    def __init__(self, *, overlap: bool, refusals: Refusals | None = None) -> None:
        """`overlap`: a worker may be told to get ready for what another one still handles."""
        self._refusals = refusals
        self._overlap = overlap
        self._known: dict[str, _Known] = defaultdict(_Known)

    def load(self, entries: Mapping[str, Entry]) -> None:
        """Replace all that is known by what was read (`assignment.…` keys)."""
        before = {worker: known.assignment for worker, known in self._known.items() if known.assignment}
        self._known.clear()
        for key, entry in entries.items():
            known = self._known[name_of(key)] = _Known(entry.revision)
            try:
                known.assignment = _decoded(entry.value) if entry.value else None
            except DecodeError as error:
                told = before.get(name_of(key))
                known.floor, known.gap = (told.version, 0) if told else (0, _SKIPPED)
                if self._refusals:
                    self._refusals.note(key, entry.revision, error, "it is written again by the claims")

    def next_version(self, worker: str, health: HealthRecord | None) -> int:
        """Above every version that the worker has been told, also if the record of it is gone."""
        known = self._known[worker]
        said = (health.applied, health.ready) if health else ()
        applied = max([0, *(each for each in said if each <= _HIGHEST)])
        version = known.assignment.version if known.assignment else known.floor
        return max(version, applied) + known.gap + 1

    @property
    def told(self) -> dict[str, Assignment]:
        """What each worker was told last, as far as it can be read."""
        return {worker: known.assignment for worker, known in self._known.items() if known.assignment}

    def revision(self, worker: str) -> int:
        """The newest revision of an assignment that was read or written; 0: there was none."""
        return self._known[worker].revision if worker in self._known else 0

    def changed(
        self,
        claims: Mapping[str, Claim],
        members: Mapping[str, MemberRecord],
        health: Mapping[str, HealthRecord],
        *,
        term: int,
        stream_created: str,
    ) -> dict[str, Assignment]:
        """The assignments that these claims make different from what was last written."""
        changed = {}
        for worker, wanted in _wanted(claims, members, stream_created, overlap=self._overlap).items():
            known, incarnation = self._known[worker].assignment, members[worker].incarnation
            said = (known.incarnation, known.partitions, known.incoming) if known else None
            up_to_date = said == (incarnation, wanted.partitions, wanted.incoming)
            if up_to_date and known and known.version >= wanted.at_least:
                continue
            changed[worker] = Assignment(
                version=self.next_version(worker, health.get(worker)),
                term=term,
                incarnation=incarnation,
                stream_created=stream_created,
                partitions=wanted.partitions,
                incoming=wanted.incoming,
            )
        return changed

    def writes(self, assignments: Sequence[tuple[str, Assignment]]) -> list[Write]:
        """How to write these."""
        return [Write(key_of("assignment", w), encode(a), self._known[w].revision) for w, a in assignments]

    def written(self, assignments: Sequence[tuple[str, Assignment]], revisions: Sequence[int]) -> None:
        """They have been written."""
        for (worker, assignment), revision in zip(assignments, revisions, strict=True):
            self._known[worker] = _Known(revision, assignment)


def _decoded(value: bytes) -> Assignment:
    assignment = decode(value, Assignment)
    if assignment.version > _HIGHEST:
        raise DecodeError(f"version {assignment.version} is higher than any fleet gets")
    return assignment


def _wanted(
    claims: Mapping[str, Claim], members: Mapping[str, MemberRecord], stream_created: str, *, overlap: bool
) -> dict[str, _Wanted]:
    wanted = {worker: _Wanted() for worker, member in members.items() if member.state != "away"}
    for partition, claim in claims.items():
        position = claim.position if claim.stream_created == stream_created else 0
        heir = wanted.get(claim.next)
        if overlap and claim.state in {"preparing", "moving"} and heir:
            # Until it is given to somebody: a heir that dropped it in between would have to get ready again.
            heir.incoming[partition] = position
            if claim.state == "preparing":
                heir.at_least = max(heir.at_least, claim.awaits)
        owner, member = wanted.get(claim.owner), members.get(claim.owner)
        if owner is None or member is None or claim.incarnation != member.incarnation:
            continue
        if claim.state == "moving":
            owner.at_least = max(owner.at_least, claim.awaits)
        elif claim.state in {"owned", "preparing"}:
            owner.partitions[partition] = Grant(
                claim.fence_token,
                position,
                claim.careful_to,
                claim.suspect,
                claim.deaths,
                claim.failed,
                claim.attempts,
            )
    return wanted
