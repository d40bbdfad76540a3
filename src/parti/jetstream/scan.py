"""Reads a stream from a sequence on to its present end, in order and without holes, leaving nothing behind.

An ephemeral push consumer, in memory, without acknowledgements. It is made anew behind the last message when
deliveries get lost. It never asks for `headers_only`: nats-server 2.15.1 dies of that when a header block is a single
byte. For small streams such as dead letters; workers and Spark have readers of their own. With
`read_by = "requests"` there is no consumer: the leader is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors

from parti.errors import PartiError, RequestTimeout
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.requested import read_on
from parti.model.headers import ReplyInfo, parse_headers, parse_reply
from parti.model.subjects import within

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_SILENT_S = 5.0
_HEARTBEAT_S = 1.0
_FORGOTTEN_S = 10.0
_RESTARTS = 5


class Scanned:
    """One message: where it lies, when it was stored, its headers, and its payload if that was asked for."""

    __slots__ = ("data", "headers", "seq", "stored_at", "subject")

    def __init__(self, seq: int, subject: str, headers: dict[str, str], data: bytes, stored_at: datetime) -> None:
        self.seq = seq
        self.subject = subject
        self.headers = headers
        self.data = data
        self.stored_at = stored_at

    @classmethod
    def delivered(cls, msg: Msg, info: ReplyInfo, *, payload: bool) -> Scanned:
        """As a consumer brings it."""
        stored_at = datetime.fromtimestamp(info.timestamp_ns / 1e9, UTC)
        return cls(info.stream_seq, msg.subject, dict(msg.headers or {}), msg.data if payload else b"", stored_at)


async def scan(
    connection: Connection,
    api: JetStreamApi,
    stream: str,
    *,
    start: int = 1,
    subjects: tuple[str, ...] = (),
    payload: bool = False,
) -> AsyncGenerator[Scanned, None]:
    """The messages from `start` on, up to what is there when the end is reached.

    Raises `NotFound` when there is no such stream, `RequestTimeout` when nothing comes, and what requests raise.
    """
    if connection.reads_by_requests:
        async with contextlib.aclosing(_asked(api, stream, start, subjects, payload=payload)) as asked:
            async for message in asked:
                yield message
        return
    seq = start
    for _ in range(_RESTARTS):
        async with contextlib.aclosing(_session(connection, api, stream, seq, subjects, payload=payload)) as session:
            async for delivered in session:
                if delivered is None:
                    break
                seq = delivered.seq + 1
                yield delivered
            else:
                return
    raise RequestTimeout(f"stream {stream!r} could not be read: deliveries got lost again and again; try again")


async def _asked(
    api: JetStreamApi, stream: str, start: int, subjects: tuple[str, ...], *, payload: bool
) -> AsyncGenerator[Scanned, None]:
    """The same from the stream's leader, without a consumer."""
    wanted = subjects[0] if len(subjects) == 1 else ">"
    async with contextlib.aclosing(read_on(api, stream, start, wanted, payload=payload)) as messages:
        async for each in messages:
            if len(subjects) < 2 or within(each.subject, subjects):
                headers = parse_headers(each.header or b"")
                yield Scanned(each.seq, each.subject, headers, each.data, each.stored_at)


async def _session(
    connection: Connection, api: JetStreamApi, stream: str, start: int, subjects: tuple[str, ...], *, payload: bool
) -> AsyncGenerator[Scanned | None, None]:
    """What one consumer brings; None at last, when something is missing."""
    inbox = connection.client.new_inbox()
    name = f"parti-scan-{uuid.uuid4().hex[:16]}"
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await connection.client.subscribe(inbox, cb=arrived.put)
    config: dict[str, Any] = {
        "name": name,
        "deliver_subject": inbox,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(1, start),
        "ack_policy": "none",
        "max_deliver": 1,
        "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        "flow_control": True,
        "inactive_threshold": int(_FORGOTTEN_S * 1e9),
        "mem_storage": True,
        "num_replicas": 1,
        **({"filter_subjects": list(subjects)} if subjects else {}),
    }
    try:
        if not (await api.put_consumer(stream, config, action="create")).pending:
            return
        received = 0
        while True:
            msg = await _next(arrived, stream)
            if msg.subject == inbox and not msg.reply.startswith("$JS.ACK."):
                if await _has_lost(connection, msg, received):
                    yield None
                    return
                continue
            info = parse_reply(msg.reply.encode())
            received += 1
            if info.consumer_seq != received:
                yield None
                return
            yield Scanned.delivered(msg, info, payload=payload)
            if not info.pending:
                return
    finally:
        with contextlib.suppress(nats_errors.Error, OSError):
            await subscription.unsubscribe()
        with contextlib.suppress(PartiError):
            await api.delete_consumer(stream, name)


async def _next(arrived: asyncio.Queue[Msg], stream: str) -> Msg:
    try:
        async with asyncio.timeout(_SILENT_S):
            return await arrived.get()
    except TimeoutError:
        raise RequestTimeout(
            f"stream {stream!r} could not be read: nothing came for {_SILENT_S:g} s; look at the server"
        ) from None


async def _has_lost(connection: Connection, msg: Msg, received: int) -> bool:
    """Answer a question of flow control; True when a heartbeat counts more than has come."""
    headers = msg.headers or {}
    if question := msg.reply or headers.get("Nats-Consumer-Stalled", ""):
        await connection.publish(question, b"")
        return False
    return headers.get("Status") != "100" or int(headers.get("Nats-Last-Consumer", received)) > received
