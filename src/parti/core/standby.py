"""Standing by: when a process takes a worker id over from the one that holds it.

Whoever stands by looks at the lease again and again. It takes the id when its holder has given it away, or when the
lease has not been renewed for so long that its holder, if it lives, has stopped by itself; a little before the server
lets it end, so that the fleet sees a worker that restarts and moves nothing. Guards OneOwner: silence is counted from
the moment at which a renewal was seen, which is never before it was sent. After an outage in which nobody could look
or renew anything, the last holder goes first: it knows all that it has finished, and others only what was stored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from parti.core.lease import LeaseTerms
from parti.core.worker_ids import Applicant, may_take
from parti.model.fleet import MemberRecord

_RANK_S = 0.25
_SETTLED_TTLS = 2.0
_ALIVE_SHARE = 0.6
_BLIND_SHARE = 0.5
"""Whoever could not look for so much of a lease cannot tell a dead holder from one that could not renew it."""


class Step(enum.Enum):
    """What to do after a look at the lease."""

    WAIT = "wait"
    TAKE = "take"


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease as it was found; `revision` 0 and no record: nobody holds the id."""

    revision: int
    record: MemberRecord | None


class Understudy:
    """Decides for one process that stands by. `rank`: of several, those with smaller numbers go first.

    `yields_until_s`: it has just given the id away, and somebody else should have it before.
    """

    def __init__(
        self, applicant: Applicant, terms: LeaseTerms, *, rank: int = 0, yields_until_s: float = float("-inf")
    ) -> None:
        self._applicant = applicant
        self._terms = terms
        self._patience_s = rank * _RANK_S
        self._yields_until_s = yields_until_s
        self._looked_s = float("inf")
        self._blind_until_s = float("-inf")
        self.replaced = applicant.preferred is None
        """Somebody else has held the id since this process did, if it ever did."""
        self._revision = -1
        self._incarnation = -1
        self._heard_s = self._since_s = self._free_s = float("inf")

    def look(self, seen: Seen, now_s: float) -> Step:
        """What to do, given what was read before `now_s`."""
        if self.replaced and now_s - self._looked_s > _BLIND_SHARE * self._terms.ttl_s:
            self._blind_until_s = self._since_s = now_s
        self._looked_s = now_s
        if seen.revision != self._revision:
            self._revision, self._heard_s = seen.revision, now_s
        held = seen.record is not None and seen.record.state != "left"
        incarnation = seen.record.incarnation if seen.record and held else 0
        if incarnation != self._incarnation:
            self._incarnation, self._since_s = incarnation, now_s
        self.replaced |= seen.record is not None and seen.record.token not in {"", self._applicant.token}
        free = not held or (seen.record is not None and may_take(self._applicant, seen.record))
        over_s = now_s if free else self._terms.silent_until(max(self._heard_s, self._blind_until_s))
        self._free_s = min(self._free_s, over_s) if free else over_s
        yields_until_s = max(self._yields_until_s, self._blind_until_s + self._terms.ttl_s)
        due = now_s >= max(self._free_s + self._patience_s, yields_until_s if free else over_s)
        return Step.TAKE if due else Step.WAIT

    def holder_lives(self, now_s: float) -> bool:
        """Whether somebody has held the id for a while and renews it: whoever is pinned then is not needed."""
        settled = now_s - self._since_s >= _SETTLED_TTLS * self._terms.ttl_s
        return self._incarnation > 0 and settled and now_s - self._heard_s < _ALIVE_SHARE * self._terms.ttl_s
