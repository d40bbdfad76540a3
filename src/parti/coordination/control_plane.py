"""The bucket that the fleet agrees through, and whether it is still the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from parti.coordination.repairs import repair_of
from parti.errors import (
    ConfigError,
    ControlPlaneReset,
    DecodeError,
    NotFound,
    PartiError,
    RequestTimeout,
    WrongRevision,
)
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.watch import Watch
from parti.model.fleet import FleetRecord, decode, encode, is_key, name_of

_HEARD_WITHIN_S = 12.0
"""A bucket that was just made in a cluster may have no leader yet, or a node has not heard of its subjects. What was
asked meanwhile is refused or, more often, never answered."""
_LISTEN_AGAIN_S = 0.02


class ControlPlane:
    """One incarnation of the bucket, with what is needed to read, write and watch it."""

    def __init__(self, connection: Connection, api: JetStreamApi, bucket: Bucket, created: str) -> None:
        self.connection = connection
        self.api = api
        self.bucket = bucket
        self.created = created

    @classmethod
    async def open(cls, connection: Connection, api: JetStreamApi, name: str, *, replicas: int) -> ControlPlane:
        """Open the bucket, making it when it is missing."""
        bucket = await Bucket.open(api, name, replicas=replicas)
        return cls(connection, api, bucket, (await bucket.info()).created)

    async def check(self) -> None:
        """Raise `ControlPlaneReset` when the bucket is gone or another one has its name."""
        try:
            created = (await self.bucket.info()).created
        except NotFound:
            raise ControlPlaneReset(f"control plane was reset: bucket {self.bucket.name!r} was deleted") from None
        if created != self.created:
            raise ControlPlaneReset(
                f"control plane was reset: bucket {self.bucket.name!r} was made anew at {created}"
            )

    async def check_if_reachable(self) -> None:
        """Raise `ControlPlaneReset` as `check` does; not being able to ask says nothing."""
        try:
            await self.check()
        except ControlPlaneReset:
            raise
        except PartiError:
            pass

    async def read(self, *keys: str) -> dict[str, Entry]:
        """Every key of parti's that matches, with its newest value; deleted ones may be there with an empty value."""
        found = await read_keys(self.connection, self.api, self.bucket.name, keys)
        return {key: entry for key, entry in found.items() if is_key(key)}

    async def members(self) -> list[str]:
        """Ids of all workers whose lease stands, whatever their state."""
        return [name_of(key) for key, entry in (await self.read("ids.>")).items() if entry.value]


async def agree(bucket: Bucket, ours: FleetRecord) -> FleetRecord:
    """Return the record of this bucket's fleet, which is `ours` if there was none.

    Raises `ConfigError` when the bucket belongs to workers of another stream, template or prefix: they would take
    each other's partitions. `NotFound`: it is gone. `RequestTimeout`: it is there, but has not answered for long.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _HEARD_WITHIN_S
    while True:
        try:
            entry = await bucket.get("fleet")
            if entry and entry.value:
                found = decode(entry.value, FleetRecord)
                break
            await bucket.put("fleet", encode(ours), revision=entry.revision if entry else 0)
        except WrongRevision:
            continue
        except DecodeError as error:
            # The rebalancer of a running fleet writes it again.
            if loop.time() >= deadline_s:
                raise ConfigError(
                    f"the key 'fleet' of bucket {bucket.name!r} cannot be read ({error}): {repair_of('fleet')}"
                ) from None
            await asyncio.sleep(_LISTEN_AGAIN_S)
            continue
        except (NotFound, RequestTimeout) as error:
            # Whatever came of it, the next look tells.
            if loop.time() >= deadline_s:
                raise
            if isinstance(error, NotFound):
                await bucket.info()
            await asyncio.sleep(_LISTEN_AGAIN_S)
            continue
        return ours
    for what in ("stream", "template", "prefix"):
        theirs, mine = getattr(found, what), getattr(ours, what)
        if theirs != mine:
            # Earlier versions had the prefix 'parti' whatever the bucket: such a fleet is to go on.
            join = f"set PARTI_PREFIX={theirs} to be part of that fleet, or " if what == "prefix" else ""
            raise ConfigError(
                f"bucket {bucket.name!r} belongs to a fleet with {what} {theirs!r}, but this worker has {mine!r}; "
                f"{join}give each fleet a bucket of its own (PARTI_BUCKET), or delete this one if that fleet is no "
                f"more"
            )
    return found


async def read_keys(connection: Connection, api: JetStreamApi, bucket: str, keys: Sequence[str]) -> dict[str, Entry]:
    """Read all keys that match, at once."""
    entries: dict[str, Entry] = {}
    watch = Watch(connection, api, bucket, keys, entries.__setitem__)
    await watch.start()
    await watch.stop()
    return entries
