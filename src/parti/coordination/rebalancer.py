"""The rebalancer: sees the fleet, lets the planner decide, writes claims and assignments."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from parti.config import Settings
from parti.coordination.claims import ClaimStore
from parti.coordination.control_plane import ControlPlane
from parti.coordination.election import Office
from parti.coordination.lease import clock
from parti.coordination.membership import Membership
from parti.coordination.sources import SourceReader
from parti.core.fleet_view import BeginMove, Command, Decision, FleetState, FleetView, Free, Give, Policy
from parti.core.planner import Planner
from parti.core.progress import Progress, decode_progress
from parti.errors import ControlPlaneReset, LeaseLost, PartiError, WrongRevision
from parti.jetstream.api import StreamInfo
from parti.jetstream.kv import MARKER_TTL_S, MAX_BATCH, Entry, Write
from parti.jetstream.system_events import SystemEvents
from parti.jetstream.watch import Watch
from parti.model.fleet import Assignment, Claim, FleetRecord, Grant, HealthRecord, decode, encode, key_of, name_of
from parti.model.partition import Partition, Template
from parti.strategies.interface import Strategy
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.rebalancer")

_BATCH = 800
"""Claims in one atomic batch; the server takes 1,000 writes, and the assignments need room too."""
_COALESCE_S = 0.05
_LOOK_AGAIN_S = 1.0
_RETRY_S = 0.5
_EVICT_AFTER_S = 0.5
_ENDED = {"Client Closed", "Read Error"}
"""What the server says when it was the client's side that ended a connection, by closing it or by dying: a process
that dies with unread data in its socket resets the connection, which is a read error."""


@dataclass(frozen=True, slots=True)
class RebalancerParts:
    """What the rebalancer works with."""

    plane: ControlPlane
    stream: str
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


@dataclass(slots=True)
class _Known:
    """An assignment as last read or written."""

    revision: int = 0
    assignment: Assignment | None = None


class Rebalancer:
    """Works for one holding of the office; a successor starts from the bucket alone."""

    def __init__(self, parts: RebalancerParts, office: Office) -> None:
        self._parts = parts
        self._plane = parts.plane
        self._office = office
        self._claims = ClaimStore(parts.plane.bucket, office, ttl_s=parts.ttl_s)
        self._membership = Membership(parts.plane.bucket)
        self._assignments: dict[str, _Known] = defaultdict(_Known)
        self._health: dict[str, HealthRecord] = {}
        self._partitions: dict[str, Partition] = {}
        self._records: dict[str, Progress] = {}
        self._stream_created = ""
        self._said = office.record
        self._changed = asyncio.Event()
        self._suspects: dict[str, float] = {}
        self._writing: Sequence[str] = ()
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
            ("ids.>", "health.>"),
            self._on_entry,
        )
        refreshing = asyncio.ensure_future(self._refresh())
        events = await self._listen()
        try:
            await self._load()
            await watch.start()
            while True:
                wake_at_s = await self._turn()
                await self._wait(wake_at_s, refreshing)
        finally:
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)
            await watch.stop()
            if events:
                await events.stop()

    async def _turn(self) -> float | None:
        """Look, decide, act; returns when to look again at the latest."""
        self._changed.clear()
        try:
            if self._doubtful:
                await self._load()
                self._doubtful = False
            await self._membership.verify()
            evict_at_s = await self._evict()
            decision = self._decide()
            if await self._resurrect(decision):
                decision = self._decide()
            await self._act(decision)
        except (LeaseLost, ControlPlaneReset):
            raise
        except WrongRevision as error:
            self._parts.metrics.claim_failures.inc()
            _log.warning("a claim was changed by somebody else; reading all of them again", error=str(error))
            before = dict(self._claims.claims)
            await self._load()
            changed = [p for p in self._writing if before.get(p) != self._claims.claims.get(p)]
            self._planner.claim_failed(changed, clock())
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
        if refreshing.done():
            refreshing.result()
        at_s = min(clock() + _LOOK_AGAIN_S, wake_at_s or float("inf"))
        try:
            async with asyncio.timeout(max(0.0, at_s - clock())):
                await self._changed.wait()
        except TimeoutError:
            return
        # Joins come in flocks: a moment's patience saves rounds.
        await asyncio.sleep(_COALESCE_S)

    # ── seeing ────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_entry(self, key: str, entry: Entry) -> None:
        if key.startswith("ids."):
            if self._membership.entry(key, entry):
                self._changed.set()
            return
        worker = name_of(key)
        if not entry.value:
            self._health.pop(worker, None)
            return
        try:
            health = decode(entry.value, HealthRecord)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            _log.error("a health record is unreadable and ignored", worker=worker, error=str(error))
            return
        before = self._health.get(worker)
        self._health[worker] = health
        if before is None or (before.applied, before.busy) != (health.applied, health.busy):
            self._changed.set()

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
        worker = self._membership.suspect(ref)
        if worker:
            _log.warning("the connection of a worker ended", worker=worker, reason=reason)
        if worker and self._parts.takeover_on_disconnect and reason in _ENDED:
            self._suspects[worker] = clock() + _EVICT_AFTER_S
            self._changed.set()

    async def _evict(self) -> float | None:
        """End the leases of workers that closed their connection and were not heard of since.

        Returns when to look again. A process that is gone cannot mind; one that is not has stopped starting handlers
        when its connection broke, and may only go on after a renewal, which this makes impossible.
        """
        for worker, due_s in list(self._suspects.items()):
            if worker not in self._membership.suspected:
                del self._suspects[worker]
            elif clock() >= due_s:
                del self._suspects[worker]
                _log.warning("ending the lease of a worker whose connection was closed", worker=worker)
                gone = Write(
                    key_of("ids", worker), b"", self._membership.revision(worker), MARKER_TTL_S, deletes=True
                )
                try:
                    await self._office.write([gone])
                except WrongRevision:
                    continue  # it has renewed its lease: it is alive
                self._membership.entry(gone.key, Entry(b"", 0))
        return min(self._suspects.values(), default=None)

    async def _load(self) -> None:
        """Read everything that a predecessor has written."""
        entries = await self._plane.read("claims.>", "assignment.>")
        self._claims.load({k: e for k, e in entries.items() if k.startswith("claims.")})
        self._assignments.clear()
        for key, entry in entries.items():
            if key.startswith("assignment."):
                known = self._assignments[name_of(key)] = _Known(entry.revision)
                known.assignment = _assignment(entry)
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
            partitions |= {p: self._parts.template.partition(p) for p in claimed}
        self._partitions = partitions

    def _decide(self) -> Decision:
        view = FleetView(
            now_s=clock(),
            members=self._membership.view(),
            partitions=tuple(self._partitions),
            claims=self._claims.claims,
            health=self._health,
            left=frozenset(self._membership.left),
            weights=self._parts.weights(),
        )
        decision = self._planner.step(view)
        if self._office.describe(decision, self._parts.strategy.name, len(view.partitions)) or decision.commands:
            _log.info(
                f"fleet {decision.state}",
                reason=decision.reason,
                commands=len(decision.commands),
                workers=len(view.members),
                term=self._office.term,
            )
        return decision

    # ── acting ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _resurrect(self, decision: Decision) -> bool:
        """Ask the leader about owners whose partitions are to be given away: a watch may have missed somebody.

        True when one of them is there after all.
        """
        members, claims = self._membership.members, self._claims.claims
        takes = [c for c in decision.commands if not isinstance(c, BeginMove) and c.partition in claims]
        missing = {claims[c.partition].owner for c in takes} - members.keys() - {""}
        keys = [key_of("ids", worker) for worker in missing]
        entries = await asyncio.gather(*(self._plane.bucket.get(key) for key in keys))
        found = [self._membership.entry(key, entry) for key, entry in zip(keys, entries, strict=True) if entry]
        return any(found)

    async def _act(self, decision: Decision) -> None:
        positions = await self._positions(decision.commands)
        commands = list(decision.commands)
        for begin in range(0, len(commands), _BATCH):
            claims = self._claims_for(commands[begin : begin + _BATCH], positions)
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

    def _claims_for(self, commands: Sequence[Command], positions: _Positions) -> dict[str, Claim]:
        claims: dict[str, Claim] = {}
        members, metrics = self._membership.members, self._parts.metrics
        for command in commands:
            partition = command.partition
            if isinstance(command, Give):
                member = members.get(command.owner)
                if member is None:
                    continue
                found = self._claims.claims.get(partition)
                claims[partition] = self._claims.given(
                    partition,
                    command.owner,
                    member.incarnation,
                    position=positions.of(partition),
                    stream_created=positions.stream_created,
                    reason=command.reason,
                )
                moved = found is not None and found.owner not in {"", command.owner}
                metrics.claims_given.inc("moved" if moved else "kept" if found and found.owner else "new")
            elif isinstance(command, BeginMove):
                owner = self._claims.claims[partition].owner
                claims[partition] = self._claims.changed(
                    partition,
                    state="moving",
                    next=command.next,
                    reason=command.reason,
                    release_version=self._next_version(owner),
                )
            else:
                claims[partition] = self._claims.changed(
                    partition,
                    owner="",
                    next="",
                    state="free",
                    position=positions.of(partition),
                    stream_created=positions.stream_created,
                    reason=command.reason,
                )
        return claims

    async def _write(self, claims: Mapping[str, Claim], *, last: bool) -> None:
        """Write claims, and after the last of them the assignments that follow from all claims."""
        changed = self._changed_assignments({**self._claims.claims, **claims}) if last else {}
        if not claims and not changed:
            return
        told = list(changed.items())
        room = MAX_BATCH - 1 - len(claims)
        await self._tell(claims, told[:room])
        for begin in range(room, len(told), MAX_BATCH - 1):
            await self._tell({}, told[begin : begin + MAX_BATCH - 1])

    async def _tell(self, claims: Mapping[str, Claim], assignments: Sequence[tuple[str, Assignment]]) -> None:
        writes = [
            Write(key_of("assignment", worker), encode(assignment), self._assignments[worker].revision)
            for worker, assignment in assignments
        ]
        revisions = await self._claims.write(claims, writes)
        for (worker, assignment), revision in zip(assignments, revisions, strict=True):
            self._assignments[worker] = _Known(revision, assignment)

    def _next_version(self, worker: str) -> int:
        """Above every version that the worker has been told, also if the record of it is gone."""
        known, health = self._assignments[worker].assignment, self._health.get(worker)
        return max(known.version if known else 0, health.applied if health else 0) + 1

    def _changed_assignments(self, claims: Mapping[str, Claim]) -> dict[str, Assignment]:
        """The assignments that these claims make different from what was last written."""
        members = self._membership.members
        wanted: dict[str, dict[str, Grant]] = {w: {} for w, m in members.items() if m.state != "away"}
        # A worker may have to let go of what it was never told of: it has to say so all the same.
        due: dict[str, int] = defaultdict(int)
        for partition, claim in claims.items():
            member = members.get(claim.owner)
            if member is None or claim.owner not in wanted or claim.incarnation != member.incarnation:
                continue
            if claim.state == "moving":
                due[claim.owner] = max(due[claim.owner], claim.release_version)
            elif claim.state == "owned":
                position = claim.position if claim.stream_created == self._stream_created else 0
                wanted[claim.owner][partition] = Grant(claim.fence_token, position)
        changed = {}
        for worker, partitions in wanted.items():
            known = self._assignments[worker].assignment
            incarnation = members[worker].incarnation
            same = known and (known.incarnation, known.partitions) == (incarnation, partitions)
            if same and known and known.version >= due[worker]:
                continue
            changed[worker] = Assignment(
                version=self._next_version(worker),
                term=self._office.term,
                incarnation=incarnation,
                stream_created=self._stream_created,
                partitions=partitions,
            )
        return changed

    # ── positions ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _positions(self, commands: Iterable[Command]) -> _Positions:
        """Where the partitions that change hands have got to."""
        changing = {c.partition: self._claims.claims.get(c.partition) for c in commands if isinstance(c, Give | Free)}
        stream = await self._plane.api.stream_info(self._parts.stream) if changing else None
        if stream:
            self._stream_created = stream.created
        if None in changing.values():
            # Never claimed, but a worker may know of them: from before a reset, or from working alone.
            self._records |= {
                name_of(key): record
                for key, entry in (await self._plane.read("progress.>")).items()
                if (record := _progress(entry))
            }
        owners = {claim.owner for claim in changing.values() if claim and claim.owner}
        entries = await asyncio.gather(*(self._plane.bucket.get(key_of("progress", owner)) for owner in owners))
        for owner, entry in zip(owners, entries, strict=True):
            if entry and (record := _progress(entry)):
                self._records[owner] = record
        return _Positions(stream, self._parts, changing, self._records)


class _Positions:
    """Positions from the records of previous owners, from the claims, and for new partitions from any record."""

    def __init__(
        self,
        stream: StreamInfo | None,
        parts: RebalancerParts,
        claims: Mapping[str, Claim | None],
        records: Mapping[str, Progress],
    ) -> None:
        self.stream_created = stream.created if stream else ""
        self._template = parts.template
        self._first = parts.fleet.first_seq if parts.fleet.stream_created == self.stream_created else 1
        self._claims = claims
        self._records = {
            worker: record
            for worker, record in records.items()
            if stream and (record.stream, record.stream_created) == (stream.name, stream.created)
        }

    def of(self, partition_id: str) -> int:
        """The position of a partition; where the fleet began, when nobody has ever had it."""
        claim, subject = self._claims.get(partition_id), self._template.partition(partition_id).subject
        known = claim.position if claim and claim.stream_created == self.stream_created else self._first
        if claim and claim.owner:
            records = [self._records[claim.owner]] if claim.owner in self._records else []
        else:
            records = list(self._records.values()) if claim is None else []
        return max([known, *(record.position(partition_id, subject) for record in records)])


def _progress(entry: Entry) -> Progress | None:
    if not entry.value:
        return None
    try:
        return decode_progress(entry.value)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def _assignment(entry: Entry) -> Assignment | None:
    try:
        return decode(entry.value, Assignment) if entry.value else None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        _log.error("an assignment is unreadable; it will be made anew", error=str(error))
        return None
