"""A worker's place in the fleet: its id, its assignment, and its part in the elections.

The manager knows nothing of consumers and handlers. It tells the reading side what to own (through
`WorkerConsumerUpdater`, after the application's own hooks) and until when it may act (through `permit`); the reading
side tells it what has been applied.

    claim an id ──> watch and heartbeat ──> stop: drain, leave
    or stand by             │
         ^                  │
         ├── lease lost, or control plane was reset: nothing may be started, until an id is held again
         └── stepped down for somebody who stands by: what ran is finished and stored
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import structlog

from parti.coordination.candidacy import Candidacy
from parti.coordination.control_plane import ControlPlane
from parti.coordination.duty import Duty, ReadingSide, StandbySide
from parti.coordination.fleet_parts import FleetParts, Memory
from parti.coordination.heartbeat import Heartbeat
from parti.coordination.hooks import ErrorHooks, Hooks
from parti.coordination.lease import clock
from parti.coordination.seating import Seating
from parti.coordination.standing import Standing
from parti.coordination.worker_ids import Seat
from parti.core.fleet_view import FleetState
from parti.core.lease import NEVER_S
from parti.errors import ControlPlaneReset, DecodeError, LeaseLost, PartiError, SteppedDown
from parti.jetstream.connection import ConnectionState
from parti.jetstream.kv import Entry
from parti.jetstream.watch import Watch
from parti.model.fleet import Assignment, LeaderRecord, decode, key_of
from parti.model.partition import Partition
from parti.telemetry.tasks import Supervised, beside, death_of, supervise

_log = structlog.get_logger("parti.manager")
_T = TypeVar("_T", bound=msgspec.Struct)
_RETRY_S = 0.5
_SUCCESSOR_TTLS = 3
"""For how long, in lengths of a lease, an id waits for somebody who stands by."""
_AFTER_RESET_TTLS = 2
"""Within one of them whoever held the id has noticed that the bucket is another one, and takes it at once."""


class Manager:
    """Takes part in the fleet from `start` to `stop`."""

    def __init__(
        self,
        parts: FleetParts,
        reading: ReadingSide,
        hooks: Hooks,
        *,
        service: str = "",
        guest: bool = False,
        standby: StandbySide | None = None,
    ) -> None:
        """`guest`: own nothing but what is placed on this worker id. `standby`: share it with others that wait."""
        self._parts = parts
        self._settings = parts.settings
        self._reading = reading
        self._hooks = hooks
        self._standby = standby
        self._standing = Standing(parts.metrics, parts.health, hooks, lambda: self.worker_id)
        self._plane: ControlPlane | None = None
        self._seat: Seat | None = None
        self._over: asyncio.TimerHandle | None = None
        self._leader: LeaderRecord | None = None
        self._last_id: str | None = None
        self._errors = ErrorHooks(hooks, parts.metrics, parts.health)
        self._duty = Duty(parts, reading, hooks, self._errors, self._on_duty_changed)
        self._memory = Memory()
        self._seating = Seating(
            parts, self._memory, service=service, guest=guest, on_look=self._stands_by if standby else None
        )
        self._beat = asyncio.Event()
        self._heartbeat = Heartbeat(
            parts, reading, self._duty, self._standing, due=self._beat, beaten=self._follow_leader
        )
        self._stopping = False
        self._successor = asyncio.Event()
        self._candidacy: Candidacy | None = None
        self._running: Supervised | None = None

    # ── what others may know ──────────────────────────────────────────────────────────────────────────────────

    @property
    def worker_id(self) -> str:
        """The id that this process holds, or held last; empty before the first."""
        return self._last_id or ""

    @property
    def state(self) -> FleetState:
        """What this worker is doing."""
        return self._standing.state

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """What this worker owns now."""
        return self._duty.partitions

    @property
    def assignment(self) -> Assignment | None:
        """The assignment that is being applied, or was last."""
        return self._duty.begun

    @property
    def leads(self) -> bool:
        """Whether this worker is the rebalancer."""
        return self._candidacy is not None and self._candidacy.leads

    @property
    def leader(self) -> LeaderRecord | None:
        """The rebalancer, as last seen."""
        return self._leader

    # ── start and stop ────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Take an id and begin; raises when there is no id to be had or the bucket cannot be used.

        Whoever stands by has no id yet on return.
        """
        self._parts.connection.on_state(self._on_connection)
        if self._standby:
            await self._seating.open()
        else:
            await self._sit_down()
        self._running = supervise(self._run, "manager", self._parts.health)

    async def wait_assigned(self) -> None:
        """Return once the first assignment has been applied."""
        await self._duty.ready.wait()

    async def drain(self) -> None:
        """Say that this worker is about to leave, and take no new assignment."""
        self._stopping = self._duty.stopping = True
        seat = self._seat
        if seat is None or not seat.lease.held:
            return
        self._standing.set(FleetState.DRAINING, "leaving")
        if not (seat.record.identity and self._settings.rejoin_s) and not self._standby:
            # Somebody who is expected back keeps its partitions; others give them away.
            seat.describe(state="draining")
        self._heartbeat.renew_next()
        try:
            await self._heartbeat.beat(seat)
        except LeaseLost as error:
            _log.warning("lost the worker id while leaving", error=str(error))

    async def stop(self) -> bool:
        """Leave: resign from roles, give the id back; False when that could not be confirmed."""
        self._stopping = self._duty.stopping = True
        if self._running:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self._seating.end()
        self._duty.close()
        seat, left = self._seat, True
        if seat:
            self._seat = None
            left = await self._leave(seat)
        if self._over:
            self._over.cancel()
        self._reading.permit(NEVER_S)
        self._standing.set(FleetState.STOPPED, "left the fleet")
        within_s = self._settings.drain_timeout_s
        await asyncio.gather(self._standing.told(within_s), self._errors.told(within_s))
        return left

    def step_down(self, reason: str) -> None:
        """Somebody who stands by is to take over: finish what runs, then give the id away and stand by."""
        if self._seat and self._standby and not self._stopping and not self._successor.is_set():
            _log.info("steps down", worker=self.worker_id, reason=reason)
            self._successor.set()

    def lapse(self) -> None:
        """Count the lease as over, as after a standstill that outlasted it: nothing is started until it is renewed.

        For `parti.testing`; no part of the public API.
        """
        if self._seat:
            self._seat.lease.ends_at_s = NEVER_S
        self._reading.permit(NEVER_S)

    async def _leave(self, seat: Seat) -> bool:
        s = self._settings
        if self._standby:
            # Whoever stands by takes over with all partitions; should nobody be there, others get them then.
            return await seat.leave(back_within_s=_SUCCESSOR_TTLS * s.lease_ttl_s, successor=True)
        return await seat.leave(back_within_s=s.rejoin_s)

    async def _sit_down(self) -> None:
        """Open the bucket, take an id and tell the reading side."""
        self._standing.set(FleetState.CLAIMING_ID, "needs a worker id")
        seat, plane = await self._seating.take(self._last_id)
        self._plane, self._seat = plane, seat
        self._last_id = seat.worker_id
        self._duty.begin(seat.worker_id)
        self._heartbeat.begin()
        self._parts.metrics.worker_id = seat.worker_id
        seat.lease.on_renewed = self._renewed
        await self._reading.seated(seat, plane)
        _log.info(
            "holds a worker id",
            worker=seat.worker_id,
            incarnation=seat.incarnation,
            identity=self._settings.identity,
        )

    def _stands_by(self, alive: bool, replaced: bool) -> None:
        assert self._settings.worker_id
        assert self._standby
        if alive:
            self._standing.set(FleetState.STANDBY, "another process holds the worker id")
        self._standby.stand_by(self._settings.worker_id, alive=alive, replaced=replaced)

    # ── the life of a seat ────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        while True:
            try:
                if self._seat is None:
                    await self._sit_down()
                assert self._seat
                assert self._plane
                await self._attend(self._seat, self._plane)
            except ControlPlaneReset as error:
                if self._seat is None:
                    # Whoever held the id has the positions in memory: it should be the first to have it again.
                    self._seating.yield_for(_AFTER_RESET_TTLS * self._settings.lease_ttl_s)
                self._note_reset()
                self._stand_up(error)
            except LeaseLost as error:
                self._stand_up(await self._why_lost(error))
            except SteppedDown:
                await self._give_away()
            except PartiError as error:
                self._stand_up(error)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:
                # A mistake in parti. It is told and this begins again, later each time: with a mistake that stays,
                # the lease ends and others get the partitions.
                self._stand_up(error)
                raise

    async def _give_away(self) -> None:
        """What ran is finished and stored: whoever stands by may have the id."""
        seat, self._seat = self._seat, None
        self._reading.permit(NEVER_S)
        self._duty.end()
        self._successor.clear()
        self._duty.stopping = self._stopping
        # Should nobody come, this process takes the id again before it counts as gone.
        self._seating.yield_for(self._settings.lease_ttl_s)
        if seat:
            await self._leave(seat)

    async def _hand_over(self) -> None:
        """Wait to be told to step down, and finish what runs; the lease is renewed meanwhile."""
        await self._successor.wait()
        assert self._standby
        self._duty.stopping = True
        self._standing.set(FleetState.DRAINING, "somebody who stands by takes over")
        await self._standby.hand_over()
        await self._duty.give_up()
        raise SteppedDown("another process takes over")

    def _note_reset(self) -> None:
        self._memory.was_reset = True
        self._parts.metrics.lease_losses.inc("reset")

    async def _why_lost(self, lost: LeaseLost) -> PartiError:
        """Tell a lease that has ended from a bucket that has gone with it."""
        try:
            if self._plane:
                await self._plane.check_if_reachable()
        except ControlPlaneReset as reset:
            self._note_reset()
            return reset
        self._parts.metrics.lease_losses.inc("ended")
        return lost

    def _stand_up(self, error: Exception) -> None:
        """Nothing may be started any more until an id is held again."""
        self._reading.permit(NEVER_S)
        seat, self._seat = self._seat, None
        self._duty.end()
        _log.error("stopped handling" if seat else "still has no worker id", reason=str(error))
        self._standing.set(FleetState.DEGRADED, str(error))
        self._errors.tell(error, self.worker_id)

    async def _attend(self, seat: Seat, plane: ControlPlane) -> None:
        """Watch, heartbeat, apply and stand for election until the seat is lost."""
        reset: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_reset(created: str) -> None:
            # Another bucket, or the same one restored from an older copy.
            if not reset.done():
                reset.set_exception(
                    ControlPlaneReset(f"control plane was reset: bucket {plane.bucket.name!r} is of {created} now")
                )

        watch = Watch(
            plane.connection,
            plane.api,
            plane.bucket.name,
            ("leader.*", key_of("assignment", seat.worker_id)),
            self._on_entry,
            on_reset=on_reset,
            health=self._parts.health,
        )
        assert self._seating.fleet
        if self._settings.may_lead:
            self._candidacy = Candidacy(self._parts, plane, seat, self._seating.fleet, self._memory)
        runs = [watch.start(), self._heartbeat.keep(seat, plane), self._hand_over(), *self._duty.runs()]
        if self._candidacy:
            runs += self._candidacy.runs()
        try:
            async with beside(*runs, name="manager") as tasks:
                await _until_one_ends(reset, tasks)
        finally:
            reset.cancel()
            self._candidacy = None
            await watch.stop()

    def _on_entry(self, key: str, entry: Entry) -> None:
        kind, _, name = key.partition(".")
        if kind == "assignment":
            offered = self._decoded(key, entry, Assignment, "the last assignment stands")
            if offered and self._seat and offered.incarnation == self._seat.incarnation:
                self._memory.knows(offered.term, *(grant.fence_token for grant in offered.partitions.values()))
                self._duty.offer(offered)
            return
        leader = self._decoded(key, entry, LeaderRecord, "the role is taken over")
        if name == "rebalancer":
            self._leader = leader
            self._follow_leader()
        if leader is None and self._candidacy:
            self._candidacy.hint(name)

    def _decoded(self, key: str, entry: Entry, kind: type[_T], then: str) -> _T | None:
        if not entry.value:
            return None
        try:
            return decode(entry.value, kind)
        except DecodeError as error:
            self._parts.metrics.refusals.note(key, entry.revision, error, then)
            return None

    def _on_connection(self, state: ConnectionState, reason: str) -> None:
        self._heartbeat.renew_next()
        self._beat.set()
        if state is not ConnectionState.CONNECTED and self._settings.takeover_on_disconnect:
            # Others may end our lease now; the next renewal tells.
            self._reading.permit(NEVER_S)

    # ── the lease ─────────────────────────────────────────────────────────────────────────────────────────────

    def _renewed(self) -> None:
        self._parts.metrics.lease_renewals.inc()
        if self._over:
            self._over.cancel()
        if self._seat:
            left_s = max(0.0, self._seat.lease.ends_at_s - clock())
            self._over = asyncio.get_running_loop().call_later(left_s, self._lease_over)
        if self._seat and self._duty.began_under(self._seat.incarnation):
            self._reading.permit(self._seat.lease.ends_at_s)

    def _lease_over(self) -> None:
        """Nothing was heard of the control plane for the length of a lease: no handler is started any more."""
        if self._seat and not self._seat.lease.held and not self._stopping:
            self._memory.lapsed_s = clock()
            self._standing.set(FleetState.DEGRADED, "the control plane cannot be reached")

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_duty_changed(self, applied: bool) -> None:
        """There is something to report; `applied`: an assignment is in force that was not before."""
        if applied:
            self._renewed()
        self._follow_leader()
        self._beat.set()

    def _follow_leader(self) -> None:
        """Work out the state of this worker from what it has and what the rebalancer says."""
        if self._stopping or self._seat is None or not self._seat.lease.held:
            return
        if self._leader is None:
            needed = "" if self._settings.may_lead else ", and this worker may not be it (may_lead=false)"
            self._standing.set(FleetState.ELECTION, f"there is no rebalancer{needed}")
        elif self._duty.trouble:
            self._standing.set(FleetState.DEGRADED, self._duty.trouble)
        elif not self._duty.began_under(self._seat.incarnation):
            self._standing.set(FleetState.WAITING, "has no assignment yet")
        else:
            told = self._leader.state
            state = FleetState(told) if told in set(FleetState) else FleetState.STABLE
            self._standing.set(state, self._leader.reason)


async def _until_one_ends(reset: asyncio.Future[None], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the first part of the manager to end, and raise why; the first of them starts the watch, and may."""
    watching, pending = tasks[0], {reset, *tasks}
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = death_of(task)
            if isinstance(error, Exception):
                raise error
            if error is not None:
                raise RuntimeError(
                    f"a part of the manager, {task!r}, ended with something that it awaited"
                ) from error
        if done != {watching}:
            raise LeaseLost("a part of the manager ended by itself")
