"""A worker's part in the elections: it stands for every role, and serves in those that it wins."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Election, Office
from parti.coordination.fleet_parts import FleetParts, Memory
from parti.coordination.history import History
from parti.coordination.lease import clock
from parti.coordination.mirror_keeping import MirrorKeeper
from parti.coordination.rebalancer import Rebalancer, RebalancerParts
from parti.coordination.roles import clean_up, monitor
from parti.coordination.sources import SourceContext, SourceReader
from parti.coordination.worker_ids import Seat
from parti.core.fleet_view import Policy
from parti.model.fleet import ROLES, FleetRecord, Role
from parti.strategies import learns_loads
from parti.telemetry.tasks import retried


class Candidacy:
    """Stands for all roles on behalf of one holding of a worker id."""

    def __init__(
        self, parts: FleetParts, plane: ControlPlane, seat: Seat, fleet: FleetRecord, memory: Memory
    ) -> None:
        self._parts = parts
        self._plane = plane
        self._fleet = fleet
        self._memory = memory
        self._elections: dict[str, Election] = {role: self._election(role, seat) for role in ROLES}

    def _election(self, role: Role, seat: Seat) -> Election:
        return Election(
            self._plane.bucket,
            role,
            holder=seat.worker_id,
            token=seat.record.token,
            ttl_s=self._parts.settings.leader_ttl_s,
            serve=self._serve,
            floor=lambda: self._memory.floor,
        )

    def runs(self) -> Iterator[Coroutine[Any, Any, None]]:
        """One run for each role; cancelled, it resigns."""
        # An election that meets something unforeseen is repeated: it is no reason to stop handling.
        health = self._parts.health
        return (retried(election.run, f"election-{role}", health) for role, election in self._elections.items())

    def hint(self, role: str) -> None:
        """Nobody seems to hold the role: look at it."""
        if role in self._elections:
            self._elections[role].hint()

    @property
    def leads(self) -> bool:
        """Whether this worker is the rebalancer."""
        office = self._elections["rebalancer"].office
        return office is not None and office.lease.held

    async def _serve(self, office: Office) -> None:
        metrics = self._parts.metrics
        self._memory.knows(office.term)
        metrics.elections.inc(office.role)
        if office.role == "monitor":
            await monitor(self._plane, metrics)
        elif office.role == "cleanup":
            parts = self._parts
            keeper = MirrorKeeper(
                parts.api, self._plane.bucket, parts.settings, parts.stream, self._plane.members, metrics.refusals
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(clean_up(self._plane, office, parts.stream, self._fleet.prefix, metrics.refusals))
                tasks.create_task(keeper.run())
        else:
            await self._rebalance(office)

    async def _rebalance(self, office: Office) -> None:
        rebalancer = Rebalancer(self._rebalancer_parts(), office)
        leading = self._parts.metrics.leading
        leading.value = 1
        try:
            await rebalancer.run()
        finally:
            leading.value = 0
            self._memory.knows(rebalancer.newest_fence)

    def _rebalancer_parts(self) -> RebalancerParts:
        parts, s, memory = self._parts, self._parts.settings, self._memory
        # After a reset only the workers themselves know their positions: give all of them time to come back.
        patience_s = s.lease_ttl_s if memory.was_reset else 0.0
        after_outage = clock() - memory.lapsed_s < 2 * s.lease_ttl_s
        policy = Policy(
            cold_start_window_s=max(s.cold_start_window_s, patience_s),
            scale_window_s=s.scale_window_s,
            min_rebalance_interval_s=s.min_rebalance_interval_s,
            takeover_grace_s=s.lease_ttl_s if after_outage else s.lease_ttl_s / 3 + 0.5,
            hysteresis=s.hysteresis,
            overlap=parts.retention.overlap,
            ready_within_s=s.ready_within_s,
            moves_at_once=s.moves_at_once,
            load_window_s=s.load_window_s if learns_loads(parts.strategy) else 0.0,
        )
        context = SourceContext(parts.api, self._plane.bucket, parts.stream, parts.template)
        bucket = self._plane.bucket.name
        return RebalancerParts(
            self._plane,
            parts.stream,
            parts.retention,
            parts.template,
            SourceReader(parts.source, context),
            parts.strategy,
            parts.weights,
            self._fleet,
            policy,
            s.lease_ttl_s,
            parts.metrics,
            s.for_system_account() if s.has_system_account else None,
            s.takeover_on_disconnect,
            after_outage=after_outage,
            history=History(parts.api, bucket, parts.metrics.history_lost, replicas=s.replicas)
            if s.history
            else None,
            health=parts.health,
        )
