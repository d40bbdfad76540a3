"""Notes of stalls in the bucket: what is written of one stall stays one note."""

from __future__ import annotations

import asyncio
import socket

from structlog.testing import capture_logs
from tests.integration.conftest import Kit, eventually

from parti.config import Settings
from parti.coordination.stall_notes import StallNotes
from parti.core.stall import Stall, StallKind
from parti.jetstream.kv import Bucket
from parti.model.fleet import RECOVERED, StallRecord, key_of
from parti.model.records import decode

STALL = Stall(StallKind.LOOP, "", 0.0)


async def test_a_worker_that_has_another_id_after_its_stall_ends_the_note_of_the_old_one(kit: Kit) -> None:
    bucket = await Bucket.open(kit.api, kit.settings["bucket"], replicas=1)
    ids = ["worker-1", "worker-2"]
    notes = StallNotes(Settings(nats=(kit.url,), bucket=bucket.name), lambda: ids[0])
    await asyncio.to_thread(notes.write, STALL, "stalled: blocked")
    del ids[0]
    await asyncio.to_thread(notes.write, STALL, "stalled: blocked", "recovered")

    async def is_over() -> bool:
        found = await bucket.get(key_of("stalls", "worker-1"))
        return found is not None and bool(found.value) and decode(found.value, StallRecord).ended == RECOVERED

    await eventually(is_over)
    assert await bucket.get(key_of("stalls", "worker-2")) is None


async def test_a_note_that_cannot_be_written_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf, capture_logs() as lines:
        notes = StallNotes(Settings(nats=(f"nats://127.0.0.1:{deaf.getsockname()[1]}",)), lambda: "worker-1")
        await asyncio.wait_for(asyncio.to_thread(notes.write, STALL, "stalled: blocked"), 1.5)
        await eventually(lambda: any(line["event"] == "the stall could not be noted in the bucket" for line in lines))
