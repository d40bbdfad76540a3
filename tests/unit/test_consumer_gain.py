"""Gaining and losing partitions at run time, against a small model of a stream and its consumer.

The model delivers what a server would: messages from where the last RESET put the consumer, on the subjects of its
filter. No message may be lost and none handled twice, whatever call fails on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from parti.config import load_settings
from parti.core.progress import Progress
from parti.core.retry import RetryPolicy
from parti.errors import PartiError, RequestTimeout
from parti.jetstream.api import ConsumerInfo, StreamInfo
from parti.jetstream.direct import Stored
from parti.model.fleet import Grant
from parti.model.message import Message
from parti.model.partition import Template
from parti.model.subjects import covers
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.consumer import WorkerConsumer
from parti.worker.lanes import Lanes
from parti.worker.runners import AsyncRunners
from parti.worker.starts import Granted
from parti.worker.vehicle import ConsumerPorts

TEMPLATE = Template("dc.{p}")
BOUND_S = 3.0


class Server:
    """A stream, its one consumer, and the calls that shall fail."""

    def __init__(self, *messages: str) -> None:
        self.messages = list(enumerate(messages, start=1))
        self.config: dict[str, Any] | None = None
        self.next = 1
        self.ack_floor = 0
        self.resets: list[int] = []
        self.fail: dict[str, int] = {}

    def _maybe_fail(self, call: str) -> None:
        if self.fail.get(call, 0):
            self.fail[call] -= 1
            raise RequestTimeout(f"{call}: no answer")

    async def stream_info(self, name: str) -> StreamInfo:
        return stream_of(len(self.messages))

    async def consumer_names(self, stream: str) -> list[str]:
        return ["parti-w0"]

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        self._maybe_fail("consumer_info")
        assert self.config is not None
        return ConsumerInfo(self.config, self.ack_floor, 0, 0, 0)

    async def put_consumer(self, stream: str, config: dict[str, Any], *, action: str) -> ConsumerInfo:
        self._maybe_fail("put_consumer")
        self.config = dict(config)
        return ConsumerInfo(self.config, self.ack_floor, 0, 0, 0)

    async def reset_consumer(self, stream: str, name: str, seq: int) -> None:
        self._maybe_fail("reset_consumer")
        self.next = seq
        self.resets.append(seq)

    async def next_on_subject(self, stream: str, subject: str, seq: int) -> Stored | None:
        self._maybe_fail("next_on_subject")
        for number, on in self.messages:
            if number >= seq and covers(subject, on):
                return Stored(number, on, b"x", None, datetime.now(UTC))
        return None

    def publish(self, *partition_ids: str) -> None:
        for partition_id in partition_ids:
            self.messages.append((len(self.messages) + 1, f"dc.{partition_id}"))


class Stub:
    """Connection and wire that take everything and say nothing."""

    def __init__(self) -> None:
        self._ids = 0

    def on_state(self, callback: Any) -> Any:
        return lambda: None

    def on_chunk(self, callback: Any) -> Any:
        return lambda: None

    async def wait_connected(self, timeout_s: float | None = None) -> None:
        return

    def subscribe(self, subject: str, sink: Any) -> bytes:
        self._ids += 1
        return b"%d" % self._ids

    def unsubscribe(self, sid: bytes) -> None:
        """Forget it."""

    def write(self, data: bytes) -> bool:
        return True

    def new_inbox(self) -> str:
        return "_INBOX.x"


class Acks:
    def __init__(self) -> None:
        self.acked: list[int] = []
        self.changed = asyncio.Event()

    def ack(self, reply: bytes) -> None:
        self.acked.append(int(reply.split(b".")[5]))
        self.changed.set()

    def in_progress(self, reply: bytes) -> None:
        """Fine."""


class Letters:
    async def send(self, message: Message, reason: str, traceback: str = "") -> None:
        """Fine."""


def stream_of(last_seq: int) -> StreamInfo:
    return StreamInfo("DC", ("dc.*",), "workqueue", "file", "t0", 1, last_seq, last_seq, True)


class World:
    """One worker on the model."""

    def __init__(self, server: Server, progress: Progress | None = None, **settings: Any) -> None:
        self.server = server
        self.acks = Acks()
        self.handled: list[int] = []
        self.doors: dict[int, asyncio.Event] = {}
        metrics, stub, acks = Metrics("w0"), Stub(), self.acks
        as_any: Any = acks
        self.lanes = Lanes(
            template=TEMPLATE,
            stream="DC",
            worker_id="w0",
            policy=RetryPolicy(),
            acks=as_any,
            dead_letters=Letters(),
            metrics=metrics,
        )
        self.runners = AsyncRunners(self.lanes, self._handle, None)
        ports: Any = ConsumerPorts(server, stub, stub, self.lanes, metrics, Health())  # type: ignore[arg-type]
        tuned = load_settings({"worker_id": "w0", "update_min_interval_s": 0.0, **settings})
        record = progress or Progress(stream="DC", stream_created="t0")
        options: Any = {}
        self.consumer = WorkerConsumer(ports, tuned, TEMPLATE, stream_of(len(server.messages)), record, **options)

    async def _handle(self, message: Message) -> None:
        self.handled.append(message.seq)
        if message.seq in self.doors:
            await self.doors[message.seq].wait()

    async def start(self, *ids: str) -> None:
        self.server.config = {"name": "parti-w0", "filter_subjects": [f"dc.{p}" for p in ids]}
        await self.consumer.start(ids)

    async def update(self, *ids: str) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.consumer.update_worker_consumer("w0", ids)

    def serve(self) -> None:
        """Deliver everything from where the consumer stands, on the subjects of its filter."""
        assert self.server.config
        filters = self.server.config["filter_subjects"]
        for seq, subject in self.server.messages:
            if seq >= self.server.next and any(covers(f, subject) for f in filters):
                reply = b"$JS.ACK.DC.c.1.%d.1.1700000000000000000.0" % seq
                self.lanes.deliver(subject.encode(), reply, None, b"x", seq)
        self.server.next = len(self.server.messages) + 1
        self.runners.kick()

    async def acked(self, *seqs: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while not set(seqs) <= set(self.acks.acked):
                self.acks.changed.clear()
                await self.acks.changed.wait()

    async def new_session(self) -> None:
        """What the engine does when a delivery is missing."""
        await self.consumer._prepare(self.consumer.shards.vehicles[0], "gap")

    def position(self, partition_id: str) -> int:
        return self.consumer.summarise("me").position(partition_id, f"dc.{partition_id}")

    async def close(self) -> None:
        await self.consumer.stop()
        await self.runners.stop()


@pytest.fixture
async def worlds() -> AsyncIterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        await world.close()


async def world_past_the_old_messages_of_b(worlds: list[World], **settings: Any) -> World:
    """Own `a`; messages 2 and 3 of `b` lie in the stream, unhandled, and the consumer is past them."""
    world = World(Server("dc.a", "dc.b", "dc.b", "dc.a"), **settings)
    worlds.append(world)
    await world.start("a")
    world.serve()
    await world.acked(1, 4)
    return world


async def test_a_gained_partition_gets_its_old_messages_in_order_and_once(worlds: list[World]) -> None:
    world = await world_past_the_old_messages_of_b(worlds)
    await world.update("a", "b")
    world.server.publish("b", "a")
    world.serve()
    await world.acked(2, 3, 5, 6)
    assert [seq for seq in world.handled if seq in (2, 3, 5)] == [2, 3, 5]
    assert sorted(world.handled) == [1, 2, 3, 4, 5, 6]


async def test_a_record_stored_before_the_old_messages_arrive_does_not_skip_them(worlds: list[World]) -> None:
    world = await world_past_the_old_messages_of_b(worlds)
    await world.update("a", "b")
    assert world.position("b") <= 2
    assert world.position("a") == 5


async def test_a_record_stored_while_the_old_messages_are_looked_for_does_not_skip_them(worlds: list[World]) -> None:
    world = await world_past_the_old_messages_of_b(worlds)
    look, during = world.server.next_on_subject, list[int]()

    async def looked(stream: str, subject: str, seq: int) -> Stored | None:
        during.append(world.position("b"))
        return await look(stream, subject, seq)

    world.server.next_on_subject = looked  # type: ignore[method-assign]
    await world.update("a", "b")
    assert during == [0]


async def test_a_session_that_breaks_before_the_old_messages_arrive_goes_back_for_them(worlds: list[World]) -> None:
    world = await world_past_the_old_messages_of_b(worlds)
    await world.update("a", "b")
    await world.new_session()
    assert world.server.resets[-1] <= 2
    world.serve()
    await world.acked(2, 3)
    assert sorted(world.handled) == [1, 2, 3, 4]


@pytest.mark.parametrize("call", ["next_on_subject", "consumer_info", "reset_consumer", "put_consumer"])
async def test_a_gain_whose_first_attempt_fails_loses_nothing(worlds: list[World], call: str) -> None:
    world = await world_past_the_old_messages_of_b(worlds)
    world.server.fail[call] = 1
    await world.update("a", "b")
    world.server.publish("b")
    world.serve()
    await world.acked(5)
    with contextlib.suppress(TimeoutError):
        await world.acked(2, 3)
    assert sorted(world.handled) == [1, 2, 3, 4, 5]


async def test_a_release_that_fails_leaves_the_partition_with_all_its_messages(worlds: list[World]) -> None:
    """The previous set stays active, so what was waiting in the lane must still be handled."""
    world = World(Server("dc.b", "dc.b", "dc.b", "dc.a"), update_attempts=1)
    worlds.append(world)
    world.doors[1] = asyncio.Event()
    await world.start("a", "b")
    world.serve()
    await world.acked(4)
    world.server.fail["put_consumer"] = 1
    with pytest.raises(PartiError):
        await world.update("a")
    await world.new_session()
    world.doors[1].set()
    world.server.publish("b")
    world.serve()
    await world.acked(5)
    with contextlib.suppress(TimeoutError):
        await world.acked(1, 2, 3)
    assert [seq for seq in world.handled if seq != 4] == [1, 2, 3, 5]


async def test_partitions_that_an_earlier_run_owned_keep_their_positions_in_the_record(worlds: list[World]) -> None:
    messages = ["dc.a", "dc.b"] * 10
    record = Progress(stream="DC", stream_created="t0", floor=15, covered=("dc.a", "dc.b"), behind={"c": 7})
    world = World(Server(*messages), record)
    worlds.append(world)
    await world.start("a")
    assert world.position("a") == 15
    assert world.position("b") == 15
    assert world.position("c") == 7


async def test_a_position_that_was_granted_holds_when_the_next_word_takes_the_partition_away(
    worlds: list[World],
) -> None:
    """The next word comes while the consumer is being updated: what is delivered until then belongs to the first."""
    world = World(Server())
    worlds.append(world)
    world.consumer.grant(Granted({"a": Grant(fence_token=1, position=1)}, "t0"))
    await world.start("a")
    world.server.publish("b", "b")
    world.consumer.grant(Granted({"a": Grant(1, 1), "b": Grant(fence_token=2, position=2)}, "t0"))
    await world.update("a", "b")
    world.consumer.grant(Granted({"a": Grant(1, 1)}, "t0"))
    world.serve()
    await world.acked(1, 2)
    assert world.handled == [2]
