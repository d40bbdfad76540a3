"""What a partition's last owner left behind: how far it got, and whether it died over a message.

Positions come from the records of previous owners, from the claims, and for partitions that were never claimed from
any record. A partition that came back from the consumer that had it before the fleet begins where that one stopped.
Guards NoLoss and NoRepeatOnPlannedMove: whoever gets a partition starts where the last one stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from parti.coordination.control_plane import ControlPlane
from parti.core.progress import Progress, decode_progress
from parti.errors import DecodeError
from parti.jetstream.api import StreamInfo
from parti.jetstream.kv import Entry
from parti.model.fleet import Claim, FleetRecord, key_of, name_of
from parti.model.migration import OLD_CONSUMERS
from parti.model.partition import Template
from parti.telemetry.refusals import Refusals


@dataclass(frozen=True, slots=True)
class Estate:
    """What the next owner has to know of a partition, as fields of its claim."""

    position: int
    stream_created: str
    careful_to: int = 0
    suspect: int = 0
    deaths: int = 0
    failed: int = 0
    attempts: int = 0


class Takeovers:
    """Reads what is known of partitions that are about to change hands."""

    def __init__(
        self,
        plane: ControlPlane,
        stream: str,
        template: Template,
        fleet: FleetRecord,
        refusals: Refusals | None = None,
    ) -> None:
        self._plane = plane
        self._stream = stream
        self._template = template
        self._fleet = fleet
        self._records: dict[str, Progress] = {}
        self._refusals = refusals
        self._unreadable: set[str] = set()

    async def read(self, claims: Mapping[str, Claim | None]) -> Estates:
        """Look up partitions by the claims that they have now (None: they were never claimed)."""
        stream = await self._plane.api.stream_info(self._stream)
        if None in claims.values():
            # Never claimed, but a worker may know of them: from before a reset, or from working alone.
            found = await self._plane.read("progress.>")
            self._take((name_of(key), entry) for key, entry in found.items())
        owners = {claim.owner for claim in claims.values() if claim and claim.owner}
        if any(claim is None or not claim.owner for claim in claims.values()):
            owners.add(OLD_CONSUMERS)  # from the leader: a replica may not know yet where it stopped
        entries = await asyncio.gather(*(self._plane.bucket.get(key_of("progress", owner)) for owner in owners))
        self._take(zip(owners, entries, strict=True))
        return Estates(stream, self._template, self._fleet, claims, self._records, self._unreadable)

    def _take(self, found: Iterable[tuple[str, Entry | None]]) -> None:
        """Take in what workers have stored; where that cannot be read the claims tell, so messages are repeated."""
        for worker, entry in found:
            if entry is None or not entry.value:
                continue
            self._unreadable.discard(worker)
            try:
                self._records[worker] = decode_progress(entry.value)
            except DecodeError as error:
                self._records.pop(worker, None)
                self._unreadable.add(worker)
                if self._refusals is None:
                    continue
                then = "its partitions begin where the claims say"
                if worker == OLD_CONSUMERS:
                    then = "partitions that came from older consumers are given to nobody"
                self._refusals.note(key_of("progress", worker), entry.revision, error, then)


class Estates:
    """What was found, partition by partition."""

    def __init__(
        self,
        stream: StreamInfo,
        template: Template,
        fleet: FleetRecord,
        claims: Mapping[str, Claim | None],
        records: Mapping[str, Progress],
        unreadable: Collection[str] = (),
    ) -> None:
        self._unreadable = unreadable
        self.stream_created = stream.created
        self._last_seq = stream.last_seq
        self._template = template
        self._first = fleet.first_seq if fleet.stream_created == stream.created else 1
        self._claims = claims
        self._records = {
            worker: record
            for worker, record in records.items()
            if (record.stream, record.stream_created) == (stream.name, stream.created)
        }

    def known(self, partition_id: str) -> bool:
        """Whether it can be said where a partition begins.

        Nothing but their own record tells how far the older consumers have got with what they have given up.
        """
        claim = self._claims.get(partition_id)
        return OLD_CONSUMERS not in self._unreadable or bool(claim and claim.owner)

    def position(self, partition_id: str) -> int:
        """The position of a partition; where the fleet began, when nobody has ever had it."""
        claim, subject = self._claims.get(partition_id), self._template.partition(partition_id).subject
        # Where an old consumer stopped (`parti migrate`) counts, also after the fleet had the partition before.
        names = set(self._records) if claim is None else {claim.owner or OLD_CONSUMERS}
        said = {n: self._records[n].position(partition_id, subject) for n in names if n in self._records}
        if claim is None and said.get(OLD_CONSUMERS):
            return max(said.values())  # somebody has had it, so it does not begin with the fleet
        known = claim.position if claim and claim.stream_created == self.stream_created else self._first
        return max([known, *said.values()])

    def of(self, partition_id: str, *, planned: bool) -> Estate:
        """What the next owner gets; `planned`: the last one let go of it by itself.

        What is known of a message that kills is kept until somebody has got past it, whoever has the partition.
        """
        claim, position = self._claims.get(partition_id), self.position(partition_id)
        if claim is None:
            return Estate(position, self.stream_created)
        same_stream = claim.stream_created == self.stream_created
        careful_to = claim.careful_to if same_stream and claim.careful_to >= position else 0
        suspect, deaths = (claim.suspect, claim.deaths) if same_stream else (0, 0)
        record = self._records.get(claim.owner)
        told = record.failed.get(partition_id, (0, 0)) if record else (0, 0)
        # Of two messages the later one counts, of the same message the larger number of attempts.
        failed, attempts = max(told, (claim.failed, claim.attempts) if same_stream else (0, 0))
        if failed < position:
            failed = attempts = 0
        if record and record.incarnation != claim.incarnation:
            record = None
        if claim.owner and not planned and not (record and record.closed):
            careful_to = self._last_seq
            tried = record.trying.get(partition_id, 0) if record else 0
            if tried:
                suspect, deaths = tried, deaths + 1 if tried == suspect else 1
        # By the owner's own word: one with a state to bring up to date begins below the position of the partition.
        reached = record.position(partition_id, self._template.partition(partition_id).subject) if record else 0
        if suspect < reached or not (claim.owner or suspect >= position):
            suspect = deaths = 0
        return Estate(position, self.stream_created, careful_to, suspect, deaths, failed, attempts)
