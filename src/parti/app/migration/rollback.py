"""The way back: the fleet lets go of partitions, and their old consumers go on where it stopped.

    withheld ──> nobody owns it, and its claim is sealed ──> the old consumer stands there, paused ──> it goes on

An old consumer is moved only while it is paused, and by nobody but this: one that delivers already has come back, so
done again, nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from parti.app.migration.shadow import remove_shadows
from parti.app.migration.site import Site, for_each, in_portions
from parti.app.migration.switch import Pace, gone, with_withheld
from parti.coordination.orders import obstacle
from parti.core.migration import FOREVER, is_reset, restored_config
from parti.core.retention import INTEREST, WORK_QUEUE
from parti.errors import ApiError
from parti.model.migration import OldConsumer

_TAKEN = 10100
"""Work-queue: another consumer still has the subject."""
_TAKEN_S = 10.0
_LOOK_S = 0.05


@dataclass(slots=True)
class RolledBack:
    """What came of it."""

    done: int = 0
    """Partitions that went back."""
    resumed: int = 0
    """Old consumers that a switch had stopped and not finished with, and that go on now."""
    left: dict[str, str] = field(default_factory=dict)
    rests_s: list[float] = field(default_factory=list)


class Rollback:
    """One run of it."""

    def __init__(self, site: Site, pace: Pace) -> None:
        self._site = site
        self._pace = pace
        self._retention = site.desk.migration.retention

    async def run(self) -> RolledBack:
        """Give everything back."""
        site, outcome = self._site, RolledBack()
        await remove_shadows(site)
        old = site.desk.old
        back = [p for p, each in old.items() if each.holder != "old"]
        await self._resume_stopped([each for each in old.values() if each.holder == "old" and each.consumer], outcome)

        async def take(portion: Sequence[str]) -> list[OldConsumer]:
            return await self._take_from_fleet(portion, outcome)

        async def give(free: list[OldConsumer]) -> None:
            await self._give_back(free, outcome)
            site.told("rolling back", outcome.done, len(back))

        outcome.rests_s = await in_portions(back, self._pace.at_once, take, give)
        return outcome

    async def _resume_stopped(self, olds: Sequence[OldConsumer], outcome: RolledBack) -> None:
        """Let those go on that a killed switch has left paused."""
        states = await for_each(olds, self._site.state)
        paused = [old for old, state in zip(olds, states, strict=True) if state and state.paused]
        resumed = await for_each(paused, self._site.resume)
        outcome.resumed += sum(resumed)
        outcome.left |= {old.partition: gone(old) for old, there in zip(paused, resumed, strict=True) if not there}

    async def _take_from_fleet(self, partitions: Sequence[str], outcome: RolledBack) -> list[OldConsumer]:
        """Let workers let go of these; returns those that they did let go of."""
        site = self._site
        olds = site.old_ones(partitions)
        if self._retention == INTEREST.name:
            # Before the fleet drops the subject: what nobody wants is deleted.
            await for_each([old for old in olds if old.consumer], self._make_early)
        since = await site.desk.change_orders(lambda orders: with_withheld(orders, partitions))
        deadline_s = time.monotonic() + self._pace.drain_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            kept = await site.eye.until(lambda: site.eye.kept(partitions), left_s, since=since)
            given = await site.desk.seal([p for p in partitions if p not in kept])
            if not given or time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(_LOOK_S)
        kept += given
        for partition in kept:
            outcome.left[partition] = obstacle(site.eye.situation, partition)
        return [old for old in olds if old.partition not in kept]

    async def _give_back(self, free: Sequence[OldConsumer], outcome: RolledBack) -> None:
        """Let their old consumers go on."""
        read = [old for old in free if old.consumer]
        back = await for_each(read, self._restore)
        lost = {old.partition: gone(old) for old, there in zip(read, back, strict=True) if not there}
        outcome.left |= lost
        now = datetime.now(UTC)
        changed = [
            msgspec.structs.replace(old, holder="old", removed=False, at=now)
            for old in free
            if old.partition not in lost
        ]
        await self._site.desk.save(old=changed)
        outcome.done += len(changed)

    def _position(self, old: OldConsumer) -> int:
        """Where the fleet stopped, or where it would have begun."""
        claim, record = self._site.eye.claims.get(old.partition), self._site.desk.migration
        fresh = claim and claim.stream_created == record.stream_created
        return max(old.position, claim.position if claim and fresh else 0, 1)

    async def _restore(self, old: OldConsumer) -> bool:
        """Make the old consumer go on at the position of the fleet; False when somebody deletes it meanwhile."""
        site, position = self._site, self._position(old)
        state = await site.state(old)
        if state and not state.paused:
            return True  # it has come back already: a run before this one was killed before it could note that
        if state and old.holder == "both":
            return await site.resume(old)  # it never gave the partition up
        if state and not is_reset(state.config):
            await site.delete(old)
            state = None
        if self._retention == WORK_QUEUE.name:
            await self._remove_finished(old, position)
            if state is None:
                await self._make(old, position, paused=False)  # there is nothing left that it must not have
                return True
        else:
            if state is None:
                await self._make(old, position)
            await site.api.reset_consumer(site.stream, old.consumer, position)
        return await site.resume(old)

    async def _remove_finished(self, old: OldConsumer, position: int) -> None:
        """Remove what is finished and still in a work-queue: its acknowledgement is on its way, or was lost.

        A worker would skip it, by the position; an old consumer gets everything that is there.
        """
        site = self._site
        first = await site.api.next_on_subject(site.stream, old.subject, 1)
        if first and first.seq < position:
            await site.api.call(f"STREAM.PURGE.{site.stream}", {"filter": old.subject, "seq": position})

    async def _make_early(self, old: OldConsumer) -> None:
        if await self._site.state(old) is None:
            await self._make(old, self._position(old))

    async def _make(self, old: OldConsumer, position: int, *, paused: bool = True) -> None:
        """Make it as it was."""
        config = restored_config(old.config, position)
        if paused:
            config["pause_until"] = FOREVER.isoformat().replace("+00:00", "Z")
        deadline_s = time.monotonic() + _TAKEN_S
        while True:
            try:
                await self._site.api.put_consumer(self._site.stream, config, action="create")
                return
            except ApiError as error:
                # The worker that had the subject drops it a moment after it has let go.
                if error.code != _TAKEN or time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(_LOOK_S)
