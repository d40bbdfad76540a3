"""The switch: partition by partition, an old consumer's finished messages become the position of the fleet.

    pause the old consumer ──> nothing is in flight ──> position stored ──> withheld no longer ──> a worker owns it
              │                        │
              └── time is up: it goes on as before

The first pause ends by itself: a switch that is killed before then leaves consumers that go on after a while. From
the moment the position is stored the fleet has the partition; done again, the switch goes on from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from parti.app.migration.site import Site, for_each, in_portions
from parti.coordination.orders import obstacle
from parti.core.migration import ConsumerState
from parti.core.retention import LIMITS, WORK_QUEUE
from parti.errors import ConfigError
from parti.jetstream.scan import scan
from parti.model.fleet import Orders
from parti.model.migration import OldConsumer

_LOOK_S = 0.01
_LOOK_MOST_S = 0.2
_PAUSE_SPARE_S = 30.0
"""How much longer than the wait for what is in flight the first pause lasts."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast."""

    at_once: int = 50
    """Partitions that rest at the same time."""
    drain_s: float = 60.0
    """Longest wait for what an old consumer has in flight."""
    take_s: float = 60.0
    """Longest wait for workers to take partitions."""
    dual: bool = False
    """Let the fleet handle what the old consumers go on handling; the sink has to tell repeats."""
    take_over: bool = False
    """Let the fleet have what is still in flight when the wait is over, as if its worker had died."""


@dataclass(slots=True)
class Switched:
    """What came of it."""

    done: int = 0
    """Partitions that the fleet has now, those that it had before included."""
    left: dict[str, str] = field(default_factory=dict)
    """Partitions that it has not, and why."""
    rests_s: list[float] = field(default_factory=list)
    """How long each portion rested: from its pause until workers owned it."""
    taken_over: int = 0
    """Messages that were in flight, and that the fleet handles as after a crash."""
    repeats: int = 0
    """Messages that were finished before one of those, and that the fleet handles again."""


class _NobodyTakesError(Exception):
    """Workers took none of a portion in the time that they have for it."""


class Switch:
    """One run of it."""

    def __init__(self, site: Site, pace: Pace) -> None:
        self._site = site
        self._pace = pace
        self._deletes = site.desk.migration.retention == WORK_QUEUE.name

    async def run(self) -> Switched:
        """Switch what is not switched; returns when workers own all of it, or with what stands in the way."""
        outcome = Switched()
        old, dual = self._site.desk.old, self._pace.dual
        taken = [p for p, each in old.items() if each.holder == "fleet" or (dual and each.holder == "both")]
        waiting = [p for p in old if p not in set(taken)]

        async def stop(portion: Sequence[str]) -> list[str]:
            return await (self._join(portion, outcome) if dual else self._finish(portion, outcome))

        async def give(ready: list[str]) -> None:
            await self._hand_over(ready, outcome)
            self._site.told("switching", outcome.done, len(old))

        try:
            await self._hand_over(taken, outcome)
            outcome.rests_s = await in_portions(waiting, self._pace.at_once, stop, give)
        except _NobodyTakesError:
            pass  # what is left says why; to stop more old consumers would only let more partitions rest
        return outcome

    async def _join(self, partitions: Sequence[str], outcome: Switched) -> list[str]:
        """Let the fleet begin at what is surely finished, beside the old consumers."""
        site = self._site
        olds = site.old_ones(partitions)
        states = await for_each(olds, site.state)
        floors: dict[str, int] = {}
        for old, state in zip(olds, states, strict=True):
            if state:
                floors[old.partition] = state.ack_floor + 1
            elif old.consumer:
                outcome.left[old.partition] = gone(old)
        now = datetime.now(UTC)
        changed = [
            msgspec.structs.replace(old, holder="both", position=floors.get(old.partition, 0), at=now)
            for old in olds
            if old.partition in floors or not old.consumer
        ]
        await site.desk.save(old=changed, positions=floors)
        return [old.partition for old in changed]

    async def check(self) -> None:
        """Raise `ConfigError` unless workers are there that can take everything."""
        await self._site.check_stream()
        site, situation = self._site, self._site.eye.situation
        record, fleet = site.desk.migration, situation.fleet
        members = [m for m in situation.records.members.values() if m.state == "active" and not m.guest]
        if not members or fleet is None:
            raise ConfigError("no worker of the fleet is running; start some, with 'parti worker MODULE:APP'")
        if (fleet.stream, fleet.template) != (record.stream, record.template):
            raise ConfigError(
                f"the fleet of this bucket handles {fleet.template!r} of {fleet.stream!r}, the migration is about "
                f"{record.template!r} of {record.stream!r}; name another --bucket"
            )
        room = sum(member.capacity for member in members)
        if room < len(site.desk.old):
            raise ConfigError(
                f"{len(members)} workers take {room:,} of {len(site.desk.old):,} partitions; start more of them"
            )

    # ── finishing ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _finish(self, partitions: Sequence[str], outcome: Switched) -> list[str]:
        """Stop the old consumers of these and note where each one stopped; returns those that did."""
        site, pace = self._site, self._pace
        read = [old for old in site.old_ones(partitions) if old.consumer]
        unread = [old for old in site.old_ones(partitions) if not old.consumer]
        there = await for_each(read, lambda old: site.pause(old, pace.drain_s + _PAUSE_SPARE_S))
        outcome.left |= {old.partition: gone(old) for old, found in zip(read, there, strict=True) if not found}
        paused = [old for old, found in zip(read, there, strict=True) if found]
        busy = await self._drain(paused)
        if pace.take_over:
            busy = {}
        drained = [old for old in paused if old.partition not in busy]
        # For good now, and only then the last look: what it says is what stays.
        await for_each(drained, lambda old: site.pause(old, None))
        states = await for_each(drained, site.state)
        positions: dict[str, int] = {}
        for old, state in zip(drained, states, strict=True):
            if state is None:
                outcome.left[old.partition] = gone(old)
            elif state.position is None and not pace.take_over:
                busy[old.partition] = state
            else:
                positions[old.partition] = self._position(state)
                outcome.taken_over += state.ack_pending
                outcome.repeats += await self._finished_above(old, state)
        await self._go_on(busy, outcome)
        now = datetime.now(UTC)
        changed = [
            msgspec.structs.replace(old, holder="fleet", position=positions.get(old.partition, 0), at=now)
            for old in (*drained, *unread)
            if not old.consumer or old.partition in positions
        ]
        await site.desk.save(old=changed, positions=positions)
        return [old.partition for old in changed]

    def _position(self, state: ConsumerState) -> int:
        """Where the fleet begins."""
        if state.position is None or (self._deletes and state.gave_up):
            # A work-queue still has what its consumer gave up on, and a message below the position would be deleted.
            return state.ack_floor + 1
        # On a work-queue too: what was acknowledged a moment ago may still be there.
        return state.position

    async def _finished_above(self, old: OldConsumer, state: ConsumerState) -> int:
        """How many messages are finished above the ack floor; which ones, the server does not tell."""
        if self._site.desk.migration.retention != LIMITS.name or not state.ack_pending:
            return 0  # what is finished is not in the stream any more, or nothing is
        site, delivered = self._site, 0
        messages = scan(
            site.plane.connection, site.api, site.stream, start=state.ack_floor + 1, subjects=(old.subject,)
        )
        async with aclosing(messages):
            async for message in messages:
                if message.seq > state.delivered:
                    break
                delivered += 1
        return max(0, delivered - state.ack_pending)

    async def _drain(self, paused: Sequence[OldConsumer]) -> dict[str, ConsumerState]:
        """Wait until nothing is in flight; returns those where something still is."""
        deadline_s, look_s = time.monotonic() + self._pace.drain_s, _LOOK_S
        left = list(paused)
        while True:
            states = await for_each(left, self._site.state)
            busy = [(o, s) for o, s in zip(left, states, strict=True) if s and s.position is None]
            if not busy or time.monotonic() >= deadline_s:
                return {old.partition: state for old, state in busy}
            left = [old for old, _ in busy]
            await asyncio.sleep(look_s)
            look_s = min(_LOOK_MOST_S, look_s * 2)

    async def _go_on(self, busy: Mapping[str, ConsumerState], outcome: Switched) -> None:
        """Let old consumers go on that did not come to rest."""
        for partition, state in busy.items():
            old = self._site.desk.old[partition]
            outcome.left[partition] = (
                f"{state.ack_pending} messages of {old.consumer} were in flight for {self._pace.drain_s:g} s, and it "
                f"goes on as before; if its worker is dead, --take-over lets the fleet have them"
                if await self._site.resume(old)
                else gone(old)
            )

    # ── handing over ──────────────────────────────────────────────────────────────────────────────────────────

    async def _hand_over(self, partitions: Sequence[str], outcome: Switched) -> None:
        """Let workers have these, whose position is stored, and wait until they do."""
        if not partitions:
            return
        site = self._site
        if self._deletes:
            gone = [old for old in site.old_ones(partitions) if old.consumer and not old.removed]
            await for_each(gone, site.delete)
            await site.desk.save(old=[msgspec.structs.replace(old, removed=True) for old in gone])
        since = await site.desk.change_orders(lambda orders: without(orders, partitions))
        missing = await site.eye.until(lambda: site.eye.unowned(partitions), self._pace.take_s, since=since)
        for partition in missing:
            outcome.left[partition] = obstacle(site.eye.situation, partition)
        outcome.done += len(partitions) - len(missing)
        if len(missing) == len(partitions):
            raise _NobodyTakesError


def gone(old: OldConsumer) -> str:
    """Why an old consumer that is not there any more stands in the way."""
    return f"its consumer {old.consumer} is gone, and with it what it had finished; make it anew, or leave it out"


def without(orders: Orders, partitions: Iterable[str]) -> Orders:
    """These are withheld no longer."""
    lifted = set(partitions)
    return msgspec.structs.replace(orders, withheld=tuple(p for p in orders.withheld if p not in lifted))


def with_withheld(orders: Orders, partitions: Iterable[str]) -> Orders:
    """These are withheld, besides those that are."""
    return msgspec.structs.replace(orders, withheld=tuple(dict.fromkeys((*orders.withheld, *partitions))))
