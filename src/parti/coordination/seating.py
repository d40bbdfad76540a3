"""How a process comes to its worker id: it opens the bucket, agrees with the fleet, and takes an id or stands by.

Guards that nobody takes an id in the bucket of another fleet, and that incarnations only grow, also in a bucket that
was made anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable

from parti.coordination.control_plane import ControlPlane, agree
from parti.coordination.fleet_parts import FleetParts, Memory
from parti.coordination.lease import clock
from parti.coordination.standby_notice import StandbyNotice
from parti.coordination.worker_ids import Profile, Seat, WorkerIds
from parti.core.lease import NEVER_S
from parti.core.worker_ids import Applicant
from parti.jetstream.system_events import client_ref
from parti.model.fleet import FleetRecord
from parti.telemetry.tasks import Supervised, supervise
from parti.version import __version__


class Seating:
    """Finds a seat for this process, the first one and another whenever it has lost one.

    With `on_look` it stands by for the worker id of the settings, and tells at each look whether somebody holds that
    firmly, and whether somebody else has held it since this process did. Without, it takes an id or raises.
    """

    def __init__(
        self,
        parts: FleetParts,
        memory: Memory,
        *,
        service: str,
        guest: bool,
        on_look: Callable[[bool, bool], None] | None,
    ) -> None:
        self.fleet: FleetRecord | None = None
        """What the fleet is, by the bucket; None before that was opened."""
        self._parts = parts
        self._settings = parts.settings
        self._memory = memory
        self._service = service
        self._guest = guest
        self._on_look = on_look
        token = parts.settings.owner_token
        self._token = token.get_secret_value() if token else uuid.uuid4().hex
        self._yields_until_s = NEVER_S
        self._notice: Supervised | None = None

    async def open(self) -> ControlPlane:
        """Open the bucket, and make sure that it is this fleet's; raises when it cannot be used."""
        parts, settings = self._parts, self._settings
        plane = await ControlPlane.open(parts.connection, parts.api, settings.bucket, replicas=settings.replicas)
        self.fleet = await self._found(plane)
        return plane

    async def take(self, last_id: str | None) -> tuple[Seat, ControlPlane]:
        """Open the bucket and take an id in it, `last_id` if that is free and no other one is set."""
        settings = self._settings
        plane = await self.open()
        ids = WorkerIds(
            plane.bucket,
            lambda: plane.read("ids.>"),
            ttl_s=settings.lease_ttl_s,
            max_workers=settings.max_workers,
        )
        applicant = Applicant(self._token, settings.identity or "", settings.worker_id, last_id)
        if self._on_look:
            seat = await self._await_turn(ids, applicant, plane, self._on_look)
        else:
            seat = await ids.take(applicant, self._profile(), floor=self._memory.floor)
        self._memory.knows(seat.incarnation)
        return seat, plane

    def yield_for(self, duration_s: float) -> None:
        """Let others who stand by go first, for as long."""
        self._yields_until_s = clock() + duration_s

    async def end(self) -> None:
        """Return when the notice that this process stood by is removed; `take` has ended."""
        if self._notice:
            await asyncio.gather(self._notice, return_exceptions=True)

    async def _await_turn(
        self, ids: WorkerIds, applicant: Applicant, plane: ControlPlane, on_look: Callable[[bool, bool], None]
    ) -> Seat:
        """Stand by until this process has the worker id, and let people see that it does."""
        assert applicant.fixed
        s, profile = self._settings, self._profile()
        notice = StandbyNotice(plane.bucket, applicant.fixed, profile, rank=s.standby_rank, ttl_s=s.lease_ttl_s)
        self._notice = supervise(notice.keep, "standby-notice", self._parts.health)
        try:
            return await ids.stand_by(
                applicant,
                profile,
                floor=self._memory.floor,
                rank=s.standby_rank,
                yields_until_s=self._yields_until_s,
                on_look=on_look,
                check=plane.check,
            )
        finally:
            self._notice.cancel()  # it is removed meanwhile: the id comes first

    async def _found(self, plane: ControlPlane) -> FleetRecord:
        """Make sure that the bucket is this fleet's; the first one to come says what the fleet is."""
        parts, s = self._parts, self._settings
        stream = await parts.api.stream_info(parts.stream)
        first = stream.last_seq + 1 if s.start == "new" else 1
        ours = FleetRecord(
            prefix=s.prefix,
            stream=parts.stream,
            template=parts.template.text,
            stream_created=stream.created,
            first_seq=first,
        )
        if self.fleet and self.fleet.stream_created == stream.created:
            ours = self.fleet  # the bucket was made anew: what was new then is not new now
        return await agree(plane.bucket, ours)

    def _profile(self) -> Profile:
        s = self._settings
        return Profile(
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            capacity=s.room,
            weight=s.weight,
            service=self._service,
            client=client_ref(self._parts.connection),
            guest=self._guest,
        )
