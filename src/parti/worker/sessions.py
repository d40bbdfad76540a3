"""How a consumer gets to its place and its filter: before each session, and when what it carries changes.

There are two ways to change what one carries:

- Where finished messages stay in the stream (limits retention), the filter is changed under standing pulls: the
  stream's last sequence U is read *after* the update has returned, and the lane is fed from the position to U and to
  whatever was delivered and let go meanwhile. Nothing else that the consumer carries is disturbed.
- Where acknowledged messages are gone (interest, work-queue), at a start, and whenever a session has to begin anew:
  with no pull standing, the consumer is put back to the lowest position that is not finished, then it gets its
  filter, then it pulls. RESET comes first, so that a crash in between leaves a consumer that starts too early (its
  messages are recognised as finished) and never one that starts too late, whose server would take unfinished messages
  for acknowledged. At a start it comes again when the filter has changed: under the old one, a pull of somebody who
  had the worker id before, and is cut off, has run the cursor past what was added.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from parti.core.filters import FilterDiff, FilterSet, diff_filters
from parti.errors import LeaseLost, NotFound, RequestTimeout
from parti.jetstream.api import ConsumerInfo
from parti.model.partition import Partition
from parti.worker.cargo import Cargo
from parti.worker.handling import Handling
from parti.worker.shards import Shards
from parti.worker.starts import Starts
from parti.worker.vehicle import ConsumerPorts, Vehicle

_log = structlog.get_logger("parti.consumer")


class Sessions:
    """Puts a consumer right wholly, or leaves the previous set in force and raises; one change of each at a time.

    While this process does not hold the worker id, no consumer is set back.
    """

    def __init__(
        self,
        ports: ConsumerPorts,
        starts: Starts,
        shards: Shards,
        cargo: Cargo,
        handling: Handling,
        *,
        each_subject: bool,
    ) -> None:
        self._ports = ports
        self._starts = starts
        self._shards = shards
        self._cargo = cargo
        self._handling = handling
        self._each_subject = each_subject

    # ── what one carries ──────────────────────────────────────────────────────────────────────────────────────

    async def apply(self, vehicle: Vehicle, owned: FilterSet, part: FilterSet) -> None:
        """Bring the part of one consumer into force, or leave its previous one in force and raise."""
        mine = self._shards.owned_with(vehicle, part, self._handling.owned, owned)
        diff = diff_filters(vehicle.carried.subjects, part.subjects)
        if diff.empty and mine.partitions.keys() == self._handling.owned.partitions.keys():
            return
        async with vehicle.lock:
            if self._handling.feeds:
                await self._refilter(vehicle, mine, part, diff)
            else:
                await self._set_back(vehicle, mine, part, diff)

    async def _refilter(self, vehicle: Vehicle, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Change the filter under standing pulls; what an added partition has already is fed to it."""
        self._handling.expect(self._shards.carried_with(vehicle, carried))
        if not diff.empty:
            try:
                await vehicle.refilter(carried)
            except NotFound:
                # Pulls would have told the engine too, but where nothing was carried there are none.
                vehicle.engine.new_session("the consumer is gone")
                raise
            bound = await self._starts.last_seq() if diff.added else 0
            self._handling.bounds |= {carried.partitions[s].id: bound for s in diff.added}
            await self._starts.begin_with_news([carried.partitions[s] for s in diff.added])
        wakes = bool(carried.partitions) and not vehicle.carried.partitions
        self._shards.carries(vehicle, carried)
        self._handling.own(owned)
        if wakes:
            vehicle.engine.new_session("has something to read now")

    async def _set_back(self, vehicle: Vehicle, owned: FilterSet, carried: FilterSet, diff: FilterDiff) -> None:
        """Change the filter with no pull standing, and begin anew where the lowest unfinished message is."""
        handling, cargo, engine = self._handling, self._cargo, vehicle.engine
        previous = handling.owned
        engine.pause()
        try:
            handling.own(owned)
            handling.expect(self._shards.carried_with(vehicle, carried))
            taken = cargo.to_take(carried)
            gained = [carried.partitions[s] for s in sorted(taken - cargo.taken)]
            pull = await self._settle_on(vehicle, carried, taken, gained, reason="update")
        except BaseException:
            handling.own(previous)
            handling.expect(self._shards.carried.partitions)
            handling.take_back([previous.partitions[s] for s in diff.removed if s in previous.partitions])
            engine.resume(prepared=False, reason="update failed")
            raise
        cargo.taken = (cargo.taken - vehicle.carried.partitions.keys()) | taken
        self._shards.carries(vehicle, carried)
        engine.resume(prepared=True, pull=pull)

    # ── where one begins ──────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, vehicle: Vehicle, reason: str) -> bool:
        """Verify a consumer and put it to the position; its engine calls this before each session."""
        async with vehicle.lock:
            return await self._settle_on(vehicle, vehicle.carried, self._cargo.taken, [], reason=reason)

    async def _settle_on(
        self,
        vehicle: Vehicle,
        carried: FilterSet,
        taken: Collection[str],
        gained: list[Partition],
        *,
        reason: str,
    ) -> bool:
        """RESET to the lowest unfinished position, then set the filter; False when there is nothing to pull.

        `taken` are the subjects that the lanes speak for, once `gained` are; the others are carried for somebody
        else, or will be taken in by the next update.
        """
        if not self._ports.entitled():
            raise LeaseLost(f"the worker id is not held at present; consumer {vehicle.name!r} is left alone")
        lanes, stream, reached = self._ports.lanes, vehicle.stream, vehicle.reached
        subjects = vehicle.filter_of(carried, stream)
        info, moves = await vehicle.find_unpulled(stream), vehicle.moves_to(stream)
        if info is None:
            await self._check_stream(vehicle)
        elif not moves and reason not in {"start", "update"} and info.subjects not in {subjects, vehicle.told}:
            await self._mistrust(vehicle, info)
        oldest = await self._handling.gain(gained)
        target = min(lanes.floors.resume_of(reached), oldest or lanes.floors.resume_of(reached))
        if self._ports.durable and not await self._ports.durable():
            raise RequestTimeout(
                f"consumer {vehicle.name!r} waits for the ledger, which does not take rows at present"
            )
        if self._ports.hot and vehicle.on_mirror(stream):
            target = max(target, await self._ports.hot.entrance(self._starts.stream.created))
            lanes.roster.begin_at(target, self._handling.brought_by(vehicle), reached)
        unread = carried.partitions.keys() - taken
        target = vehicle.begin_at(target)
        await vehicle.put_at(target, stream, subjects, info, reason=reason, unread=unread)
        return bool(carried.partitions)

    async def _check_stream(self, vehicle: Vehicle) -> None:
        """The consumer is gone; if the stream went with it and is another one now, nothing we know holds."""
        lanes = self._ports.lanes
        stream = await self._ports.api.stream_info(self._starts.stream.name)
        # Looked up only now: another consumer of ours may have found out in the meantime.
        same = stream.created == self._starts.stream.created
        if same and stream.last_seq + 1 >= lanes.floors.resume_of(vehicle.reached):
            return
        _log.warning(
            "the stream was made anew or restored; starting over", stream=stream.name, created=stream.created
        )
        self._starts.start_over(stream)
        self._ports.on_new_stream(stream)
        self._handling.start_over()
        lanes.start_over()
        if self._ports.stateful:
            self._ports.stateful.start_over()
            self._handling.own(self._handling.owned)
        for other in self._shards.vehicles:
            other.confirmed.start_over()
            if other is not vehicle:
                other.engine.new_session("the stream was made anew")

    async def verify(self, vehicle: Vehicle) -> None:
        """Notice that somebody else has deleted, changed or paused a consumer: pulls that stand do not tell."""
        async with vehicle.lock:
            if not (self._ports.entitled() and vehicle.engine.healthy and vehicle.told):
                return
            info = await vehicle.find(vehicle.settled_on)
        if info is None:
            vehicle.engine.new_session("the consumer is gone")
        elif vehicle.was_changed(info):
            _log.warning("the consumer was changed by somebody else; putting it right", consumer=vehicle.name)
            vehicle.engine.new_session("changed by somebody else")
        vehicle.tell_paused(info is not None and info.paused)

    async def _mistrust(self, vehicle: Vehicle, info: ConsumerInfo) -> None:
        """Somebody else changed the filter: messages may have been passed over, so look for them."""
        _log.error("the consumer's filter was changed by somebody else; putting it right", found=info.subjects[:20])
        handling, reached = self._handling, vehicle.reached
        if self._each_subject:
            reached.next_seq = min(reached.next_seq, self._starts.record.floor)
            return
        carried = {p.id for p in vehicle.carried.partitions.values()}
        if handling.bounds.keys() & carried:
            bound = await self._starts.last_seq()
            handling.bounds |= dict.fromkeys(handling.bounds.keys() & carried, bound)
        floors = self._ports.lanes.floors
        await handling.gain([p for s, p in handling.owned.partitions.items() if floors.reached(s) is reached])
