"""The reading side of a worker meets an error of the server's API that nobody has foreseen: it goes on reading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.integration.conftest import Kit, Record, eventually
from tests.integration.test_fleet_deaths import odd_api

from parti.config import Settings
from parti.jetstream.kv import Bucket
from parti.jetstream.vitals import Vitals
from parti.jetstream.wire import Wire
from parti.model.partition import Template
from parti.worker.deadletters import DeadLetterStream
from parti.worker.reader import Reader, ReaderPorts

SOON_S = 10.0


@asynccontextmanager
async def reading(
    kit: Kit, record: Record, odd: dict[str, list[BaseException]]
) -> AsyncIterator[tuple[Reader, Vitals]]:
    """A reader of partition a, whose calls of the server's API raise what is in `odd`."""
    vitals, settings = Vitals("one"), Settings(**kit.settings)
    letters = await DeadLetterStream.open(kit.api, vitals.health, settings, max_payload=1 << 20, omit_large=True)
    ports = ReaderPorts(
        kit.connection,
        odd_api(kit, odd),
        Wire(kit.connection.client),
        letters,
        await kit.api.stream_info(kit.stream),
        Template(kit.template),
        record.handle,
        vitals.metrics,
        vitals.health,
    )
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    reader = Reader(ports, settings, bucket, each_subject=False)
    await reader.start(["a"])
    try:
        yield reader, vitals
    finally:
        await reader.stop()


async def test_an_update_of_the_consumer_that_fails_is_tried_again(kit: Kit, record: Record) -> None:
    odd = dict[str, list[BaseException]]()
    async with reading(kit, record, odd) as (reader, vitals):
        odd["CONSUMER."] = [RuntimeError("a mistake"), RecursionError("nested")]
        await reader.update(["a", "b"])
        assert not odd["CONSUMER."], "nothing was planted"
        sent = await kit.publish(["a", "b"], 3)
        await record.reaches(6)
        record.is_exactly(sent)
        await eventually(lambda: vitals.health.healthy, SOON_S)


async def test_a_session_whose_preparation_fails_is_begun_again(kit: Kit, record: Record) -> None:
    odd = dict[str, list[BaseException]]()
    async with reading(kit, record, odd) as (_, vitals):
        await kit.api.delete_consumer(kit.stream, kit.consumer)
        odd["CONSUMER."] = [RuntimeError("a mistake"), RecursionError("nested")]
        await eventually(lambda: not odd["CONSUMER."], SOON_S)
        sent = await kit.publish(["a"], 3)
        await record.reaches(3, SOON_S)
        record.is_exactly(sent)
        await eventually(lambda: vitals.health.healthy, 2 * SOON_S)
