"""`parti move`: put partitions where an operator wants them, or give them back to the strategy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
import typer

from parti.cli.control import Control, count, listed, span
from parti.cli.options import (
    PARTITIONS_HELP,
    TIMEOUT_S,
    BucketOption,
    JsonOption,
    NatsOption,
    NoWaitOption,
    TimeoutOption,
)
from parti.cli.orders import (
    Aim,
    Answer,
    Outcome,
    Patience,
    fell_short,
    follow,
    give_order,
    look,
    partitions_named,
    worker_named,
)
from parti.coordination.orders import Situation, change_orders
from parti.errors import ConfigError
from parti.model.fleet import Orders


def move(
    partitions: Annotated[list[str], typer.Argument(metavar="PARTITION", help=PARTITIONS_HELP, show_default=False)],
    to: Annotated[
        str | None, typer.Option(metavar="WORKER", help="Who is to own them: worker id or identity.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Let the strategy decide about them again.")] = False,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = TIMEOUT_S,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Move partitions to a worker, at once, and keep them there.

    They stay with that worker for as long as it is there, whatever the strategy wants, until --auto. Others may move
    away from it to keep the shares even. Nothing is lost, repeated or handled out of order. Exit codes: 0 done,
    1 not done in time (the order stands), 2 refused, and nothing was changed.
    """
    if (to is None) != auto:
        raise ConfigError(
            "--to and --auto exclude each other; name a worker, or give the partitions back to the strategy"
            if auto
            else "say where the partitions are to go: --to WORKER, or --auto to let the strategy decide again"
        )

    async def give(control: Control) -> Answer:
        if to is None:
            return await _give_back(control, partitions)
        return await _place(control, partitions, to, Patience(not no_wait, timeout, quiet=json))

    give_order(give, nats, bucket, json=json)


# ── to a worker ───────────────────────────────────────────────────────────────────────────────────────────────────


async def _place(control: Control, names: Sequence[str], to: str, patience: Patience) -> Answer:
    situation = await look(control)
    partitions = partitions_named(names, situation.records.claims)
    worker = worker_named(to, situation)
    _check_worker(worker, situation)

    def place(orders: Orders) -> Orders:
        _check_orders(orders, partitions, worker, patience)
        after = msgspec.structs.replace(orders, placed={**orders.placed, **dict.fromkeys(partitions, worker)})
        _check_room(after, worker, situation)
        return after

    change = await change_orders(control.plane.bucket, place)

    def left(now: Situation) -> Collection[str]:
        claims = now.records.claims
        return [p for p in partitions if not (c := claims.get(p)) or (c.owner, c.state) != (worker, "owned")]

    def taken_back(orders: Orders, partition: str) -> str:
        if partition in orders.paused:
            return "another operator has paused it"
        if (now_at := orders.placed.get(partition)) == worker:
            return ""
        return f"another operator has placed it on {now_at}" if now_at else "another operator has taken this back"

    aim = Aim(tuple(left(situation)), f"moving to {worker}", left, taken_back, worker)
    outcome = await follow(control, aim, change, patience)
    return Answer(_summary(worker, partitions, aim, outcome), change, aim.partitions, outcome)


def _check_worker(worker: str, situation: Situation) -> None:
    state = situation.records.members[worker].state
    if state == "away":
        raise ConfigError(f"{worker} is away; wait until it is back, or name another worker")
    if state == "draining":
        raise ConfigError(f"{worker} is about to stop and gives its partitions away; name another worker")


def _check_orders(orders: Orders, partitions: Sequence[str], worker: str, patience: Patience) -> None:
    if theirs := [p for p in partitions if p in orders.withheld]:
        raise ConfigError(f"{listed(theirs)}: older consumers handle what is withheld; see 'parti migrate status'")
    if paused := [p for p in partitions if p in orders.paused]:
        raise ConfigError(
            f"{listed(paused)} {'is' if len(paused) == 1 else 'are'} paused: nobody handles what is paused; resume "
            f"first, with 'parti resume {' '.join(paused[:3])}{' …' if len(paused) > 3 else ''}'"
        )
    if worker in orders.drained:
        raise ConfigError(f"{worker} is drained; name another worker, or first use 'parti drain {worker} --undo'")
    if orders.hold_moves and patience.waits:
        raise ConfigError(
            "moves are paused, so nothing would move; use 'parti resume' first, or --no-wait to leave the order for "
            "later"
        )


def _check_room(orders: Orders, worker: str, situation: Situation) -> None:
    """Others make room for what is placed, but it must fit."""
    claims, capacity = situation.records.claims, situation.records.members[worker].capacity
    placed = [p for p, w in orders.placed.items() if w == worker and p in claims and p not in orders.paused]
    if len(placed) > capacity:
        raise ConfigError(
            f"{worker} is full: it takes {count(capacity, 'partition')} at most, and {len(placed):,} would be placed "
            f"there; raise its capacity, name another worker, or give some back with 'parti move PARTITION... --auto'"
        )


def _summary(worker: str, partitions: Sequence[str], aim: Aim, outcome: Outcome) -> str:
    moving, there = len(aim.partitions), len(partitions) - len(aim.partitions)
    if outcome.missing:
        return fell_short(f"had moved to {worker}", aim, outcome, "'parti move PARTITION... --auto'")
    if not moving:
        are = "is" if there == 1 else "are"
        return f"{count(there, 'partition')} {are} on {worker} already, and will stay there."
    also = f"; {there:,} {'was' if there == 1 else 'were'} there already" if there else ""
    if outcome.took_s is None:
        return f"Told {count(moving, 'partition')} to move to {worker}{also}; 'parti status' shows how far they are."
    return f"Moved {count(moving, 'partition')} to {worker} in {span(outcome.took_s)}{also}."


# ── back to the strategy ──────────────────────────────────────────────────────────────────────────────────────────


async def _give_back(control: Control, names: Sequence[str]) -> Answer:
    situation = await look(control)
    known = situation.records.claims.keys() | situation.orders.placed.keys()
    partitions = frozenset(partitions_named(names, known))

    def give_back(orders: Orders) -> Orders:
        placed = {p: worker for p, worker in orders.placed.items() if p not in partitions}
        return msgspec.structs.replace(orders, placed=placed)

    change = await change_orders(control.plane.bucket, give_back)
    freed = [p for p in partitions if p in change.before.placed]
    if not freed:
        said = "was not placed by hand" if len(partitions) == 1 else "were not placed by hand"
        return Answer(f"{count(len(partitions), 'partition')} {said}; nothing has changed.", change)
    summary = f"The strategy decides about {count(len(freed), 'partition')} again; what need not move stays."
    return Answer(summary, change, sorted(freed))
