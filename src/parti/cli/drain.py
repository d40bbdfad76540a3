"""`parti drain`: let workers own nothing while they go on running, or give them their share again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
import typer

from parti.cli.control import Control, count, listed, span
from parti.cli.options import TIMEOUT_S, BucketOption, JsonOption, NatsOption, NoWaitOption, TimeoutOption
from parti.cli.orders import Aim, Answer, Outcome, Patience, fell_short, follow, give_order, look, worker_named
from parti.coordination.orders import Situation, change_orders
from parti.errors import ConfigError
from parti.model.fleet import Orders
from parti.strategies import natural_order


def drain(
    workers: Annotated[list[str], typer.Argument(metavar="WORKER", help="Worker ids or identities.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let them have their share again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if nobody is left to take what they own.")] = False,
    no_wait: NoWaitOption = False,
    timeout: TimeoutOption = TIMEOUT_S,
    json: JsonOption = False,
    nats: NatsOption = None,
    bucket: BucketOption = None,
) -> None:
    """Move everything away from workers, at once, and give them nothing more.

    They go on running. The order stands for the worker id until --undo, also for the next process that holds it. Exit
    codes: 0 done, 1 not done in time (the order stands), 2 refused, and nothing was changed.
    """

    async def give(control: Control) -> Answer:
        if undo:
            return await _undo(control, workers)
        return await _drain(control, workers, Patience(not no_wait, timeout, quiet=json), force=force)

    give_order(give, nats, bucket, json=json)


async def _drain(control: Control, names: Sequence[str], patience: Patience, *, force: bool) -> Answer:
    situation = await look(control)
    workers = natural_order({worker_named(name, situation) for name in names})

    def add(orders: Orders) -> Orders:
        drained = natural_order({*orders.drained, *workers})
        if not force:
            _check_others(situation, drained, workers)
        return msgspec.structs.replace(orders, drained=tuple(drained))

    change = await change_orders(control.plane.bucket, add)

    def left(now: Situation) -> Collection[str]:
        claims = now.records.claims.items()
        return [p for p, c in claims if c.state != "free" and not {c.owner, c.next}.isdisjoint(workers)]

    def taken_back(orders: Orders, partition: str) -> str:
        kept = [worker for worker in workers if worker not in orders.drained]
        return f"another operator wants {listed(kept)} to have its share" if len(kept) == len(workers) else ""

    aim = Aim(natural_order(left(situation)), f"draining {listed(workers, 3)}", left, taken_back)
    outcome = await follow(control, aim, change, patience)
    after = await look(control) if patience.waits else situation
    return Answer(_summary(workers, aim, outcome, after), change, aim.partitions, outcome)


def _check_others(situation: Situation, drained: Collection[str], workers: Sequence[str]) -> None:
    members = situation.records.members.items()
    if not [
        worker
        for worker, member in members
        if member.state == "active" and not member.guest and worker not in drained
    ]:
        raise ConfigError(
            f"nobody would be left to take what {listed(workers)} {'owns' if len(workers) == 1 else 'own'}; start "
            f"another worker, undo another drain, or insist with --force"
        )


def _summary(workers: Sequence[str], aim: Aim, outcome: Outcome, after: Situation) -> str:
    names, number = listed(workers), len(aim.partitions)
    are = "is" if len(workers) == 1 else "are"
    if outcome.missing:
        return fell_short(f"had left {names}", aim, outcome, f"'parti drain {' '.join(workers)} --undo'")
    if outcome.took_s is None:
        return f"Told {count(number, 'partition')} to leave {names}; 'parti status' shows how far they are."
    if not number:
        return f"{names} {are} drained; there was nothing to move."
    claims = after.records.claims
    takers = Counter(c.owner for p in aim.partitions if (c := claims.get(p)) and c.owner)
    to = listed([f"{worker} ({takers[worker]:,})" for worker in natural_order(takers)])
    return f"{names} {are} drained: {count(number, 'partition')} moved to {to} in {span(outcome.took_s)}."


async def _undo(control: Control, names: Sequence[str]) -> Answer:
    situation = await look(control)
    workers = natural_order({worker_named(name, situation, situation.orders.drained) for name in names})

    def remove(orders: Orders) -> Orders:
        return msgspec.structs.replace(orders, drained=tuple(w for w in orders.drained if w not in workers))

    change = await change_orders(control.plane.bucket, remove)
    undone = [worker for worker in workers if worker in change.before.drained]
    if not undone:
        said = "was not drained" if len(workers) == 1 else "were not drained"
        return Answer(f"{listed(workers)} {said}; nothing has changed.", change)
    gets = "gets its share again, like a worker" if len(undone) == 1 else "get their shares again, like workers"
    return Answer(f"{listed(undone)} {gets} that joins now: when nobody has come or gone for a while.", change)
