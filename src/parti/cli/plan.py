"""`parti plan`: what would move, and why, if workers joined or left. Nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

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
    timestamp,
)
from parti.cli.options import BucketOption, JsonOption, NatsOption
from parti.cli.orders import read_all, standing
from parti.config import Settings
from parti.coordination.orders import Situation
from parti.core.fleet_view import FleetState, MemberView, Policy
from parti.core.what_if import Change, Fleet, Move, Outlook, foresee
from parti.errors import ConfigError
from parti.strategies import STRATEGY_NAMES, Strategy, learns_loads, natural_key, natural_order, strategy_named

_FIRST = 20
"""Lines of each table without --all."""
_SOON_S = 0.5


def plan(
    join: Annotated[int, typer.Option(metavar="N", min=0, help="As if so many more workers were started.")] = 0,
    leave: Annotated[
        list[str] | None, typer.Option(metavar="WORKER", help="As if this one were gone for good; may be repeated.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Instead of the rebalancer's: {', '.join(STRATEGY_NAMES)}.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="List every worker and every partition that moves.")] = False,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Show what would move, and why, if workers joined or left.

    Without --join and --leave: what would move now. The rebalancer's planner is run ahead on a copy of the fleet's
    records and orders; nothing is written. The strategy is the rebalancer's, unless --strategy names another; windows
    come from the settings here. New workers count as being like most of the others. Exit codes: 0 every partition
    would have an owner, 1 some would have none, 2 no server, no bucket or no such worker.
    """
    settings = read_settings(nats, bucket)
    strategy_named(strategy or settings.strategy)  # a mistake is said before anything is read

    async def read() -> Situation:
        async with open_control(settings) as control:
            return await read_all(control)

    situation = run_interruptibly(read())
    leader = situation.records.leaders.get("rebalancer")
    told = leader.strategy if leader and leader.strategy in STRATEGY_NAMES else settings.strategy
    chosen = strategy_named(strategy or told)
    fleet = _measured(_fleet(situation), situation, chosen)
    change = Change(_newcomers(join, fleet, settings), _leavers(leave or (), fleet))
    outlook = foresee(fleet, change, chosen, _policy(settings, chosen))
    answer = Answer(
        chosen.name,
        change,
        outlook,
        _sentence(change, outlook, _imbalance(fleet, settings)),
        _notes(situation, change, settings),
    )
    if json:
        print_json(_json(settings.bucket, answer))
    else:
        _print(open_console(), answer, everything=all)
    if outlook.unowned:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is to show."""

    strategy: str
    change: Change
    outlook: Outlook
    summary: str
    notes: Sequence[str]


# ── the question ──────────────────────────────────────────────────────────────────────────────────────────────────


def _fleet(situation: Situation) -> Fleet:
    records = situation.records
    leader = records.leaders.get("rebalancer")
    members = {
        w: MemberView(m.incarnation, m.state, m.capacity, m.weight, m.guest) for w, m in records.members.items()
    }
    settled = leader is not None and leader.state == FleetState.STABLE
    return Fleet(members, records.claims, settled=settled, orders=situation.orders)


def _measured(fleet: Fleet, situation: Situation, strategy: Strategy) -> Fleet:
    """The same with the loads that the workers have measured, for a strategy that goes by them."""
    return replace(fleet, loads=situation.records.measured) if learns_loads(strategy) else fleet


def _policy(settings: Settings, strategy: Strategy) -> Policy:
    return Policy(
        cold_start_window_s=settings.cold_start_window_s,
        scale_window_s=settings.scale_window_s,
        min_rebalance_interval_s=settings.min_rebalance_interval_s,
        hysteresis=settings.hysteresis,
        load_window_s=settings.load_window_s if learns_loads(strategy) else 0.0,
    )


def _newcomers(number: int, fleet: Fleet, settings: Settings) -> dict[str, MemberView]:
    """The ids that new workers would get, with the capacity and weight that most of the others have."""
    free = [w for n in range(settings.max_workers) if (w := f"worker-{n}") not in fleet.members]
    if number > len(free):
        raise ConfigError(
            f"--join is {number}, but only {len(free)} of {settings.max_workers} worker ids are free; join fewer, or "
            f"raise max_workers"
        )
    kinds = Counter((m.capacity, m.weight) for m in fleet.members.values() if m.state == "active")
    usual = settings.room, settings.weight
    capacity, weight = kinds.most_common(1)[0][0] if kinds else usual
    # Incarnations only grow, which is how a new holder of an old id is told from the old one.
    known = [m.incarnation for m in fleet.members.values()] + [c.incarnation for c in fleet.claims.values()]
    incarnation = 1 + max(known, default=0)
    return {worker: MemberView(incarnation, "active", capacity, weight) for worker in free[:number]}


def _leavers(names: Sequence[str], fleet: Fleet) -> frozenset[str]:
    for name in names:
        if name not in fleet.members:
            raise no_such_worker(name, natural_order(fleet.members))
    return frozenset(names)


# ── the answer ────────────────────────────────────────────────────────────────────────────────────────────────────


def _sentence(change: Change, outlook: Outlook, imbalance: str) -> str:
    if not outlook.partitions:
        return "No partition has been claimed yet, so there is nothing that could move."
    supposed = _supposed(change)
    moved, given = outlook.count("moved"), outlook.count("given")
    said = []
    if moved:
        said.append(f"{_share(moved, outlook)} would move between live workers, {_against(moved, outlook)}")
        window_s = min(m.after_s for m in outlook.moves if m.kind == "moved")
        if window_s >= _SOON_S and supposed:
            said[-1] += f", once nobody has joined or left for {window_s:g} s"
    if given:
        said.append(f"{_share(given, outlook)} without a live owner would be given to others at once")
    if outlook.unowned:
        why = "no worker would be left" if outlook.state is FleetState.WAITING else "every worker would be full"
        said.append(f"{_share(len(outlook.unowned), outlook)} would have no owner: {why}")
    if kept := outlook.count("kept"):
        said.append(f"{count(kept, 'partition')} would stay with a worker id that is held again")
    if not said and outlook.minimum:
        said.append(
            f"nothing would move: {count(outlook.minimum, 'move')} would even out the shares, but {imbalance}"
        )
    text = "; ".join(said or ["nothing would move"])
    text = f"{supposed}, {text}" if supposed else text[0].upper() + text[1:]
    return f"{text}."


def _imbalance(fleet: Fleet, settings: Settings) -> str:
    """Why shares that are not even would be left as they are."""
    if fleet.orders.hold_moves:
        return "moves are paused"
    if fleet.orders.placed:
        return "partitions are placed by an operator"
    return f"the imbalance is small (hysteresis {settings.hysteresis:g})"


def _supposed(change: Change) -> str:
    joins, leaves = natural_order(change.joins), natural_order(change.leaves)
    joining = f"{listed(joins, 3)} joined" if joins else ""
    leaving = f"{listed(leaves, 3)} left" if leaves else ""
    return f"If {' and '.join(filter(None, (joining, leaving)))}" if joins or leaves else ""


def _share(number: int, outlook: Outlook) -> str:
    return f"{number:,} of {count(outlook.partitions, 'partition')} ({_percent(number, outlook)})"


def _against(moved: int, outlook: Outlook) -> str:
    if moved <= outlook.minimum:
        return (
            "the least possible" if moved == outlook.minimum else f"fewer than even shares take ({outlook.minimum:,})"
        )
    return f"where {outlook.minimum:,} would do for even shares"


def _notes(situation: Situation, change: Change, settings: Settings) -> list[str]:
    notes, records = [], situation.records
    leader = records.leaders.get("rebalancer")
    named = [w for w in natural_order(change.leaves) if records.members[w].identity]
    if named and settings.rejoin_s:
        notes.append(
            f"{listed(named)} has an identity: when it stops in order, its partitions first wait up to "
            f"{settings.rejoin_s:g} s for it to come back (rejoin_s)."
        )
    if leader is None and records.members:
        notes.append("There is no rebalancer at the moment; nothing moves before one is elected.")
    if leader and leader.state == FleetState.DEGRADED:
        notes.append(
            f"The rebalancer says: {leader.reason}. Partitions that were never claimed are not in this plan."
        )
    if orders := list(standing(records, situation.orders)):
        notes.append(f"Orders stand: {'; '.join(orders)}.")
    if records.trouble:
        notes.append(f"Not in this plan is what cannot be read: {records.trouble}.")
    return notes


def _print(console: Console, answer: Answer, *, everything: bool) -> None:
    outlook = answer.outlook
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("strategy", answer.strategy)
    facts.add_row("partitions", f"{outlook.partitions:,}")
    if outlook.partitions:
        facts.add_row("moves", _moves_text(outlook))
    if given := outlook.count("given"):
        facts.add_row("given away", f"{given:,} ({_percent(given, outlook)}), their owner is gone")
    if begun := outlook.count("begun"):
        facts.add_row("under way", f"{begun:,}, on the move already")
    if outlook.unowned:
        facts.add_row("unowned", Text(f"{len(outlook.unowned):,}: {listed(outlook.unowned)}", style="bold red"))
    console.print(facts)
    console.print()
    _print_workers(console, answer, everything=everything)
    _print_moves(console, answer.outlook.moves, everything=everything)
    for note in answer.notes:
        console.print(note, style="yellow")
    console.print(answer.summary, style="bold red" if outlook.unowned else "green" if not outlook.moves else "")


def _moves_text(outlook: Outlook) -> str:
    moved = outlook.count("moved")
    share = f" ({_percent(moved, outlook)})" if moved else ""
    return f"{moved:,}{share}, least possible {outlook.minimum:,}"


def _percent(number: int, outlook: Outlook) -> str:
    return f"{round(100 * number / outlook.partitions, 1):g} %"


def _print_workers(console: Console, answer: Answer, *, everything: bool) -> None:
    rows = sorted(_workers(answer), key=lambda row: not row["change"])
    changed = [row for row in rows if row["gets"] or row["gives"] or row["change"]]
    shown = rows if everything else changed[:_FIRST]
    if not shown:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worker", no_wrap=True)
    for title in ("owns", "gets", "gives", "then"):
        table.add_column(title, justify="right", no_wrap=True)
    if measured := bool(answer.outlook.load_before):
        for title in ("load", "then"):
            table.add_column(title, justify="right", no_wrap=True)
    table.add_column()
    for row in shown:
        numbers = [f"{row[key]:,}" for key in ("owns", "gets", "gives", "then")]
        numbers += [f"{row[key]:.2f}" for key in ("load", "load_then") if measured]
        table.add_row(Text(row["worker"]), *numbers, Text(row["change"], style="yellow"))
    console.print(table)
    if not everything and len(rows) > len(shown):
        more, same = len(changed) - len(shown), len(rows) - len(changed)
        text = ", ".join([f"{count(more, 'more worker')}"] * bool(more) + [f"{same:,} without a change"] * bool(same))
        console.print(f"… and {text} (--all)", style="dim")
    console.print()


def _workers(answer: Answer) -> list[dict[str, Any]]:
    """What each worker gets and gives away, those that are gone included."""
    outlook, change = answer.outlook, answer.change
    gets = Counter(move.target for move in outlook.moves if move.source != move.target)
    before, after = outlook.before, outlook.after
    names = natural_order([*before, *after, *change.joins, *change.leaves])
    return [
        {
            "worker": name,
            "change": "joins" if name in change.joins else "leaves" if name in change.leaves else "",
            "owns": before.get(name, 0),
            "gets": gets[name],
            "gives": before.get(name, 0) + gets[name] - after.get(name, 0),
            "then": after.get(name, 0),
            "load": outlook.load_before.get(name, 0.0) if outlook.load_before else None,
            "load_then": outlook.load_after.get(name, 0.0) if outlook.load_before else None,
        }
        for name in names
    ]


def _print_moves(console: Console, moves: Sequence[Move], *, everything: bool) -> None:
    moves = sorted(moves, key=lambda move: natural_key(move.partition))
    if not moves:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("partition", overflow="fold", min_width=10)
    table.add_column("from", no_wrap=True)
    table.add_column("to", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=12)
    for move in moves if everything else moves[:_FIRST]:
        table.add_row(*(Text(cell) for cell in (move.partition, move.source or "nobody", move.target, _why(move))))
    console.print(table)
    if not everything and len(moves) > _FIRST:
        console.print(f"… and {count(len(moves) - _FIRST, 'more move')} (--all)", style="dim")
    console.print()


def _why(move: Move) -> str:
    return f"{move.reason} (under way)" if move.kind == "begun" else move.reason


def _json(bucket: str, answer: Answer) -> dict[str, Any]:
    outlook, change = answer.outlook, answer.change
    return {
        "bucket": bucket,
        "at": timestamp(datetime.now(UTC)),
        "strategy": answer.strategy,
        "joins": natural_order(change.joins),
        "leaves": natural_order(change.leaves),
        "summary": answer.summary,
        "notes": list(answer.notes),
        "partitions": outlook.partitions,
        "moved": outlook.count("moved"),
        "given": outlook.count("given"),
        "begun": outlook.count("begun"),
        "kept": outlook.count("kept"),
        "minimum": outlook.minimum,
        "moved_share": round(outlook.count("moved") / outlook.partitions, 4) if outlook.partitions else 0.0,
        "unowned": list(outlook.unowned),
        "workers": _workers(answer),
        "moves": [
            {
                "partition": move.partition,
                "from": move.source,
                "to": move.target,
                "kind": move.kind,
                "why": move.reason,
                "after_s": round(move.after_s, 3),
            }
            for move in outlook.moves
        ],
    }
