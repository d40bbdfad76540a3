"""Moves, as claims: what each command of the planner makes of a partition's claim, and how long a move took.

Guards NoLoss and NoRepeatOnPlannedMove where they are written down: whoever gets a partition gets what the last one
left behind, under a fence token of its own, and a step that waits for a worker waits for a version of its assignment
that it has not been told yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from parti.coordination.assignments import Assignments
from parti.coordination.claims import ClaimStore
from parti.coordination.lease import clock
from parti.coordination.membership import Membership
from parti.coordination.takeover import Estates
from parti.core.fleet_view import BeginMove, Command, Free, Give, Keep
from parti.core.guests import home_after
from parti.model.fleet import Claim, HealthRecord
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.rebalancer")


class Moves:
    """Makes the claims that carry commands out, and writes none of them; `health` is kept current by its owner."""

    def __init__(
        self,
        claims: ClaimStore,
        assignments: Assignments,
        membership: Membership,
        health: Mapping[str, HealthRecord],
        metrics: Metrics,
        *,
        overlap: bool,
    ) -> None:
        """`overlap`: a worker may get ready for what another one still handles."""
        self.took_s: dict[str, float] = {}
        """Planned moves that are about to be written as done, and how long they took."""
        self._claims = claims
        self._assignments = assignments
        self._membership = membership
        self._health = health
        self._metrics = metrics
        self._overlap = overlap
        self._begun_s: dict[str, float] = {}

    def claim_for(self, command: Command, estates: Estates | None) -> Claim:
        """The claim that carries a command out; `estates` is there for whatever changes hands, or is about to."""
        partition = command.partition
        if isinstance(command, Give):
            assert estates
            return self._given(command, estates)
        claim = self._claims.claims[partition]
        if isinstance(command, BeginMove):
            assert estates
            prepares = bool(command.next) and self._overlap
            self._begun_s[partition] = clock()
            return self._claims.changed(
                partition,
                state="preparing" if prepares else "moving",
                next=command.next,
                reason=command.reason,
                cause=command.cause,
                awaits=self._next_version(command.next if prepares else claim.owner),
                position=estates.position(partition),
                stream_created=estates.stream_created,
            )
        if isinstance(command, Free):
            assert estates
            owner = self._membership.members.get(claim.owner)
            # What an owner that died has left behind is kept for the next one.
            estate = estates.of(partition, planned=owner is not None and owner.incarnation == claim.incarnation)
            return self._claims.changed(
                partition,
                owner="",
                next="",
                home="",
                state="free",
                awaits=0,
                position=estate.position,
                stream_created=estate.stream_created,
                careful_to=estate.careful_to,
                suspect=estate.suspect,
                deaths=estate.deaths,
                failed=estate.failed,
                attempts=estate.attempts,
                reason=command.reason,
                cause=command.cause,
            )
        if isinstance(command, Keep):
            _log.warning("a move was called off", partition=partition, next=claim.next, reason=command.reason)
            return self._claims.changed(
                partition, state="owned", next="", awaits=0, reason=command.reason, cause=command.cause
            )
        return self._claims.changed(partition, state="moving", awaits=self._next_version(claim.owner))

    def written(self) -> None:
        """The claims that were made have been written."""
        self.took_s.clear()

    def _given(self, give: Give, estates: Estates) -> Claim:
        partition, members = give.partition, self._membership.members
        found = self._claims.claims.get(partition)
        owner = members.get(found.owner) if found else None
        planned = bool(found and owner and found.state == "moving" and owner.incarnation == found.incarnation)
        moved = found is not None and found.owner not in {"", give.owner}
        if planned and moved and partition in self._begun_s:
            self.took_s[partition] = took_s = clock() - self._begun_s.pop(partition)
            self._metrics.move_duration.observe(took_s)
        self._metrics.claims_given.inc("moved" if moved else "kept" if found and found.owner else "new")
        estate = estates.of(partition, planned=planned)
        home = home_after(found, give.owner, [w for w, member in members.items() if member.guest])
        incarnation = members[give.owner].incarnation
        return self._claims.given(give.owner, incarnation, estate, reason=give.reason, cause=give.cause, home=home)

    def _next_version(self, worker: str) -> int:
        return self._assignments.next_version(worker, self._health.get(worker))
