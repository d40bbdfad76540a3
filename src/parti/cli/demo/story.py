"""The story: a fleet comes up, grows under load, loses a worker to SIGKILL, lets one go, and finishes everything.

Chapters wait for what they tell of, and last at least their share of the time; nothing depends on how fast the
machine is, except that each wait has an end.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from parti.cli.control import count, listed
from parti.cli.demo.fleet import SETTINGS, WorkerProcess
from parti.cli.demo.stage import Chapter, Parting, Stage
from parti.coordination.orders import change_orders
from parti.errors import PartiError
from parti.model.fleet import Orders
from parti.strategies import natural_order

_MOST_RATE, _RATE_PER_PARTITION = 1_000.0, 25.0
_ENDS = (0.15, 0.45, 0.75, 1.0)
"""Up to which part of the time each chapter with load lasts."""
_LEAST_S = 1.5
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for."""

    seconds: float = 30.0
    workers: int = 3
    partitions: int = 48
    seed: int = 1

    @property
    def joining(self) -> int:
        """How many join later."""
        return (self.workers + 1) // 2

    @property
    def rate(self) -> float:
        """Messages a second at full load."""
        return min(_MOST_RATE, _RATE_PER_PARTITION * self.partitions)


def chapters_of(plan: Plan) -> tuple[Chapter, ...]:
    """The chapters, as they are announced."""
    lease_s = SETTINGS["lease_ttl_s"]
    return (
        Chapter(
            "a fleet comes up",
            f"{plan.workers} processes share {plan.partitions} partitions: a cell has the colour of its owner.",
        ),
        Chapter(
            "the load doubles, the fleet grows",
            f"{plan.joining} more join: only as many cells change their colour as even shares need.",
        ),
        Chapter(
            "a worker is killed",
            f"SIGKILL, no goodbye: its cells wait until its lease of {lease_s:g} s ends, the others go on.",
        ),
        Chapter(
            "a worker is drained",
            "Its cells leave one owner for the next without a gap, then it is stopped: so goes an update.",
        ),
        Chapter("the load ends", "What still waits is finished, then all workers leave in good order."),
        Chapter("the proof", "Stream, handlers' notes and ledger tell what has become of every message."),
    )


async def act(stage: Stage, plan: Plan) -> None:
    """Tell everything up to the proof; on return no worker runs and nothing is published any more.

    Raises `PartiError` when something does not happen that should, and what publishing raises.
    """
    chance = random.Random(plan.seed)
    publishing = await _come_up(stage, plan)
    try:
        await _rest(stage, plan, 0)
        await _grow(stage, plan)
        victims = chance.sample(natural_order([stage.name_of(worker) for worker in stage.fleet.running]), 2)
        await _kill(stage, plan, _process(stage, victims[0]))
        await _drain(stage, plan, _process(stage, victims[1]))
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
    await _finish(stage)


async def _come_up(stage: Stage, plan: Plan) -> asyncio.Task[None]:
    stage.open_chapter(1)
    for _ in range(plan.workers):
        stage.fleet.start()
    await stage.until(lambda: _settled(stage), "the start of the fleet", _PATIENCE_S)
    stage.begin()
    stage.publisher.rate = plan.rate / 2
    publishing = asyncio.create_task(stage.publisher.run())
    stage.keep(publishing)
    stage.tell(f"{_shares(stage)}; {plan.rate / 2:,.0f} messages a second")
    return publishing


async def _grow(stage: Stage, plan: Plan) -> None:
    stage.open_chapter(2)
    stage.publisher.rate, before = plan.rate, len(stage.moves)
    new = [stage.fleet.start() for _ in range(plan.joining)]
    await stage.until(lambda: all(each.name in stage.names for each in new), "joining the fleet", _PATIENCE_S)
    names = natural_order([stage.name_of(each) for each in new])
    stage.mark(f"+{count(len(new), 'worker')}")
    stage.tell(f"{listed(names)} joined; {plan.rate:,.0f} messages a second")
    await stage.until(lambda: _settled(stage), "a share for those who joined", _PATIENCE_S)
    await _rest(stage, plan, 1)
    stage.tell(f"{_told(stage, before)}; {_shares(stage)}")


async def _kill(stage: Stage, plan: Plan, victim: WorkerProcess) -> None:
    stage.open_chapter(3)
    name, before = stage.name_of(victim), len(stage.moves)
    owned, led = stage.owned_by(name), stage.rebalancer == name
    stage.killed = Parting(name, stage.mark(f"SIGKILL {name}"))
    await stage.fleet.kill(victim)
    role, lease_s = ", the rebalancer" if led else "", SETTINGS["lease_ttl_s"]
    wait = f"its {count(owned, 'cell')} wait{'s' * (owned == 1)}"
    stage.look = f"SIGKILL to {name}{role}: {wait} until its lease of {lease_s:g} s ends, the others go on."
    stage.tell(f"SIGKILL to {name} (pid {victim.pid}{role}), which owned {owned}")
    await stage.until(lambda: _settled(stage), "taking over from the killed worker", _PATIENCE_S)
    await _rest(stage, plan, 2)
    stage.tell(f"{_told(stage, before)}; {_shares(stage)}")


async def _drain(stage: Stage, plan: Plan, leaver: WorkerProcess) -> None:
    stage.open_chapter(4)
    name, before = stage.name_of(leaver), len(stage.moves)
    stage.look = f"'parti drain {name}': its cells go to others without a gap, then it is stopped: so goes an update."
    stage.drained = Parting(name, stage.mark(f"drain {name}"))
    stage.tell(f"parti drain {name}, which owned {stage.owned_by(name)}")

    def add(orders: Orders) -> Orders:
        return msgspec.structs.replace(orders, drained=(*orders.drained, name))

    await change_orders(stage.plane.bucket, add)
    await stage.until(lambda: _settled(stage, drained=name), "draining the worker", _PATIENCE_S)
    await stage.fleet.leave(leaver)
    stage.tell(f"{name} was stopped and left with code 0")
    await _rest(stage, plan, 3)
    stage.tell(f"{_told(stage, before)}; {_shares(stage)}")


async def _finish(stage: Stage) -> None:
    stage.open_chapter(5)
    stage.mark("load ends")
    await stage.publisher.all_acknowledged()
    # What never comes is for the check to tell.
    with suppress(PartiError):
        await stage.until(
            lambda: len(stage.notes.done) >= stage.publisher.acknowledged, "finishing everything", _PATIENCE_S
        )
    await stage.fleet.leave(*stage.fleet.running)
    stage.tick()
    stage.tell(f"{stage.publisher.acknowledged:,} messages published, {len(stage.notes.done):,} finished")


# ── what is waited for, what is told ──────────────────────────────────────────────────────────────────────────────


def _settled(stage: Stage, drained: str = "") -> bool:
    """Whether every partition has a live owner, nothing moves, and everybody who is to have some has some."""
    here = [stage.names[worker.name] for worker in stage.fleet.running if worker.name in stage.names]
    claims = stage.situation.records.claims
    owners = [claim.owner for p in stage.partitions if (claim := claims.get(p)) and claim.state == "owned"]
    wanted = set(here) - {drained}
    return (
        len(here) == len(stage.fleet.running)
        and len(owners) == len(stage.partitions)
        and (set(owners) == wanted if len(stage.partitions) >= len(wanted) else set(owners) <= wanted)
    )


async def _rest(stage: Stage, plan: Plan, chapter: int) -> None:
    """Let the chapter last for its share of the time, and until what has just moved had a message."""
    end_s = max(stage.began_s + plan.seconds * _ENDS[chapter], time.time() + _LEAST_S)
    await stage.until(lambda: time.time() >= end_s, "the end of the chapter", plan.seconds + _PATIENCE_S)


def _process(stage: Stage, name: str) -> WorkerProcess:
    return next(worker for worker in stage.fleet.running if stage.name_of(worker) == name)


def _shares(stage: Stage) -> str:
    names = natural_order([stage.name_of(worker) for worker in stage.fleet.running])
    return ", ".join(f"{name} owns {stage.owned_by(name)}" for name in names)


def _told(stage: Stage, before: int) -> str:
    moves = stage.moves[before:]
    if not moves:
        return "no partition changed hands yet"
    longest_s = max(move.pause_s for move in moves)
    pause = f"{longest_s * 1000:.0f} ms" if longest_s < 1 else f"{longest_s:.1f} s"
    return f"{count(len(moves), 'partition')} moved, longest pause {pause}"
