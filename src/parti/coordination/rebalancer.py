"""The rebalancer: sees the fleet, lets the planner decide, writes claims and assignments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import structlog

from parti.config import Settings
from parti.coordination.assignments import Assignments
from parti.coordination.claims import ClaimStore
from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Office
from parti.coordination.evictions import Evictions
from parti.coordination.history import History
from parti.coordination.lease import clock
from parti.coordination.membership import Membership
from parti.coordination.moves import Moves
from parti.coordination.sources import SourceReader
from parti.coordination.standing_orders import StandingOrders
from parti.coordination.takeover import Estates, Takeovers
from parti.core.fleet_view import BeginMove, Command, Decision, FleetState, FleetView, Free, Give, Policy
from parti.core.history import changes
from parti.core.loads import LoadBook
from parti.core.planner import Planner
from parti.core.retention import Retention
from parti.errors import ControlPlaneReset, DecodeError, LeaseLost, PartiError, WrongRevision
from parti.jetstream.kv import MAX_BATCH, Entry, Write
from parti.jetstream.system_events import SystemEvents
from parti.jetstream.watch import Watch
from parti.model.fleet import (
    Assignment,
    Claim,
    FleetRecord,
    HealthRecord,
    LoadRecord,
    decode,
    encode,
    is_key,
    key_of,
    name_of,
)
from parti.model.partition import Partition, Template
from parti.strategies.interface import Strategy, learns_loads
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import beside, death_of, supervise

_log = structlog.get_logger("parti.rebalancer")

_BATCH = 800
"""Claims in one atomic batch; the server takes 1,000 writes, and the assignments need room too."""
_COALESCE_S = 0.05
_LOOK_AGAIN_S = 1.0
_RETRY_S = 0.5
_WATCHED = ("ids.>", "health.>", "orders", "fleet", "claims.>", "assignment.>")
_T = TypeVar("_T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class RebalancerParts:
    """What the rebalancer works with."""

    plane: ControlPlane
    stream: str
    retention: Retention
    template: Template
    source: SourceReader
    strategy: Strategy
    weights: Callable[[], Mapping[str, float] | None]
    fleet: FleetRecord
    policy: Policy
    ttl_s: float
    metrics: Metrics
    system_settings: Settings | None = None
    """Address and credentials for the server's system events."""
    takeover_on_disconnect: bool = False
    after_outage: bool = False
    """Whether this worker's own lease had ended a moment ago, as everybody's does when the control plane is away."""
    history: History | None = None
    """Where changes of owners are recorded, if they are."""
    health: Health | None = None
    """Of the worker that is the rebalancer."""


class Rebalancer:
    """Works for one holding of the office; a successor starts from the bucket alone."""

    def __init__(self, parts: RebalancerParts, office: Office) -> None:
        self._parts = parts
        self._plane = parts.plane
        self._office = office
        overlap = parts.policy.overlap
        refusals = self._refusals = parts.metrics.refusals
        self._claims = ClaimStore(
            parts.plane.bucket,
            office,
            ttl_s=parts.ttl_s,
            refusals=refusals,
            fits=lambda partition: parts.template.find(partition) is not None,
        )
        self._membership = Membership(parts.plane.bucket, refusals=refusals)
        self._assignments = Assignments(overlap=overlap, refusals=refusals)
        self._takeovers = Takeovers(parts.plane, parts.stream, parts.template, parts.fleet, refusals)
        self._orders = StandingOrders(parts.retention, refusals)
        self._health: dict[str, HealthRecord] = {}
        self._moves = Moves(
            self._claims, self._assignments, self._membership, self._health, parts.metrics, overlap=overlap
        )
        self._evictions = Evictions(
            parts.plane,
            office,
            self._membership,
            stream=parts.stream,
            prefix=parts.fleet.prefix,
            on_disconnect=parts.takeover_on_disconnect,
        )
        self._loads = LoadBook() if learns_loads(parts.strategy) else None
        self._partitions: dict[str, Partition] = {}
        self._stream_created = ""
        self._said = office.record
        self._changed = asyncio.Event()
        self._flock = False
        """Somebody joined or left: others may follow."""
        self._writing: Sequence[str] = ()
        self._spoilt_fleet: Entry | None = None
        """The record of the fleet, if it is there and cannot be read, or is gone."""
        self._doubtful = False
        self._planner = Planner(parts.strategy, parts.policy, elected_s=clock(), after_outage=parts.after_outage)

    @property
    def newest_fence(self) -> int:
        """The largest fence token given out or found."""
        return self._claims.newest_fence

    async def run(self) -> None:
        """Keep the claims as they should be until the office is lost or this is cancelled."""
        watch = Watch(
            self._plane.connection,
            self._plane.api,
            self._plane.bucket.name,
            (*_WATCHED, *(("load.>",) if self._loads else ())),
            self._on_entry,
            health=self._parts.health,
        )
        history, health = self._parts.history, self._parts.health
        recording = supervise(history.run, "history", health) if history else None
        events: SystemEvents | None = None
        try:
            async with beside(self._refresh(), name="partition-source") as (refreshing,):
                events = await self._listen()
                await self._load()
                await watch.start()
                while True:
                    wake_at_s = await self._turn()
                    await self._wait(wake_at_s, refreshing)
        finally:
            await watch.stop()
            if events:
                await events.stop()
            await self._stop_recording(recording)

    async def _stop_recording(self, recording: asyncio.Future[None] | None) -> None:
        if recording and self._parts.history:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
            await self._parts.history.close()

    async def _turn(self) -> float | None:
        """Look, decide, act; returns when to look again at the latest."""
        self._changed.clear()
        try:
            if self._doubtful:
                self._doubtful = False
                await self._load()
            await self._repair()
            await self._membership.verify()
            evict_at_s = await self._evictions.end_leases()
            decision = self._decide()
            if await self._resurrect(decision):
                decision = self._decide()
            await self._act(decision)
        except (LeaseLost, ControlPlaneReset):
            raise
        except WrongRevision as error:
            self._parts.metrics.claim_failures.inc()
            _log.warning("a claim was changed by somebody else; reading all of them again", error=str(error))
            before, told = dict(self._claims.claims), self._assignments.told
            await self._load()
            changed = [p for p in self._writing if before.get(p) != self._claims.claims.get(p)]
            self._planner.claim_failed(changed, clock())
            if (before, told) == (self._claims.claims, self._assignments.told):
                return clock() + _RETRY_S  # whatever it was, at once it would happen again
            self._changed.set()
            return None
        except PartiError as error:
            _log.warning("rebalancing failed and will be tried again", error=str(error))
            await self._plane.check()
            # What was being written may have taken effect or not: only reading tells.
            self._doubtful = True
            self._planner.claim_failed(self._writing, clock())
            return clock() + _RETRY_S
        return min((t for t in (decision.wake_at_s, evict_at_s) if t is not None), default=None)

    async def _wait(self, wake_at_s: float | None, refreshing: asyncio.Future[None]) -> None:
        if error := death_of(refreshing):
            raise error if isinstance(error, Exception) else RuntimeError("the partition source was cancelled")
        at_s = min(clock() + _LOOK_AGAIN_S, wake_at_s or float("inf"))
        try:
            async with asyncio.timeout(max(0.0, at_s - clock())):
                await self._changed.wait()
        except TimeoutError:
            return
        if self._flock:
            # Joins come in flocks: a moment's patience saves rounds. A step of a move waits for nobody.
            self._flock = False
            await asyncio.sleep(_COALESCE_S)

    # ── seeing ────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_entry(self, key: str, entry: Entry) -> None:
        if not is_key(key):
            self._refusals.note(key, entry.revision, DecodeError("the key is not as parti writes it"))
            return
        if key.startswith("ids."):
            if self._membership.entry(key, entry):
                self._flock = True
                self._changed.set()
            return
        if key == "orders":
            self._orders.take(entry)
            self._changed.set()
            return
        if key == "fleet" or key.startswith(("claims.", "assignment.")):
            self._look_at_own(key, entry)
            return
        worker = name_of(key)
        if key.startswith("load.") and self._loads:
            self._loads.take(worker, self._decoded(key, entry, LoadRecord))
            return
        health = self._decoded(key, entry, HealthRecord)
        before = self._health.pop(worker, None)
        if health is None:
            return
        self._health[worker] = health
        if before is None or _moves(before) != _moves(health):
            self._changed.set()

    def _look_at_own(self, key: str, entry: Entry) -> None:
        """A record that only rebalancers write was written: should it be unreadable, all are read and made good."""
        name = name_of(key)
        if key == "fleet":
            spoilt = self._decoded(key, entry, FleetRecord) is None
        elif key.startswith("claims."):
            newer = not entry.revision or entry.revision > self._claims.revision(name)
            spoilt = newer and name in self._claims.claims and self._decoded(key, entry, Claim) is None
        else:
            newer = not entry.revision or entry.revision > self._assignments.revision(name)
            spoilt = newer and name in self._membership.members and self._decoded(key, entry, Assignment) is None
        if spoilt:
            self._doubtful = True
            self._changed.set()

    def _decoded(self, key: str, entry: Entry, kind: type[_T]) -> _T | None:
        if not entry.value:
            return None
        try:
            return decode(entry.value, kind)
        except DecodeError as error:
            self._refusals.note(key, entry.revision, error)
            return None

    async def _listen(self) -> SystemEvents | None:
        """Hear of broken connections from the servers, if that is set up; without them leases tell, later."""
        settings = self._parts.system_settings
        if settings is None:
            return None
        events = SystemEvents(settings, on_connect=lambda ref: None, on_disconnect=self._on_disconnect)
        try:
            await events.start()
        except PartiError as error:
            _log.error("system events cannot be heard; lost workers are seen when their lease ends", error=str(error))
            return None
        return events

    def _on_disconnect(self, ref: str, reason: str) -> None:
        if self._evictions.disconnected(ref, reason):
            self._changed.set()

    async def _load(self) -> None:
        """Read everything that a predecessor has written, and the orders that are at least as new as the claims."""
        entries = await self._plane.read("claims.>", "assignment.>", "orders", "fleet")
        orders = entries.get("orders", Entry(b"", 0))
        if orders.revision > self._orders.revision:
            self._orders.take(orders)
        self._assignments.load({k: e for k, e in entries.items() if k.startswith("assignment.")})
        claims = {k: e for k, e in entries.items() if k.startswith("claims.")}
        self._claims.load(claims, self._assignments.told)
        fleet = entries.get("fleet", Entry(b"", 0))
        self._spoilt_fleet = None if self._decoded("fleet", fleet, FleetRecord) else fleet
        self._stream_created = (await self._plane.api.stream_info(self._parts.stream)).created
        await self._read_source()

    async def _refresh(self) -> None:
        """Read the source of partitions as often as it wants to be read."""
        while (interval_s := self._parts.source.refresh_s) is not None:
            await asyncio.sleep(interval_s)
            await self._read_source()
            if self._parts.source.changed:
                self._changed.set()

    async def _read_source(self) -> None:
        source = self._parts.source
        partitions = {p.id: p for p in await source.read()}
        if source.remembers:
            # The messages of a partition may be gone for now; giving it up and taking it again would move it about.
            claimed = (p for p, c in self._claims.claims.items() if c.state != "free" and p not in partitions)
            # What somebody else wrote under a key that fits no template is no partition.
            partitions |= {p: found for p in claimed if (found := self._parts.template.find(p))}
        self._partitions = partitions

    async def _repair(self) -> None:
        """Write again what is known and cannot be read in the bucket."""
        if fleet := self._spoilt_fleet:
            await self._office.write([Write("fleet", encode(self._parts.fleet), fleet.revision)])
            self._spoilt_fleet = None
        if self._claims.recovered:
            _log.warning("claims were unreadable and are written again", claims=len(self._claims.recovered))
            await self._claims.repair()

    def _decide(self) -> Decision:
        orders = self._orders.now(self._partitions, self._claims.claims)
        view = FleetView(
            now_s=clock(),
            members=self._membership.view(),
            partitions=tuple(p for p in self._partitions if not self._is_in_doubt(p)),
            claims=self._claims.claims,
            health=self._health,
            left=frozenset(self._membership.left),
            weights=self._weights(),
            orders=orders,
        )
        decision = self._planner.step(view)
        wanted = len(self._partitions.keys() - orders.resting)
        if self._office.describe(decision, self._parts.strategy.name, wanted) or decision.commands:
            _log.info(
                f"fleet {decision.state}",
                reason=decision.reason,
                commands=len(decision.commands),
                workers=len(view.members),
                term=self._office.term,
            )
        return decision

    def _is_in_doubt(self, partition: str) -> bool:
        """Whether a worker may still be letting go of a partition whose claim nobody can read.

        It was told so by an assignment that does not name it any more, and is done when it has applied that.
        """
        if partition not in self._claims.unknown:
            return False
        told = self._assignments.told
        for worker, member in self._membership.members.items():
            said = self._health.get(worker)
            if member.state == "away":
                continue
            if said is None or said.incarnation != member.incarnation or partition in said.busy:
                return True
            newest = told.get(worker)
            if newest and newest.incarnation == member.incarnation and said.applied < newest.version:
                return True
        self._claims.unknown.discard(partition)
        return False

    def _weights(self) -> Mapping[str, float] | None:
        """Loads of the partitions: as measured, or as the application says."""
        given = self._parts.weights()
        if self._loads is None:
            return given
        claims = self._claims.claims
        owners = {p: claims[p].owner if p in claims else "" for p in self._partitions}
        return self._loads.weights(owners, given)

    # ── acting ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _resurrect(self, decision: Decision) -> bool:
        """Ask the leader about owners whose partitions are to be given away: a watch may have missed somebody.

        True when one of them is there after all.
        """
        members, claims = self._membership.members, self._claims.claims
        takes = [c for c in decision.commands if isinstance(c, Give | Free) and c.partition in claims]
        missing = {claims[c.partition].owner for c in takes} - members.keys() - {""}
        keys = [key_of("ids", worker) for worker in missing]
        entries = await asyncio.gather(*(self._plane.bucket.get(key) for key in keys))
        found = [self._membership.entry(key, entry) for key, entry in zip(keys, entries, strict=True) if entry]
        return any(found)

    async def _act(self, decision: Decision) -> None:
        estates = await self._estates(decision.commands)
        commands = list(decision.commands)
        if not self._parts.retention.overlap:
            # No two consumers may carry one subject: those of workers that are not there have to go first.
            await self._evictions.remove_consumers(self._owners_before(commands))
        for begin in range(0, len(commands), _BATCH):
            batch = commands[begin : begin + _BATCH]
            claims = {c.partition: claim for c in batch if (claim := self._claim_for(c, estates))}
            self._writing = tuple(claims)
            # The assignments follow from the claims: with the last of them, or, should they not fit, right after.
            await self._write(claims, last=begin + _BATCH >= len(commands))
        # Workers whose claims did not change may still need a word: a new process has to be told what it owns, unless
        # everybody is about to get something.
        if decision.state is not FleetState.WAITING:
            await self._write({}, last=True)
        if self._said != self._office.record:
            self._said = self._office.record
            await self._office.write()

    async def _estates(self, commands: Sequence[Command]) -> Estates | None:
        """What is known of the partitions that change hands, or are about to."""
        changing = {
            c.partition: self._claims.claims.get(c.partition)
            for c in commands
            if isinstance(c, Give | Free | BeginMove)
        }
        if not changing:
            return None
        estates = await self._takeovers.read(changing)
        self._stream_created = estates.stream_created
        return estates

    def _owners_before(self, commands: Sequence[Command]) -> set[str]:
        """Who has the partitions that are about to be given to somebody, or to rest: later nobody knows that."""
        claims = self._claims.claims
        return {claims[c.partition].owner for c in commands if isinstance(c, Give | Free) and c.partition in claims}

    def _claim_for(self, command: Command, estates: Estates | None) -> Claim | None:
        """The claim that carries a command out; None when it should not be, by what has happened in the meantime."""
        claim = self._claims.claims.get(command.partition)
        if isinstance(command, Give | Free) and claim and self._membership.in_doubt(claim.owner, self._parts.ttl_s):
            return None
        if isinstance(command, Give):
            gone = command.owner not in self._membership.members
            # Whoever ordered that it rests may already have seen that nobody has it, and counts on that.
            nowhere = estates is not None and not estates.known(command.partition)
            if gone or nowhere or self._orders.rests(command.partition, claim):
                return None
        return self._moves.claim_for(command, estates)

    async def _write(self, claims: Mapping[str, Claim], *, last: bool) -> None:
        """Write claims, and after the last of them the assignments that follow from all claims."""
        changed: dict[str, Assignment] = {}
        if last:
            changed = self._assignments.changed(
                {**self._claims.claims, **claims},
                self._membership.members,
                self._health,
                term=self._office.term,
                stream_created=self._stream_created,
            )
        if not claims and not changed:
            return
        told = list(changed.items())
        room = MAX_BATCH - 1 - len(claims)
        await self._tell(claims, told[:room])
        for begin in range(room, len(told), MAX_BATCH - 1):
            await self._tell({}, told[begin : begin + MAX_BATCH - 1])

    async def _tell(self, claims: Mapping[str, Claim], assignments: Sequence[tuple[str, Assignment]]) -> None:
        before = {partition: self._claims.claims.get(partition) for partition in claims}
        revisions = await self._claims.write(claims, self._assignments.writes(assignments))
        self._assignments.written(assignments, revisions)
        self._said = self._office.record  # it went with them
        if self._parts.history:
            by, now = self._office.record.holder, datetime.now(UTC)
            self._parts.history.note(list(changes(before, claims, by=by, at=now, took_s=self._moves.took_s)))
        self._moves.written()


def _moves(health: HealthRecord) -> tuple[object, ...]:
    """What a move may be waiting for."""
    return health.incarnation, health.applied, health.ready, health.busy, health.pulling
