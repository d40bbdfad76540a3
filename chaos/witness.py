"""Sees what a consumer's readers acknowledge, from outside: whoever acknowledges publishes, and anybody may listen.

A message is finished when it is handled *and* acknowledged. The handlers' notes tell the first half. This tells the
second: an acknowledgement that was seen here has left its process and has reached the server, whatever becomes of the
process then.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from parti.config import Settings
from parti.jetstream.connection import Connection
from parti.model.headers import parse_reply


class Witness:
    """When each message was acknowledged first, by its stream sequence, in nanoseconds of the wall clock."""

    def __init__(self) -> None:
        self.at_ns: dict[int, int] = {}

    async def see(self, message: Msg) -> None:
        """Take in what was published on the subject of an acknowledgement."""
        if message.data == b"+ACK":
            self.at_ns.setdefault(parse_reply(message.subject.encode()).stream_seq, time.time_ns())

    def before(self, seq: int, at_ns: int) -> bool:
        """Whether a message was acknowledged before a moment."""
        return self.at_ns.get(seq, at_ns) < at_ns


@asynccontextmanager
async def witnessing(url: str, stream: str, consumer: str) -> AsyncIterator[Witness]:
    """Listen to the acknowledgements of one consumer."""
    witness = Witness()
    connection = await Connection.open(Settings(nats=(url,)), name="witness")
    try:
        await connection.client.subscribe(f"$JS.ACK.{stream}.{consumer}.>", cb=witness.see)
        await connection.flush(5.0)
        yield witness
    finally:
        await connection.close()
