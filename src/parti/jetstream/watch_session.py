"""One session of a watch: one consumer on the server, and the unbroken chain of what it delivers.

First comes the whole state, the last value of each key, then every change. Deliveries are counted: a hole, or a
heartbeat that counts more than has come, means that the chain is broken, and then nothing more is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nats import errors as nats_errors

from parti.errors import PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Entry
from parti.model.headers import parse_reply

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

_MISSED_HEARTBEATS = 3
_INACTIVE_HEARTBEATS = 5
"""The server deletes the consumer of a process that has been gone for so many heartbeats."""


class WatchSession:
    """One consumer on keys of a bucket, from `open` to `close`.

    `on_value(key, entry)` gets each delivery, in order and without holes, `on_change()` is called when `complete` or
    `trouble` has changed. Nothing is delivered before `confirm`.
    """

    def __init__(
        self,
        connection: Connection,
        api: JetStreamApi,
        bucket_name: str,
        keys: tuple[str, ...],
        heartbeat_s: float,
        on_value: Callable[[str, Entry], None],
        on_change: Callable[[], None],
    ) -> None:
        self.keys = keys
        self.complete = False
        """The whole state has come."""
        self.trouble = ""
        """Why the chain is in doubt."""
        self._connection = connection
        self._api = api
        self._stream = f"KV_{bucket_name}"
        self._prefix = f"$KV.{bucket_name}."
        self._heartbeat_s = heartbeat_s
        self._on_value = on_value
        self._on_change = on_change
        self._inbox = connection.client.new_inbox()
        self.consumer = f"watch-{self._inbox.rpartition('.')[2]}"
        self._subscription: Subscription | None = None
        self._confirmed = asyncio.Event()
        self._closed = False
        self._total = 0
        self._received = 0
        self._heard_s = 0.0

    @property
    def silent_at_s(self) -> float:
        """When the session is in doubt if nothing is heard until then, on the clock of the event loop."""
        return self._heard_s + _MISSED_HEARTBEATS * self._heartbeat_s

    async def open(self) -> None:
        """Create the consumer; raises PartiError or an error of nats-py."""
        self._subscription = await self._connection.client.subscribe(self._inbox, cb=self._on_message)
        config = {
            "name": self.consumer,
            "description": "watch of a parti process",
            "deliver_subject": self._inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "max_deliver": 1,
            "filter_subjects": [self._prefix + key for key in self.keys],
            "idle_heartbeat": int(self._heartbeat_s * 1e9),
            "flow_control": True,
            "inactive_threshold": int(_INACTIVE_HEARTBEATS * self._heartbeat_s * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        self._total = (await self._api.put_consumer(self._stream, config, action="create")).pending

    def confirm(self) -> None:
        """Begin to pass on what has come."""
        self._heard_s = asyncio.get_running_loop().time()
        self._confirmed.set()
        if not self._total:
            self._complete()

    def doubt(self, reason: str) -> None:
        """Pass on nothing more: something may be missing."""
        if not self.trouble:
            self.trouble = reason
            self._on_change()

    async def close(self) -> None:
        """Stop listening; never raises. The consumer is still to be deleted."""
        self._closed = True
        if self._subscription is not None:
            with contextlib.suppress(nats_errors.Error, OSError):
                await self._subscription.unsubscribe()

    async def _on_message(self, msg: Msg) -> None:
        await self._confirmed.wait()
        if self._closed or self.trouble:
            return
        self._heard_s = asyncio.get_running_loop().time()
        headers = msg.headers or {}
        if msg.subject == self._inbox:
            await self._on_status(headers, msg.reply)
            return
        info = parse_reply(msg.reply.encode())
        if info.consumer_seq != self._received + 1:
            self.doubt(f"delivery {self._received + 1} is missing, got {info.consumer_seq}")
            return
        self._received = info.consumer_seq
        self._on_value(msg.subject[len(self._prefix) :], Entry.of(msg.data, info.stream_seq, headers))
        # Both, because under a stream of changes there is always something pending, and because fewer come than were
        # counted when keys are removed meanwhile. If the last of them is, the next heartbeat completes the state.
        if self._received >= self._total or not info.pending:
            self._complete()

    async def _on_status(self, headers: Mapping[str, str], reply: str) -> None:
        if headers.get("Status") != "100":
            self.doubt(f"the server ended the consumer with status {headers.get('Status')}")
            return
        # Flow control: the server waits for this answer, and repeats its question in the heartbeat when it stalls.
        if question := reply or headers.get("Nats-Consumer-Stalled"):
            with contextlib.suppress(PartiError):
                await self._connection.publish(question, b"")
            return
        missing = int(headers.get("Nats-Last-Consumer", self._received)) - self._received
        if missing:
            self.doubt(f"{missing} deliveries are missing")
        else:
            self._complete()

    def _complete(self) -> None:
        if not self.complete:
            self.complete = True
            self._on_change()
