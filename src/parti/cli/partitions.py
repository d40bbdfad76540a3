"""`parti partitions`: every partition with its owner, its position and what waits in the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
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
    span,
    timestamp,
)
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.orders import look, worker_named
from parti.cli.progress import progress_bar
from parti.coordination.orders import Situation
from parti.coordination.takeover import Takeovers
from parti.core.fleet_report import waits_for_room
from parti.errors import ConfigError, PartiError
from parti.jetstream.waiting import UNKNOWN, Backlog, Waiting
from parti.model.fleet import Claim, FleetRecord
from parti.model.partition import Template
from parti.strategies import natural_key, natural_order

_STYLES = {"owned": "green", "unowned": "bold red", "unwanted": "dim"}
"""Of states; yellow for all others, which pass."""


def partitions(
    owner: Annotated[
        str | None, typer.Option(metavar="WORKER", help="Only those of this worker: worker id or identity.")
    ] = None,
    unowned: Annotated[bool, typer.Option("--unowned", help="Only those that nobody handles.")] = False,
    behind: Annotated[
        bool, typer.Option("--behind", help="Only those with messages that wait, most of them first.")
    ] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="No more than so many.")] = None,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """List the partitions: who owns each, its fence token, its position, and how many messages wait.

    What waits is counted in the stream, from the position that the owner has stored last: what it has in hand counts.
    States: owned, preparing (its next owner gets ready), moving, waiting (for its owner to come back), paused,
    withheld (with an older consumer), unowned, unwanted (the source of partitions no longer names it). Exit codes:
    0 listed, 2 no server, no fleet or no such worker.
    """
    if unowned and owner is not None:
        raise ConfigError("--unowned and --owner exclude each other; leave one of them out")
    settings = read_settings(nats, bucket)
    console = open_console()

    async def read() -> tuple[Listing, str]:
        async with open_control(settings) as control:
            situation = await look(control)
            worker = worker_named(owner, situation, also=_owners(situation)) if owner else ""
            chosen = _chosen(situation, worker, unowned)
            total = len(chosen)
            if limit is not None and not behind:
                chosen = chosen[:limit]  # before anything is counted
            rows, note = await read_rows(control, situation, chosen, console, quiet=json)
            if behind:
                rows = sorted((row for row in rows if row.backlog.messages != 0), key=_most_first)
                total = len(rows)
                rows = rows[:limit]
            return Listing(rows, total, len(situation.records.claims), note), control.place

    listing, place = run_interruptibly(read())
    if json:
        print_json(_json(settings.bucket, listing))
    else:
        _print(console, place, listing)


@dataclass(frozen=True, slots=True)
class Row:
    """A partition at the moment of looking."""

    partition: str
    subject: str
    claim: Claim
    state: str
    position: int | None
    """None: the stream could not be read."""
    backlog: Backlog = UNKNOWN


@dataclass(frozen=True, slots=True)
class Listing:
    """What there is to show."""

    rows: Sequence[Row]
    total: int
    """How many there are of those that were asked for."""
    known: int
    """How many partitions there are at all."""
    note: str
    """What could not be found out."""


# ── finding out ───────────────────────────────────────────────────────────────────────────────────────────────────


def _owners(situation: Situation) -> set[str]:
    return {claim.owner for claim in situation.records.claims.values() if claim.owner}


def _chosen(situation: Situation, owner: str, unowned: bool) -> list[str]:
    claims = situation.records.claims
    names = natural_order(claims)
    if owner:
        return [p for p in names if claims[p].owner == owner and claims[p].state != "free"]
    if unowned:
        handled = {"owned", "preparing", "moving"}
        return [p for p in names if shown_state(p, claims[p], situation) not in handled]
    return names


def shown_state(partition: str, claim: Claim, situation: Situation) -> str:
    """What can be said of a partition: its claim's state, or what keeps everybody from handling it."""
    if waits_for_room(claim):
        return "unowned"
    if claim.state == "free":
        if partition in situation.orders.withheld:
            return "withheld"
        return "paused" if partition in situation.orders.paused else "unwanted"
    owner = situation.records.members.get(claim.owner)
    if owner is None:
        return "unowned"
    return "waiting" if owner.state == "away" else claim.state


async def read_rows(
    control: Control,
    situation: Situation,
    names: Sequence[str],
    console: Console,
    *,
    quiet: bool,
    first: bool = False,
) -> tuple[list[Row], str]:
    """Rows of these partitions and, if the stream cannot be read, why; `first`: with the first message that waits."""
    assert situation.fleet
    claims, template = situation.records.claims, Template(situation.fleet.template)
    found = [partition for p in names if (partition := template.find(p))]
    rows = [Row(p.id, p.subject, claims[p.id], shown_state(p.id, claims[p.id], situation), None) for p in found]
    if not rows:
        return rows, ""
    try:
        positions = await _positions(control, situation.fleet, template, {p.id: claims[p.id] for p in found})
        rows = [replace(row, position=positions[row.partition]) for row in rows]
        info = await control.plane.api.stream_info(situation.fleet.stream)
        wanted = {row.partition: (row.subject, positions[row.partition]) for row in rows}
        with progress_bar(console, "counting what waits", len(rows), quiet=quiet) as counted:
            waiting = Waiting(control.plane.connection, control.plane.api, info)
            backlogs = await waiting.count(wanted, template.pattern, counted=counted, look=first)
    except PartiError as error:
        return rows, f"what waits is not known: {error}"
    return [replace(row, backlog=backlogs[row.partition]) for row in rows], ""


async def _positions(
    control: Control, fleet: FleetRecord, template: Template, claims: Mapping[str, Claim]
) -> dict[str, int]:
    """Where each partition is: as its owner has stored it last, or as its claim says."""
    estates = await Takeovers(control.plane, fleet.stream, template, fleet).read(dict(claims))
    return {partition: estates.position(partition) for partition in claims}


def _most_first(row: Row) -> tuple[float, str]:
    messages = row.backlog.messages
    return (float("-inf") if messages is None else -messages), natural_key(row.partition)


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _print(console: Console, place: str, listing: Listing) -> None:
    rows = listing.rows
    if not listing.known:
        console.print(f"No partition has been claimed yet ({place}).", soft_wrap=True)
        return
    if rows:
        console.print(_table(rows))
    if listing.total > len(rows):
        console.print(f"… and {count(listing.total - len(rows), 'more partition')} (--limit)", style="dim")
    if rows:
        console.print()
    if listing.note:
        console.print(listing.note, style="yellow", soft_wrap=True)
    console.print(_summary(listing), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    now = datetime.now(UTC)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("partition", overflow="fold", min_width=9)
    table.add_column("owner", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("fence token", "position", "waits", "since"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=8)
    for row in rows:
        claim, waits = row.claim, row.backlog.messages
        table.add_row(
            Text(row.partition),
            Text(claim.owner or "nobody"),
            Text(_state_text(row), style=_STYLES.get(row.state, "yellow")),
            str(claim.fence_token),
            "?" if row.position is None else f"{row.position:,}",
            "?" if waits is None else f"{waits:,}",
            span((now - claim.claimed_at).total_seconds()),
            Text(claim.reason),
        )
    return table


def _state_text(row: Row) -> str:
    if row.state in {"preparing", "moving"} and row.claim.next:
        return f"{row.state} to {row.claim.next}"
    return row.state


def _summary(listing: Listing) -> str:
    rows = listing.rows
    counted = [row.backlog.messages for row in rows if row.backlog.messages is not None]
    behind = sum(1 for number in counted if number)
    shown = f"{count(len(rows), 'partition')}"
    of = f" of {listing.known:,}" if listing.known != len(rows) else ""
    waits = f"; {count(sum(counted), 'message')} wait in {behind:,} of them" if counted else ""
    unowned = [row.partition for row in rows if row.state == "unowned"]
    nobody = f"; without a live owner: {listed(unowned)}" if unowned else ""
    return f"{shown}{of}{waits}{nobody}."


def row_json(row: Row) -> dict[str, Any]:
    """A partition for scripts."""
    claim = row.claim
    return {
        "partition": row.partition,
        "subject": row.subject,
        "owner": claim.owner,
        "state": row.state,
        "next": claim.next,
        "fence_token": claim.fence_token,
        "position": row.position,
        "waiting": row.backlog.messages,
        "since": timestamp(claim.claimed_at),
        "cause": claim.cause,
        "reason": claim.reason,
    }


def _json(bucket: str, listing: Listing) -> dict[str, Any]:
    return {
        "bucket": bucket,
        "at": timestamp(datetime.now(UTC)),
        "summary": _summary(listing),
        "note": listing.note,
        "total": listing.total,
        "known": listing.known,
        "partitions": [row_json(row) for row in listing.rows],
    }
