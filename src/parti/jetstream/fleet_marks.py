"""The mark by which a consumer says whose it is: two fleets with one prefix would take each other's messages.

A worker looks before it changes anything. A consumer without a mark, made by hand or by an earlier version, is
adopted if a worker could have made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from parti.config import Settings
from parti.core.consumer_config import (
    PREFIX,
    consumer_name,
    fleet_of,
    is_foreign,
    shard_number,
    surely_of,
    why_not_adopted,
    workers_of,
)
from parti.errors import ForeignConsumer, NotFound
from parti.jetstream.api import JetStreamApi

_log = structlog.get_logger("parti.consumer")
_AT_ONCE = 16
_MOST = 128
"""Consumers that are looked at: every one of another fleet carries its mark, so a few tell."""


def check_mark(config: Mapping[str, Any], stream: str, *, prefix: str, fleet: str) -> None:
    """Raise `ForeignConsumer` when a consumer with one of our names is not ours and cannot be adopted."""
    name = config.get("name", "")
    if is_foreign(config, fleet):
        theirs = fleet_of(config)
        raise ForeignConsumer(
            f"consumer {name!r} of stream {stream!r} belongs to the fleet of bucket {theirs!r}, and this one has "
            f"bucket {fleet!r} and the same prefix {prefix!r}: they would take each other's messages; set "
            f"PARTI_PREFIX to a name that no other fleet of this stream has, or PARTI_BUCKET={theirs} to join that "
            f"fleet, or delete the consumer if that fleet is no more; nothing was changed"
        )
    if not fleet_of(config) and (why := why_not_adopted(config)):
        raise ForeignConsumer(
            f"consumer {name!r} of stream {stream!r} has the name of a worker's, but {why}: parti did not make it; "
            f"set PARTI_PREFIX to another name, or delete the consumer; nothing was changed"
        )


def tell_adopted(config: Mapping[str, Any], fleet: str) -> None:
    """Say in one log line that a consumer without a mark gets ours."""
    if not fleet_of(config):
        _log.info("adopts a consumer that carries no mark of a fleet", consumer=config.get("name"), fleet=fleet)


async def check_fleet(api: JetStreamApi, stream: str, settings: Settings) -> None:
    """Raise `ForeignConsumer` when consumers on the stream that this worker might use are another fleet's.

    A worker with an id of its own looks at its own consumers only, as its permissions may allow no more.
    """
    names = _ours(await api.consumer_names(stream), settings)
    turn = asyncio.Semaphore(_AT_ONCE)

    async def look(name: str) -> None:
        async with turn:
            try:
                config = (await api.consumer_info(stream, name)).config
            except NotFound:
                return
        if (config.get("metadata") or {}).get(PREFIX, settings.prefix) == settings.prefix:
            check_mark(config, stream, prefix=settings.prefix, fleet=settings.bucket)

    await asyncio.gather(*(look(name) for name in names[:_MOST]))


def _ours(names: Iterable[str], settings: Settings) -> list[str]:
    if settings.worker_id:
        first = consumer_name(settings.prefix, settings.worker_id)
        shards = settings.consumer_shards
        return [n for n in names if n == first or 1 < shard_number(n, first) <= shards]
    return [n for n in sorted(names) if any(surely_of(w, ()) for w in workers_of(n, settings.prefix))]
