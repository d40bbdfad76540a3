"""Whole fleets out of bytes: one line for each record, `key value`, as they would lie in the bucket."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

from fuzz.targets.records import EXAMPLES
from parti.coordination.orders import Situation
from parti.jetstream.kv import Entry
from parti.model.fleet import (
    Assignment,
    Claim,
    FleetRecord,
    HealthRecord,
    LeaderRecord,
    LoadRecord,
    MemberRecord,
    Orders,
    StandbyRecord,
    encode,
)
from parti.model.history import HistoryRecord

KEYS: dict[str, type[msgspec.Struct]] = {
    "fleet": FleetRecord,
    "ids.w-0": MemberRecord,
    "ids.w-1": MemberRecord,
    "health.w-0": HealthRecord,
    "health.w-1": HealthRecord,
    "standby.x": StandbyRecord,
    "load.w-0": LoadRecord,
    "leader.rebalancer": LeaderRecord,
    "claims.p0": Claim,
    "claims.p1": Claim,
    "assignment.w-0": Assignment,
    "orders": Orders,
    "history.p0": HistoryRecord,
}


def entries_in(data: bytes) -> dict[str, Entry]:
    """The records of an input, by key; a line without a value is a key that was deleted."""
    found = {}
    for revision, line in enumerate(data.split(b"\n")[:40], start=1):
        key, _, value = line.partition(b" ")
        found[key.decode("utf-8", "replace")] = Entry(value, revision)
    return found


def situation_in(data: bytes) -> Situation:
    """The fleet of an input."""
    return Situation.of(entries_in(data))


def whole_fleet() -> bytes:
    """A fleet with one record of each kind; its times are of now, so that nothing has expired."""
    return b"\n".join(b"%b %b" % (key.encode(), _value(kind)) for key, kind in KEYS.items())


def single_records() -> list[bytes]:
    """Each record alone."""
    return [b"%b %b" % (key.encode(), _value(kind)) for key, kind in KEYS.items()]


def _value(kind: type[msgspec.Struct]) -> bytes:
    record, now = EXAMPLES[kind], datetime.now(UTC) - timedelta(seconds=1)
    times = {name: now for name in kind.__struct_fields__ if isinstance(getattr(record, name), datetime)}
    return encode(msgspec.structs.replace(record, **times))
