"""The lesser roles: the monitor looks at the fleet from outside the rebalancer, the cleanup tidies up."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import structlog

from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Office
from parti.coordination.lease import clock
from parti.coordination.records import KEYS, Records
from parti.errors import WrongRevision
from parti.jetstream.kv import MARKER_TTL_S, Write
from parti.jetstream.watch import Watch
from parti.model.fleet import key_of
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.roles")

_LOOK_S = 2.0
_RESYNC_S = 60.0
_COMPLAIN_AFTER_S = 15.0
_CLEAN_S = 60.0
_FORGET_AFTER_S = 600.0


async def monitor(plane: ControlPlane, metrics: Metrics) -> None:
    """Measure the fleet by its records, and complain about what lasts too long."""
    records = Records()
    watch = Watch(plane.connection, plane.api, plane.bucket.name, KEYS[:-1], records.take, resync_s=_RESYNC_S)
    since: dict[str, float] = {}
    try:
        await watch.start()
        while True:
            report = records.report()
            metrics.fleet_workers.value = len(records.members)
            metrics.fleet_partitions.value = report.partitions
            metrics.fleet_unowned.value = len(report.unowned) + report.unclaimed
            metrics.fleet_moving.value = len(report.moving)
            problems = set(report.problems)
            since = {problem: since.get(problem, clock()) for problem in problems}
            for problem, began_s in since.items():
                if clock() - began_s > _COMPLAIN_AFTER_S:
                    _log.warning("the fleet has a problem", problem=problem, for_s=round(clock() - began_s))
                    since[problem] = clock()
            await asyncio.sleep(_LOOK_S)
    finally:
        await watch.stop()


async def clean_up(plane: ControlPlane, office: Office) -> None:
    """Remove health and assignment of workers that have long been gone and own nothing; positions are kept."""
    while True:
        entries = await plane.read("ids.>", "health.>", "claims.>", "assignment.>")
        records = Records.of(entries)
        needed = {name for claim in records.claims.values() for name in (claim.owner, claim.next)}
        now = datetime.now(UTC)
        gone = [
            worker
            for worker, said in records.health.items()
            if worker not in records.members
            and worker not in needed
            and (now - said.at).total_seconds() > _FORGET_AFTER_S
        ]
        for worker in gone:
            keys = [k for kind in ("health", "assignment") if (k := key_of(kind, worker)) in entries]
            try:
                await office.write([Write(k, b"", entries[k].revision, MARKER_TTL_S, deletes=True) for k in keys])
            except WrongRevision:
                continue  # it is back
            _log.info("forgot a worker that is long gone", worker=worker)
        await asyncio.sleep(_CLEAN_S)
