"""What the control bucket says of a fleet: its template, who is alive, and how far each partition is.

A partition's position is what the next owner would begin at (`coordination.takeover` decides the same way): the
position in its claim, or the one in the record of the claim's owner if that is further. A partition that was never
claimed is as far as any worker's record says; one that nobody knows is at 0, and nothing of it can be lost yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import structlog

from parti.core.progress import Progress, decode_progress
from parti.errors import ConfigError, DecodeError, StreamNotFound
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.kv import Entry
from parti.jetstream.ranges import RangeReader, Wanted
from parti.jetstream.target import Target
from parti.model.fleet import Claim, FleetRecord, MemberRecord, decode, is_key, name_of
from parti.model.headers import parse_headers
from parti.model.partition import Partition, Template
from parti.model.safe_text import log_value, text_of
from parti.spark.planning import bounds

_Record = TypeVar("_Record", bound=msgspec.Struct)
_log = structlog.get_logger("parti.audit")

_LOGGED = 10
"""Most claims named in one log line."""
_SHOWN = 100
"""Most characters of each."""
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

    def fitting(self, template: Template) -> ControlRecords:
        """These records, with claims of partitions that the template can have; raises when it can have none of them.

        Anything may lie under the key of a claim. Where nothing fits, it is rather the template that is wrong.
        """
        claims = {name: claim for name, claim in self.claims.items() if template.find(name)}
        for name in self.claims if not claims else ():
            template.partition(name)  # raises, and says why
        left_out = self.claims.keys() - claims.keys()
        if left_out:
            examples = [log_value(name, _SHOWN) for name in sorted(left_out)[:_LOGGED]]
            _log.warning("claims of no partition are left out", count=len(left_out), claims=examples)
        return replace(self, claims=claims)

    def positions(self, stream: str, created: str, partitions: Iterable[Partition]) -> dict[str, int]:
        """The positions of these partitions, by id."""
        records = {
            worker: record
            for worker, record in self.progress.items()
            if (record.stream, record.stream_created) == (stream, created)
        }
        return {each.id: self._position(each, created, records) for each in partitions}

    def _position(self, partition: Partition, created: str, records: Mapping[str, Progress]) -> int:
        claim = self.claims.get(partition.id)
        known = claim.position if claim and claim.stream_created == created else 0
        owners = records if claim is None else {claim.owner}
        told = [records[owner] for owner in owners if owner in records]
        return max([known, *(record.position(partition.id, partition.subject) for record in told)])


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
        for subject, block, payload in zip(chunk.subjects, chunk.headers, chunk.payloads, strict=True):
            entry = Entry.of(payload, 0, parse_headers(block or b""))
            records[text_of(subject).removeprefix(f"$KV.{bucket}.")] = entry.value
    return _records({key: value for key, value in records.items() if value and is_key(key)})


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
