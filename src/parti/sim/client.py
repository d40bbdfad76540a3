"""The client side of the simulated network: what parti's connection and its lean path are built on.

`SimClient` stands where parti's own NATS client does, below the real `Connection`; `SimWire` for the lean path.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from parti.jetstream.connection import Connection
from parti.jetstream.protocol import Sink
from parti.model.headers import parse_headers
from parti.sim.network import Channel, Network, Sent
from parti.sim.process import Process, current_process
from parti.sim.server import Delivery

_DIAL_S = 3.0

networks: dict[Process, Network] = {}
"""The network of each process: a client is made deep inside parti's code and finds its own here."""


class SimMsg:
    """A message as callbacks of subscriptions get it."""

    __slots__ = ("data", "headers", "reply", "subject")

    def __init__(self, delivery: Delivery) -> None:
        self.subject = delivery.subject.decode()
        self.reply = delivery.reply.decode()
        self.data = delivery.payload
        self.headers = _headers(delivery.header) if delivery.header else None


def _headers(block: bytes) -> dict[str, str]:
    headers = parse_headers(block)
    status = block.partition(b"\r\n")[0].split(b" ", 2)
    if len(status) > 1:
        headers["Status"] = status[1].decode()
        if len(status) > 2:
            headers["Description"] = status[2].decode()
    return headers


class SimSubscription:
    """A subscription with a callback; one message after the other."""

    def __init__(
        self, client: SimClient, subject: str, sid: bytes, callback: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.subject = subject
        self._client = client
        self._sid = sid
        self._callback = callback
        self._queue: deque[SimMsg] = deque()
        self._pump: asyncio.Task[None] | None = None
        # The one that every answer comes through, and which never waits: no task for it.
        self._at_once = getattr(callback, "__func__", None) is Connection._on_reply

    def take(self, message: SimMsg) -> None:
        """Call back, when those before have been."""
        if self._at_once:
            try:
                self._callback(message).send(None)  # type: ignore[attr-defined]
            except StopIteration:
                pass
            return
        self._queue.append(message)
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._queue:
            await self._callback(self._queue.popleft())
        self._pump = None

    async def unsubscribe(self) -> None:
        """End it; what waits is dropped."""
        self._client.drop(self._sid)
        self._queue.clear()


class SimClient:
    """What `Connection` and `Wire` need of a NATS client, over the simulated network."""

    max_payload = 1 << 20
    pending_data_size = 0

    def __init__(self, dial: Any, *, on_down: Callable[[str], None], on_denied: Callable[[str, str], None]) -> None:
        self._process = current_process()
        self._network = networks[self._process]
        self._dial = dial
        self._on_down = on_down
        self._channel: Channel | None = None
        self._closed = False
        self._sids = itertools.count(1)
        self._subscriptions: dict[bytes, SimSubscription] = {}
        self._inboxes = itertools.count(1)
        self._id = self._network.new_id()
        self._callbacks: dict[str, Callable[..., Awaitable[None]]] = {}
        self._reconnecting: asyncio.Task[None] | None = None
        self._loop = self._network.loop
        self.sinks: dict[bytes, Sink] = {}
        self.on_chunk: Callable[[], None] = lambda: None
        self.info: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.dialled = "nats://127.0.0.1:4222"
        self.pool = {self.dialled}

    def read_leanly(self) -> None:
        """There is no parser: the simulated network carries messages, not bytes."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as this side knows."""
        return self._channel is not None and self._channel.open

    def new_inbox(self) -> str:
        """A fresh reply subject."""
        return f"_INBOX.{self._id}n{next(self._inboxes)}"

    def new_sid(self) -> bytes:
        """A fresh subscription id."""
        return b"%d" % next(self._sids)

    async def connect(self, **options: Any) -> None:
        """Connect; keeps trying."""
        self.options = options
        self._callbacks = {name: options[name] for name in options if name.endswith("_cb")}
        await self._keep_dialling()

    async def _keep_dialling(self) -> None:
        while not self._closed:
            try:
                await self._dial_once()
                return
            except (OSError, TimeoutError) as error:
                await self._callbacks["error_cb"](error)
            await asyncio.sleep(self.options["reconnect_time_wait"])

    async def _dial_once(self) -> None:
        network, conditions = self._network, self._network.conditions[self._process]
        try:
            async with asyncio.timeout(min(_DIAL_S, self.options.get("connect_timeout", _DIAL_S))):
                # The handshake takes two round trips, and packets of it are sent again until they pass.
                await asyncio.sleep(4 * conditions.latency_s)
                while conditions.cut:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise TimeoutError from None
        if not network.up:
            raise ConnectionRefusedError("connection refused")
        channel = self._channel = Channel(network, self._process, self._on_delivery)
        channel.on_broken = self._broken
        channel.silent_after_s = 3 * float(self.options.get("ping_interval", 3.0))
        self.info = {"version": "2.15.1", "server_id": "SIM", "client_id": network.new_id()}
        for sid, subscription in self._subscriptions.items():
            channel.subscribe(subscription.subject, sid)

    def _broken(self, reason: str) -> None:
        self._on_down(reason)
        if not self._closed and self._reconnecting is None:
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        await self._callbacks["error_cb"](ConnectionResetError("connection reset"))
        await self._callbacks["disconnected_cb"]()
        await self._keep_dialling()
        self._reconnecting = None
        if not self._closed:
            await self._callbacks["reconnected_cb"]()

    async def subscribe(self, subject: str, *, cb: Callable[[Any], Awaitable[None]]) -> SimSubscription:
        """Subscribe; goes on after a reconnect."""
        if self._closed:
            raise ConnectionError("closed")
        sid = self.new_sid()
        subscription = self._subscriptions[sid] = SimSubscription(self, subject, sid, cb)
        if self.is_connected:
            assert self._channel
            self._channel.subscribe(subject, sid)
        return subscription

    def drop(self, sid: bytes) -> None:
        """End a subscription."""
        if self._subscriptions.pop(sid, None) is not None and self.is_connected:
            assert self._channel
            self._channel.unsubscribe(sid)

    async def publish(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Send a message."""
        block = None
        if headers:
            block = "NATS/1.0\r\n{}\r\n\r\n".format("\r\n".join(f"{k}: {v}" for k, v in headers.items())).encode()
        self.write([(subject, payload, reply, block)])

    def write(self, messages: list[Sent]) -> None:
        """Send messages in one packet; ConnectionError when there is no connection."""
        channel = self._channel
        if channel is None or not channel.open or self._process.gone:
            raise ConnectionError("not connected")
        channel.publish(messages)

    async def barrier(self, timeout_s: float) -> None:
        """Return once the server has processed all that was written before."""
        if not self.is_connected:
            raise ConnectionError("not connected")
        assert self._channel
        done = asyncio.get_running_loop().create_future()

        def pong() -> None:
            if not done.done():
                done.set_result(None)

        self._channel.ping(pong)
        async with asyncio.timeout(timeout_s):
            await done

    async def drain_writes(self, timeout_s: float) -> None:
        """There is no buffer."""

    async def discard(self) -> None:
        """Close for good."""
        self._closed = True
        if self._reconnecting:
            self._reconnecting.cancel()
        if self._channel and self._channel.open:
            self._channel.abandon()
        self._channel = None

    @property
    def channel(self) -> Channel | None:
        """The connection, if there is one."""
        return self._channel if self.is_connected else None

    def _on_delivery(self, deliveries: list[Delivery]) -> None:
        ours = False
        for delivery in deliveries:
            sink = self.sinks.get(delivery.sid)
            if sink is not None:
                ours = True
                sink(delivery.subject, delivery.reply, delivery.header, delivery.payload)
            elif (subscription := self._subscriptions.get(delivery.sid)) is not None:
                subscription.take(SimMsg(delivery))
        if ours:
            self.on_chunk()


class SimWire:
    """The lean path over the simulated network; see `parti.jetstream.wire.Wire`."""

    def __init__(self, client: SimClient, *, plain: bool = False) -> None:
        """`plain` makes no difference: there are no bytes to read."""
        self._client = client
        self._listeners: list[Callable[[], None]] = []
        client.on_chunk = self._chunk_done

    def on_chunk(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each packet that carried messages for a sink; returns what removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _chunk_done(self) -> None:
        for listener in self._listeners:
            listener()

    def subscribe(self, subject: str, sink: Sink) -> bytes:
        """Subscribe on the current connection."""
        sid = self._client.new_sid()
        self._client.sinks[sid] = sink
        if channel := self._client.channel:
            channel.subscribe(subject, sid)
        return sid

    def unsubscribe(self, sid: bytes) -> None:
        """End a subscription; what is still on its way is dropped."""
        if self._client.sinks.pop(sid, None) is not None and (channel := self._client.channel):
            channel.unsubscribe(sid)

    def write(self, data: bytes) -> bool:
        """Send protocol bytes now; False when there is no connection."""
        if not self._client.is_connected:
            return False
        self._client.write(_parse(data))
        return True

    def new_inbox(self) -> str:
        """A fresh reply subject."""
        return self._client.new_inbox()


def _parse(data: bytes) -> list[Sent]:
    """The messages in a run of PUB commands."""
    messages: list[Sent] = []
    position, end = 0, len(data)
    while position < end:
        line_end = data.index(b"\r\n", position)
        words = data[position:line_end].decode().split()
        assert words[0] == "PUB", words
        begin = line_end + 2
        position = begin + int(words[-1]) + 2
        messages.append((words[1], data[begin : position - 2], words[2] if len(words) == 4 else "", None))
    return messages
