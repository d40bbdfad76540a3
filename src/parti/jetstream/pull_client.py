"""A pull client that stands alone: messages of one consumer, which others may read too, as an async iterator.

It is the pull engine of parti's workers without partitions, positions and handlers. What it adds to other clients is
priority groups: overflow, pinned and prioritized pulls. Being pinned is no exclusivity: there are times when two
clients have messages of one group in hand. Whatever must not happen twice needs a fence of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Self
from weakref import WeakKeyDictionary

import structlog

from parti.config import load_settings
from parti.core.pin import PinChange, PinState
from parti.core.priority import Policy, PullOptions, check_numbers, check_pull, check_server, group_of
from parti.errors import ConfigError, ConnectionFailed, NotFound, PartiError
from parti.jetstream.acks import AckWriter
from parti.jetstream.api import GroupState, JetStreamApi
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.priority import release
from parti.jetstream.pull import PullEngine, PullTuning
from parti.jetstream.pull_group import PullGroup
from parti.jetstream.wire import Wire
from parti.model.headers import ReplyInfo, parse_headers, parse_reply, split_pin
from parti.model.safe_text import text_of
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.pull_client")

_BATCH = 50
_TURN = 64
_wires: WeakKeyDictionary[Connection, Wire] = WeakKeyDictionary()
"""A connection has one wire, however many clients pull over it."""


class Pulled:
    """A message, until it is answered: `ack`, `nak` or `term`; `in_progress` asks for more time.

    Answers are written at the end of the present turn of the event loop. While there is no connection they are
    dropped, and the message comes again.
    """

    __slots__ = ("_client", "_waits", "data", "header", "reply", "seq", "subject")

    def __init__(
        self, client: PullClient, subject: bytes, reply: bytes, header: bytes | None, data: bytes, seq: int
    ) -> None:
        self.subject = text_of(subject)
        self.data = data
        self.seq = seq
        """Its stream sequence."""
        self.reply = reply
        self.header = header
        """The header block as it came over the wire, or None."""
        self._client = client
        self._waits = True

    @property
    def headers(self) -> Mapping[str, str]:
        """The publisher's headers; of a repeated name the first value."""
        return parse_headers(split_pin(self.header)[0]) if self.header else {}

    @property
    def pin_id(self) -> str:
        """The pin under which it was delivered; empty without one."""
        return split_pin(self.header)[1] if self.header and self._client.pinning else ""

    @property
    def delivery(self) -> ReplyInfo:
        """What the server says of this delivery: how often it came, what is pending."""
        return parse_reply(self.reply)

    @property
    def published_at(self) -> datetime:
        """When the server stored it (UTC)."""
        return datetime.fromtimestamp(self.delivery.timestamp_ns / 1e9, UTC)

    def ack(self) -> None:
        """It is finished."""
        if self._client._answered(self, finished=True):
            self._client._acks.ack(self.reply)

    def nak(self, delay_s: float = 0.0) -> None:
        """Have it delivered again, here or elsewhere, after a while."""
        if self._client._answered(self):
            self._client._acks.give_back(self.reply, delay_s)

    def term(self) -> None:
        """Never deliver it again, although it is not finished."""
        if self._client._answered(self):
            self._client._acks.terminate(self.reply)

    def in_progress(self) -> None:
        """It is being worked on: begin to count ack_wait anew."""
        self._client._acks.in_progress(self.reply)

    async def ack_confirmed(self, timeout_s: float = 5.0) -> None:
        """It is finished, and the server has said that it knows; raises what `Connection.request` raises."""
        await self._client._connection.request(self.reply.decode(), b"+ACK", timeout_s=timeout_s)
        self._client._answered(self, finished=True)

    def __repr__(self) -> str:
        return f"Pulled(seq={self.seq}, subject={self.subject!r}, {len(self.data)} bytes)"


class PullClient:
    """Pulls from one consumer from `start` to `stop`, or for the length of an `async with` block, through everything.

    `connection` is one of parti's, or the URL of a server. `limit` is how many messages may be unanswered at a time.
    `on_pinned(pin_id)` and `on_unpinned(reason)` are called on the event loop. What was received and not yet handed
    out when the pin is lost, or at the end, is given back to the server at once.

    `start` raises ConfigError, NotFound or ServerTooOld when the consumer cannot be read in this way. Later, the
    iterator raises NotFound when the consumer was deleted, ConfigError when it was changed so, and ConnectionFailed
    when the connection was closed; it waits through reconnects and restarts.

    Example:
        async with PullClient("nats://localhost:4222", stream="JOBS", consumer="jobs", group="eu") as messages:
            async for message in messages:
                await work(message.data)
                message.ack()
    """

    def __init__(
        self,
        connection: Connection | str,
        *,
        stream: str,
        consumer: str,
        group: str = "",
        min_pending: int = 0,
        min_ack_pending: int = 0,
        priority: int | None = None,
        on_pinned: Callable[[str], None] | None = None,
        on_unpinned: Callable[[str], None] | None = None,
        limit: int = 100,
        expires_s: float = 30.0,
        heartbeat_s: float = 5.0,
        metrics: Metrics | None = None,
        health: Health | None = None,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"limit={limit} leaves no room for a message; expected 1 or more")
        self._options = PullOptions(group, min_pending, min_ack_pending, priority)
        check_numbers(self._options)
        self.stream = stream
        self.consumer = consumer
        self.metrics = metrics or Metrics(consumer)
        self.health = health or Health()
        self._place = connection
        self._tuning = PullTuning(min(_BATCH, max(1, limit // 2)), 0, expires_s, heartbeat_s, limit)
        self._callbacks = (on_pinned, on_unpinned)
        self._group = PullGroup(self._options, self.metrics, on_change=self._on_pin)
        self._held: dict[int, Pulled] = {}
        self._ready: deque[Pulled] = deque()
        self._wake = asyncio.Event()
        self._failure: PartiError | None = None
        self._finished = self._taken = 0
        self._running = False
        self._engine: PullEngine | None = None
        self._remove_listener: Callable[[], None] = lambda: None

    # ── what is known ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pinning(self) -> bool:
        """Whether the consumer pins a client."""
        return self._group.pin is not None

    @property
    def pin(self) -> PinState:
        """Whether this client believes to be the pinned one; always unpinned with other policies."""
        return self._group.pin.state if self._group.pin else PinState.UNPINNED

    @property
    def pin_id(self) -> str:
        """The server's name for this client while it is pinned."""
        return self._group.pin_id

    @property
    def held(self) -> int:
        """Messages taken and not yet answered."""
        return len(self._held)

    @property
    def finished(self) -> int:
        """Messages answered since the start."""
        return self._finished

    async def group_state(self) -> GroupState | None:
        """What the server knows of the consumer's group now; None without a group."""
        info = await JetStreamApi(self._connection).consumer_info(self.stream, self.consumer)
        return next((state for state in info.groups if state.name == self._options.group), None)

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Connect if need be, check that the consumer serves such pulls, and begin."""
        owned = isinstance(self._place, str)
        self._connection = await _connect(self._place, self.consumer)
        try:
            wire = _wires.get(self._connection) or _wires.setdefault(self._connection, Wire(self._connection.client))
            self._engine = PullEngine(
                self._connection,
                wire,
                self,
                self._tuning,
                self.metrics,
                self.health,
                stream=self.stream,
                consumer=self.consumer,
                prepare=self._prepare,
                passed=lambda seq: None,
                group=self._group,
                shared=True,
            )
            self._acks = AckWriter(wire, self.metrics, self._engine.refill)
            await self._engine.start()
        except BaseException:
            if owned:
                await self._connection.close()
            raise
        self._running = True
        self._remove_listener = self._connection.on_state(self._on_state)

    async def stop(self) -> None:
        """Pull no more, give back what was not handed out, and release the pin; iterating ends."""
        if not self._running:
            return
        self._running = False
        self._wake.set()
        self._remove_listener()
        pin_id = self._group.pin_id
        if self._engine is not None:
            await self._engine.stop()
        self._group.leave()
        self._give_back()
        self._acks.flush()
        if not self._connection.closed:
            with suppress(PartiError):
                await self._connection.flush(2.0)
                if pin_id:
                    api = JetStreamApi(self._connection)
                    await release(api, self.stream, self.consumer, self._options.group, pin_id)
        if isinstance(self._place, str):
            await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Pulled:
        self._taken += 1
        if not self._taken % _TURN:
            # Who never waits for anything would keep answers, pulls and what has come in from being dealt with.
            await asyncio.sleep(0)
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        message = self._ready.popleft()
        message._waits = False
        return message

    async def _prepare(self, reason: str) -> bool:
        try:
            await self._look()
        except (NotFound, ConfigError) as error:
            self._fail(error)
            raise
        return True

    async def _look(self) -> None:
        """Follow what the consumer is now; raises when it serves no such pulls."""
        info = await JetStreamApi(self._connection).consumer_info(self.stream, self.consumer)
        group = group_of(info.config)
        if info.config.get("deliver_subject") or info.config.get("ack_policy") != "explicit":
            raise ConfigError(
                f"consumer {self.consumer!r} of stream {self.stream!r} is no pull consumer with explicit "
                f"acknowledgements; make one, or name another"
            )
        if group is None and self._options.group:
            # A server that knows nothing of groups has made the consumer without one, and said nothing.
            check_server(self._connection.server_version, Policy.OVERFLOW)
        check_pull(self._options, group)
        self._group.adopt(group)

    def _fail(self, error: PartiError) -> None:
        if self._running:
            self._failure = error
            self._wake.set()

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        if self._connection.closed:
            self._fail(ConnectionFailed("the connection was closed, so nothing is pulled any more; open a new one"))

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes, seq: int) -> None:
        """Take one message; called by the engine."""
        before = self._held.get(seq)
        if before is not None and before._waits:
            before.reply = reply  # nobody has seen it yet: it is answered as the newest delivery
            return
        message = Pulled(self, subject, reply, header, payload, seq)
        self._held[seq] = message
        self._ready.append(message)
        self._wake.set()

    def _answered(self, message: Pulled, *, finished: bool = False) -> bool:
        """Note an answer; False when there was one, or when the message has come again since and is not finished."""
        newest = self._held.get(message.seq)
        if newest is None or (newest is not message and not finished):
            return False
        if newest is message or newest._waits:
            del self._held[message.seq]
            self._finished += 1
        if newest is not message and newest._waits:
            self._ready.remove(newest)  # it came again while it was worked on, and nobody has seen that yet
        return True

    def _give_back(self) -> None:
        """Have what nobody has seen delivered again at once."""
        while self._ready:
            message = self._ready.popleft()
            if self._held.get(message.seq) is message:
                del self._held[message.seq]
                self._acks.give_back(message.reply, 0.0)

    def _on_pin(self, change: PinChange) -> None:
        on_pinned, on_unpinned = self._callbacks
        if change.taken:
            if on_pinned is not None:
                on_pinned(change.pin_id)
            return
        self._give_back()
        if on_unpinned is not None:
            on_unpinned(change.reason)


async def _connect(place: Connection | str, consumer: str) -> Connection:
    if isinstance(place, Connection):
        return place
    return await Connection.open(load_settings({"nats": place}), name=f"parti-pull-{consumer}")
