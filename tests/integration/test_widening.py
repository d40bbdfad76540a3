"""Workers that go around the cliff without a mirror: one wide filter, and what is not theirs is thrown away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats
from benchmarks.audit import Findings, Handled, audit, read_back
from nats.aio.client import Client
from nats.js.api import StreamConfig
from tests.integration.conftest import eventually
from tests.integration.test_outages import note

import parti
from parti.embedded import Server

SUBJECTS = 1_200
ROUNDS = 20
CLEAN = Findings(unpublished=0, lost=0, repeated=0, out_of_order=0, altered=0)


def app_for(
    stream: str, journal: list[Handled], owned: list[str], may_handle: asyncio.Event | None = None
) -> parti.App:
    app = parti.App(stream=stream, subject=f"{stream}.{{key}}", partitions=owned)

    @app.handler
    async def handle(message: parti.Message) -> None:
        if may_handle:
            await may_handle.wait()
        note(journal, message)

    return app


async def fill(url: str, stream: str, rounds: int) -> None:
    """So many messages on each subject."""
    client = await nats.connect(url)
    try:
        js = client.jetstream()
        await js.add_stream(StreamConfig(name=stream, subjects=[f"{stream}.*"], allow_direct=True))
        for _ in range(rounds):
            for n in range(SUBJECTS):
                await client.publish(f"{stream}.k{n}", b"x" * 64)
            await js.publish(f"{stream}.last", b"")  # the server has taken in what came before
    finally:
        await client.close()


async def has_filters(client: Client, stream: str, count: int) -> bool:
    info = await client.jetstream().consumer_info(stream, "parti-worker-0")
    return len(info.config.filter_subjects or [info.config.filter_subject]) == count


async def test_a_worker_that_lags_reads_everything_until_it_has_caught_up(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    """A third of 1,200 subjects: to have them searched costs several times what it takes to pass the others over."""
    server = nats_server_factory()
    await fill(server.url, stream_name, ROUNDS)
    owned, journal = [f"k{n}" for n in range(0, SUBJECTS, 3)], list[Handled]()
    settings: dict[str, Any] = {"fleet": False, "hot_mirror": "off", "max_ack_pending": 200}
    may_handle = asyncio.Event()  # a quick machine would have caught up before the lag has lasted long enough

    async with app_for(stream_name, journal, owned, may_handle).running(nats=server.url, **settings) as worker:
        wide = worker.metrics.wide_filter
        await eventually(lambda: wide.value == 1, 20)
        may_handle.set()
        await eventually(lambda: len(journal) == len(owned) * ROUNDS, 40)
        await eventually(lambda: wide.value == 0, 20)

        client = await nats.connect(server.url)
        await eventually(lambda: has_filters(client, stream_name, len(owned)))
        for n in range(SUBJECTS):
            await client.publish(f"{stream_name}.k{n}", b"y")
        await client.flush()
        await eventually(lambda: len(journal) == len(owned) * (ROUNDS + 1), 20)
        await client.close()
    mine = {f"{stream_name}.{key}" for key in owned}
    stored = [message for message in await read_back(server.url, stream_name) if message.subject in mine]
    assert audit(stored, journal, ()) == CLEAN


async def test_whoever_has_all_subjects_has_one_filter_for_them(
    nats_server_factory: Callable[..., Server], stream_name: str
) -> None:
    """Two workers share them; when one has left, the other needs no list any more."""
    server = nats_server_factory()
    await fill(server.url, stream_name, 3)
    owned = [*(f"k{n}" for n in range(SUBJECTS)), "last"]
    first, second = list[Handled](), list[Handled]()
    settings: dict[str, Any] = {"max_subjects": 2_000, "scale_window_s": 0.3, "nats": server.url}
    async with app_for(stream_name, first, owned).running(**settings) as staying:
        async with app_for(stream_name, second, owned).running(**settings) as leaving:
            await eventually(lambda: len(staying.partitions) + len(leaving.partitions) == len(owned))
            await eventually(lambda: abs(len(staying.partitions) - len(leaving.partitions)) <= 1, 20)
            await eventually(lambda: not staying.metrics.wide_filter.value)
        await eventually(lambda: len(staying.partitions) == len(owned), 20)
        await eventually(lambda: staying.metrics.wide_filter.value == 1, 20)
        client = await nats.connect(server.url)
        await eventually(lambda: has_filters(client, stream_name, 1))
        for n in range(SUBJECTS):
            await client.publish(f"{stream_name}.k{n}", b"y")
        await client.flush()
        await client.close()
        total = SUBJECTS * 4 + 3
        await eventually(lambda: len(first) + len(second) >= total, 20)
    journal = sorted([*first, *second], key=lambda entry: entry.at_s)
    assert audit(await read_back(server.url, stream_name), journal, ()) == CLEAN
