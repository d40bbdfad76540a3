"""Parity windows: before the switch the shadow consumers against the old ones, after it the fleet against its SLO."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from parti.app.migration.shadow import has_shadows, shadow_names
from parti.app.migration.site import Site, for_each, state_of
from parti.coordination.takeover import Takeovers
from parti.core.consumer_config import workers_of
from parti.core.hot_mirror import mirror_name
from parti.core.migration import ConsumerState
from parti.core.parity import Side, Window, compare, side_of
from parti.core.retention import LIMITS
from parti.errors import NotFound, PermissionDenied
from parti.jetstream.scan import scan
from parti.jetstream.taking import Taken, take
from parti.jetstream.waiting import Waiting
from parti.model.partition import Template

_TAKE_S = 2.0

OnTaken = Callable[[str, Sequence[Taken]], None]
"""Hears what each shadow consumer was given."""


class Parity:
    """Looks at one window after another."""

    def __init__(self, site: Site, window_s: float, on_taken: OnTaken = lambda consumer, taken: None) -> None:
        self._site = site
        self._window_s = window_s
        self._on_taken = on_taken
        self.partition_of = {old.subject: old.partition for old in site.desk.old.values()}
        self._number = 0
        self._next = 0
        """Where the next window begins: windows follow one another without a gap."""

    async def shadow_window(self) -> Window:
        """One window of the shadow consumers: what they were given against what the stream stored."""
        site, record = self._site, self._site.desk.migration
        self._number += 1
        shadows = await shadow_names(site) if has_shadows(record.retention) else []
        first = self._next or (await site.api.stream_info(record.stream)).last_seq + 1
        await for_each(shadows, lambda name: site.api.reset_consumer(record.stream, name, first))
        before, began_s = await self._all_consumers(), time.monotonic()
        await asyncio.sleep(self._window_s)
        last = (await site.api.stream_info(record.stream)).last_seq
        self._next = last + 1
        seconds = time.monotonic() - began_s
        stored = await self._stored(first, last)
        given, readers = await self._given(shadows, stored, last)
        after = await self._all_consumers()
        if not has_shadows(record.retention):
            for worker, mine in record.shares.items():
                for partition in mine:
                    readers[partition].append(worker)
        rows = compare(
            site.desk.old,
            stored=stored,
            given=given,
            readers=readers,
            before=self._old(before),
            after=self._old(after),
            lags={},
        )
        taken, repeated = sum(map(len, given.values())), sum(row.repeated for row in rows)
        return Window(
            self._number,
            seconds,
            first,
            last,
            rows,
            old=side_of(self._old(before), self._old(after)),
            new=Side(taken, repeated, sum(row.missing for row in rows) if shadows else 0),
            delivered=bool(shadows),
        )

    async def fleet_window(self) -> Window:
        """One window of the fleet: who owns what, what waits, what was delivered again."""
        site, record = self._site, self._site.desk.migration
        self._number += 1
        first = (await site.api.stream_info(record.stream)).last_seq + 1
        before, began_s = self._workers(await self._fleet_consumers()), time.monotonic()
        await asyncio.sleep(self._window_s)
        after = self._workers(await self._fleet_consumers())
        last = (await site.api.stream_info(record.stream)).last_seq
        seconds = time.monotonic() - began_s
        ours = [p for p, old in site.desk.old.items() if old.holder == "fleet"]
        lags = await self._lags(ours)
        unowned = set(site.eye.unowned(ours))
        readers = {p: (site.eye.claims[p].owner,) for p in ours if p not in unowned}
        rows = compare(ours, stored={}, given={}, readers=readers, before={}, after={}, lags=lags)
        moved = side_of(before, after)
        return Window(
            self._number,
            seconds,
            first,
            last,
            rows,
            new=Side(moved.deliveries, moved.redelivered, sum(lags.values())),
            delivered=False,
        )

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _all_consumers(self) -> dict[str, ConsumerState]:
        return {info.name: state_of(info) for info in await self._site.api.consumers(self._site.stream)}

    async def _fleet_consumers(self) -> dict[str, ConsumerState]:
        """Those of the stream and of its hot mirror, which a fleet that lags reads instead."""
        record, found = self._site.desk.migration, await self._all_consumers()
        if record.retention != LIMITS.name:
            return found
        try:
            mirrored = await self._site.api.consumers(mirror_name(record.prefix, record.stream))
        except (NotFound, PermissionDenied):  # 'parti perms' grants it where the settings allow a mirror
            return found
        return found | {info.name: state_of(info) for info in mirrored}

    def _old(self, consumers: Mapping[str, ConsumerState]) -> dict[str, ConsumerState]:
        """Old consumers by partition."""
        olds = self._site.desk.old.values()
        return {old.partition: consumers[old.consumer] for old in olds if old.consumer in consumers}

    def _workers(self, consumers: Mapping[str, ConsumerState]) -> dict[str, ConsumerState]:
        """The consumers of the fleet."""
        prefix, members = self._site.desk.migration.prefix, self._site.eye.situation.records.members
        return {n: s for n, s in consumers.items() if any(w in members for w in workers_of(n, prefix))}

    async def _given(
        self, shadows: Sequence[str], stored: Mapping[str, list[int]], last: int
    ) -> tuple[dict[str, list[int]], dict[str, list[str]]]:
        """What the shadow consumers are given up to a sequence, and who carries which partition."""
        site = self._site
        given: dict[str, list[int]] = defaultdict(list)
        readers: dict[str, list[str]] = defaultdict(list)

        async def read(name: str) -> None:
            info = await site.api.consumer_info(site.stream, name)
            carried = [partition for s in info.subjects if (partition := self.partition_of.get(s))]
            for partition in carried:
                readers[partition].append(name)
            taken = await take(site.plane.connection, site.stream, name, most=info.pending, wait_s=_TAKE_S)
            # The server counts what is pending a moment after it has stored it.
            missing = {seq for partition in carried for seq in stored.get(partition, ())} - {
                each.seq for each in taken
            }
            while missing:
                more = await take(site.plane.connection, site.stream, name, most=len(missing), wait_s=_TAKE_S)
                if not more:
                    break
                taken += more
                missing -= {each.seq for each in more}
            self._on_taken(name, [each for each in taken if each.seq <= last])
            for each in taken:
                if each.seq <= last and (partition := self.partition_of.get(each.subject)):
                    given[partition].append(each.seq)

        await for_each(shadows, read)
        return given, readers

    async def _stored(self, first: int, last: int) -> dict[str, list[int]]:
        stored: dict[str, list[int]] = defaultdict(list)
        # Another reader would be refused, or would take part in what the stream keeps.
        if last >= first and has_shadows(self._site.desk.migration.retention):
            site = self._site
            async with aclosing(scan(site.plane.connection, site.api, site.stream, start=first)) as messages:
                async for message in messages:
                    if message.seq > last:
                        break
                    if partition := self.partition_of.get(message.subject):
                        stored[partition].append(message.seq)
        return stored

    async def _lags(self, partitions: Sequence[str]) -> dict[str, int]:
        site, record = self._site, self._site.desk.migration
        fleet = site.eye.situation.fleet
        assert fleet
        template = Template(record.template)
        claims = {p: site.eye.claims.get(p) for p in partitions}
        estates = await Takeovers(site.plane, record.stream, template, fleet).read(claims)
        waiting = Waiting(site.plane.connection, site.api, await site.api.stream_info(record.stream))
        wanted = {p: (site.desk.old[p].subject, estates.position(p)) for p in partitions}
        found = await waiting.count(wanted, template.pattern)
        return {p: backlog.messages or 0 for p, backlog in found.items()}
