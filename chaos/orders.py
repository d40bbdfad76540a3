"""Orders of an operator: partitions are placed on workers, many with one change of the record."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.fleet import Observer

from parti.errors import PartiError, WrongRevision
from parti.jetstream.kv import Bucket

KEY = "orders"
_LOOK_S = 0.01
_RETRY_S = 0.1


async def place(bucket: Bucket, placements: Mapping[str, str], *, timeout_s: float = 60.0) -> None:
    """Order that partitions go to workers; other orders stay as they are.

    Repeats over lost answers and losses of the leader until the time is over; raises the last error then.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            entry = await bucket.get(KEY)
            orders: dict[str, Any] = json.loads(entry.value) if entry and entry.value else {}
            placed = {**orders.get("placed", {}), **placements}
            if placed != orders.get("placed"):
                text = json.dumps({"kind": "orders", **orders, "placed": placed}).encode()
                await bucket.put(KEY, text, revision=entry.revision if entry else 0)
        except WrongRevision:
            continue
        except PartiError:
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(_RETRY_S)
        else:
            return


def elsewhere(observer: Observer, placements: Mapping[str, str]) -> dict[str, str]:
    """Partitions that are not where they were placed, with what their claims say."""
    found = {}
    for partition, worker in placements.items():
        claim = observer.records.claims.get(partition)
        if claim is None or claim.owner != worker or claim.state != "owned":
            found[partition] = f"{claim.state} by {claim.owner or 'nobody'}" if claim else "not claimed"
    return found


async def obeyed(observer: Observer, placements: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Wait until all partitions are where they were placed; returns those that are not when the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while left := elsewhere(observer, placements):
        if time.monotonic() >= deadline_s:
            return left
        await asyncio.sleep(_LOOK_S)
    return {}
