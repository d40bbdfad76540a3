"""The server's advisories about pins, as events: who was pinned, who is no more, and why.

Advisories are core NATS messages: what is sent while this connection is away is lost. They are for people and graphs;
what a client may do is said by the answers to its own pulls.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import structlog
from nats import errors as nats_errors

from parti.errors import ConnectionFailed
from parti.jetstream.connection import Connection, ConnectionState
from parti.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

_log = structlog.get_logger("parti.switches")

_PREFIX = "$JS.EVENT.ADVISORY.CONSUMER"
_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Switch:
    """A client was pinned (`pinned`), or the pin was taken away."""

    at: datetime
    stream: str
    consumer: str
    group: str
    pinned: bool
    pin_id: str
    """The client that was pinned; empty when one was unpinned: the server does not say which."""
    reason: str
    """Of an unpinning: `admin` or `timeout`."""


class Switches:
    """Listens from `start` to `stop`, or for the length of a `with` block; iterate over it for the events.

    `stream` and `consumer` may be `*`. If nobody takes the events, the oldest are dropped. Iterating ends with
    `stop`, and with ConnectionFailed when the connection was closed.

    Example:
        async with Switches(connection, stream="JOBS", consumer="jobs") as switches:
            async for switch in switches:
                print(switch.group, "pinned" if switch.pinned else f"unpinned: {switch.reason}")
    """

    def __init__(
        self, connection: Connection, *, stream: str = "*", consumer: str = "*", metrics: Metrics | None = None
    ) -> None:
        self._connection = connection
        self._place = f"{stream}.{consumer}"
        self._metrics = metrics
        self._events: deque[Switch] = deque(maxlen=_KEPT)
        self._wake = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._stopped = False
        self._remove_listener = connection.on_state(self._on_state)

    async def start(self) -> None:
        """Subscribe; what happens after the return is told. Raises PermissionDenied when the account may not."""
        known = len(self._connection.permission_errors)
        try:
            for word in ("PINNED", "UNPINNED"):
                subject = f"{_PREFIX}.{word}.{self._place}"
                self._subscriptions.append(await self._connection.client.subscribe(subject, cb=self._take))
            await self._connection.flush()
        except nats_errors.Error as error:
            raise ConnectionFailed(f"could not subscribe to advisories: {error}; try again") from None
        for denied in list(self._connection.permission_errors)[known:]:
            if denied.subject.lower().startswith(_PREFIX.lower()):
                raise denied

    async def stop(self) -> None:
        """Listen no more."""
        self._stopped = True
        self._wake.set()
        self._remove_listener()
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except nats_errors.Error:
                pass  # the connection is gone, and with it the subscription
        self._subscriptions = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Switch:
        while not self._events:
            if self._stopped:
                raise StopAsyncIteration
            if self._connection.closed:
                raise ConnectionFailed("the connection is closed, so switches are told no more; open a new one")
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        if self._connection.closed:
            self._wake.set()

    async def _take(self, msg: Msg) -> None:
        try:
            event = _switch(json.loads(msg.data))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            _log.warning("an advisory could not be read", subject=msg.subject, error=repr(error))
            return
        if self._metrics is not None and event.pinned:
            self._metrics.pin_switches.inc()
        self._events.append(event)
        self._wake.set()


def _switch(advisory: dict[str, Any]) -> Switch:
    return Switch(
        at=datetime.fromisoformat(advisory["timestamp"]).astimezone(UTC),
        stream=str(advisory["stream"]),
        consumer=str(advisory["consumer"]),
        group=str(advisory["group"]),
        pinned=str(advisory["type"]).endswith("_pinned"),
        pin_id=str(advisory.get("pinned_id", "")),
        reason=str(advisory.get("reason", "")),
    )
