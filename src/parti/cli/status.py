"""`parti status`: one screen that says whether the fleet is well."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
    Control,
    count,
    listed,
    open_console,
    open_control,
    print_json,
    read_settings,
    shown,
    span,
    timestamp,
)
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.orders import orders_json, read_all, standing
from parti.cli.workers import worker_table
from parti.config import Settings
from parti.coordination.orders import Situation, watch_situation
from parti.coordination.records import Records
from parti.coordination.worker_rows import WorkerRow, worker_rows
from parti.core.fleet_report import FleetReport, waits_for_room
from parti.core.fleet_view import FleetState
from parti.errors import ConfigError
from parti.jetstream.kv import Entry
from parti.model.fleet import LeaderRecord, Orders
from parti.model.safe_text import escape_line
from parti.strategies import natural_order

_BY_WEIGHT = (
    *(
        "worker",
        "state",
        "owns",
        "moving",
        "load",
        "standby",
        "msg/s",
        "failures",
        "heartbeat",
        "finished",
        "capacity",
        "host:pid",
        "identity",
    ),
    *("version", "problems"),
)
"""The columns, the most important ones first."""
_PASSING = frozenset({FleetState.WAITING, FleetState.SCALING, FleetState.REBALANCING, FleetState.EMERGENCY})
"""States of a rebalancer that is at work."""
_STATES = ("owned", "preparing", "moving", "waiting", "paused", "unowned")
_OTHER_LINES = 5
"""Titles of the table, two empty lines, the count of workers left out, and the prompt that follows."""
_SAID = 5
"""Problems that a sentence names."""
_NAMED = 10
"""Partitions that a sentence names."""
_LATE_S = 3.0
_DRAW_S = 0.25
_REDRAW_S = 1.0


def status(
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Show the fleet on one screen: rebalancer, workers, partitions, and whether all is well.

    Exit codes: 0 all is well, 1 there are problems, 2 no server or no bucket. With --watch 0 after Ctrl-C.
    """
    if watch and json:
        raise ConfigError("--watch and --json exclude each other; call --json as often as you need it")
    settings = read_settings(nats, bucket)
    console = open_console()
    if watch:
        _watch(settings, console)
        return
    picture = run_interruptibly(_look(settings))
    if json:
        print_json(_json(settings.bucket, picture))
    else:
        console.print(draw(picture, console, fit=console.is_terminal))
    if picture.verdict.problems:
        raise typer.Exit(1)


async def _look(settings: Settings) -> Picture:
    async with open_control(settings) as control:
        situation = await read_all(control)
        return take_picture(control.place, situation.records, situation.orders)


def _watch(settings: Settings, console: Console) -> None:
    if not console.is_terminal:
        raise ConfigError("--watch draws on a terminal, and this is none; leave it out, or use --json")

    async def show() -> None:
        async with open_control(settings) as control:
            await _keep_showing(control, console)

    try:
        run_interruptibly(show())
    except KeyboardInterrupt:
        return


# ── what there is to say ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether all is well."""

    problems: tuple[str, ...]
    """What somebody should look at."""
    notes: tuple[str, ...]
    """What is worth knowing and passes, or does no harm."""
    summary: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The fleet at one moment."""

    place: str
    at: datetime
    report: FleetReport
    rows: Sequence[WorkerRow]
    partitions: Counter[str]
    """By what can be said of them: owned, preparing, moving, waiting, paused, unowned."""
    orders: Orders
    verdict: Verdict


def take_picture(place: str, records: Records, orders: Orders | None = None) -> Picture:
    """Put together what the records say."""
    now, report, orders = datetime.now(UTC), records.report(), orders or Orders()
    rows = worker_rows(records, now, orders)
    partitions: Counter[str] = Counter()
    for partition, claim in records.claims.items():
        owner = records.members.get(claim.owner)
        if claim.state == "free" and not waits_for_room(claim):
            partitions["paused"] += partition in orders.paused
        elif owner is None:
            partitions["unowned"] += 1
        elif owner.state == "away":
            partitions["waiting"] += 1
        else:
            partitions[claim.state] += 1
    notes = (*_notes(records, report, rows, partitions), *standing(records, orders))
    verdict = _judge(records, report, tuple(_problems(records, report, rows)), notes)
    return Picture(place, now, report, rows, partitions, orders, verdict)


def _judge(records: Records, report: FleetReport, problems: tuple[str, ...], notes: tuple[str, ...]) -> Verdict:
    if problems:
        return Verdict(problems, notes, f"Look at this: {_in_short(problems)}.")
    there = f"{count(report.partitions, 'partition')} on {count(len(records.members), 'worker')}"
    if notes:
        return Verdict(problems, notes, f"Nothing is wrong ({there}), but note: {_in_short(notes)}.")
    return Verdict(problems, notes, f"All is well: {there}, each with one owner.")


def _in_short(sentences: Sequence[str]) -> str:
    more = [f"and {len(sentences) - _SAID:,} more, see --json"] if len(sentences) > _SAID else []
    return "; ".join([*sentences[:_SAID], *more])


def _problems(records: Records, report: FleetReport, rows: Sequence[WorkerRow]) -> Iterator[str]:
    leader = report.leader
    if not records.members:
        yield "no worker is running; start one with 'parti worker MODULE:APP'"
    elif leader is None:
        yield "there is no rebalancer"
    if report.unowned:
        yield f"{count(len(report.unowned), 'partition')} without a live owner ({listed(report.unowned, _NAMED)})"
    if leader and leader.state == FleetState.DEGRADED:
        yield f"the rebalancer says: {leader.reason}"
    ailing: dict[str, list[str]] = {}
    for row in rows:
        for problem in row.problems:
            ailing.setdefault(problem, []).append(row.worker)
    for problem, names in ailing.items():
        # In a degraded fleet each worker repeats what the rebalancer says.
        if not leader or problem != f"{FleetState.DEGRADED}: {leader.reason}":
            yield f"{listed(names, 3)}: {problem}"
    yield from report.stalls
    if records.trouble:
        yield records.trouble


def _notes(
    records: Records, report: FleetReport, rows: Sequence[WorkerRow], partitions: Counter[str]
) -> Iterator[str]:
    if report.leader and report.leader.state in _PASSING:
        yield f"{report.leader.state}: {report.leader.reason}"
    if report.leader and records.members and report.leader.holder not in records.members:
        yield f"the rebalancer {report.leader.holder} is gone, and another takes over when its lease ends"
    if partitions["waiting"]:
        away = [row.worker for row in rows if row.state == "away"]
        yield f"{count(partitions['waiting'], 'partition')} wait for {listed(away)} to come back"
    if records.members and not report.partitions:
        yield "no partition has been claimed yet"
    late = [
        worker for worker, member in records.members.items() if member.state == "active" and _late(records, worker)
    ]
    if late:
        yield f"{listed(late)} did not apply the newest assignment yet"
    yield from report.recoveries
    skewed = [row.worker for row in rows if _skewed(row)]
    if skewed:
        yield f"the clock of {listed(skewed)} and the one here differ: the heartbeat looks too old"
    versions = Counter(member.version for member in records.members.values())
    if len(versions) > 1:
        yield f"different versions of parti are running: {', '.join(f'{v} ({n})' for v, n in versions.most_common())}"


def _late(records: Records, worker: str) -> bool:
    member, told, said = records.members[worker], records.assignments.get(worker), records.health.get(worker)
    if told is None or told.incarnation != member.incarnation:
        return False
    return said is None or said.incarnation != member.incarnation or said.applied < told.version


def _skewed(row: WorkerRow) -> bool:
    """A heartbeat and the lease are renewed together, so one that is older than a live lease cannot be."""
    member, age_s = row.report.member, row.heartbeat_age_s
    return member is not None and member.state == "active" and abs(age_s or 0.0) > member.ttl_seconds + _LATE_S


# ── the screen ────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(picture: Picture, console: Console, *, fit: bool) -> RenderableType:
    """The whole screen; with `fit` no more workers than there is room for, those with trouble first."""
    head, foot = _head(picture), _foot(picture.verdict)
    rows = list(picture.rows)
    around = sum(len(console.render_lines(part)) for part in (head, foot))
    room = max(3, console.height - around - _OTHER_LINES)
    hidden = max(0, len(rows) - room) if fit else 0
    if hidden:
        rows.sort(key=_is_calm)
        del rows[room:]
    parts: list[RenderableType] = [head, Text()]
    if rows:
        parts.append(worker_table(rows, _BY_WEIGHT, console.width)[0])
    if hidden:
        parts.append(Text(f"… and {count(hidden, 'more worker')} ('parti workers' lists all)", style="dim"))
    if rows:
        parts.append(Text())
    return Group(*parts, foot)


def _foot(verdict: Verdict) -> Text:
    foot = Text()
    if verdict.problems and verdict.notes:
        foot.append(f"Note: {escape_line(_in_short(verdict.notes))}.\n", style="yellow")
    return foot.append(
        escape_line(verdict.summary), style="bold red" if verdict.problems else "yellow" if verdict.notes else "green"
    )


def _is_calm(row: WorkerRow) -> bool:
    return row.state == FleetState.STABLE and not row.problems and not row.report.leaving and not row.report.coming


def _head(picture: Picture) -> Table:
    head = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row("fleet", shown(f"{picture.place}, {timestamp(picture.at)[:19].replace('T', ' ')} UTC"))
    leader = picture.report.leader
    head.add_row("rebalancer", _leader_text(leader, picture.at) if leader else Text("none", style="bold red"))
    states = Counter(row.shown_state for row in picture.rows)
    by_state = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    waiting_by = sum(len(row.standbys) for row in picture.rows)
    standby = f"; {waiting_by:,} standing by" if waiting_by else ""
    head.add_row("workers", shown(f"{len(picture.rows):,}{': ' + by_state if by_state else ''}{standby}"))
    numbers = picture.partitions
    unowned = numbers["unowned"]
    preparing = f"{numbers['preparing']:,} preparing to move, " if numbers["preparing"] else ""
    partitions = Text(f"{picture.report.partitions:,}: {numbers['owned']:,} owned, {preparing}")
    partitions.append(f"{numbers['moving']:,} moving, ")
    if waiting := numbers["waiting"]:
        partitions.append(f"{waiting:,} waiting, ", style="yellow")
    partitions.append(f"{unowned:,} unowned", style="bold red" if unowned else "")
    if unowned:
        partitions.append(escape_line(f" ({listed(picture.report.unowned, 3)})"))
    if paused := numbers["paused"]:
        partitions.append(f"; {paused:,} paused", style="yellow")
    head.add_row("partitions", partitions)
    if orders := "; ".join(_orders_said(picture.orders)):
        head.add_row("orders", shown(orders))
    return head


def _orders_said(orders: Orders) -> Iterator[str]:
    if orders.hold_moves:
        yield "no planned moves"
    if orders.drained:
        yield f"{listed(orders.drained)} to own nothing"
    if orders.paused:
        yield f"{count(len(orders.paused), 'partition')} paused ({listed(orders.paused, 3)})"
    if orders.withheld:
        yield f"{count(len(orders.withheld), 'partition')} with older consumers ({listed(orders.withheld, 3)})"
    if orders.placed:
        yield f"{count(len(orders.placed), 'partition')} placed ({listed(natural_order(orders.placed), 3)})"


def _leader_text(leader: LeaderRecord, now: datetime) -> Text:
    since = span((now - leader.since).total_seconds())
    text = shown(f"{leader.holder}, term {leader.term}, since {since}: ")
    style = "green" if leader.state == FleetState.STABLE else "yellow"
    text.append(
        escape_line(leader.state) or "elected", style="bold red" if leader.state == FleetState.DEGRADED else style
    )
    if leader.reason and leader.state != FleetState.STABLE:  # which says what stands below anyway
        text.append(escape_line(f", {leader.reason}"))
    return text


async def _keep_showing(control: Control, console: Console) -> None:
    """Draw at every change, and each second for the ages, until cancelled; the last screen stays."""
    situation, changed = Situation(), asyncio.Event()
    picture: Picture | None = None

    def on_reset(created: str) -> None:
        nonlocal situation
        situation = Situation()

    def on_entry(key: str, entry: Entry) -> None:
        situation.take(key, entry)
        changed.set()

    watch = watch_situation(control.plane, on_entry, on_reset)
    try:
        await watch.start()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                changed.clear()
                picture = take_picture(control.place, situation.records, situation.orders)
                screen = draw(picture, console, fit=True)
                if not watch.healthy:
                    old = shown(f"No news, so this may be old: {watch.last_error}", "bold red")
                    screen = Group(old, screen)
                live.update(screen, refresh=True)
                await asyncio.sleep(_DRAW_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REDRAW_S - _DRAW_S):
                        await changed.wait()
    finally:
        if picture:
            console.print(draw(picture, console, fit=True))
        await watch.stop()


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _json(bucket: str, picture: Picture) -> dict[str, Any]:
    report, leader, verdict = picture.report, picture.report.leader, picture.verdict
    return {
        "bucket": bucket,
        "at": timestamp(picture.at),
        "ok": not verdict.problems,
        "summary": verdict.summary,
        "problems": list(verdict.problems),
        "notes": list(verdict.notes),
        "rebalancer": leader
        and {
            "worker": leader.holder,
            "term": leader.term,
            "since": timestamp(leader.since),
            "state": leader.state,
            "reason": leader.reason,
        },
        "partitions": {
            "total": report.partitions,
            **{state: picture.partitions[state] for state in _STATES},
            "moving_partitions": list(report.moving),
            "unowned_partitions": list(report.unowned),
        },
        "orders": orders_json(picture.orders),
        "workers": [_row_json(row) for row in picture.rows],
    }


def _row_json(row: WorkerRow) -> dict[str, Any]:
    report, member, health = row.report, row.report.member, row.report.health
    return {
        "worker": row.worker,
        "state": row.state,
        "identity": member.identity if member else "",
        "host": member.host if member else "",
        "pid": member.pid if member else None,
        "version": member.version if member else "",
        "owned": report.owned,
        "leaving": report.leaving,
        "coming": report.coming,
        "load": report.load,
        "load_share": report.load_share,
        "standby": len(row.standbys),
        "capacity": member.capacity if member else None,
        "finished": health.finished if health else None,
        "rate": health.rate if health else None,
        "failures": health.failures if health else None,
        "heartbeat_age_s": row.heartbeat_age_s,
        "problems": list(row.problems),
    }
