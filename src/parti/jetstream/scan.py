"""Reads a stream from a sequence on to its present end, in order and without holes, leaving nothing behind.

An ephemeral push consumer, in memory, without acknowledgements and, unless payloads are wanted, with headers only. It
is made anew behind the last message when deliveries get lost. For small streams such as dead letters; workers and
Spark have readers of their own.
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
from parti.model.headers import ReplyInfo, parse_reply

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_SILENT_S = 5.0
_HEARTBEAT_S = 1.0
_FORGOTTEN_S = 10.0
_RESTARTS = 5


class Scanned:
    """One message: where it lies, when it was stored, its headers, and its payload if that was asked for."""

    __slots__ = ("data", "headers", "seq", "stored_at", "subject")

    def __init__(self, msg: Msg, info: ReplyInfo) -> None:
        self.seq = info.stream_seq
        self.subject = msg.subject
        self.headers: dict[str, str] = dict(msg.headers or {})
        self.data = msg.data
        self.stored_at = datetime.fromtimestamp(info.timestamp_ns / 1e9, UTC)


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
    seq = start
    for _ in range(_RESTARTS):
        async with contextlib.aclosing(_session(connection, api, stream, seq, subjects, payload=payload)) as session:
            async for message in session:
                if message is None:
                    break
                seq = message.seq + 1
                yield message
            else:
                return
    raise RequestTimeout(f"stream {stream!r} could not be read: deliveries got lost again and again; try again")


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
        **({} if payload else {"headers_only": True}),
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
            yield Scanned(msg, info)
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
