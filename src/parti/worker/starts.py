"""Where partitions begin: at their position, by whoever knows it best.

What is known comes from the lanes (this process has handled it), from the rebalancer's grants (somebody else has),
and from the progress record that an earlier run has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import structlog

from parti.core.filters import FilterSet
from parti.core.progress import Progress
from parti.core.retention import WORK_QUEUE
from parti.errors import SubjectMismatch
from parti.jetstream.api import ConsumerInfo, JetStreamApi, StreamInfo
from parti.model.fleet import Grant
from parti.model.partition import Partition, Template
from parti.model.subjects import covers, has_wildcard
from parti.worker.lanes import Lanes

_log = structlog.get_logger("parti.starts")
_PROBES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Granted:
    """What the rebalancer lets a worker handle and get ready for, and which stream the positions are in."""

    grants: Mapping[str, Grant] = field(default_factory=dict)
    stream_created: str = ""
    incoming: Mapping[str, int] = field(default_factory=dict)


class Starts:
    """Positions of partitions that may have no lane yet, in one stream."""

    def __init__(
        self,
        api: JetStreamApi,
        lanes: Lanes,
        template: Template,
        stream: StreamInfo,
        progress: Progress,
        *,
        only_new: bool,
        each_subject: bool,
    ) -> None:
        self.stream = stream
        self.record = progress
        self.recorded = not progress.fresh
        """An earlier run has stored what is finished; else the record says only what its consumers have told."""
        self.granted: Granted | None = None
        """None: nobody grants anything, this worker is on its own."""
        self._api = api
        self._lanes = lanes
        self._template = template
        self._only_new = only_new
        self._each_subject = each_subject
        self._granted_from: dict[str, int] = {}
        self._news_from: dict[str, int] = {}
        self._states: dict[str, int] = {}

    def grant(self, granted: Granted) -> None:
        """Take in what the rebalancer says; positions that it has told before hold, also of what it takes away.

        An update for an earlier word may still be under way, and what that brings must not be handled again.
        """
        self.granted = granted
        if granted.stream_created == self.stream.created:
            told = dict(granted.incoming) | {p: grant.position for p, grant in granted.grants.items()}
            self._granted_from |= {p: max(at, self._granted_from.get(p, 0)) for p, at in told.items()}

    def position(self, partition_id: str, subject: str) -> int:
        """Where a partition stands; 0 when nothing is known of it."""
        if partition_id in self._states:
            # What is not in the state has to be handled again, whoever has handled it.
            return max(self._states[partition_id], self._lanes.roster.known_position(partition_id))
        return max(
            self._lanes.roster.known_position(partition_id),
            self._granted_from.get(partition_id, 0),
            self._news_from.get(partition_id, 0),
            self.record.position(partition_id, subject),
        )

    def begin_at(self, partition_id: str, position: int) -> None:
        """The partition begins where its state was saved, whatever else is known."""
        self._states[partition_id] = position

    def raise_by(
        self,
        infos: Collection[ConsumerInfo],
        nobodys: Collection[str] = (),
        beyond: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take in what existing consumers have acknowledged: of several, what all of them have.

        `nobodys` are subjects of those that carry nothing. `beyond`: where it is known of single subjects how far all
        is acknowledged.
        """
        if len(infos) > 1:
            infos = [info for info in infos if not set(info.subjects) <= set(nobodys)] or infos
        subjects = sorted({subject for info in infos for subject in self.carried_by(info)})
        self.record = self.record.raised(tuple(subjects), min(info.ack_floor for info in infos))
        if set(self.record.covered) == set(subjects):
            self.record = self.record.advanced({p.id: beyond[p.subject] for p in self._partitions(beyond)})

    def carried_by(self, info: ConsumerInfo) -> tuple[str, ...]:
        """The subjects of a consumer; where it has one wide filter, those under it that the record speaks for.

        What a wide filter brings of others is acknowledged too, but never of a subject for which the record speaks.
        """
        found: dict[str, None] = {}
        for subject in info.subjects:
            under = [s for s in self.record.covered if covers(subject, s)] if has_wildcard(subject) else []
            found |= dict.fromkeys(under or (subject,))
        return tuple(found)

    def start_over(self, stream: StreamInfo) -> None:
        """The stream was made anew: nothing that is known holds."""
        self.stream = stream
        self.record = Progress(stream=stream.name, stream_created=stream.created)
        self.recorded = False
        self._granted_from.clear()
        self._news_from.clear()
        self._states.clear()
        if self.granted:
            self.grant(self.granted)  # it may speak of the new one already

    async def last_seq(self) -> int:
        """The stream's last sequence, by its leader."""
        return (await self._api.stream_info(self.stream.name)).last_seq

    async def probe(self, partitions: Sequence[Partition]) -> list[int | None]:
        """The first message of each partition that has to be delivered."""
        room = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def probe(partition: Partition) -> int | None:
            async with room:
                return await self.first_unfinished(partition)

        await self.begin_with_news(partitions)
        return await asyncio.gather(*(probe(p) for p in partitions))

    async def begin_with_news(self, partitions: Iterable[Partition]) -> None:
        """With `start="new"`, partitions that nobody knows of begin at the end of the stream."""
        unknown = [p.id for p in partitions if not self.position(p.id, p.subject)] if self._only_new else []
        if unknown:
            self._news_from |= dict.fromkeys(unknown, await self.last_seq() + 1)

    async def first_unfinished(self, partition: Partition) -> int | None:
        """Sequence of the first message that has to be delivered, or None."""
        # On a work-queue nothing should be left below the position; what is has lost its acknowledgement.
        start = 0 if self.stream.retention == WORK_QUEUE.name else self.position(partition.id, partition.subject)
        message = await self._api.next_on_subject(self.stream.name, partition.subject, start)
        return message.seq if message else None

    # ── at the start ──────────────────────────────────────────────────────────────────────────────────────────

    def no_longer_owned(self, filters: FilterSet) -> list[Partition]:
        """Partitions that an earlier run owned and this one does not: their positions must not be forgotten."""
        gone = [s for s in self.record.covered if not self._each_subject and s not in filters.partitions]
        return self._partitions(gone)

    def _partitions(self, subjects: Iterable[str]) -> list[Partition]:
        partitions = []
        for subject in subjects:
            try:
                partitions.append(self._template.parse(subject))
            except SubjectMismatch:
                _log.warning("the record speaks of a subject that does not fit the template", subject=subject)
        return partitions

    def parked(self, filters: FilterSet) -> list[Partition]:
        """Partitions that were parked when the record was written (and not released), and are owned again."""
        by_id = {p.id: p for p in filters.partitions.values()}
        found = []
        for partition_id in self.record.behind:
            partition = self._template.of_id(partition_id) if self._each_subject else by_id.get(partition_id)
            if partition and self.record.covers(partition.subject):
                found.append(partition)
        return found
