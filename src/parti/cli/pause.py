"""`parti pause` and `parti resume`: no planned moves for a while, or nobody who handles certain partitions."""

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
from parti.cli.orders import Aim, Answer, Outcome, Patience, fell_short, follow, give_order, look, partitions_named
from parti.coordination.orders import Change, Situation, change_orders
from parti.core.retention import INTEREST
from parti.errors import ConfigError, NotFound
from parti.model.fleet import Orders
from parti.strategies import natural_order

_PartitionsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PARTITION", help=PARTITIONS_HELP, show_default=False)
]


def pause(
    partitions: _PartitionsArgument = None,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = TIMEOUT_S,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Stop planned moves between live workers, or let nobody handle certain partitions.

    Without partitions: nothing moves for balance or by 'parti move' until 'parti resume'; partitions of workers that
    leave, drain or die still go to others. With partitions: their owners let go of them when running handlers have
    ended, and messages wait in the stream; the position is kept. Exit codes: 0 done, 1 not done in time (the order
    stands), 2 refused, and nothing was changed.
    """

    async def give(control: Control) -> Answer:
        if not partitions:
            return await _hold_moves(control)
        return await _pause(control, partitions, Patience(not no_wait, timeout, quiet=json))

    give_order(give, nats, bucket, json=json)


def resume(
    partitions: _PartitionsArgument = None,
    all: Annotated[bool, typer.Option("--all", help="Moves and every partition that is paused.")] = False,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = TIMEOUT_S,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Take back what 'parti pause' has ordered: without partitions for moves, with partitions for these.

    Partitions go on at the position where they were paused. Exit codes: 0 done, 1 not done in time (the order is
    taken back all the same), 2 refused, and nothing was changed.
    """
    if all and partitions:
        raise ConfigError("--all and partitions exclude each other; leave out one of them")

    async def give(control: Control) -> Answer:
        patience = Patience(not no_wait, timeout, quiet=json)
        return await _resume(control, partitions or (), patience, everything=all)

    give_order(give, nats, bucket, json=json)


# ── pause ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _hold_moves(control: Control) -> Answer:
    await look(control)
    change = await change_orders(
        control.plane.bucket, lambda orders: msgspec.structs.replace(orders, hold_moves=True)
    )
    if change.before.hold_moves:
        return Answer("Moves are paused already; 'parti resume' lets them go on.", change)
    return Answer("Moves are paused: what has begun comes to its end, and 'parti resume' lets them go on.", change)


async def _pause(control: Control, names: Sequence[str], patience: Patience) -> Answer:
    situation = await look(control)
    partitions = partitions_named(names, situation.records.claims)
    await _check_stream(control, situation)

    def add(orders: Orders) -> Orders:
        return msgspec.structs.replace(orders, paused=tuple(natural_order({*orders.paused, *partitions})))

    change = await change_orders(control.plane.bucket, add)
    if not situation.records.members:
        return Answer(f"Paused {count(len(partitions), 'partition')}; no worker is running anyway.", change)

    def left(now: Situation) -> Collection[str]:
        return [p for p in partitions if (c := now.records.claims.get(p)) and c.state != "free"]

    def taken_back(orders: Orders, partition: str) -> str:
        return "" if partition in orders.paused else "another operator has resumed it"

    aim = Aim(tuple(left(situation)), "pausing", left, taken_back)
    outcome = await follow(control, aim, change, patience)
    return Answer(_pause_summary(partitions, aim, outcome), change, aim.partitions, outcome)


async def _check_stream(control: Control, situation: Situation) -> None:
    assert situation.fleet
    stream = situation.fleet.stream
    try:
        info = await control.plane.api.stream_info(stream)
    except NotFound:
        raise ConfigError(f"the stream {stream!r} of this fleet does not exist; there is nothing to pause") from None
    if info.retention == INTEREST.name:
        raise ConfigError(
            f"partitions of the stream {stream!r} cannot be paused: it has the retention 'interest', so the server "
            f"would drop what is published to a partition while nobody owns it; stop the publishers instead"
        )


def _pause_summary(partitions: Sequence[str], aim: Aim, outcome: Outcome) -> str:
    one, number = len(partitions) == 1, count(len(partitions), "partition")
    if outcome.missing:
        return fell_short("were let go", aim, outcome, "'parti resume PARTITION...'")
    if not aim.partitions:
        return (
            f"Nobody handles {number}, as before; 'parti resume PARTITION...' lets {'it' if one else 'them'} go on."
        )
    if outcome.took_s is None:
        return f"Told the owners of {number} to let go; 'parti status' shows how far they are."
    kept = (
        "nobody handles it, and its position is kept" if one else "nobody handles them, and their positions are kept"
    )
    return f"Paused {number} in {span(outcome.took_s)}: {kept}."


# ── resume ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _resume(control: Control, names: Sequence[str], patience: Patience, *, everything: bool) -> Answer:
    situation = await look(control)
    named = partitions_named(names, situation.records.claims.keys() | situation.orders.resting)
    if theirs := [p for p in named if p in situation.orders.withheld]:
        raise ConfigError(f"{listed(theirs)}: older consumers handle what is withheld; see 'parti migrate status'")

    def remove(orders: Orders) -> Orders:
        paused = () if everything else tuple(p for p in orders.paused if p not in named)
        return msgspec.structs.replace(orders, paused=paused, hold_moves=bool(named) and orders.hold_moves)

    change = await change_orders(control.plane.bucket, remove)
    resumed = [p for p in change.before.paused if p not in change.after.paused]

    def left(now: Situation) -> Collection[str]:
        claims, members = now.records.claims, now.records.members
        # One that was resumed while it was let go is given anew.
        return [p for p in resumed if not (c := claims.get(p)) or c.state != "owned" or c.owner not in members]

    def taken_back(orders: Orders, partition: str) -> str:
        return "another operator has paused it again" if partition in orders.paused else ""

    aim = Aim(tuple(left(situation)), "resuming", left, taken_back)
    waits = bool(resumed and situation.records.members)
    outcome = await follow(control, aim, change, patience) if waits else Outcome()
    return Answer(_resume_summary(named, resumed, change, aim, outcome), change, aim.partitions, outcome)


def _resume_summary(named: Sequence[str], resumed: Sequence[str], change: Change, aim: Aim, outcome: Outcome) -> str:
    if outcome.missing:
        return fell_short("had an owner again", aim, outcome, "'parti pause PARTITION...'")
    said = []
    if change.before.hold_moves and not change.after.hold_moves:
        said.append("moves go on")
    if resumed:
        took = f" in {span(outcome.took_s)}" if outcome.took_s is not None else ""
        said.append(f"{count(len(resumed), 'partition')} resumed{took}")
    if not said:
        were = f"{listed(named)} {'was' if len(named) == 1 else 'were'}" if named else "moves were"
        said.append(f"nothing has changed: {were} not paused")
    if change.after.paused and not named:
        paused, one = change.after.paused, len(change.after.paused) == 1
        said.append(
            f"{listed(paused)} {'stays' if one else 'stay'} paused: name {'it' if one else 'them'}, or use --all"
        )
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}."
