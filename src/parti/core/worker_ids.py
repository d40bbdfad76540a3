"""Which worker id a process should take: a pure decision from the leases that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parti.errors import NoFreeWorkerId
from parti.model.fleet import MemberRecord


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that needs an id."""

    token: str
    identity: str = ""
    fixed: str | None = None
    """The one id that it insists on."""
    preferred: str | None = None
    """The id that it had a moment ago."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Ids to try in this order, and an id that is worth waiting for first, should its lease end soon."""

    candidates: Sequence[str]
    await_end_of: str | None = None


def choose_id(applicant: Applicant, held: Mapping[str, MemberRecord], names: Sequence[str]) -> Choice:
    """Decide between the ids `names`, of which `held` have a lease.

    An id may be taken over from its holder only where that holder is known to be gone: it said so (`away`), or it
    was a process of ours (the same token). A lease with our identity but another token is that of our predecessor,
    who crashed and whose lease will end, or of somebody who uses the identity too: whoever waits will see.

    Raises `NoFreeWorkerId` when the range is exhausted.
    """
    names = [applicant.fixed] if applicant.fixed else names
    ours = [name for name in names if name in held and may_take(applicant, held[name])]
    if ours:
        return Choice(ours)
    waiting_for = _predecessor(applicant, held)
    free = [name for name in names if name not in held]
    if applicant.preferred in free:
        free.remove(applicant.preferred)
        free.insert(0, applicant.preferred)
    if not free and waiting_for is None:
        raise NoFreeWorkerId(
            f"all {len(names)} worker ids ({names[0]} to {names[-1]}) are held by running workers; stop one, or "
            f"raise max_workers for the whole fleet"
        )
    return Choice(free, waiting_for)


def may_take(applicant: Applicant, record: MemberRecord) -> bool:
    """Whether the holder of an id is known to be gone."""
    if record.token == applicant.token:
        return True
    expected = bool(record.identity) and record.identity == applicant.identity
    return record.state == "away" and (expected or applicant.fixed is not None)


def _predecessor(applicant: Applicant, held: Mapping[str, MemberRecord]) -> str | None:
    if applicant.fixed:
        return applicant.fixed if applicant.fixed in held else None
    if not applicant.identity:
        return None
    return next((name for name, record in held.items() if record.identity == applicant.identity), None)
