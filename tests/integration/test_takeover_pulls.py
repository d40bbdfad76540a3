"""A worker id is taken over while a pull of the process before still stands at the server, as of one that is cut off.

Such a pull runs the consumer's cursor to the end of the stream, under whatever filter it has: between the moment in
which the consumer is put back and the one in which it gets the filter of its new process, that is the old one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.integration.conftest import Kit, Record, eventually
from tests.integration.fleet import FLEET


@asynccontextmanager
async def standing_pull(kit: Kit) -> AsyncIterator[None]:
    """A pull for one message on the worker's consumer, by somebody who takes no notice of what comes."""
    client, before = kit.connection.client, (await kit.consumer_info()).waiting
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    request = json.dumps({"batch": 1, "expires": 60_000_000_000}).encode()
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{kit.stream}.{kit.consumer}", request, inbox)

    async def stands() -> bool:
        return (await kit.consumer_info()).waiting > before

    try:
        await eventually(stands)
        yield
    finally:
        await subscription.unsubscribe()


async def test_it_passes_over_nothing_of_what_the_next_process_is_given(kit: Kit) -> None:
    shared: dict[str, Any] = {**FLEET, "worker_id": "one"}
    record = Record()
    async with kit.app(record.handle, ["old"], **shared).running():
        await kit.publish(["old"])
        await record.reaches(1)
    async with standing_pull(kit):
        waits = await kit.publish(["new"], 20)
        async with kit.app(record.handle, ["new"], **shared).running():
            await eventually(lambda: record.of("new") == waits["new"], 15)
