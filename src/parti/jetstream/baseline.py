"""nats-py's own way to read a stream, `fetch` and `ack` in a loop: what parti's rates are compared with."""

from __future__ import annotations

import time

from nats import errors as nats_errors

from parti.errors import RequestTimeout
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

_FETCH_S = 10.0


async def fetch_rate(
    connection: Connection, api: JetStreamApi, stream: str, *, subject: str, messages: int, max_ack_pending: int
) -> float:
    """Messages a second that nats-py reads and acknowledges, through a consumer like that of a worker."""
    name = f"{stream}-fetch-{time.monotonic_ns()}"
    config = {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "filter_subjects": [subject],
        "ack_wait": 30_000_000_000,
        "max_ack_pending": max_ack_pending,
        "max_waiting": 256,
    }
    await api.put_consumer(stream, config, action="create")
    subscription = await connection.client.jetstream().pull_subscribe_bind(name, stream)
    got, began_s = 0, time.perf_counter()
    try:
        while got < messages:
            for message in await subscription.fetch(max_ack_pending * 2 // 5, timeout=_FETCH_S):
                await message.ack()
                got += 1
    except nats_errors.TimeoutError:
        raise RequestTimeout(
            f"nats-py read {got} of {messages} messages and then nothing for {_FETCH_S:g} s"
        ) from None
    finally:
        elapsed_s = time.perf_counter() - began_s
        await subscription.unsubscribe()
        await api.delete_consumer(stream, name)
    return got / elapsed_s
