"""Groups of a test's own, and a client that sends pulls exactly as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.integration.conftest import Kit, eventually

from parti.core.priority import PriorityGroup
from parti.jetstream.api import ConsumerInfo
from parti.jetstream.priority import ensure_consumer
from parti.jetstream.pull_client import PullClient

GROUP = "g"
SHORT_S = 0.3
"""How long a pull stands that is expected to bring nothing: its end is what such a test waits for."""
LONG_S = 20.0


@dataclass
class RawPull:
    """One pull, and everything that came on it."""

    messages: list[Msg] = field(default_factory=list)
    heartbeats: int = 0
    status: tuple[int, str] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, msg: Msg) -> None:
        if msg.reply:
            self.messages.append(msg)
        else:
            headers = msg.headers or {}
            code, text = int(headers["Status"]), headers.get("Description", "")
            if code == 100:
                self.heartbeats += 1
            else:
                self.status = (code, text)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def message(self, number: int = 1) -> Msg:
        """The message of this number."""
        await self.until(lambda: len(self.messages) >= number)
        return self.messages[number - 1]

    async def ended(self) -> tuple[int, str]:
        """The status that ends it."""
        await self.until(lambda: self.status)
        assert self.status
        return self.status

    async def brings_nothing(self) -> None:
        """It stands until it expires, without a message."""
        assert (await self.ended())[0] == 408
        assert self.messages == []


class RawClient:
    """Sends pulls."""

    def __init__(self, client: Client, stream: str, consumer: str) -> None:
        self.client = client
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"

    async def pull(self, body: bytes | None = None, *, seconds: float = LONG_S, **fields: Any) -> RawPull:
        """Send a pull, and return when the server has read it."""
        pull, reply = RawPull(), self.client.new_inbox()
        await self.client.subscribe(reply, cb=pull.take)
        asked = json.dumps({"batch": 1, "expires": int(seconds * 1e9), **fields}).encode() if body is None else body
        await self.client.publish(self._next, asked, reply=reply)
        await self.client.flush()
        return pull


@dataclass
class GroupKit:
    """One consumer with a group, on the test's stream."""

    kit: Kit
    consumer: str = "shared"
    _raw: list[Client] = field(default_factory=list)

    @property
    def stream(self) -> str:
        return self.kit.stream

    async def make(self, group: PriorityGroup | None, **config: Any) -> ConsumerInfo:
        """The consumer, through the checks of parti."""
        return await ensure_consumer(self.kit.connection, self.stream, self.consumer, group, **config)

    async def put(self, action: str = "create", **config: Any) -> dict[str, Any]:
        """The consumer, or the server's error, past all checks."""
        config = {"name": self.consumer, "durable_name": self.consumer, "ack_policy": "explicit", **config}
        body = {"stream_name": self.stream, "config": config, "action": action}
        verb = f"$JS.API.CONSUMER.CREATE.{self.stream}.{self.consumer}"
        reply = await self.kit.connection.request(verb, json.dumps(body).encode())
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    async def raw(self) -> RawClient:
        """A client with a connection of its own."""
        connection = await nats.connect(self.kit.url)
        self._raw.append(connection)
        return RawClient(connection, self.stream, self.consumer)

    def client(self, **options: Any) -> PullClient:
        """A pull client with a connection of its own, not started."""
        return PullClient(
            self.kit.url, **{"stream": self.stream, "consumer": self.consumer, "group": GROUP, **options}
        )

    async def publish(
        self, count: int = 1, data: bytes = b"x", headers: Mapping[str, str] | None = None
    ) -> list[int]:
        """Publish, and return the sequences."""
        publish, subject = self.kit.api.publish, self.kit.subject("p")
        return list(await asyncio.gather(*(publish(subject, data, headers=headers) for _ in range(count))))

    async def info(self) -> ConsumerInfo:
        return await self.kit.api.consumer_info(self.stream, self.consumer)

    async def pinned_id(self) -> str:
        (state,) = (await self.info()).groups
        return state.pinned_id

    async def standing(self, pulls: int) -> None:
        """Wait until so many pulls stand at least: the server queues them a moment after it has read them."""

        async def stand() -> bool:
            return (await self.info()).waiting >= pulls

        await eventually(stand)

    async def all_acked(self) -> bool:
        info = await self.info()
        return not info.ack_pending and not info.pending

    async def clean_up(self) -> None:
        for connection in self._raw:
            await connection.close()


def pin_of(msg: Msg) -> str:
    """The pin that a message carries, as any client sees it."""
    return (msg.headers or {}).get("Nats-Pin-Id", "")


def seq_of(msg: Msg) -> int:
    return int(msg.reply.split(".")[5])
