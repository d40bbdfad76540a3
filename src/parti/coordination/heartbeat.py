"""A worker's heartbeat: it renews the lease of the worker id, and says how far the assignment has got.

Guards that a lease is renewed before it can end. A beat that the control plane did not take says nothing about the
lease and is tried again, soon; only `LeaseLost` and `ControlPlaneReset` end the beating.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
import structlog

from parti.coordination.control_plane import ControlPlane
from parti.coordination.duty import Duty, ReadingSide
from parti.coordination.fleet_parts import FleetParts
from parti.coordination.lease import clock
from parti.coordination.standing import Standing
from parti.coordination.worker_ids import Seat
from parti.errors import ControlPlaneReset, LeaseLost, PartiError, WrongRevision
from parti.jetstream.system_events import client_ref
from parti.model.fleet import HealthRecord, encode, key_of
from parti.telemetry.tasks import report_death

_log = structlog.get_logger("parti.manager")


class Heartbeat:
    """Beats for whichever worker id is held, one at a time.

    Whoever has news that others wait for sets `due`: the next beat comes at once. `beaten` is called after each one
    that the control plane took.
    """

    def __init__(
        self,
        parts: FleetParts,
        reading: ReadingSide,
        duty: Duty,
        standing: Standing,
        *,
        due: asyncio.Event,
        beaten: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._reading = reading
        self._duty = duty
        self._standing = standing
        self._due = due
        self._beaten = beaten
        self._renew_now = False
        self._revision = 0
        """Of the health record, as last written or read."""
        self._trouble = ""
        """Why the last report could not be written."""

    def begin(self) -> None:
        """A worker id is held from now on; nothing is known of what its last holder wrote."""
        self._revision = 0

    def renew_next(self) -> None:
        """Renew the lease with the next beat, however long it still lasts."""
        self._renew_now = True

    async def keep(self, seat: Seat, plane: ControlPlane) -> None:
        """Renew the lease, with news of this worker, before it can end; raise when it is lost."""
        while True:
            self._due.clear()
            beaten = await self.beat(seat)
            if not beaten:
                self._renew_now = True
                await plane.check_if_reachable()
                pause_s = seat.lease.terms.retry_after(clock(), seat.lease.ends_at_s)
            else:
                pause_s = max(0.05, seat.lease.renew_at_s - clock())
            try:
                async with asyncio.timeout(pause_s):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def beat(self, seat: Seat) -> bool:
        """One heartbeat; False when the control plane did not take it. Raises `LeaseLost`."""
        seat.describe(client=client_ref(self._parts.connection))
        value = self._report(seat)
        key = key_of("health", seat.worker_id)
        try:
            # Two writes, not one batch: small batches take the server some twenty times as long. A report that others
            # wait for goes alone.
            if self._renew_now or clock() >= seat.lease.renew_at_s:
                self._renew_now = False
                await seat.renew()
            self._revision = await seat.bucket.put(key, value, revision=self._revision)
        except WrongRevision:
            return await self._reread(seat, key)
        except (LeaseLost, ControlPlaneReset):
            raise
        except PartiError as error:
            _log.warning("heartbeat failed", error=str(error))
            return False
        self._beaten()
        return True

    def _report(self, seat: Seat) -> bytes:
        """What a beat says. Should the reading side fail to tell, or what it tells fail to be written, it says that.

        The lease has to be renewed all the same, and the fleet has to see that something is wrong here.
        """
        applied = HealthRecord(
            incarnation=seat.incarnation,
            applied=self._duty.settled_version,
            busy=self._duty.busy,
            ready=self._duty.ready_version,
            refused=tuple(self._duty.refused),
            state=self._standing.state.value,
            at=datetime.now(UTC),
        )
        try:
            problems = tuple(self._parts.health.reasons.values())[:5]
            value = encode(msgspec.structs.replace(applied, problems=problems, **self._reading.report()))
            self._trouble = ""
            return value
        except Exception as error:
            if self._trouble != repr(error):
                self._trouble = repr(error)
                what = "could not tell how this worker is, and says that instead"
                report_death("heartbeat", error, self._parts.health, what, signals=False)
            said = f"the report of this worker cannot be written: {error!r}".encode("ascii", "backslashreplace")
            return encode(msgspec.structs.replace(applied, problems=(said.decode(),)))

    async def _reread(self, seat: Seat, key: str) -> bool:
        """Our own write whose answer got lost, or that of the last holder of the id: the next one goes on from it."""
        try:
            found = await seat.bucket.get(key)
        except PartiError as error:
            _log.warning("heartbeat failed", error=str(error))
        else:
            self._revision = found.revision if found else 0
        return False
