"""`parti workers`: who is in the fleet, with everything that each worker says of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parti.app.signals import run_interruptibly
from parti.cli.control import (
    count,
    listed,
    no_such_worker,
    open_console,
    open_control,
    print_json,
    read_settings,
    shown,
    span,
    timestamp,
)
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.orders import read_all
from parti.coordination.orders import Situation
from parti.coordination.records import Records
from parti.coordination.worker_rows import WorkerRow, worker_rows
from parti.errors import ConfigError
from parti.model.fleet import Claim, MemberRecord, StandbyRecord
from parti.model.safe_text import escape, escape_line
from parti.strategies import natural_key

_SECRET = "token"
_LONGEST_TEXT = 40
"""A column of free text gives way to this width before other columns are left out."""


def workers(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Worker id or identity: that one in detail.")
    ] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """List the workers of the fleet, or show one of them with its partitions.

    As many columns as fit are shown; a pipe gets all of them. Exit codes: 0 listed, 2 no server, no bucket or no
    such worker.
    """
    settings = read_settings(nats, bucket)

    async def read() -> tuple[str, Situation]:
        async with open_control(settings) as control:
            return control.place, await read_all(control)

    place, situation = run_interruptibly(read())
    records = situation.records
    rows = worker_rows(records, datetime.now(UTC), situation.orders)
    if name is None:
        if json:
            print_json(_list_json(settings.bucket, rows))
        else:
            _print_list(open_console(), place, rows)
        return
    row = _find(name, rows, records)
    if json:
        print_json(_detail_json(settings.bucket, row, records))
    else:
        _print_detail(open_console(), row, records)


def _find(name: str, rows: Sequence[WorkerRow], records: Records) -> WorkerRow:
    named = [row for row in rows if name in {row.worker, row.report.member.identity if row.report.member else ""}]
    if len(named) == 1:
        return named[0]
    if len(named) > 1:
        raise ConfigError(
            f"{name!r} is the identity of several workers: {listed([r.worker for r in named])}; name one"
        )
    if said := records.health.get(name):
        ago = span((datetime.now(UTC) - said.at).total_seconds())
        raise ConfigError(f"worker {name!r} is gone and owns nothing; its last heartbeat was {ago} ago")
    identities = [member.identity for member in records.members.values() if member.identity]
    raise no_such_worker(name, [row.worker for row in rows], identities)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table of workers."""

    title: str
    cell: Callable[[WorkerRow], str]
    right: bool = False


def _said(field: str) -> Callable[[WorkerRow], str]:
    def cell(row: WorkerRow) -> str:
        return f"{getattr(row.report.health, field):,}" if row.report.health else ""

    return cell


def _leased(show: Callable[[MemberRecord], str]) -> Callable[[WorkerRow], str]:
    return lambda row: show(row.report.member) if row.report.member else ""


def _changing(row: WorkerRow) -> str:
    leaving, coming = row.report.leaving, row.report.coming
    return " ".join([f"-{leaving}"] * bool(leaving) + [f"+{coming}"] * bool(coming))


def _heartbeat(row: WorkerRow) -> str:
    return "" if row.heartbeat_age_s is None else span(row.heartbeat_age_s)


def _age(row: WorkerRow) -> str:
    member = row.report.member
    return span((row.now - member.started_at).total_seconds()) if member else ""


def _pulling(row: WorkerRow) -> str:
    return "" if row.report.health is None else "yes" if row.report.health.pulling else "no"


def _rate(row: WorkerRow) -> str:
    return f"{row.report.health.rate:,.0f}" if row.report.health else ""


def _load(row: WorkerRow) -> str:
    load, share = row.report.load, row.report.load_share
    return "" if load is None else f"{load:.2f}" + (f" ({share:.0%})" if share is not None else "")


def _busy(row: WorkerRow) -> str:
    busy = row.report.health.busy if row.report.health else ()
    return str(len(busy)) if busy else ""


COLUMNS: tuple[Column, ...] = (
    Column("worker", lambda row: row.worker),
    Column("state", lambda row: row.shown_state),
    Column("leads", lambda row: ", ".join(row.roles)),
    Column("standby", lambda row: str(len(row.standbys)) if row.standbys else "", right=True),
    Column("owns", lambda row: f"{row.report.owned:,}", right=True),
    Column("moving", _changing, right=True),
    Column("load", _load, right=True),
    Column("capacity", _leased(lambda m: f"{m.capacity:,}"), right=True),
    Column("weight", _leased(lambda m: f"{m.weight:g}"), right=True),
    Column("subjects", _said("subjects"), right=True),
    Column("pulling", _pulling),
    Column("applied", _said("applied"), right=True),
    Column("busy", _busy, right=True),
    Column("finished", _said("finished"), right=True),
    Column("msg/s", _rate, right=True),
    Column("failures", _said("failures"), right=True),
    Column("dead letters", _said("dead_letters"), right=True),
    Column("updates", _said("updates"), right=True),
    Column("skipped", _said("updates_skipped"), right=True),
    Column("failing", _said("update_failures"), right=True),
    Column("heartbeat", _heartbeat, right=True),
    Column("lease", _leased(lambda m: span(m.ttl_seconds)), right=True),
    Column("started", _age, right=True),
    Column("host:pid", _leased(lambda m: f"{m.host}:{m.pid}")),
    Column("identity", _leased(lambda m: m.identity)),
    Column("version", _leased(lambda m: m.version)),
    Column("incarnation", _leased(lambda m: str(m.incarnation)), right=True),
    Column("service", _leased(lambda m: m.service)),
    Column("client", _leased(lambda m: m.client)),
    Column("problems", lambda row: "; ".join(row.problems)),
)
_BY_WEIGHT = (
    *("worker", "state", "owns", "moving", "load", "standby", "identity", "host:pid", "version", "started", "leads"),
    *("capacity",),
    *("heartbeat", "pulling", "finished", "msg/s", "failures", "dead letters", "busy", "applied", "subjects"),
    *("weight", "failing", "updates", "skipped", "lease", "incarnation", "service", "client", "problems"),
)
"""Every column, the most important ones first."""


def worker_table(rows: Sequence[WorkerRow], titles: Sequence[str], width: int) -> tuple[Table, list[str]]:
    """A table of the columns that have something to say and fit, and the titles of those that did not fit.

    `titles` names the columns, the most important ones first.
    """
    told = [column for column in COLUMNS if column.title in titles and any(column.cell(row) for row in rows)]
    fitting = sorted(told, key=lambda column: titles.index(column.title))
    while len(fitting) > 1 and sum(_width(column, rows) + 2 for column in fitting) - 2 > width:
        fitting.pop()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = [column for column in told if column in fitting]
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(shown(c.cell(row), row.style if c.title == "state" else "") for c in columns))
    return table, [column.title for column in told if column not in fitting]


def _width(column: Column, rows: Sequence[WorkerRow]) -> int:
    longest = max((len(escape_line(column.cell(row))) for row in rows), default=0)
    return max(len(column.title), min(longest, _LONGEST_TEXT) if column.title == "problems" else longest)


def _print_list(console: Console, place: str, rows: Sequence[WorkerRow]) -> None:
    if not rows:
        console.print(f"No worker is running ({place}).", soft_wrap=True)
        return
    table, left_out = worker_table(rows, _BY_WEIGHT, console.width)
    console.print(table)
    if left_out:
        text = (
            f"Left out for want of room: {', '.join(left_out)}. A wider terminal, a pipe, NAME or --json shows them."
        )
        console.print(text, style="dim")


# ── one worker ────────────────────────────────────────────────────────────────────────────────────────────────────


def _print_detail(console: Console, row: WorkerRow, records: Records) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for title, text in _facts(row):
        if text:
            facts.add_row(title, Text(escape(text), style=row.style if title in {"state", "problems"} else ""))
    console.print(facts)
    console.print()
    claims = _claims_of(row.worker, records)
    if not claims:
        console.print("It owns no partition.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    changing = any(claim.state != "owned" for _, claim in claims)
    table.add_column("partition", overflow="fold", min_width=9)
    if changing:
        table.add_column("state", overflow="fold")
    table.add_column("fence token", justify="right", no_wrap=True)
    table.add_column("began at", justify="right", no_wrap=True)
    table.add_column("since", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=12)
    for partition, claim in claims:
        state = [_claim_state(row.worker, claim)] * changing
        since = span((row.now - claim.claimed_at).total_seconds())
        cells = (partition, *state, str(claim.fence_token), f"{claim.position:,}", since, claim.reason)
        table.add_row(*(shown(cell) for cell in cells))
    console.print(table)


def _facts(row: WorkerRow) -> list[tuple[str, str]]:
    report, member, health = row.report, row.report.member, row.report.health
    facts = [("worker", row.worker), ("state", _full_state(row)), ("leads", ", ".join(row.roles))]
    owns = f"{count(report.owned, 'partition')}, {report.leaving} leaving, {report.coming} coming"
    facts += [("owns", owns), ("orders", _orders_text(row))]
    if member is None:
        facts.append(("lease", "ended: nobody holds this worker id"))
    else:
        facts += [
            ("takes", f"{count(member.capacity, 'partition')} at most, weight {member.weight:g}"),
            ("process", f"{member.pid} on {member.host}, parti {member.version}, started {_age(row)} ago"),
            ("identity", member.identity),
            ("standby", "\n".join(_standby_text(each, row.now) for each in row.standbys)),
            ("incarnation", str(member.incarnation)),
            ("lease", f"{member.ttl_seconds:g} s"),
            ("service", member.service),
            ("client", member.client),
        ]
    if health is None:
        facts.append(("heartbeat", "none from this process yet" if member else "none"))
        return facts
    pulling = "pulling" if health.pulling else "not pulling"
    updates = (
        f"{health.updates:,} done, {health.updates_skipped:,} skipped, {health.update_failures:,} failed in a row"
    )
    return [
        *facts,
        ("heartbeat", f"{_heartbeat(row)} ago"),
        ("reading", f"{pulling}, {count(health.subjects, 'subject')}, assignment {health.applied} applied"),
        ("busy", f"{len(health.busy)} to let go, but still handled: {listed(health.busy)}" if health.busy else ""),
        ("messages", f"{health.finished:,} finished, {health.rate:,.0f} a second"),
        ("failures", f"{health.failures:,}, {count(health.dead_letters, 'dead letter')}"),
        ("updates", updates),
        ("problems", "\n".join(health.problems)),
    ]


def _standby_text(standby: StandbyRecord, now: datetime) -> str:
    since = span((now - standby.since).total_seconds())
    return f"process {standby.pid} on {standby.host}, parti {standby.version}, rank {standby.rank}, since {since}"


def _orders_text(row: WorkerRow) -> str:
    said = [f"to own nothing, until 'parti drain {row.worker} --undo'"] * row.drained
    return "; ".join([*said, *[f"{count(row.placed, 'partition')} placed here"] * bool(row.placed)])


def _full_state(row: WorkerRow) -> str:
    return row.state if row.state == row.shown_state else f"{row.state}, {row.shown_state}"


def _claims_of(worker: str, records: Records) -> list[tuple[str, Claim]]:
    """Claims that name it as the owner, or as who comes next."""
    mine = ((p, c) for p, c in records.claims.items() if c.state != "free" and worker in {c.owner, c.next})
    return sorted(mine, key=lambda pair: natural_key(pair[0]))


def _claim_state(worker: str, claim: Claim) -> str:
    if claim.state == "preparing":
        return f"stays until {claim.next} is ready" if claim.owner == worker else f"prepares, still on {claim.owner}"
    if claim.state != "moving":
        return claim.state
    return f"leaves to {claim.next or 'nobody'}" if claim.owner == worker else f"comes from {claim.owner}"


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _list_json(bucket: str, rows: Sequence[WorkerRow]) -> dict[str, Any]:
    return {"bucket": bucket, "at": timestamp(datetime.now(UTC)), "workers": [_row_json(row) for row in rows]}


def _detail_json(bucket: str, row: WorkerRow, records: Records) -> dict[str, Any]:
    partitions = [{"partition": name, **_record_json(claim)} for name, claim in _claims_of(row.worker, records)]
    return {"bucket": bucket, "at": timestamp(row.now), **_row_json(row), "partitions": partitions}


def _row_json(row: WorkerRow) -> dict[str, Any]:
    report = row.report
    return {
        "worker": row.worker,
        "state": row.state,
        "roles": list(row.roles),
        "owned": report.owned,
        "leaving": report.leaving,
        "coming": report.coming,
        "heartbeat_age_s": row.heartbeat_age_s,
        "standby": [_record_json(each) for each in row.standbys],
        "member": _record_json(report.member) if report.member else None,
        "health": _record_json(report.health) if report.health else None,
    }


def _record_json(record: msgspec.Struct) -> dict[str, Any]:
    """Every field by its name in Python, also those at their defaults; never a token."""
    fields = msgspec.structs.asdict(record).items()
    return {k: timestamp(v) if isinstance(v, datetime) else v for k, v in fields if k != _SECRET}
