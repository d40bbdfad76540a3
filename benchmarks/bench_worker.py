"""How fast a worker reads, against what nats-py and the server can give, in one run on one server.

    python -m benchmarks.bench_worker --messages 200000 --rounds 3

Every contender drains the same stream (256 B messages over 2000 subjects, file storage) through a fresh durable
pull consumer with the same configuration, one filter for all subjects, explicit acknowledgement of each message:

    a   nats-py: fetch() and ack() in a loop
    b   bare pulls and acknowledgements without any logic, on parti's protocol reader: the ceiling
    b0  the same on nats-py's own subscription callback, for comparison
    c   parti, ordered lanes, async handler
    d   parti, ordered lanes, plain function

Rounds are interleaved and the median counts, since the machine is never quiet. Ratios are the result; absolute
rates belong to the machine. Exit code 1 when c < 2.5 a or c < 0.6 b.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import nats
from benchmarks.report import write_result
from nats.aio.client import Client
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

import parti
from parti.embedded import Server
from parti.jetstream.wire import Wire, pub
from parti.telemetry.logs import configure_logging

STREAM, TEMPLATE, PATTERN = "BENCH", "bench.{key}", "bench.*"
PAYLOAD = b"x" * 256
SLOTS = 2


@dataclass(frozen=True)
class Bench:
    """What all contenders share."""

    url: str
    messages: int
    max_ack_pending: int
    batch: int

    def pull_body(self) -> bytes:
        """One pull request, as parti sends it."""
        return json.dumps({"batch": self.batch, "expires": 30_000_000_000, "idle_heartbeat": 5_000_000_000}).encode()


async def fill(client: Client, messages: int, subjects: int) -> None:
    """Publish the messages; a stream confirms by its count, not message by message."""
    await client.jetstream().add_stream(name=STREAM, subjects=[PATTERN], storage="file")
    for start in range(0, messages, 1000):
        for i in range(start, min(start + 1000, messages)):
            await client.publish(f"bench.{i % subjects}", PAYLOAD)
        await client.flush(timeout=30)
    while (await client.jetstream().stream_info(STREAM)).state.messages < messages:  # noqa: ASYNC110 - a server's count
        await asyncio.sleep(0.05)


async def make_consumer(client: Client, bench: Bench, name: str) -> None:
    """The consumer that parti makes, made by hand."""
    config = {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "filter_subjects": [PATTERN],
        "ack_wait": 30_000_000_000,
        "max_ack_pending": bench.max_ack_pending,
        "max_waiting": 256,
    }
    body = json.dumps({"stream_name": STREAM, "config": config, "action": "create"}).encode()
    reply = await client.request(f"$JS.API.CONSUMER.CREATE.{STREAM}.{name}", body, timeout=10)
    assert b'"error"' not in reply.data, reply.data


async def contender_a(bench: Bench, name: str) -> float:
    """nats-py's fetch and ack; a quarter of the messages is enough."""
    client = await nats.connect(bench.url)
    await make_consumer(client, bench, name)
    subscription = await client.jetstream().pull_subscribe_bind(name, STREAM)
    wanted, got = bench.messages // 4, 0
    started = time.perf_counter()
    while got < wanted:
        for message in await subscription.fetch(bench.batch):
            await message.ack()
            got += 1
    rate = got / (time.perf_counter() - started)
    await client.close()
    return rate


async def contender_b(bench: Bench, name: str) -> float:
    """Bare pulls on parti's protocol reader: parse, acknowledge, pull again."""
    client = await nats.connect(bench.url)
    await make_consumer(client, bench, name)
    wire, done = Wire(client), asyncio.Event()
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}".encode()
    body, got, out = bench.pull_body(), 0, list[bytes]()

    def slot() -> None:
        inbox, left = wire.new_inbox(), bench.batch

        def sink(_subject: bytes, reply: bytes, _header: bytes | None, _payload: bytes) -> None:
            nonlocal got, left
            if not reply:
                return
            out.append(b"PUB %b 4\r\n+ACK\r\n" % reply)
            got += 1
            left -= 1
            if not left:
                left = bench.batch
                out.append(pub(subject, body, inbox.encode()))
            if got == bench.messages:
                done.set()

        wire.subscribe(inbox, sink)
        wire.write(pub(subject, body, inbox.encode()))

    def flush() -> None:
        wire.write(b"".join(out))
        out.clear()

    wire.on_chunk(flush)
    started = time.perf_counter()
    for _ in range(SLOTS):
        slot()
    await done.wait()
    rate = got / (time.perf_counter() - started)
    await client.close()
    return rate


async def contender_b0(bench: Bench, name: str) -> float:
    """Bare pulls on nats-py's subscription callback."""
    client = await nats.connect(bench.url)
    await make_consumer(client, bench, name)
    done, got = asyncio.Event(), 0
    subject, body = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}", bench.pull_body()

    async def slot() -> None:
        inbox, left = client.new_inbox(), bench.batch

        async def on_message(message: Msg) -> None:
            nonlocal got, left
            if not message.reply:
                return
            await client.publish(message.reply, b"+ACK")
            got += 1
            left -= 1
            if not left:
                left = bench.batch
                await client.publish(subject, body, reply=inbox)
            if got == bench.messages:
                done.set()

        await client.subscribe(inbox, cb=on_message)
        await client.publish(subject, body, reply=inbox)

    started = time.perf_counter()
    for _ in range(SLOTS):
        await slot()
    await done.wait()
    rate = got / (time.perf_counter() - started)
    await client.close()
    return rate


async def run_parti(bench: Bench, name: str, *, plain: bool) -> float:
    """parti as users run it: settings by default, but for names and the common MaxAckPending."""
    app = parti.App(
        stream=STREAM, subject=TEMPLATE, nats=bench.url, max_ack_pending=bench.max_ack_pending, fleet=False
    )
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    started, got, first = 0.0, 0, 0.0

    def count() -> None:
        nonlocal got, first
        if not got:
            first = time.perf_counter()
        got += 1
        if got == bench.messages:
            loop.call_soon_threadsafe(done.set)

    async def on_message(_message: parti.Message) -> None:
        count()

    def on_message_plain(_message: parti.Message) -> None:
        with lock:
            count()

    lock = threading.Lock()
    app.handler(on_message_plain if plain else on_message)
    async with app.running(worker_id=name):
        started = first or time.perf_counter()
        await done.wait()
        return got / (time.perf_counter() - min(started, first))


async def contender_c(bench: Bench, name: str) -> float:
    """parti with an async handler."""
    return await run_parti(bench, name, plain=False)


async def contender_d(bench: Bench, name: str) -> float:
    """parti with a plain function."""
    return await run_parti(bench, name, plain=True)


CONTENDERS: dict[str, tuple[str, Callable[[Bench, str], Awaitable[float]]]] = {
    "a": ("nats-py fetch + ack", contender_a),
    "b": ("bare pulls + ack, parti's reader (ceiling)", contender_b),
    "b0": ("bare pulls + ack, nats-py callback", contender_b0),
    "c": ("parti, ordered, async handler", contender_c),
    "d": ("parti, ordered, plain function", contender_d),
}


async def run(args: argparse.Namespace) -> dict[str, list[float]]:
    """Interleave the rounds of all contenders on one server."""
    rates: dict[str, list[float]] = {key: [] for key in CONTENDERS}
    console = Console(stderr=True)
    async with Server() as server:
        client = await nats.connect(server.url)
        with console.status(f"publishing {args.messages:,} messages"):
            await fill(client, args.messages, args.subjects)
        bench = Bench(server.url, args.messages, args.max_ack_pending, args.max_ack_pending * 2 // 5)
        for number in range(args.rounds):
            for key, (label, contender) in CONTENDERS.items():
                with console.status(f"round {number + 1} of {args.rounds}: {label}"):
                    name = f"bench-{key}-{number}"
                    rates[key].append(await contender(bench, name))
        await client.close()
    return rates


def show(rates: dict[str, list[float]], args: argparse.Namespace) -> dict[str, float]:
    """Print the table and return the ratios that matter."""
    medians = {key: statistics.median(values) for key, values in rates.items()}
    table = Table(
        title=f"{args.messages:,} messages of 256 B over {args.subjects:,} subjects, file storage, "
        f"MaxAckPending {args.max_ack_pending}, median of {args.rounds}"
    )
    for column in ("", "contender", "msg/s", "x a", "x b", "rounds"):
        table.add_column(column, justify="left" if column in {"", "contender"} else "right")
    for key, (label, _) in CONTENDERS.items():
        table.add_row(
            key,
            label,
            f"{medians[key]:,.0f}",
            f"{medians[key] / medians['a']:.2f}",
            f"{medians[key] / medians['b']:.2f}",
            " ".join(f"{rate / 1000:.0f}k" for rate in rates[key]),
        )
    Console().print(table)
    return {
        "c/a": medians["c"] / medians["a"],
        "c/b": medians["c"] / medians["b"],
        "d/a": medians["d"] / medians["a"],
    }


def main() -> int:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--subjects", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-ack-pending", type=int, default=2_000)
    parser.add_argument("--result", default="bench_worker", help="name of the JSON file, without ending")
    args = parser.parse_args()
    configure_logging("warning")
    rates = asyncio.run(run(args))
    ratios = show(rates, args)
    path = write_result(args.result, {"settings": vars(args), "msg_per_s": rates, "ratios": ratios})
    good = ratios["c/a"] >= 2.5 and ratios["c/b"] >= 0.6
    print(
        f"c/a {ratios['c/a']:.2f} (wanted 2.5), c/b {ratios['c/b']:.2f} (wanted 0.6): {'ok' if good else 'NOT MET'}"
    )
    print(f"written to {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
