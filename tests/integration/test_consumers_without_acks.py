"""What nats-server does with pull consumers that want no acknowledgements, or one for many, on a memory mirror.

parti keeps positions itself and drives such consumers by RESET; these are the behaviours that it leans on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from parti.config import Settings
from parti.embedded import Server
from parti.errors import ApiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire, pub
from parti.model.headers import ReplyInfo, parse_reply

SUBJECTS = 10
COUNT = 1_000
POLICIES = ("none", "all", "explicit")


class Reader:
    """One connection; keeps what was delivered to it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.api = JetStreamApi(connection)
        self._wire = Wire(connection.client)
        self.got: list[ReplyInfo] = []
        self._came = asyncio.Event()

    def pull(self, batch: int) -> None:
        """Send one pull for the consumer `c`, which stands for ten seconds."""
        inbox = self._wire.new_inbox()
        self._wire.subscribe(inbox, self._take)
        body = json.dumps({"batch": batch, "expires": int(10e9), "idle_heartbeat": int(1e9)}).encode()
        self._wire.write(pub(b"$JS.API.CONSUMER.MSG.NEXT.HOT.c", body, inbox.encode()))

    def _take(self, _subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
        if reply:
            self.got.append(parse_reply(reply))
            self._came.set()

    async def read(self, count: int) -> tuple[list[int], list[int]]:
        """Wait for so many deliveries; their sequences in the stream and of the consumer."""
        async with asyncio.timeout(10.0):
            while len(self.got) < count:
                self._came.clear()
                await self._came.wait()
        got, self.got = self.got, []
        return [info.stream_seq for info in got], [info.consumer_seq for info in got]

    async def publish(self, key: int, count: int) -> None:
        """Add messages of one key, and wait until the mirror has them."""
        for _ in range(count):
            last = await self.api.publish(f"s.{key}", b"x")
        await mirrored(self.api, last)


async def mirrored(api: JetStreamApi, seq: int) -> None:
    async with asyncio.timeout(10.0):
        while (await api.stream_info("HOT")).last_seq < seq:  # noqa: ASYNC110 - a server's count
            await asyncio.sleep(0.01)


@asynccontextmanager
async def mirror(**limits: int) -> AsyncIterator[tuple[Reader, Callable[[], Any]]]:
    """A file stream whose key k has sequences k + 1, k + 11, ..., its memory mirror, and how to connect."""
    async with Server() as server:
        opened: list[Connection] = []

        async def connect() -> Reader:
            opened.append(await Connection.open(Settings(nats=(server.url,)), name="test"))
            return Reader(opened[-1])

        reader = await connect()
        await reader.api.call("STREAM.CREATE.S", {"name": "S", "subjects": ["s.*"], "storage": "file"})
        for number in range(COUNT):
            await reader.connection.publish(f"s.{number % SUBJECTS}", b"x")
        await reader.connection.flush()
        hot = {"name": "HOT", "storage": "memory", "mirror": {"name": "S"}, **limits}
        await reader.api.call("STREAM.CREATE.HOT", hot)
        await mirrored(reader.api, COUNT)
        try:
            yield reader, connect
        finally:
            for connection in opened:
                await connection.close()


async def consumer(reader: Reader, policy: str, *keys: int, **more: Any) -> None:
    filters = [f"s.{key}" for key in keys]
    config = {"name": "c", "durable_name": "c", "ack_policy": policy, "filter_subjects": filters, **more}
    await reader.api.put_consumer("HOT", {"deliver_policy": "all", **config}, action="create")


@pytest.mark.parametrize("policy", POLICIES)
async def test_reset_sets_place_and_counter_also_under_a_standing_pull(policy: str) -> None:
    async with mirror() as (reader, _):
        await consumer(reader, policy, 0, 1)
        reader.pull(30)
        seqs, counters = await reader.read(30)
        assert (seqs[0], seqs[-1], counters) == (1, 142, list(range(1, 31)))

        await reader.api.reset_consumer("HOT", "c", 51)
        assert (await reader.api.consumer_info("HOT", "c")).pending == 190
        reader.pull(190)
        seqs, counters = await reader.read(190)
        assert (seqs[:4], seqs[-1], counters) == ([51, 52, 61, 62], 992, list(range(1, 191)))

        reader.pull(100)
        await reader.api.reset_consumer("HOT", "c", 991)
        assert await reader.read(2) == ([991, 992], [1, 2])
        assert (await reader.api.consumer_info("HOT", "c")).pending == 0


@pytest.mark.parametrize("policy", POLICIES)
async def test_reset_beyond_the_end_delivers_from_there_once_it_arrives(policy: str) -> None:
    async with mirror() as (reader, _):
        await consumer(reader, policy, 0)
        await reader.api.reset_consumer("HOT", "c", COUNT + 6)
        reader.pull(100)
        await reader.publish(0, 8)
        assert await reader.read(3) == ([1006, 1007, 1008], [1, 2, 3])


@pytest.mark.parametrize("policy", POLICIES)
async def test_reset_below_the_first_message_begins_at_it_without_an_error(policy: str) -> None:
    async with mirror(max_msgs=100) as (reader, _):
        assert (await reader.api.stream_info("HOT")).first_seq == 901
        await consumer(reader, policy, 0)
        await reader.api.reset_consumer("HOT", "c", 1)
        reader.pull(2)
        assert await reader.read(2) == ([901, 911], [1, 2])


async def test_what_went_to_a_dead_client_comes_back_by_reset_only() -> None:
    async with mirror() as (reader, connect):
        await consumer(reader, "none", 0)
        other = await connect()
        other.pull(40)
        await other.read(40)
        await other.connection.close()
        info = await reader.api.consumer_info("HOT", "c")
        assert (info.ack_pending, info.pending, info.ack_floor) == (0, 60, 391)
        reader.pull(10)
        assert (await reader.read(10))[0] == list(range(401, 501, 10))
        await reader.api.reset_consumer("HOT", "c", 1)
        reader.pull(10)
        assert (await reader.read(10))[0] == list(range(1, 101, 10))


async def test_an_empty_reset_brings_nothing_back_without_acknowledgements() -> None:
    async with mirror() as (reader, _):
        await consumer(reader, "none", 0)
        reader.pull(10)
        await reader.read(10)
        assert (await reader.api.call("CONSUMER.RESET.HOT.c"))["reset_seq"] == 92


async def test_max_ack_pending_means_nothing_without_acknowledgements() -> None:
    async with mirror() as (reader, _):
        await consumer(reader, "none", 0, max_ack_pending=5)
        reader.pull(60)
        seqs, _counters = await reader.read(60)
        assert len(seqs) == 60


async def test_the_policy_of_a_consumer_cannot_be_changed() -> None:
    async with mirror() as (reader, _):
        await consumer(reader, "explicit", 0)
        config = {"name": "c", "durable_name": "c", "deliver_policy": "all", "filter_subjects": ["s.0"]}
        with pytest.raises(ApiError, match="ack policy can not be updated"):
            await reader.api.put_consumer("HOT", {**config, "ack_policy": "none"}, action="update")
