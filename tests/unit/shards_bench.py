"""A worker with several consumers, against a small model of a stream and its consumers.

A consumer of the model delivers what a server would: messages from where the last RESET put it, on the subjects of
its filter, one at a time when a test asks for it. What handlers do is done by the test too, so that every order of
events can be played.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.unit.test_consumer_gain import TEMPLATE, Letters, Stub

from parti.config import load_settings
from parti.core.consumer_config import HOLD
from parti.core.lane import Lane
from parti.core.progress import Progress
from parti.core.retry import RetryPolicy
from parti.errors import NotFound
from parti.jetstream.api import ConsumerInfo, StreamInfo
from parti.jetstream.direct import Stored
from parti.model.message import StoredMessage
from parti.model.subjects import covers
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.consumer import WorkerConsumer
from parti.worker.intake import ShardIntake
from parti.worker.lanes import Lanes
from parti.worker.starts import Granted
from parti.worker.vehicle import ConsumerPorts, Vehicle

BOUND_S = 5.0


@dataclass
class Consumer:
    config: dict[str, Any]
    next: int = 1
    delivered: int = 0
    pending: set[int] = field(default_factory=set)
    resets: list[int] = field(default_factory=list)

    @property
    def ack_floor(self) -> int:
        return min(self.pending) - 1 if self.pending else self.delivered

    @property
    def filters(self) -> list[str]:
        return list(self.config["filter_subjects"])


class Server:
    """A stream with its consumers; on a work-queue, an acknowledgement deletes, and so does an ack floor."""

    def __init__(self, *partitions: str, retention: str = "limits") -> None:
        self.retention = retention
        self.created = "t0"
        self.last = 0
        self.messages: dict[int, str] = {}
        self.consumers: dict[str, Consumer] = {}
        self.fail: dict[str, int] = {}
        self.publish(*partitions)

    def publish(self, *partitions: str) -> None:
        for partition in partitions:
            self.last += 1
            self.messages[self.last] = f"dc.{partition}"

    def of(self, partition: str) -> list[int]:
        return [seq for seq, subject in self.messages.items() if subject == f"dc.{partition}"]

    def stream(self) -> StreamInfo:
        return StreamInfo(
            "DC", ("dc.*",), self.retention, "file", self.created, 1, self.last, len(self.messages), True
        )

    async def stream_info(self, name: str) -> StreamInfo:
        return self.stream()

    async def consumer_names(self, stream: str) -> list[str]:
        return list(self.consumers)

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        if name not in self.consumers:
            raise NotFound(10014, "consumer not found")
        return self._info(name)

    def _info(self, name: str) -> ConsumerInfo:
        consumer = self.consumers[name]
        return ConsumerInfo(consumer.config, consumer.ack_floor, consumer.delivered, len(consumer.pending), 0)

    async def put_consumer(self, stream: str, config: Mapping[str, Any], *, action: str) -> ConsumerInfo:
        name = config["name"]
        if self.fail.get(name, 0):
            self.fail[name] -= 1
            raise NotFound(10014, f"{name}: no")
        readers = {n: c for n, c in self.consumers.items() if n != name and HOLD not in n}
        taken = {s for c in readers.values() for s in c.filters}
        both = taken & set(config["filter_subjects"]) if HOLD not in name else ()  # nobody reads a hold
        assert not both, f"{both} are on two consumers"
        consumer = self.consumers.setdefault(name, Consumer(dict(config)))
        consumer.config = dict(config)
        if self.retention == "workqueue":
            passed = [
                seq for seq, on in self.messages.items() if on in consumer.filters and seq <= consumer.ack_floor
            ]
            for seq in passed:
                del self.messages[seq]
        return self._info(name)

    async def reset_consumer(self, stream: str, name: str, seq: int) -> None:
        consumer = self.consumers[name]
        consumer.next, consumer.delivered = seq, seq - 1
        consumer.pending.clear()
        consumer.resets.append(seq)

    async def delete_consumer(self, stream: str, name: str) -> None:
        del self.consumers[name]

    async def next_on_subject(self, stream: str, subject: str, seq: int) -> Stored | None:
        for number, on in self.messages.items():
            if number >= seq and covers(subject, on):
                return Stored(number, on, b"x", None, datetime.now(UTC))
        return None

    def next_for(self, name: str) -> int | None:
        """The next message of a consumer; its cursor stands behind it then, or at the end."""
        consumer = self.consumers[name]
        for seq, subject in self.messages.items():
            if seq >= consumer.next and subject in consumer.filters:
                consumer.next, consumer.delivered = seq + 1, seq
                consumer.pending.add(seq)
                return seq
        consumer.next = max(consumer.next, self.last + 1)
        return None


class Acks:
    def __init__(self, server: Server) -> None:
        self._server = server

    def ack(self, reply: bytes) -> None:
        seq = int(reply.split(b".")[5])
        for consumer in self._server.consumers.values():
            consumer.pending.discard(seq)
        if self._server.retention == "workqueue":
            self._server.messages.pop(seq, None)

    def in_progress(self, reply: bytes) -> None:
        """Fine."""


class World:
    """One worker with several consumers on the model, moved step by step."""

    def __init__(
        self, server: Server, record: Progress | None = None, handled: list[int] | None = None, **settings: Any
    ) -> None:
        self.server = server
        self.handled = handled if handled is not None else []
        metrics, stub, acks = Metrics("w0"), Stub(), Acks(server)
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
        self.lanes.on_starved = self._feed
        ports: Any = ConsumerPorts(server, stub, stub, self.lanes, metrics, Health())  # type: ignore[arg-type]
        quick = {"worker_id": "w0", "update_min_interval_s": 0.0, "max_subjects": 1, "consumer_shards": 2}
        tuned = load_settings({**quick, **settings})
        fresh = Progress(stream="DC", stream_created=server.created)
        self.consumer = WorkerConsumer(ports, tuned, TEMPLATE, server.stream(), record or fresh)

    def _feed(self, lane: Lane) -> None:
        """What a backlog reader does, at once."""
        subject = lane.ownership.partition.subject
        wanted = range(lane.feed_from, lane.parked_to + 1)
        seqs = [seq for seq, on in self.server.messages.items() if on == subject and seq in wanted]
        lane.feed([StoredMessage(subject, b"x", seq, lane.ownership) for seq in seqs], True)
        self.lanes.fed(lane)

    @property
    def shards(self) -> list[Vehicle]:
        return self.consumer.shards.vehicles

    def intake(self, number: int) -> ShardIntake | Lanes:
        found = self.shards[number - 1].reached
        assert isinstance(found, ShardIntake | Lanes)
        return found

    async def start(self, *partitions: str, granted: Granted | None = None) -> World:
        if granted:
            self.consumer.grant(granted)
        await self.consumer.start(partitions)
        await self.rest()
        return self

    async def update(self, *partitions: str) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.consumer.update_worker_consumer("w0", partitions)
        await self.rest()

    async def rest(self) -> None:
        """Let the engines do what they have been asked to."""
        async with asyncio.timeout(BOUND_S):
            while self._busy():  # noqa: ASYNC110 - each turn lets others act, and time does not count
                await asyncio.sleep(0)

    def _busy(self) -> bool:
        shards = self.consumer.shards
        return shards.changing or any(engine._trouble.is_set() for engine in shards.engines)

    async def break_session(self, number: int) -> None:
        self.shards[number - 1].engine.new_session("gap")
        await self.rest()

    def serve(self, number: int, most: int = 1_000) -> int:
        """Deliver from one consumer, as far as its session is open; at the end a heartbeat says so."""
        shard = self.shards[number - 1]
        intake = self.intake(number)
        for count in range(most):
            if not shard.engine._open:
                return count
            seq = self.server.next_for(shard.name)
            if seq is None:
                return count
            reply = b"$JS.ACK.DC.c.1.%d.1.1700000000000000000.0" % seq
            intake.deliver(self.server.messages[seq].encode(), reply, None, b"x", seq)
        return most

    def heartbeat(self, number: int) -> None:
        """What the server says when it has looked and found nothing."""
        shard, intake = self.shards[number - 1], self.intake(number)
        if shard.engine._open and isinstance(intake, ShardIntake):
            intake.passed(self.server.consumers[shard.name].next - 1)

    def work(self, most: int = 1_000) -> int:
        """Handle what is ready."""
        for count in range(most):
            if not self.lanes.ready:
                return count
            lane = self.lanes.ready.popleft()
            if lane.waiting and lane.phase.value == "ready":
                self.handled.append(lane.waiting[0].seq)
                self.lanes.settle(lane)
        return most

    async def finish(self) -> None:
        """Deliver and handle everything there is."""
        await self.rest()
        while sum(self.serve(shard.number) for shard in self.shards) + self.work():
            self.lanes.floors.catch_up()

    def record(self) -> Progress:
        record = self.consumer.summarise("me")
        self.lanes.stored()
        return record

    def position(self, partition: str) -> int:
        return self.record().position(partition, f"dc.{partition}")

    async def stop(self) -> None:
        await self.consumer.stop()


def by_partition(server_subjects: Mapping[int, str], handled: list[int]) -> dict[str, list[int]]:
    """What was handled, in order, by partition."""
    found: dict[str, list[int]] = defaultdict(list)
    for seq in handled:
        found[server_subjects[seq]].append(seq)
    return dict(found)
