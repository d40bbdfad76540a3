"""`parti bench`: a short self-measurement. How fast are messages published and handled here, against nats-py?"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from parti.app.process import run_on_loop
from parti.app.worker import Job, Worker
from parti.cli.control import open_console, open_server, print_json
from parti.cli.options import JsonOption
from parti.cli.progress import progress_bar
from parti.config import Settings, load_settings
from parti.embedded import Server
from parti.errors import NotFound, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.baseline import fetch_rate
from parti.jetstream.connection import Connection
from parti.model.letter_mark import marks_stream
from parti.model.message import Message
from parti.model.partition import Template
from parti.model.safe_text import strip_userinfo
from parti.strategies import strategy_named

_MAX_ACK_PENDING = 2000
_CHUNK = 1000
_POLL_S = 0.02
_STORED_S = 60.0
_FETCHED = 4
"""nats-py reads one in so many messages: its rate shows soon, and it takes long."""


def bench(
    messages: Annotated[int, typer.Option(metavar="N", min=1000, help="Messages to publish and handle.")] = 100_000,
    subjects: Annotated[int, typer.Option(metavar="N", min=1, help="Partitions that they are spread over.")] = 200,
    size: Annotated[int, typer.Option(metavar="BYTES", min=1, max=500_000, help="Size of a message.")] = 256,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=20, help="Rounds; the median counts.")] = 3,
    nats: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this server, instead of one that is started for it.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure how fast messages are published and handled here, and how that compares with nats-py's fetch.

    Takes 15 to 20 s. Everything is done in a stream of its own, which is deleted again. Absolute rates belong to the
    machine; the ratio says more. Exit codes: 0 measured, 2 no server, or it could not be measured.
    """
    settings = load_settings({"nats": nats})
    console = open_console()
    plan = Plan(messages, subjects, size, rounds)

    async def work() -> Rates:
        async with _server(settings, nats) as found:
            return await _measure(found, plan, console, quiet=json)

    rates = run_on_loop(work(), settings.event_loop)
    if json:
        print_json(_json(plan, rates, strip_userinfo(nats) if nats else "embedded"))
    else:
        _print(console, plan, rates)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    messages: int
    subjects: int
    size: int
    rounds: int


@dataclass(slots=True)
class Rates:
    """Messages a second."""

    published: float = 0.0
    fetched: list[float] = field(default_factory=list)
    handled: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """parti against nats-py, by their medians."""
        return statistics.median(self.handled) / statistics.median(self.fetched)


@asynccontextmanager
async def _server(settings: Settings, nats: str | None) -> AsyncIterator[Settings]:
    if nats is not None:
        yield settings
        return
    async with Server() as server:
        # Nothing but the address: credentials of this machine's settings belong to another server.
        yield Settings.model_construct(nats=(server.url,), event_loop=settings.event_loop)


async def _measure(settings: Settings, plan: Plan, console: Console, *, quiet: bool) -> Rates:
    name, rates = f"parti-bench-{uuid.uuid4().hex[:8]}", Rates()
    async with open_server(settings) as (connection, api):
        config = {"name": name, "subjects": [f"{name}.*"], "storage": "file", "allow_direct": True}
        await api.call(f"STREAM.CREATE.{name}", config)
        try:
            with progress_bar(console, "publishing", plan.messages, quiet=quiet) as done:
                rates.published = await _publish(connection, api, name, plan, done)
            with progress_bar(console, "reading", 2 * plan.rounds, quiet=quiet) as done:
                for number in range(plan.rounds):
                    rates.fetched.append(await _fetch(settings, name, plan))
                    done(1)
                    rates.handled.append(await _handle(settings, name, plan, number))
                    done(1)
        finally:
            letters = f"{name}-dlq"
            for stream in (name, f"KV_{name}", letters, marks_stream(letters)):
                with suppress(NotFound):
                    await api.call(f"STREAM.DELETE.{stream}")
    return rates


async def _publish(
    connection: Connection, api: JetStreamApi, name: str, plan: Plan, done: Callable[[int], None]
) -> float:
    """Publish without waiting for each acknowledgement; the stream's own count says when all are stored."""
    payload, began_s = b"x" * plan.size, time.perf_counter()
    for start in range(0, plan.messages, _CHUNK):
        for number in range(start, min(start + _CHUNK, plan.messages)):
            await connection.publish(f"{name}.{number % plan.subjects}", payload)
        await connection.flush()
        done(_CHUNK)
    deadline_s = time.perf_counter() + _STORED_S
    while (stored := (await api.stream_info(name)).messages) < plan.messages:
        if time.perf_counter() > deadline_s:
            raise PartiError(
                f"only {stored:,} of {plan.messages:,} messages were stored; is the account's limit reached?"
            )
        await asyncio.sleep(_POLL_S)
    return plan.messages / (time.perf_counter() - began_s)


async def _fetch(settings: Settings, name: str, plan: Plan) -> float:
    async with open_server(settings) as (connection, api):
        return await fetch_rate(
            connection,
            api,
            name,
            subject=f"{name}.*",
            messages=max(1, plan.messages // _FETCHED),
            max_ack_pending=_MAX_ACK_PENDING,
        )


async def _handle(settings: Settings, name: str, plan: Plan, number: int) -> float:
    """parti as users run it, alone, with a handler that only counts."""
    chosen: dict[str, Any] = {
        "fleet": False,
        "prefix": name,
        "bucket": name,
        "worker_id": f"round-{number}",
        "dead_letter_stream": f"{name}-dlq",
        "dead_letter_subject": f"{name}-dlq",
        "max_ack_pending": _MAX_ACK_PENDING,
        "log_level": "error",
        "metrics_port": None,
        "ledger": "off",
    }
    done, got, first_s = asyncio.Event(), 0, 0.0

    async def count(_message: Message) -> None:
        nonlocal got, first_s
        if not got:
            first_s = time.perf_counter()
        got += 1
        if got == plan.messages:
            done.set()

    job = Job(name, Template(f"{name}.{{key}}"), None, count, strategy_named(settings.strategy))
    worker = Worker(settings.model_copy(update=chosen), job)
    await worker.start()
    try:
        await done.wait()
        return plan.messages / (time.perf_counter() - first_s)
    finally:
        await worker.stop()


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _print(console: Console, plan: Plan, rates: Rates) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("msg/s", justify="right", no_wrap=True)
    table.add_column("rounds", no_wrap=True)
    table.add_row("published", f"{rates.published:,.0f}", "")
    for title, found in (("nats-py fetch and ack", rates.fetched), ("parti, handled in order", rates.handled)):
        each = " ".join(f"{rate / 1000:.0f}k" for rate in found)
        table.add_row(title, f"{statistics.median(found):,.0f}", each)
    console.print(table)
    console.print()
    console.print(
        f"parti handles {rates.ratio:.1f} times as many messages a second as a loop of nats-py's fetch and ack "
        f"({plan.messages:,} messages of {plan.size} bytes, {plan.subjects:,} partitions, file storage, one core).",
        soft_wrap=True,
    )


def _json(plan: Plan, rates: Rates, server: str) -> dict[str, Any]:
    return {
        "server": server,
        "messages": plan.messages,
        "subjects": plan.subjects,
        "size": plan.size,
        "rounds": plan.rounds,
        "published_per_s": round(rates.published),
        "fetched_per_s": [round(rate) for rate in rates.fetched],
        "handled_per_s": [round(rate) for rate in rates.handled],
        "ratio": round(rates.ratio, 2),
    }
