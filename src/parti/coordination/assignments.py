"""Assignments: what each worker is told, worked out from the claims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

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

_log = structlog.get_logger("parti.assignments")


@dataclass(slots=True)
class _Known:
    """An assignment as last read or written."""

    revision: int = 0
    assignment: Assignment | None = None


@dataclass(slots=True)
class _Wanted:
    """What the claims say that a worker should be told."""

    partitions: dict[str, Grant] = field(default_factory=dict)
    incoming: dict[str, int] = field(default_factory=dict)
    at_least: int = 0
    """Version that a claim waits for: a worker may have to let go of what it was never told of, and has to say so."""


class Assignments:
    """All assignments, as last read or written; they can be made anew from the claims at any time."""

    def __init__(self, *, overlap: bool) -> None:
        """`overlap`: a worker may be told to get ready for what another one still handles."""
        self._overlap = overlap
        self._known: dict[str, _Known] = defaultdict(_Known)

    def load(self, entries: Mapping[str, Entry]) -> None:
        """Replace all that is known by what was read (`assignment.…` keys)."""
        self._known.clear()
        for key, entry in entries.items():
            known = self._known[name_of(key)] = _Known(entry.revision)
            try:
                known.assignment = decode(entry.value, Assignment) if entry.value else None
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                _log.error("an assignment is unreadable; it will be made anew", key=key, error=str(error))

    def next_version(self, worker: str, health: HealthRecord | None) -> int:
        """Above every version that the worker has been told, also if the record of it is gone."""
        known = self._known[worker].assignment
        applied = max(health.applied, health.ready) if health else 0
        return max(known.version if known else 0, applied) + 1

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
            grant = Grant(claim.fence_token, position, claim.careful_to, claim.suspect, claim.deaths)
            owner.partitions[partition] = grant
    return wanted
