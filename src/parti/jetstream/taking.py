"""Taking what waits for a consumer, without handling or acknowledging it: to see which messages it is given."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats import errors as nats_errors

from parti.jetstream.connection import Connection
from parti.model.headers import parse_reply

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_PULL_MOST = 1000
_SPARE_S = 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """One delivery."""

    seq: int
    subject: str
    deliveries: int
    """How often this message was delivered, this time included."""
    at_s: float
    """Wall clock."""


async def take(connection: Connection, stream: str, consumer: str, *, most: int, wait_s: float) -> list[Taken]:
    """Up to so many deliveries, asking again until there are that many or nothing comes for `wait_s`."""
    taken: list[Taken] = []
    while len(taken) < most:
        portion = await _pull(connection, stream, consumer, min(_PULL_MOST, most - len(taken)), wait_s)
        taken += portion
        if not portion:
            break
    return taken


async def _pull(connection: Connection, stream: str, consumer: str, batch: int, wait_s: float) -> list[Taken]:
    inbox = connection.client.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await connection.client.subscribe(inbox, cb=arrived.put)
    taken: list[Taken] = []
    request = {"batch": batch, "expires": int(wait_s * 1e9)}
    try:
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await connection.client.publish(subject, json.dumps(request).encode(), inbox)
        async with asyncio.timeout(wait_s + _SPARE_S):
            while len(taken) < batch:
                message = await arrived.get()
                if not message.reply.startswith("$JS.ACK."):
                    break  # a status: the time is up, or the consumer is gone
                info = parse_reply(message.reply.encode())
                taken.append(Taken(info.stream_seq, message.subject, info.deliveries, time.time()))
    except TimeoutError:
        pass
    finally:
        with suppress(nats_errors.Error, OSError):
            await subscription.unsubscribe()
    return taken
