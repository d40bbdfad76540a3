"""What a worker's consumers are to carry: what it is to own, what it gets ready for, and what it may not drop yet.

A worker may carry partitions that it does not own: those that it is to get ready for (incoming), and leftovers, which
it goes on carrying only because nobody else does yet. On an interest stream the server deletes what no consumer
carries, so nothing is dropped there before its next owner has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from parti.config import Settings
from parti.core.filters import FilterSet, build_filters
from parti.core.retention import INTEREST, retention_named
from parti.errors import PartiError, SubjectMismatch
from parti.model.partition import Partition, PartitionLike, Template
from parti.model.subjects import within
from parti.worker.shards import Shards
from parti.worker.starts import Starts
from parti.worker.vehicle import NOTHING, ConsumerPorts

_log = structlog.get_logger("parti.consumer")


class Cargo:
    """The newest set that is wanted, and which of what is carried has been taken in.

    Nothing here talks to a consumer: what is wanted becomes what is carried by an update. A set that is not valid is
    refused before anything changes.
    """

    def __init__(
        self, ports: ConsumerPorts, settings: Settings, template: Template, starts: Starts, shards: Shards
    ) -> None:
        self.wanted = NOTHING
        """What is to be owned."""
        self.leftovers: dict[str, Partition] = {}
        """Carried only because nobody else does yet, by subject; their messages are not taken in."""
        self.taken: frozenset[str] = frozenset()
        """Subjects that are carried, and whose messages have been taken in from their position on."""
        self._wanted_incoming = NOTHING
        """Belongs to `wanted`: one assignment says both."""
        retention = retention_named(starts.stream.retention)
        self.overlaps = retention.overlap and settings.ordered
        """It can get ready for partitions that somebody else still handles."""
        self._drops_late = retention is INTEREST and ports.safe_elsewhere is not None
        self._ports = ports
        self._settings = settings
        self._template = template
        self._starts = starts
        self._shards = shards

    def build(self, partitions: Iterable[PartitionLike]) -> FilterSet:
        """The subjects of these partitions.

        Raises `ConfigError` when they are too many or overlap, `SubjectMismatch` when one is outside the stream.
        """
        s = self._settings
        filters = build_filters(
            self._template.partitions(partitions), max_subjects=s.max_subjects, shards=s.consumer_shards
        )
        stream = self._starts.stream
        for subject in filters.partitions:
            if not within(subject, stream.stored_subjects):
                raise SubjectMismatch(
                    f"subject {subject!r} is outside stream {stream.name!r}, which takes "
                    f"{', '.join(stream.stored_subjects) or 'nothing'}; correct the template or the stream"
                )
        if filters.duplicates:
            self._ports.metrics.duplicate_subjects.inc(filters.duplicates)
            _log.warning("partitions were named more than once", duplicates=filters.duplicates)
        return filters

    def want(self, owned: FilterSet) -> None:
        """From now on these are to be owned, with what the newest grants name as incoming."""
        granted, self.wanted, self._wanted_incoming = self._starts.granted, owned, NOTHING
        if granted and self.overlaps:
            self._wanted_incoming = FilterSet({p.subject: p for p in self._template.partitions(granted.incoming)}, 0)
        wanted = owned.partitions.keys() | self._wanted_incoming.partitions.keys()
        self.leftovers = {s: p for s, p in self.leftovers.items() if s not in wanted}

    def to_carry(self) -> FilterSet:
        """What is wanted, what to get ready for, and what an earlier process carried and nobody else does yet."""
        others = self.leftovers | self._wanted_incoming.partitions
        return FilterSet(others | self.wanted.partitions, 0) if others else self.wanted

    def to_take(self, carried: FilterSet) -> frozenset[str]:
        """Subjects of these whose messages are to be taken in."""
        return frozenset(carried.partitions.keys() - self.leftovers.keys())

    def keep_leftovers(self, subjects: Iterable[str]) -> None:
        """On an interest stream the server deletes what the last consumer drops, so drop nothing before it is safe.

        Others may have been given these partitions and not carry them yet.
        """
        if not self._drops_late:
            return
        # Whoever asked had to wait for an answer, and some may be wanted again meanwhile.
        wanted = self.wanted.partitions.keys() | self._wanted_incoming.partitions.keys() | self._shards.kept
        for subject in subjects:
            try:
                partition = self._template.parse(subject)
            except SubjectMismatch:
                continue
            if subject not in self._shards.placeholders and subject not in wanted:
                self.leftovers[subject] = partition
        # Their messages are let pass from now on: whoever owns them next, be it this worker, goes back for them.
        self.taken -= self.leftovers.keys()

    async def keep_unsafe(self) -> None:
        """Go on carrying what is no longer wanted here, until somebody else does."""
        carried, ask = self._shards.carried.partitions, self._ports.safe_elsewhere
        going = carried.keys() - self.to_carry().partitions.keys()
        if not self._drops_late or ask is None or not going:
            return
        partitions = {s: carried[s].id for s in going}
        try:
            safe = await ask(partitions.values())
        except PartiError as error:
            _log.warning("it is not known yet whether others carry what was let go", error=str(error))
            safe = set()
        self.keep_leftovers(s for s, partition in partitions.items() if partition not in safe)

    async def drop_leftovers(self) -> bool:
        """Want no more of what others carry by now; whether there was any such."""
        ask = self._ports.safe_elsewhere
        if not self.leftovers or ask is None:
            return False
        safe = await ask([partition.id for partition in self.leftovers.values()])
        left = {s: p for s, p in self.leftovers.items() if p.id not in safe}
        if left == self.leftovers:
            return False
        self.leftovers = left
        return True
