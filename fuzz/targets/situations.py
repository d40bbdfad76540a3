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
from parti.model.safe_text import text_of

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


ODD_NAMES = (b"\xff", b"w.x", b"p9/x", b"worker=2D0", b"=C3", b"=3", b"\x1b[2J", b"*")
"""What `key_of` would not make, or not of a name that is used."""


def entries_in(data: bytes) -> dict[str, Entry]:
    """The records of an input, by key, as a watch gives them.

    A line that is a key alone is one that was deleted; behind a blank there may be a value of no bytes.
    """
    found = {}
    for revision, line in enumerate(data.split(b"\n")[:40], start=1):
        key, blank, value = line.partition(b" ")
        found[text_of(key)] = Entry.of(value, revision, {} if blank else {"KV-Operation": "DEL"})
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


def odd_records() -> list[bytes]:
    """Fleets with records under keys that parti never writes, and with values of no bytes."""
    kinds = {key.partition(".")[0].encode(): _value(kind) for key, kind in KEYS.items() if "." in key}
    return [
        b"\n".join((whole_fleet(), *(b"%b.%b %b" % (kind, name, value) for name in ODD_NAMES)))
        for kind, record in kinds.items()
        for value in (record, b"")
    ]


def _value(kind: type[msgspec.Struct]) -> bytes:
    record, now = EXAMPLES[kind], datetime.now(UTC) - timedelta(seconds=1)
    times = {name: now for name in kind.__struct_fields__ if isinstance(getattr(record, name), datetime)}
    return encode(msgspec.structs.replace(record, **times))
