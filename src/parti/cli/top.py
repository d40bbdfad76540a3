"""`parti top`: the fleet at work, live. Rates, lags, latencies, failures and moves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parti.app.signals import run_interruptibly
from parti.cli.control import (
    count,
    open_console,
    open_control,
    print_json,
    read_settings,
    shown,
    span,
    timestamp,
)
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.orders import look
from parti.config import Settings
from parti.coordination.lags import Lags
from parti.coordination.orders import Situation, watch_situation
from parti.coordination.worker_rows import WorkerRow, worker_rows
from parti.errors import ConfigError
from parti.jetstream.kv import Entry

_MINUTE_S = 60.0
_AROUND = 9
"""Lines of a screen that no worker stands on."""
_FAILING = 5
"""Failing partitions that are named."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="Time between two pictures.")] = 1.0,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Show the fleet at work until q or Ctrl-C: rates, messages in hand, lags, handler times, failures, moves.

    Rate, messages in hand, handler times (p50, p99) and failures are what each worker said with its last heartbeat;
    lag is what its consumers have not delivered yet, as the server counts. Exit codes: 0 left, 2 no server or no
    fleet. --json prints one picture.
    """
    settings = read_settings(nats, bucket)
    console = open_console()
    if json or once:
        picture = run_interruptibly(_look_once(settings))
        if json:
            print_json(_json(settings.bucket, picture))
        else:
            console.print(draw(picture))
        return
    if not console.is_terminal:
        raise ConfigError("'parti top' draws on a terminal, and this is none; use --once or --json")
    with contextlib.suppress(KeyboardInterrupt):
        run_interruptibly(_keep_showing(settings, console, interval))


@dataclass(frozen=True, slots=True)
class Picture:
    """The fleet at one moment."""

    place: str
    at: datetime
    rows: Sequence[WorkerRow]
    lags: Mapping[str, int]
    """Messages that each worker's consumers have not delivered."""
    partitions: int
    unowned: int
    moving: int
    moved: int
    """Partitions that got another owner within the last minute."""
    state: str
    """What the rebalancer says."""
    note: str = ""
    stalls: Sequence[str] = ()
    """Workers that stand still, or have left because they did."""

    @property
    def failing(self) -> dict[str, str]:
        """Partitions whose next message fails, and why."""
        return {p: text for row in self.rows if row.report.health for p, text in row.report.health.failing.items()}

    def total(self, name: str) -> float:
        """The sum of what all workers say."""
        return float(sum(getattr(row.report.health, name) for row in self.rows if row.report.health))


# ── finding out ───────────────────────────────────────────────────────────────────────────────────────────────────


async def _look_once(settings: Settings) -> Picture:
    async with open_control(settings) as control:
        situation = await look(control)
        lags = Lags(control.plane.api)
        await lags.read(situation)
        return take_picture(control.place, situation, lags.by_worker, lags.trouble)


def take_picture(place: str, situation: Situation, lags: Mapping[str, int], note: str = "") -> Picture:
    """Put together what the records and the server say."""
    now, report = datetime.now(UTC), situation.records.report()
    moved = sum(
        claim.cause not in {"", "new", "return"} and (now - claim.claimed_at).total_seconds() < _MINUTE_S
        for claim in situation.records.claims.values()
        if claim.owner
    )
    leader = report.leader
    said = f"{leader.holder}: {leader.state or 'elected'}, {leader.reason}" if leader else "none"
    return Picture(
        place,
        now,
        worker_rows(situation.records, now, situation.orders),
        # A consumer that somebody left behind lags for ever, and nobody waits for it.
        {worker: lag for worker, lag in lags.items() if worker in situation.records.members},
        report.partitions,
        len(report.unowned),
        len(report.moving),
        moved,
        said,
        note or situation.records.trouble,
        report.stalls,
    )


# ── the screen ────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(picture: Picture, room: int | None = None) -> RenderableType:
    """The whole screen; with `room` no more workers than that, the busiest first."""
    head = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row("fleet", shown(f"{picture.place}, {timestamp(picture.at)[:19].replace('T', ' ')} UTC"))
    head.add_row("rebalancer", shown(picture.state, "bold red" if picture.state == "none" else ""))
    head.add_row("messages", _totals(picture))
    unowned = Text(f"{picture.unowned:,} unowned", style="bold red" if picture.unowned else "")
    head.add_row(
        "partitions",
        Text.assemble(
            f"{picture.partitions:,}: {picture.moving:,} moving, ",
            unowned,
            f"; {picture.moved:,} got another owner in the last minute",
        ),
    )
    rows = list(picture.rows)
    if room is not None and len(rows) > room:
        rows.sort(key=lambda row: (not row.problems, -(row.report.health.rate if row.report.health else 0.0)))
        del rows[room:]
    parts: list[RenderableType] = [head, Text(), _table(picture, rows)]
    if hidden := len(picture.rows) - len(rows):
        parts.append(Text(f"… and {count(hidden, 'more worker')} ('parti workers' lists all)", style="dim"))
    for partition, text in list(picture.failing.items())[:_FAILING]:
        parts.append(shown(f"{partition} fails: {text}", "yellow"))
    parts += [shown(stall, "bold red") for stall in picture.stalls]
    if picture.note:
        parts.append(shown(picture.note, "yellow"))
    return Group(*parts)


def _totals(picture: Picture) -> str:
    lag = f"{sum(picture.lags.values()):,} lag" if picture.lags else "lag not known"
    return (
        f"{picture.total('rate'):,.0f} a second, {picture.total('in_hand'):,.0f} in hand, {lag}, "
        f"{picture.total('finished'):,.0f} finished, {picture.total('failures'):,.0f} failures, "
        f"{picture.total('dead_letters'):,.0f} dead letters"
    )


def _table(picture: Picture, rows: Sequence[WorkerRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("worker", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("owns", "msg/s", "in hand", "lag", "p50", "p99", "failures", "dead letters", "heartbeat"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        said, lag = row.report.health, picture.lags.get(row.worker)
        numbers = ["", "", "", "", "", ""]
        if said:
            numbers = [
                f"{said.rate:,.0f}",
                f"{said.in_hand:,}",
                _time(said.p50_ms),
                _time(said.p99_ms),
                f"{said.failures:,}",
                f"{said.dead_letters:,}",
            ]
        numbers.insert(2, "" if lag is None else f"{lag:,}")
        age_s = row.heartbeat_age_s
        table.add_row(
            shown(row.worker),
            shown(row.shown_state, row.style),
            f"{row.report.owned:,}",
            *numbers,
            "" if age_s is None else span(age_s),
        )
    return table


def _time(ms: float) -> str:
    """A handler's time; empty when none ran."""
    if not ms:
        return ""
    return f"{ms:.2g} ms" if ms < 10 else f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:,.0f} s"


async def _keep_showing(settings: Settings, console: Console, interval_s: float) -> None:
    """Draw until a key ends it or it is cancelled; the last picture stays."""
    async with open_control(settings) as control:
        situation = await look(control)  # says what is wrong before the screen is taken over
        picture: Picture | None = None

        def on_reset(created: str) -> None:
            nonlocal situation
            situation = Situation()

        def on_entry(key: str, entry: Entry) -> None:
            situation.take(key, entry)

        watch, lags = watch_situation(control.plane, on_entry, on_reset), Lags(control.plane.api)
        try:
            await watch.start()
            with _leaving_by_key() as left, Live(console=console, screen=True, auto_refresh=False) as live:
                while not left.is_set():
                    await lags.read(situation)
                    note = "" if watch.healthy else f"No news, so this may be old: {watch.last_error}"
                    picture = take_picture(control.place, situation, lags.by_worker, note or lags.trouble)
                    room = max(3, console.height - _AROUND)
                    live.update(Group(draw(picture, room), Text("q or Ctrl-C ends", style="dim")), refresh=True)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await left.wait()
        finally:
            if picture:
                console.print(draw(picture))
            await watch.stop()


@contextlib.contextmanager
def _leaving_by_key() -> Iterator[asyncio.Event]:
    """An event that q sets; the terminal gives single keys meanwhile, and is as it was afterwards."""
    left, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        import termios  # noqa: PLC0415 - not on every platform
        import tty  # noqa: PLC0415
    except ImportError:
        yield left
        return
    if not sys.stdin.isatty():
        yield left
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def on_key() -> None:
        if os.read(fd, 64).lower().startswith((b"q", b"\x1b")):
            left.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, on_key)
    try:
        yield left
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _json(bucket: str, picture: Picture) -> dict[str, Any]:
    return {
        "bucket": bucket,
        "at": timestamp(picture.at),
        "rebalancer": picture.state,
        "note": picture.note,
        "rate": round(picture.total("rate"), 1),
        "in_hand": int(picture.total("in_hand")),
        "lag": sum(picture.lags.values()) if picture.lags else None,
        "finished": int(picture.total("finished")),
        "failures": int(picture.total("failures")),
        "dead_letters": int(picture.total("dead_letters")),
        "partitions": picture.partitions,
        "unowned": picture.unowned,
        "moving": picture.moving,
        "moved_in_a_minute": picture.moved,
        "failing": picture.failing,
        "workers": [_row_json(row, picture.lags.get(row.worker)) for row in picture.rows],
    }


def _row_json(row: WorkerRow, lag: int | None) -> dict[str, Any]:
    said = row.report.health
    return {
        "worker": row.worker,
        "state": row.shown_state,
        "owned": row.report.owned,
        "rate": said.rate if said else None,
        "in_hand": said.in_hand if said else None,
        "lag": lag,
        "p50_ms": said.p50_ms if said else None,
        "p99_ms": said.p99_ms if said else None,
        "failures": said.failures if said else None,
        "dead_letters": said.dead_letters if said else None,
        "heartbeat_age_s": row.heartbeat_age_s,
    }
