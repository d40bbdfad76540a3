"""What the control bucket says of a fleet: its template, who is alive, and how far each partition is.

A partition's position is what the next owner would begin at (`coordination.takeover` decides the same way): the
position in its claim, or the one in the record of the claim's owner if that is further. A partition that was never
claimed is as far as any worker's record says; one that nobody knows is at 0, and nothing of it can be lost yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from parti.core.progress import Progress, decode_progress
from parti.errors import ConfigError, DecodeError, StreamNotFound
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import RangeReader, Wanted
from parti.jetstream.target import Target
from parti.model.fleet import Claim, FleetRecord, MemberRecord, decode, name_of
from parti.model.partition import Template
from parti.spark.planning import bounds

_Record = TypeVar("_Record", bound=msgspec.Struct)
_PAGE = 100_000
"""Subjects that a server lists at once."""


@dataclass(frozen=True, slots=True)
class ControlRecords:
    """The records of a control bucket that an audit needs."""

    fleet: FleetRecord | None = None
    claims: Mapping[str, Claim] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    alive: frozenset[str] = frozenset()
    """Workers that hold the lease of their id."""

    def template(self, stream: str) -> str | None:
        """The template of the fleet, if it works on this stream."""
        return self.fleet.template if self.fleet and self.fleet.stream == stream else None

    def positions(self, stream: str, created: str, template: Template, partitions: Iterable[str]) -> dict[str, int]:
        """The position of every partition: of those that are claimed, and of the others that are named."""
        records = {
            worker: record
            for worker, record in self.progress.items()
            if (record.stream, record.stream_created) == (stream, created)
        }
        return {name: self._position(name, created, template, records) for name in {*self.claims, *partitions}}

    def _position(self, name: str, created: str, template: Template, records: Mapping[str, Progress]) -> int:
        claim, subject = self.claims.get(name), template.partition(name).subject
        known = claim.position if claim and claim.stream_created == created else 0
        owners = records if claim is None else {claim.owner}
        told = [records[owner] for owner in owners if owner in records]
        return max([known, *(record.position(name, subject) for record in told)])


def read_control(target: Target, bucket: str) -> ControlRecords:
    """Read the bucket as it is now; raises ConfigError when there is none."""
    stream = f"KV_{bucket}"
    try:
        with BlockingClient.open(target, name="parti-audit") as client:
            info = client.stream_info(stream)
    except StreamNotFound:
        raise ConfigError(
            f"bucket {bucket!r} does not exist, so no position is known; name another one with --bucket, or say with "
            f"--complete that everything stored must be finished"
        ) from None
    first, last = bounds(info)
    wanted = Wanted(stream=stream, created=info["created"], start=first, end=last + 1)
    records: dict[str, bytes] = {}
    for chunk in RangeReader(target, wanted, name="parti-audit").chunks():
        for subject, payload in zip(chunk.subjects, chunk.payloads, strict=True):
            records[subject.decode().removeprefix(f"$KV.{bucket}.")] = payload
    return _records({key: value for key, value in records.items() if value})


def _records(found: Mapping[str, bytes]) -> ControlRecords:
    def of(kind: str) -> Iterator[tuple[str, bytes]]:
        return ((name_of(key), value) for key, value in found.items() if key.startswith(f"{kind}."))

    progress = {}
    for worker, value in of("progress"):
        try:
            progress[worker] = decode_progress(value)
        except DecodeError:
            continue
    members = {worker: _decode(value, MemberRecord) for worker, value in of("ids")}
    claims = {partition: _decode(value, Claim) for partition, value in of("claims")}
    return ControlRecords(
        fleet=_decode(found["fleet"], FleetRecord) if "fleet" in found else None,
        claims={partition: claim for partition, claim in claims.items() if claim},
        progress=progress,
        alive=frozenset(worker for worker, member in members.items() if member and member.state != "left"),
    )


def _decode(value: bytes, kind: type[_Record]) -> _Record | None:
    try:
        return decode(value, kind)
    except DecodeError:
        return None


def subjects_of(client: BlockingClient, stream: str) -> list[str]:
    """All subjects that a stream holds messages of."""
    found: list[str] = []
    while True:
        info = client.stream_info(stream, subjects_filter=">", offset=len(found))
        page = info["state"].get("subjects") or {}
        found += page
        if len(page) < _PAGE:
            return found
