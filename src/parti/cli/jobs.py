"""`parti jobs`: run a job worker, look at jobs, cancel one, send a failed one again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parti.app.process import run_worker
from parti.app.signals import run_interruptibly
from parti.app.supervisor import die_with_parent
from parti.cli.control import count, open_console, print_json, shown, span, timestamp
from parti.cli.options import (
    JsonOption,
    LogFormatOption,
    LogLevelOption,
    MetricsPortOption,
    NatsOption,
    NoWaitOption,
    TimeoutOption,
)
from parti.cli.worker import load_named
from parti.config import Settings, load_settings
from parti.errors import ConfigError, NotFound
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Entry
from parti.jobs.app import JobApp
from parti.jobs.desk import JobDesk, Line, Picture, Queue
from parti.model.job import BUCKET_SUFFIX, JobState, job_id
from parti.model.safe_text import escape_line, strip_userinfo
from parti.telemetry.logs import configure_logging

app = typer.Typer(help="Run heavy jobs under a weighted scheduler, and look at them.", no_args_is_help=True)

PrefixOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Prefix of the deployment whose jobs these are; else the setting prefix (parti)."
    ),
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A job, as 'parti jobs ls' calls it.")]
_CONNECT_S = 3.0
_SHOWN = frozenset({JobState.RUNNING, JobState.WAITING, JobState.FAILED})
_STYLES = {
    JobState.RUNNING: "green",
    JobState.WAITING: "yellow",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "dim",
    JobState.DONE: "dim",
}
_BAR = 20
_REDRAW_S = 1.0
_DRAW_S = 0.25
_AROUND = 6
"""Lines of a screen that no job stands on."""


@app.command()
def run(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="Where the app is, for example media.main:jobs.")
    ],
    nats: NatsOption = None,
    worker_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Name of this worker; without it host and process id.")
    ] = None,
    max_capacity: Annotated[int | None, typer.Option(metavar="N", min=1, help="Slots for the work of jobs.")] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Size of the machine: auto, small, medium or large.")
    ] = None,
    metrics_port: MetricsPortOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Run a job worker: start the same command as often as you like, on as many machines.

    SIGTERM or Ctrl-C drains: pulling stops, what has not begun goes back at once, running jobs finish within
    drain_timeout_s. A second one leaves at once. Exit codes: 0 drained, 1 something will be delivered again, 2 the
    worker could not start, 70 it stood still.
    """
    die_with_parent()
    found = load_named(target, JobApp, "parti.jobs.JobApp")
    made = found.worker(
        nats=nats,
        worker_id=worker_id,
        max_capacity=max_capacity,
        profile=profile,
        metrics_port=metrics_port,
        log_level=log_level,
        log_format=log_format,
    )
    if code := run_worker(made):
        raise typer.Exit(code)


@app.command("ls")
def ls_(
    all: Annotated[bool, typer.Option("--all", help="Also those that are done or cancelled.")] = False,
    state: Annotated[
        str | None, typer.Option(metavar="STATE,...", help="Only these: running, waiting, failed, done, cancelled.")
    ] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List the jobs that run, wait or have failed, with their progress.

    Exit codes: 0 listed, 2 no server, or no job worker has ever run here.
    """
    states = _states(state) if state else frozenset(JobState) if all else _SHOWN

    async def look(settings: Settings) -> Picture:
        async with _desk(settings) as desk:
            return await desk.picture(await desk.entries(), states)

    settings = _settings(nats, prefix)
    picture = run_interruptibly(look(settings))
    if json:
        print_json(_as_json(picture))
        return
    console = open_console()
    console.print(draw(picture, _place(settings)))


@app.command()
def top(nats: NatsOption = None, prefix: PrefixOption = None) -> None:
    """Show the jobs with live progress bars until Ctrl-C.

    Exit codes: 0 after Ctrl-C, 2 no terminal, no server, or no job worker has ever run here.
    """
    console = open_console()
    if not console.is_terminal:
        raise ConfigError("'parti jobs top' draws on a terminal, and this is none; use 'parti jobs ls --json'")
    settings = _settings(nats, prefix)
    with suppress(KeyboardInterrupt):
        run_interruptibly(_keep_showing(settings, console))


@app.command()
def cancel(
    wanted: IdArgument,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
    nats: NatsOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Cancel a job: interrupt it if it runs, drop it when its turn comes if it waits.

    A coroutine is interrupted at its next await; a plain function has to look at job.cancelled. Exit codes: 0 ended,
    or asked for (with --no-wait, or while nobody has the job), 1 it had not ended in time, 2 refused.
    """
    settings = _settings(nats, prefix)

    async def work() -> tuple[str, str, bool]:
        async with _desk(settings) as desk:
            durable, seq, entry = await desk.find(wanted, f"{settings.prefix}{BUCKET_SUFFIX}")
            name = job_id(durable, seq)
            record = await desk.cancel(durable, seq, entry)
            if record is None or not record.worker:
                return name, "is dropped when its turn comes", True
            if no_wait:
                return name, f"is to be cancelled by {record.worker}", True
            ended = await desk.wait_final(durable, seq, timeout)
            if ended is None:
                return name, f"has not ended within {timeout:g} s; {record.worker} was asked to cancel it", False
            return name, f"ended: {ended.state.value}", True

    name, said, ended = run_interruptibly(work())
    if json:
        print_json({"id": name, "answer": said, "ok": ended})
    else:
        open_console().print(f"Job {name} {said}.")
    if not ended:
        raise typer.Exit(1)


@app.command()
def retry(wanted: IdArgument, json: JsonOption = False, nats: NatsOption = None, prefix: PrefixOption = None) -> None:
    """Send a failed job again, from its dead letter, as a new job.

    Exit codes: 0 sent, 2 refused: it has not failed, was sent again before, or its dead letter is gone.
    """
    settings = _settings(nats, prefix)

    async def work() -> tuple[str, str]:
        async with _desk(settings) as desk:
            durable, seq, entry = await desk.find(wanted, f"{settings.prefix}{BUCKET_SUFFIX}")
            new = await desk.retry(durable, seq, entry, settings.dead_letter_stream)
            return job_id(durable, seq), job_id(durable, new)

    old, new = run_interruptibly(work())
    if json:
        print_json({"id": old, "retried_as": new})
    else:
        open_console().print(f"Job {old} was sent again, as {new}.")


# ── the question ──────────────────────────────────────────────────────────────────────────────────────────────────


def _settings(nats: str | None, prefix: str | None) -> Settings:
    settings = load_settings({"nats": nats, "prefix": prefix})
    if "connect_timeout_s" not in settings.model_fields_set:
        settings = settings.model_copy(update={"connect_timeout_s": _CONNECT_S})
    return settings


@asynccontextmanager
async def _desk(settings: Settings) -> AsyncIterator[JobDesk]:
    configure_logging("error", settings.log_format)
    connection = await Connection.open(settings, name=f"{settings.prefix}-cli")
    try:
        desk = JobDesk(connection, settings.prefix)
        await desk.check()
        yield desk
    finally:
        await connection.close()


def _states(text: str) -> frozenset[JobState]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in set(JobState):
            raise ConfigError(f"--state {name!r}: expected one of {', '.join(JobState)}")
    return frozenset(JobState(name) for name in names)


def _place(settings: Settings) -> str:
    servers = ",".join(strip_userinfo(url) for url in settings.nats)
    return f"bucket {settings.prefix}{BUCKET_SUFFIX} on {servers}"


# ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(picture: Picture, place: str, room: int | None = None) -> RenderableType:
    """The whole screen; with `room` no more jobs than that."""
    numbers = ", ".join(f"{number:,} {state}" for state, number in picture.counts.items() if number)
    parts: list[RenderableType] = [shown(f"{place}: {numbers or 'no jobs'}", "bold")]
    parts += [shown(_queue_text(queue), "dim") for queue in picture.queues]
    lines = picture.lines if room is None else picture.lines[:room]
    if lines:
        parts += [Text(), _table(lines)]
    if hidden := len(picture.lines) - len(lines):
        parts.append(Text(f"… and {count(hidden, 'more job')} ('parti jobs ls' lists all)", style="dim"))
    return Group(*parts)


def _queue_text(queue: Queue) -> str:
    return (
        f"consumer {queue.durable} of stream {queue.stream}: {queue.pending:,} not yet received, {queue.held:,} of "
        f"at most {queue.limit:,} with workers"
    )


def _table(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("job", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("progress", no_wrap=True, width=_BAR)
    table.add_column("%", justify="right", no_wrap=True)
    for title in ("slots", "try", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("worker", no_wrap=True)
    table.add_column("doing")  # as if it could be wrapped, so that a narrow screen takes from it first
    for line in lines:
        record = line.record
        state = Text(record.state.value, style=_STYLES[record.state])
        if line.silent:
            state = Text("silent", style="bold red")
        table.add_row(
            shown(line.id),
            state,
            ProgressBar(total=100, completed=record.percent, width=_BAR),
            f"{record.percent:.0f}",
            str(record.slots or ""),
            str(record.attempt),
            span(line.seconds) if record.started_s else "",
            shown(record.worker),
            Text(escape_line(_doing(line)), overflow="ellipsis", no_wrap=True),
        )
    return table


def _doing(line: Line) -> str:
    record = line.record
    if record.retried_as:
        return f"sent again as {record.retried_as}: {record.error}"
    if record.next_s and not record.worker and not record.state.final:
        return f"next try in {span(record.next_s - time.time())}: {record.error}"
    return record.error or record.phrase


async def _keep_showing(settings: Settings, console: Console) -> None:
    entries: dict[str, Entry] = {}
    changed = asyncio.Event()
    async with _desk(settings) as desk:
        watch = desk.watch(entries, changed)
        try:
            await watch.start()
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    changed.clear()
                    with suppress(NotFound):
                        picture = await desk.picture(entries, _SHOWN)
                        live.update(draw(picture, _place(settings), max(3, console.height - _AROUND)), refresh=True)
                    await asyncio.sleep(_DRAW_S)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_REDRAW_S - _DRAW_S):
                            await changed.wait()
        finally:
            await watch.stop()


def _as_json(picture: Picture) -> dict[str, Any]:
    return {
        "counts": dict(picture.counts),
        "consumers": [
            {
                "stream": queue.stream,
                "consumer": queue.durable,
                "pending": queue.pending,
                "held": queue.held,
                "limit": queue.limit,
            }
            for queue in picture.queues
        ],
        "jobs": [_job_json(line) for line in picture.lines],
    }


def _job_json(line: Line) -> dict[str, Any]:
    record = line.record
    return {
        "id": line.id,
        "state": record.state.value,
        "silent": line.silent,
        "percent": record.percent,
        "phrase": record.phrase,
        "slots": record.slots,
        "attempt": record.attempt,
        "failures": record.failures,
        "crashes": record.crashes,
        "worker": record.worker or None,
        "stream": record.stream,
        "seq": record.seq,
        "subject": record.subject,
        "received": _moment(record.received_s),
        "started": _moment(record.started_s),
        "seen": _moment(record.seen_s),
        "finished": _moment(record.finished_s),
        "next": _moment(record.next_s),
        "seconds": round(line.seconds, 3),
        "error": record.error or None,
        "dead_letter": record.dead_letter or None,
        "retried_as": record.retried_as or None,
    }


def _moment(seconds: float) -> str | None:
    return timestamp(datetime.fromtimestamp(seconds, UTC)) if seconds else None
