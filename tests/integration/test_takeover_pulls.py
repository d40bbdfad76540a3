"""Pulls that stand at the server when a worker prepares its consumer: another process's, or its own.

A worker id is taken over while a pull of the process before still stands, as of one that is cut off. Such a pull runs
the consumer's cursor to the end of the stream, under whatever filter it has: between the moment in which the consumer
is put back and the one in which it gets the filter of its new process, that is the old one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.fleet import FLEET
from tests.integration.proxy import proxy_to

from parti.jetstream.pull import PullEngine, PullTuning
from parti.jetstream.wire import Wire
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics


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


async def test_pulls_of_an_update_that_outlives_a_reconnect_are_not_taken_for_those_of_another_process(
    kit: Kit,
) -> None:
    """Both wait for the connection: the new session that a reconnect asks for, and the update of the filter."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    record = Record()
    async with proxy_to(int(kit.url.rpartition(":")[2])) as proxy:
        app = kit.app(record.handle, ["a"], nats=proxy.url, reconnect_wait_s=0.05)
        async with app.running() as worker:
            proxy.refuse()
            await eventually(lambda: not worker.health.healthy)
            with structlog.testing.capture_logs() as logs:
                update = asyncio.create_task(worker.update_worker_consumer("one", ["a", "b"]))
                proxy.refuse(False)
                await update
                sent = await kit.publish(["a", "b"], 5)
                await record.reaches(10)
                await eventually(lambda: any(entry["event"] == "pulling again" for entry in logs), 10)
            assert not [entry["error"] for entry in logs if entry["event"] == "consumer not ready, will try again"]
            await eventually(lambda: worker.health.healthy)
    record.is_exactly(sent)


class Nobody:
    """Takes in deliveries that never come."""

    held = finished = 0

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        raise AssertionError(f"nothing was published, and {seq} arrives")


async def test_a_session_asked_for_before_the_start_has_ended_finds_no_pulls_of_its_engine(kit: Kit) -> None:
    config = {"name": kit.consumer, "durable_name": kit.consumer, "ack_policy": "explicit"}
    await kit.api.put_consumer(kit.stream, config, action="create")
    prepared: list[str] = []

    async def nobody_pulls() -> bool:
        return not (await kit.consumer_info()).waiting

    async def prepare(reason: str) -> bool:
        await eventually(nobody_pulls, 5)
        prepared.append(reason)
        if reason == "start":
            engine.new_session("asked for in between")
        return True

    engine = PullEngine(
        kit.connection,
        Wire(kit.connection.client),
        Nobody(),
        PullTuning(batch=10, max_bytes=0, expires_s=30.0, heartbeat_s=2.0, limit=100),
        Metrics("one"),
        Health(),
        stream=kit.stream,
        consumer=kit.consumer,
        prepare=prepare,
    )
    await engine.start()
    try:
        await eventually(lambda: prepared == ["start", "asked for in between"], 10)
        await eventually(lambda: engine.healthy)
    finally:
        await engine.stop()
