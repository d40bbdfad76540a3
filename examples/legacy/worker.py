"""A worker of the older kind: a durable pull consumer for each of its partitions, read with plain nats-py.

    python -m examples.legacy.worker --stream ORDERS --subject 'orders.eu.{}' --consumer 'orders-{}' ada bob cy

Each partition is read by one task, a message at a time, so that its order is kept. SIGTERM lets requests that stand
at the server end, and what is in hand be finished and acknowledged. A consumer that is paused, deleted or made anew
does not end it: those that are gone are looked for, with one question for all of them. So it can stay up during a
migration, and take its partitions back (docs/migration.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

Handler = Callable[[str, Msg], Awaitable[None]]


class LegacyWorker:
    """Reads partitions, each through a consumer of its own, until it is told to stop."""

    def __init__(
        self,
        client: Client,
        stream: str,
        subject: str,
        consumer: str,
        handler: Handler,
        *,
        batch: int = 5,
        wait_s: float = 5.0,
        look_s: float = 1.0,
    ) -> None:
        """`subject` and `consumer` have `{}` where the partition goes."""
        self._client = client
        self._stream = stream
        self._subject = subject
        self._consumer = consumer
        self._handler = handler
        self._batch = batch
        self._wait_s = wait_s
        self._look_s = look_s
        self._stopping = asyncio.Event()
        self._missing: dict[str, asyncio.Event] = {}

    def stop(self) -> None:
        """Ask for nothing more; what is in hand is finished."""
        self._stopping.set()

    async def create(self, partition: str, *, ack_wait_s: float = 30.0) -> None:
        """Make the consumer of a partition, unless it is there."""
        stream, name = self._client.jetstream(), self._consumer.format(partition)
        with suppress(NotFoundError):
            await stream.consumer_info(self._stream, name)
            return
        config = ConsumerConfig(
            durable_name=name,
            filter_subject=self._subject.format(partition),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=100,
        )
        await stream.add_consumer(self._stream, config)

    async def run(self, partitions: list[str]) -> None:
        """Read these until stopped."""
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.gather(*(self._read(partition) for partition in partitions))
        finally:
            looking.cancel()

    async def _read(self, partition: str) -> None:
        name = self._consumer.format(partition)
        subscription = await self._client.jetstream().pull_subscribe_bind(name, self._stream)
        try:
            while not self._stopping.is_set():
                # Not cut short by a stop: the server would deliver to a request that nobody waits for any more.
                try:
                    messages = await subscription.fetch(self._batch, timeout=self._wait_s)
                except TimeoutError:
                    continue
                except NatsError:
                    # The consumer is gone for now, or the connection is. Thousands that ask often would be a load.
                    await self._missing.setdefault(name, asyncio.Event()).wait()
                    continue
                for message in messages:
                    await self._handler(partition, message)
                    await message.ack()
        finally:
            with suppress(NatsError):
                await subscription.unsubscribe()

    async def _look(self) -> None:
        """Look which of the missing consumers are there again."""
        while True:
            await asyncio.sleep(self._look_s)
            stopping = self._stopping.is_set()
            there: set[str] = set()
            if self._missing and not stopping:
                with suppress(NatsError):
                    there = await self._names()
            for name in [name for name in self._missing if stopping or name in there]:
                self._missing.pop(name).set()

    async def _names(self) -> set[str]:
        """The names of all consumers of the stream."""
        names: list[str] = []
        while True:
            body = json.dumps({"offset": len(names)}).encode()
            answer = await self._client.request(f"$JS.API.CONSUMER.NAMES.{self._stream}", body, timeout=10.0)
            page = json.loads(answer.data)
            names += page.get("consumers") or []
            if not page.get("consumers") or len(names) >= page["total"]:
                return set(names)


class Notebook:
    """Notes start and end of each message in a file, a line each, as the checkers of this project read them."""

    def __init__(self, path: Path, takes_s: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._takes_s = takes_s

    async def handle(self, partition: str, message: Msg) -> None:
        """Take a while."""
        seq = message.metadata.sequence.stream
        self._note("S", partition, seq)
        await asyncio.sleep(self._takes_s * random.random())
        self._note("E", partition, seq)

    def _note(self, what: str, partition: str, seq: int) -> None:
        os.write(self._file, f"{what} {time.time_ns()} {partition} {seq} 0 old {os.getpid()}\n".encode())


async def _print(partition: str, message: Msg) -> None:
    print(partition, message.metadata.sequence.stream, message.data[:60], flush=True)


async def main(options: argparse.Namespace) -> None:
    """Run one worker."""
    handler: Handler = Notebook(options.notes, options.takes_ms / 1000).handle if options.notes else _print
    client = await nats.connect(options.nats, max_reconnect_attempts=-1)
    worker = LegacyWorker(
        client, options.stream, options.subject, options.consumer, handler, batch=options.batch, wait_s=options.wait
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    for partition in options.partitions:
        await worker.create(partition)
    print(f"reading {len(options.partitions)} partitions", flush=True)
    await worker.run(options.partitions)
    await client.drain()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("partitions", nargs="+")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--stream", default="ORDERS")
    parser.add_argument("--subject", default="orders.eu.{}")
    parser.add_argument("--consumer", default="orders-{}")
    parser.add_argument("--batch", type=int, default=5, help="messages asked for at a time")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds that one request waits for messages")
    parser.add_argument("--notes", type=Path, help="file that starts and ends are noted in, instead of printed")
    parser.add_argument("--takes-ms", type=float, default=4.0, help="most that a message takes, with --notes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asyncio.run(main(parse()))
