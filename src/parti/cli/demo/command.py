"""Runs the demo and draws its screen."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from parti.cli.demo import app as demo_app
from parti.cli.demo.check import NOTE_BYTES, Findings, Note, compare, percentiles, read_notes
from parti.cli.demo.traffic import Outgoing, Publisher, make_messages, read_back
from parti.config import Settings
from parti.core.consumer_config import consumer_name
from parti.embedded import Server, child
from parti.errors import ConfigError, NotFound, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.wire import Wire
from parti.telemetry.logs import configure_logging

MOST_MESSAGES = 1_000_000
MOST_PARTITIONS = 100_000
STEADY_RATE = 4_000
MOST_STEADY = 10_000
LEAST_BURST = 1_000
"""Fewer messages say nothing of the throughput."""
_POLL_S = 0.02
_DRAW_S = 0.1
_START_S = 20.0
_STALL_S = 15.0
_LEAVE_S = 15.0
_INTERRUPTED = 130


def demo(
    messages: Annotated[int, typer.Option(help=f"How many to send, 2 to {MOST_MESSAGES:,}.")] = 20_000,
    partitions: Annotated[int, typer.Option(help=f"Over how many partitions, 1 to {MOST_PARTITIONS:,}.")] = 200,
) -> None:
    """Show parti at work: a NATS server, a worker process, messages, and a check that none went wrong.

    Takes about five seconds and leaves nothing behind. Exit codes: 0 every message was handled once and in order,
    1 it was not, or something broke, 2 the demo could not start, 130 interrupted.
    """
    if not 2 <= messages <= MOST_MESSAGES:
        raise ConfigError(f"--messages is {messages}: expected 2 to {MOST_MESSAGES}")
    if not 1 <= partitions <= MOST_PARTITIONS:
        raise ConfigError(f"--partitions is {partitions}: expected 1 to {MOST_PARTITIONS}")
    configure_logging("warning")
    screen = Screen(Console(highlight=False))
    try:
        outcome = asyncio.run(_run(messages, min(partitions, messages), screen))
    except asyncio.CancelledError:
        screen.say("interrupted: server and worker are stopped, nothing is left behind")
        raise typer.Exit(_INTERRUPTED) from None
    screen.summarise(outcome)
    if not outcome.findings.flawless:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the summary shows."""

    findings: Findings
    duration_s: float
    burst: int
    burst_s: float
    latency_s: Mapping[int, float]
    complaint: str
    """The worker's last warning or error, if it had any."""


class Screen:
    """The demo's output: live bars on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, soft_wrap=True)

    @contextmanager
    def bars(self) -> Iterator[Progress | None]:
        """Show progress while the block runs; None when this is not a terminal."""
        if not self._console.is_terminal:
            yield None
            return
        bar = BarColumn(40, complete_style="cyan", finished_style="green")
        columns = TextColumn("{task.description:<9}"), bar, TextColumn("{task.completed:>9,.0f}")
        with Progress(*columns, console=self._console) as progress:
            yield progress

    def summarise(self, outcome: Outcome) -> None:
        """Print the table and what it means."""
        found = outcome.findings
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column(style="dim")
        table.add_row("published", f"{found.published:,}", "acknowledged by the server")
        table.add_row("handled", f"{found.handled:,}", "handler's notes against the stream read back")
        for name, count, note in (
            ("lost", found.lost, "in the stream, but never handled"),
            ("repeated", found.repeated, "handled once more"),
            ("out of order", found.out_of_order, "handled after a newer one of its partition"),
        ):
            table.add_row(name, f"[bold {'red' if count else 'green'}]{count:,}[/]", note)
        table.add_row("partitions", f"{found.partitions:,}", "subjects, each with its own order")
        table.add_row("duration", f"{outcome.duration_s:.1f} s", "first publish to last handler call")
        if outcome.burst >= LEAST_BURST and outcome.burst_s > 0:
            rate = f"{outcome.burst / outcome.burst_s:,.0f} msg/s"
            table.add_row("throughput", rate, f"last {outcome.burst:,}; publishing and handling together")
        for percent, seconds in outcome.latency_s.items():
            note = f"stored to handler called, at {STEADY_RATE:,} msg/s" if percent == 50 else ""
            table.add_row(f"latency p{percent}", f"{seconds * 1000:.1f} ms", note)
        if self._console.is_terminal:
            self._console.print()  # after the bars
        self._console.print(table)
        self._console.print()
        self._close(found, outcome.complaint)

    def _close(self, found: Findings, complaint: str) -> None:
        if not found.flawless:
            self.say(
                f"[red]Something is wrong:[/] {found.lost:,} lost, {found.repeated:,} repeated, "
                f"{found.out_of_order:,} out of order. Please report it with this output."
            )
            if complaint:
                self._console.print(f"The worker's last complaint: {complaint}", markup=False, soft_wrap=True)
            return
        self.say(
            f"Each of {found.handled:,} messages reached the handler exactly once, in order within its partition,\n"
            f"through one worker process with one durable consumer."
        )
        self.say(f"Try next: {_parti()} dev demo --messages 200000 --partitions 2000, or the example in README.md.")


def _parti() -> str:
    """How this command can be called again from here."""
    return "parti" if shutil.which("parti") else os.path.relpath(sys.argv[0])


async def _run(messages: int, partitions: int, screen: Screen) -> Outcome:
    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM):
        # Once only: a second Ctrl-C must not interrupt the tidying up, which is bounded.
        asyncio.get_running_loop().add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    with tempfile.TemporaryDirectory(prefix="parti-demo-") as directory:
        async with Server() as server, _connected(server.url) as connection:
            screen.say(f"server   nats-server {server.version} with JetStream at {server.url}")
            try:
                return await _show(connection, Path(directory), server.url, messages, partitions, screen)
            except PartiError as error:
                typer.echo(f"parti: {error}", err=True)
                raise typer.Exit(1) from None


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    # Constructed without the usual sources: the user's own settings are for another server.
    connection = await Connection.open(Settings.model_construct(nats=(url,)), name="parti-demo")
    try:
        yield connection
    finally:
        await connection.close()


async def _show(
    connection: Connection, directory: Path, url: str, messages: int, partitions: int, screen: Screen
) -> Outcome:
    api, wire = JetStreamApi(connection), Wire(connection.client)
    template = demo_app.app.template
    await api.ensure_stream({"name": demo_app.STREAM, "subjects": [template.pattern], "allow_direct": True})
    outgoing = make_messages(messages, partitions, template)
    worker = WorkerProcess(directory, url)
    try:
        await worker.ready(api)
        screen.say(f"worker   process {worker.pid}, one consumer for {partitions:,} partitions of {template.text}")
        steady = _steady(messages)
        screen.say(f"traffic  {steady:,} messages at {STEADY_RATE:,} msg/s, then {messages - steady:,} at once\n")
        publisher = Publisher(wire)
        with screen.bars() as progress:
            drawing = asyncio.create_task(_draw(progress, publisher, worker, messages))
            try:
                started_s, burst_s = await _send(publisher, outgoing)
                await worker.handled_all(messages)
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
        await worker.leave()
        notes = worker.notes()
        findings = compare(publisher.acknowledged, await read_back(wire, demo_app.STREAM), notes)
        return _measure(findings, notes, worker.complaint(), started_s, burst_s)
    finally:
        await worker.end()


async def _send(publisher: Publisher, outgoing: list[Outgoing]) -> tuple[float, float]:
    """Send one part at a steady rate, to see the latency, and the rest at once; returns when each began."""
    steady = _steady(len(outgoing))
    started_s = time.time()
    await publisher.publish(outgoing[:steady], rate=STEADY_RATE)
    burst_s = time.time()
    await publisher.publish(outgoing[steady:])
    return started_s, burst_s


def _steady(messages: int) -> int:
    return min(messages // 2, MOST_STEADY)


def _measure(findings: Findings, notes: list[Note], complaint: str, started_s: float, burst_s: float) -> Outcome:
    steady = _steady(findings.published)
    end_s = max((note.handled_s for note in notes), default=started_s)
    latencies = [note.handled_s - note.stored_s for note in notes if note.seq <= steady]
    return Outcome(
        findings=findings,
        duration_s=end_s - started_s,
        burst=findings.published - steady,
        burst_s=end_s - burst_s,
        latency_s=percentiles(latencies, (50, 99)),
        complaint=complaint,
    )


async def _draw(progress: Progress | None, publisher: Publisher, worker: WorkerProcess, messages: int) -> None:
    if progress is None:
        return
    sent = progress.add_task("published", total=messages)
    done = progress.add_task("handled", total=messages)
    try:
        while True:
            await asyncio.sleep(_DRAW_S)
            progress.update(sent, completed=publisher.acknowledged)
            progress.update(done, completed=worker.handled)
    finally:
        progress.update(sent, completed=publisher.acknowledged)
        progress.update(done, completed=min(worker.handled, messages))


class WorkerProcess:
    """The `parti worker` process of the demo and the notes that its handler takes."""

    def __init__(self, directory: Path, url: str) -> None:
        self._notes = directory / demo_app.NOTES
        self._log = directory / "worker.log"
        command = [sys.executable, "-P", "-m", demo_app.__name__, str(directory), url]
        self._process: subprocess.Popen[bytes] = child.spawn(command, self._log)
        self.pid = self._process.pid

    @property
    def handled(self) -> int:
        """Handler calls so far."""
        return self._notes.stat().st_size // NOTE_BYTES if self._notes.exists() else 0

    def notes(self) -> list[Note]:
        """All notes, in the order of the handler calls."""
        return read_notes(self._notes.read_bytes()) if self._notes.exists() else []

    async def ready(self, api: JetStreamApi) -> None:
        """Return when the worker waits for messages; raises `PartiError` when it does not come to that."""
        name = consumer_name(Settings.model_fields["prefix"].default, demo_app.WORKER_ID)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._check_alive()
            try:
                if (await api.call(f"CONSUMER.INFO.{demo_app.STREAM}.{name}"))["num_waiting"]:
                    return
            except NotFound:
                pass
            await asyncio.sleep(_POLL_S)
        raise PartiError(f"the worker did not begin to read within {_START_S:g} s: {self._last_words()}")

    async def handled_all(self, messages: int) -> None:
        """Return when as many messages are handled, or when there was no progress for a while."""
        before, changed_s = -1, time.monotonic()
        while (handled := self.handled) < messages:
            self._check_alive()
            if handled != before:
                before, changed_s = handled, time.monotonic()
            elif time.monotonic() - changed_s > _STALL_S:
                return
            await asyncio.sleep(_POLL_S)

    async def leave(self) -> None:
        """Ask the worker to drain and wait until it is gone."""
        await asyncio.to_thread(child.end, self._process, _LEAVE_S)
        if self._process.returncode:
            raise PartiError(f"the worker left with code {self._process.returncode}: {self._last_words()}")

    async def end(self) -> None:
        """End the worker at once if it still runs."""
        await asyncio.to_thread(child.end, self._process, 0)

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise PartiError(f"the worker ended by itself, code {self._process.returncode}: {self._last_words()}")

    def complaint(self) -> str:
        """The last warning or error that the worker logged, or nothing."""
        return next((line for line in reversed(self._lines()) if '"info"' not in line), "")

    def _last_words(self) -> str:
        return next(reversed(self._lines()), "it said nothing")

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
