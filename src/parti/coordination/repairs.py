"""Unreadable records: what becomes of each, and how an operator removes one.

Most of them are written again by whoever owns the key: a worker its lease and its health, the rebalancer claims and
assignments, a candidate the lease of a role. What only operators write stays as it is until one of them removes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from parti.core.progress import Progress
from parti.errors import ConfigError, DecodeError, WrongRevision
from parti.jetstream.kv import Bucket, Entry
from parti.model.fleet import (
    Assignment,
    Claim,
    FleetRecord,
    HealthRecord,
    LeaderRecord,
    LoadRecord,
    MemberRecord,
    MirrorRecord,
    Orders,
    StallRecord,
    StandbyRecord,
    decode,
    is_key,
)
from parti.model.migration import MigrationRecord, MigratorLease, OldConsumer
from parti.model.state import StatePointer

KINDS: Mapping[str, type[msgspec.Struct]] = {
    "assignment": Assignment,
    "claims": Claim,
    "health": HealthRecord,
    "ids": MemberRecord,
    "leader": LeaderRecord,
    "load": LoadRecord,
    "migration": OldConsumer,
    "progress": Progress,
    "stalls": StallRecord,
    "standby": StandbyRecord,
    "state": StatePointer,
}
"""What lies under the keys that begin with a word and a dot."""
SINGLE: Mapping[str, type[msgspec.Struct]] = {
    "fleet": FleetRecord,
    "migration": MigrationRecord,
    "migrator": MigratorLease,
    "mirror": MirrorRecord,
    "orders": Orders,
}
"""What lies under the keys that are one word."""
_COSTS = {
    "orders": "which takes all orders back: give them again then",
    "state": "which makes that partition begin without state",
    "progress": "which makes the next owner begin where the claim says",
    "migration": "and begin that step of the migration again",
}
_BY_ITSELF = frozenset({"assignment", "claims", "fleet", "health", "ids", "leader", "load", "standby"})


def repair_of(key: str) -> str:
    """What somebody who sees an unreadable key should do about it, as a part of a sentence."""
    kind = key.partition(".")[0]
    command = f"'parti doctor --repair {key}'"
    if kind in _BY_ITSELF:
        return f"a running fleet writes it again within two minutes; if it does not, run {command}"
    cost = _COSTS.get(kind)
    return f"run {command}{f', {cost}' if cost else ''}"


def unreadable_among(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Keys of records that cannot be read, and why."""
    found = {}
    for key, entry in entries.items():
        kind = _kind_of(key)
        if kind and entry.value:
            try:
                decode(entry.value, kind)
            except DecodeError as error:
                found[key] = str(error)
    return found


def _kind_of(key: str) -> type[msgspec.Struct] | None:
    word, dot, _ = key.partition(".")
    if not is_key(key):
        return None  # nobody reads it; and what is shown of a key that is no text is not its name
    return KINDS.get(word) if dot else SINGLE.get(key)


async def remove_unreadable(bucket: Bucket, key: str) -> str:
    """Delete a key whose value is no record; returns why it was none.

    Raises `ConfigError` when there is no such key, when it holds no record of parti, and when its record is fine.
    """
    kind = _kind_of(key)
    if kind is None:
        raise ConfigError(f"{key!r} is no key of a record; 'parti status' names those that cannot be read")
    entry = await bucket.get(key)
    if entry is None or not entry.value:
        raise ConfigError(f"there is no record {key!r} in bucket {bucket.name!r}, so there is nothing to repair")
    try:
        decode(entry.value, kind)
    except DecodeError as error:
        try:
            await bucket.delete(key, revision=entry.revision)
        except WrongRevision:
            raise ConfigError(f"the record {key!r} was written at this very moment; look again") from None
        return str(error)
    raise ConfigError(f"the record {key!r} can be read, so it is left as it is")
