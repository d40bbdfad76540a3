"""Taking what waits for a consumer, without handling or acknowledging it: to see which messages it is given."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats import errors as nats_errors

from parti.errors import ConnectionFailed
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
    pin_id: str = ""
    """The pin under which it came, where the consumer pins a client."""


async def take(
    connection: Connection, stream: str, consumer: str, *, most: int, wait_s: float, group: str = ""
) -> list[Taken]:
    """Up to so many deliveries, asking again until there are that many or nothing comes for `wait_s`.

    `group`: the priority group of the consumer, where it has one.
    """
    taken: list[Taken] = []
    pull = {"expires": int(wait_s * 1e9), **({"group": group} if group else {})}
    while len(taken) < most:
        portion = await _pull(connection, stream, consumer, {**pull, "batch": min(_PULL_MOST, most - len(taken))})
        taken += portion
        if not portion:
            break
        if portion[-1].pin_id:
            pull["id"] = portion[-1].pin_id
    return taken


async def _pull(connection: Connection, stream: str, consumer: str, request: Mapping[str, Any]) -> list[Taken]:
    inbox = connection.client.new_inbox()
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await connection.client.subscribe(inbox, cb=arrived.put)
    taken: list[Taken] = []
    try:
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        await connection.client.publish(subject, json.dumps(request).encode(), inbox)
        async with asyncio.timeout(request["expires"] / 1e9 + _SPARE_S):
            while len(taken) < request["batch"]:
                message = await arrived.get()
                if not message.reply.startswith("$JS.ACK."):
                    break  # a status: the time is up, or the consumer is gone
                info = parse_reply(message.reply.encode())
                pin_id = (message.headers or {}).get("Nats-Pin-Id", "")
                taken.append(Taken(info.stream_seq, message.subject, info.deliveries, time.time(), pin_id))
    except TimeoutError:
        pass
    except (OSError, nats_errors.Error) as error:
        raise ConnectionFailed(f"nothing can be taken from consumer {consumer!r}: {error}; try again") from None
    finally:
        with suppress(nats_errors.Error, OSError):
            await subscription.unsubscribe()
    return taken
