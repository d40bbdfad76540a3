"""What the commands that give orders share: names, waiting until the fleet has followed, and the outcome."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from parti.app.signals import run_interruptibly
from parti.cli.control import (
    Control,
    count,
    listed,
    no_such_worker,
    open_console,
    open_control,
    print_json,
    read_settings,
    span,
    timestamp,
)
from parti.coordination.orders import Change, Situation, obstacle, read_situation, watch_situation
from parti.coordination.records import Records
from parti.coordination.repairs import repair_of
from parti.errors import ConfigError, ControlPlaneReset, RequestTimeout
from parti.jetstream.kv import Entry
from parti.model.fleet import Orders
from parti.strategies import natural_order

_READ_S = 10.0
_DRAW_S = 0.05
_LOOK_S = 1.0
_SAY_S = 5.0
"""How often a line tells the progress where there is no terminal."""
_CLOSE = 3
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Patience:
    """Whether to wait, how long, and whether to show it."""

    waits: bool
    timeout_s: float
    quiet: bool


@dataclass(frozen=True, slots=True)
class Aim:
    """What an order is to bring about."""

    partitions: Sequence[str]
    """Those that have to change for it."""
    doing: str
    """`moving to worker-1`."""
    left: Callable[[Situation], Collection[str]]
    """Partitions that have not got there."""
    taken_back: Callable[[Orders, str], str]
    """What another operator wants of a partition instead; empty while the order stands."""
    to: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far the fleet has followed."""

    took_s: float | None = None
    """None: nobody waited."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What each partition that is not there is waiting for."""
    stands: bool = True
    """Whether the order does, for some of those that are missing."""


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def read_all(control: Control) -> Situation:
    """The fleet and its orders as they are, whether there is a fleet or not."""
    try:
        async with asyncio.timeout(_READ_S):
            return await read_situation(control.plane)
    except TimeoutError:
        raise RequestTimeout(
            f"{control.place} was not read within {_READ_S:g} s; look whether the server is overloaded or has no "
            f"leader for the stream KV_{control.settings.bucket}"
        ) from None


async def look(control: Control) -> Situation:
    """The fleet and its orders as they are; raises `ConfigError` when there is no fleet in the bucket."""
    situation = await read_all(control)
    if "fleet" in situation.records.unreadable:
        raise ConfigError(f"the record of the fleet in {control.place} cannot be read: {repair_of('fleet')}")
    if situation.fleet is None:
        raise ConfigError(
            f"there is no fleet in {control.place}: only workers on their own (--solo) have run here, and they take "
            f"no orders; name another place with --bucket or --nats"
        )
    return situation


def partitions_named(names: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The partitions, each once, in natural order; raises `ConfigError` when one does not exist."""
    named = natural_order(dict.fromkeys(names))
    unknown = [name for name in named if name not in known]
    if not unknown:
        return tuple(named)
    close = difflib.get_close_matches(unknown[0], known, n=_CLOSE, cutoff=0.6)
    hint = f"did you mean {', '.join(natural_order(close))}?" if close else _examples(known)
    which = f"partition {unknown[0]!r}" if len(unknown) == 1 else f"partitions {listed(unknown)}"
    raise ConfigError(f"there {'is' if len(unknown) == 1 else 'are'} no {which}; {hint}")


def _examples(known: Collection[str]) -> str:
    if not known:
        return "no partition has been claimed yet"
    are = "is" if len(known) == 1 else "are"
    return f"there {are} {count(len(known), 'partition')}, such as {', '.join(natural_order(known)[:_CLOSE])}"


def worker_named(name: str, situation: Situation, also: Collection[str] = ()) -> str:
    """The id of a worker that is there, by its id or identity; `also`: ids that count though nobody holds them."""
    members = situation.records.members
    if name in members or name in also:
        return name
    holders = [worker for worker, member in members.items() if member.identity == name]
    if len(holders) == 1:
        return holders[0]
    if holders:
        raise ConfigError(f"{name!r} is the identity of several workers: {listed(natural_order(holders))}; name one")
    if name in situation.records.health:
        here = f"workers here: {listed(natural_order(members), 10)}" if members else "no worker is running here"
        raise ConfigError(f"worker {name!r} is gone; {here}")
    raise no_such_worker(name, natural_order(members), [m.identity for m in members.values() if m.identity])


# ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def follow(control: Control, aim: Aim, change: Change, patience: Patience) -> Outcome:
    """Wait until the fleet has done what was ordered, time is up, or another operator wants something else.

    Nothing counts as done before the order itself has been seen: a replica that lags may show claims from before it.
    Raises `ControlPlaneReset` when the bucket was made anew meanwhile: the order is gone with the old one.
    """
    if not patience.waits:
        return Outcome()
    following = _Following(aim, change.revision)
    watch = watch_situation(control.plane, following.take, following.lose)
    began_s = time.monotonic()
    try:
        with _Display(aim, patience) as display, suppress(TimeoutError):
            async with asyncio.timeout(patience.timeout_s):
                await watch.start()
                while pending := following.pending():
                    following.changed.clear()
                    display.show(len(pending))
                    await asyncio.sleep(_DRAW_S)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await following.changed.wait()
    except asyncio.CancelledError:
        typer.echo("parti: the order stands, though nobody waits for it any more", err=True)
        raise
    finally:
        await watch.stop()
    silence = "" if watch.last_error == "" or following.seen else f"no news from the server: {watch.last_error}"
    return following.outcome(time.monotonic() - began_s, silence)


class _Following:
    """The fleet on its way to an aim."""

    def __init__(self, aim: Aim, revision: int) -> None:
        self.changed = asyncio.Event()
        self._aim = aim
        self._revision = revision
        self._situation = Situation()
        self._reset = False

    def take(self, key: str, entry: Entry) -> None:
        self._situation.take(key, entry)
        self.changed.set()

    def lose(self, created: str) -> None:
        self._reset = True
        self.changed.set()

    @property
    def seen(self) -> bool:
        """Whether the order has been."""
        return self._situation.revision >= self._revision

    def pending(self) -> Collection[str]:
        """What is worth waiting for."""
        if self._reset:
            raise ControlPlaneReset("the bucket was made anew meanwhile, and orders went with it; give it again")
        if not self.seen:
            return self._aim.partitions or ("",)
        orders = self._situation.orders
        return [p for p in self._aim.left(self._situation) if not self._aim.taken_back(orders, p)]

    def outcome(self, took_s: float, silence: str) -> Outcome:
        """How far it has come; `silence`: why nothing is known of that."""
        aim, situation = self._aim, self._situation
        left = natural_order(aim.left(situation) if self.seen else aim.partitions)
        other = {p: aim.taken_back(situation.orders, p) if self.seen else "" for p in left}
        missing = {p: silence or other[p] or obstacle(situation, p, aim.to) for p in left}
        return Outcome(took_s, missing, stands=not all(other.values()))


class _Display:
    """How far it is: a bar on a terminal, a line from time to time elsewhere, nothing with --json."""

    def __init__(self, aim: Aim, patience: Patience) -> None:
        self._doing = aim.doing
        self._most = len(aim.partitions)
        self._quiet = patience.quiet
        self._said_s = time.monotonic()
        self._said = -1
        self._console = open_console()
        self._bar: Progress | None = None

    def __enter__(self) -> _Display:
        if self._console.is_terminal and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task(self._doing, total=self._most, completed=0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, left: int) -> None:
        self._most = max(self._most, left)  # a move to a worker that is drained may have begun a moment before
        done, now_s = self._most - left, time.monotonic()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], total=self._most, completed=done)
        elif not self._quiet and now_s - self._said_s >= _SAY_S and done != self._said:
            self._said_s, self._said = now_s, done
            self._console.print(f"{self._doing}: {done:,} of {self._most:,}")


# ── telling ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is to say of an order that was given."""

    summary: str
    change: Change
    partitions: Sequence[str] = ()
    """Those that had to change for it."""
    outcome: Outcome = field(default_factory=Outcome)


def give_order(
    give: Callable[[Control], Awaitable[Answer]], nats: str | None, bucket: str | None, *, json: bool
) -> None:
    """Give an order to the fleet in this place and tell what became of it.

    Exit code 1 when the fleet has not followed; raises what `open_control` raises, and `give`.
    """
    settings = read_settings(nats, bucket)

    async def run() -> Answer:
        async with open_control(settings) as control:
            return await give(control)

    _tell(settings.bucket, run_interruptibly(run()), json=json)


def _tell(bucket: str, answer: Answer, *, json: bool) -> None:
    missing = answer.outcome.missing
    if json:
        print_json(_json(bucket, answer))
    else:
        console = open_console()
        console.print(answer.summary, style="bold red" if missing else "green")
        _print_missing(console, missing)
    if missing:
        raise typer.Exit(1)


def fell_short(done: str, aim: Aim, outcome: Outcome, undo: str) -> str:
    """The sentence for an order that the fleet has not followed in time."""
    missing = len(outcome.missing)
    total = max(len(aim.partitions), missing)
    stands = f"; the order stands, and {undo} takes it back" if outcome.stands else ""
    return f"After {span(outcome.took_s or 0.0)} {total - missing:,} of {count(total, 'partition')} {done}{stands}."


def _print_missing(console: Console, missing: Mapping[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for partition, why in missing.items():
        by_reason.setdefault(why, []).append(partition)
    for why, partitions in by_reason.items():
        console.print(Text(f"  {listed(partitions, _NAMED)}: {why}"))


def standing(records: Records, orders: Orders) -> Iterator[str]:
    """Orders that somebody may have forgotten to take back."""
    if orders.hold_moves:
        yield "moves are paused, until 'parti resume'"
    if orders.paused:
        are = "is" if len(orders.paused) == 1 else "are"
        yield f"{count(len(orders.paused), 'partition')} {are} paused ({listed(orders.paused, 3)})"
    if orders.withheld:
        yield f"{count(len(orders.withheld), 'partition')} with older consumers ('parti migrate status')"
    if orders.drained:
        yield f"{listed(orders.drained)} {'is' if len(orders.drained) == 1 else 'are'} drained"
    absent = [worker for worker in orders.placed.values() if worker not in records.members]
    if absent:
        are, not_here = "is" if len(absent) == 1 else "are", listed(natural_order(set(absent)))
        yield f"{count(len(absent), 'partition')} {are} placed on {not_here}, not here at the moment"


def orders_json(orders: Orders) -> dict[str, Any]:
    """Orders that stand, for scripts."""
    return {
        "placed": dict(orders.placed),
        "drained": list(orders.drained),
        "paused": list(orders.paused),
        "hold_moves": orders.hold_moves,
        "withheld": list(orders.withheld),
    }


def _json(bucket: str, answer: Answer) -> dict[str, Any]:
    outcome = answer.outcome
    return {
        "bucket": bucket,
        "at": timestamp(datetime.now(UTC)),
        "ok": not outcome.missing,
        "summary": answer.summary,
        "changed": answer.change.after != answer.change.before,
        "waited_s": None if outcome.took_s is None else round(outcome.took_s, 3),
        "partitions": list(answer.partitions),
        "missing": [{"partition": partition, "why": why} for partition, why in outcome.missing.items()],
        "orders": orders_json(answer.change.after),
    }
