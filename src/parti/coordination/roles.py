"""The lesser roles: the monitor looks at the fleet from outside the rebalancer, the cleanup tidies up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime

import structlog

from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Office
from parti.coordination.lease import clock
from parti.coordination.records import MONITORED, Records
from parti.core.consumer_config import is_foreign, owner_of, workers_of
from parti.core.fleet_report import waits_for_room
from parti.errors import DecodeError, NotFound, WrongRevision
from parti.jetstream.kv import MARKER_TTL_S, Write
from parti.jetstream.state_store import StateStore
from parti.jetstream.watch import Watch
from parti.model.fleet import Assignment, HealthRecord, decode, key_of
from parti.model.state import StatePointer
from parti.telemetry.metrics import Metrics
from parti.telemetry.refusals import Refusals

_log = structlog.get_logger("parti.roles")

_LOOK_S = 2.0
_RESYNC_S = 60.0
_COMPLAIN_AFTER_S = 15.0
_CLEAN_S = 60.0
_FORGET_AFTER_S = 600.0
_REMOVED = ("ids.", "health.", "load.", "standby.")
"""Keys that a live worker writes again soon: an unreadable one that stays is that of a worker that is gone."""


async def monitor(plane: ControlPlane, metrics: Metrics) -> None:
    """Measure the fleet by its records, and complain about what lasts too long."""
    records = Records(on_refused=metrics.refusals.note)
    watch = Watch(plane.connection, plane.api, plane.bucket.name, MONITORED, records.take, resync_s=_RESYNC_S)
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
        # What it saw last is not true for ever, and from now on another worker tells.
        for gauge in (metrics.fleet_workers, metrics.fleet_partitions, metrics.fleet_unowned, metrics.fleet_moving):
            gauge.value = 0
        await watch.stop()


async def clean_up(plane: ControlPlane, office: Office, stream: str, prefix: str, refusals: Refusals) -> None:
    """Remove what workers left behind that are gone and own nothing; positions are kept."""
    unreadable: dict[str, int] = {}
    while True:
        entries = await plane.read("ids.>", "health.>", "claims.>", "assignment.>", "load.>", "standby.>")
        records = Records.of(entries, refusals.note)
        before, unreadable = unreadable, {key: entries[key].revision for key in records.unreadable}
        await _remove_unreadable(office, unreadable.items() & before.items())
        if not unreadable:
            # Else nobody can tell who is here and who owns what.
            await _remove_consumers(plane, stream, prefix, records)
        await _sweep_states(plane, refusals)
        for worker in _long_gone(records) if not unreadable else ():
            keys = [k for kind in ("health", "assignment", "load") if (k := key_of(kind, worker)) in entries]
            try:
                await office.write([Write(k, b"", entries[k].revision, MARKER_TTL_S, deletes=True) for k in keys])
            except WrongRevision:
                continue  # it is back
            _log.info("forgot a worker that is long gone", worker=worker)
        await asyncio.sleep(_CLEAN_S)


async def _remove_unreadable(office: Office, found: Iterable[tuple[str, int]]) -> None:
    """Remove records that have been unreadable for a while and that nobody has written again."""
    for key, revision in found:
        if not key.startswith(_REMOVED):
            continue  # the rebalancer makes them good
        try:
            await office.write([Write(key, b"", revision, MARKER_TTL_S, deletes=True)])
        except WrongRevision:
            continue
        _log.info("removed an unreadable record that nobody writes any more", key=key)


def _long_gone(records: Records) -> list[str]:
    """Workers whose last word was long ago and that own nothing."""
    now, needed = datetime.now(UTC), records.named_in_claims
    return [
        worker
        for worker, said in records.health.items()
        if worker not in records.members
        and worker not in needed
        and (now - said.at).total_seconds() > _FORGET_AFTER_S
    ]


async def _remove_consumers(plane: ControlPlane, stream: str, prefix: str, records: Records) -> None:
    """Delete consumers of workers that are gone: on interest streams they would hold on to messages for ever.

    Not before everybody carries what it has been told to: until then such a consumer may be what keeps the messages
    of a partition that is about to be read by somebody else.
    """
    told, said = records.assignments, records.health
    owners = {claim.owner for claim in records.claims.values() if claim.owner} | told.keys() & records.members.keys()
    # An owner that is not there for a moment has not applied what it was given either.
    if any(w not in records.members or w not in told or not _has_applied(told[w], said.get(w)) for w in owners):
        return
    if any(map(waits_for_room, records.claims.values())):
        return  # a consumer of whoever had them last may be all that keeps their messages
    here = records.members.keys() | records.named_in_claims
    known = records.health.keys() | records.assignments.keys() | here
    for name in await plane.api.consumer_names(stream):
        workers = [worker for worker in workers_of(name, prefix) if worker in known]
        try:
            if not workers or all(worker in here for worker in workers):
                continue
            # A shard of one worker or the first consumer of another, or another fleet's: only its metadata tell.
            config = (await plane.api.consumer_info(stream, name)).config
            if len(workers) > 1:
                workers = [owner_of(config, prefix)[0]]
            if workers[0] in here or is_foreign(config, plane.bucket.name):
                continue
            await plane.api.delete_consumer(stream, name)
        except NotFound:
            continue
        _log.info("removed the consumer of a worker that is gone", consumer=name)


async def _sweep_states(plane: ControlPlane, refusals: Refusals) -> None:
    """Remove states that a process had begun to save when it died."""
    store = StateStore(plane.connection, plane.bucket.name)
    try:
        await plane.api.stream_info(store.stream)
    except NotFound:
        return
    pointers = []
    for key, entry in (await plane.read("state.>")).items():
        try:
            pointers += [decode(entry.value, StatePointer)] if entry.value else []
        except DecodeError as error:
            # What it points at would look like what nothing points at.
            refusals.note(key, entry.revision, error, "no state is removed until that is repaired")
            return
    if removed := await store.sweep(pointers):
        _log.info("removed states that nothing points at", states=removed)


def _has_applied(told: Assignment, said: HealthRecord | None) -> bool:
    return said is not None and said.incarnation == told.incarnation and said.ready >= told.version
