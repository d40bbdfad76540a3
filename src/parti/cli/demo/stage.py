"""What goes on while the demo runs, put together for whoever tells it and whoever draws it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from parti.cli.demo.check import Owners
from parti.cli.demo.fleet import Fleet, WorkerProcess
from parti.cli.demo.notes import Notes
from parti.cli.demo.traffic import Publisher
from parti.coordination.control_plane import ControlPlane
from parti.coordination.lags import Lags
from parti.coordination.orders import Situation, watch_situation
from parti.errors import PartiError
from parti.jetstream.kv import Entry
from parti.spark.report_page import Move

_TICK_S = 0.1
_RATE_S = 1.0
"""Rates are those of the last so many seconds."""
_LAG_S = 0.5
_HISTORY = 600


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of the story: its name, and one sentence of what to look at."""

    title: str
    look: str


@dataclass(frozen=True, slots=True)
class Parting:
    """Who went, and when, in seconds since 1970."""

    worker: str
    at_s: float


@dataclass(slots=True)
class Stage:
    """Everything that a picture of the running demo is made of."""

    plane: ControlPlane
    fleet: Fleet
    notes: Notes
    publisher: Publisher
    partitions: tuple[str, ...]
    chapters: tuple[Chapter, ...]
    tell: Callable[[str], None]
    """Is told what has happened, as it happens."""
    announce: Callable[[str], None]
    """Is told of each chapter, whose name and sentence are in the picture."""
    chapter: int = 0
    look: str = ""
    """What to look at; names those that the chapter is about, once they are known."""
    began_s: float = field(default_factory=time.time)
    """When the load began, in seconds since 1970."""
    situation: Situation = field(default_factory=Situation)
    moves: list[Move] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Moments that the report names."""
    killed: Parting | None = None
    drained: Parting | None = None
    names: dict[str, str] = field(default_factory=dict)
    """Worker id of each process that has joined."""
    rates: dict[str, float] = field(default_factory=dict)
    """Messages finished a second, by process."""
    history: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    """Messages finished a second by all, a value for each tick."""
    waiting: deque[int] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    """Messages acknowledged to the publisher and not finished, likewise."""
    lags: dict[str, int] = field(default_factory=dict)
    """Messages that the consumers of each worker have not delivered."""
    _owners: Owners = field(default_factory=Owners)
    _recent: deque[tuple[float, Counter[str]]] = field(default_factory=deque)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    # ── keeping up ────────────────────────────────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        """Follow records, notes and lags until cancelled."""

        def on_entry(key: str, entry: Entry) -> None:
            self.situation.take(key, entry)
            pids = {member.pid: worker for worker, member in self.situation.records.members.items()}
            self.names |= {each.name: pids[each.pid] for each in self.fleet.workers if each.pid in pids}

        def on_reset(created: str) -> None:
            self.situation = Situation()

        watch, lags = watch_situation(self.plane, on_entry, on_reset), Lags(self.plane.api)
        await watch.start()
        asked_s = 0.0
        try:
            while True:
                self.tick()
                if time.monotonic() - asked_s >= _LAG_S:
                    await lags.read(self.situation)
                    self.lags, asked_s = lags.by_worker, time.monotonic()
                await asyncio.sleep(_TICK_S)
        finally:
            await watch.stop()

    def tick(self) -> None:
        """Read the notes, and what follows from them."""
        self._owners.died_ns = self.fleet.died_ns
        for call in sorted(self.notes.poll(), key=lambda call: call.start_ns):
            if move := self._owners.take(call):
                self.moves.append(move)
        now_s = time.monotonic()
        self._recent.append((now_s, Counter(self.notes.finished)))
        while len(self._recent) > 2 and self._recent[1][0] <= now_s - _RATE_S:
            self._recent.popleft()
        then_s, then = self._recent[0]
        took_s = max(now_s - then_s, 1e-6)
        self.rates = {name: (n - then[name]) / took_s for name, n in self.notes.finished.items()}
        if self.chapter < len(self.chapters):  # what the last one tells has happened
            self.history.append(sum(self.rates.values()))
            self.waiting.append(max(0, self.publisher.acknowledged - len(self.notes.done)))

    def owned_by(self, worker: str) -> int:
        """How many partitions a worker has."""
        return sum(claim.owner == worker for claim in self.situation.records.claims.values())

    def name_of(self, worker: WorkerProcess) -> str:
        """Its worker id, once it has one."""
        return self.names.get(worker.name, worker.name)

    @property
    def rebalancer(self) -> str:
        """Who leads; empty when nobody does."""
        leader = self.situation.records.leaders.get("rebalancer")
        return leader.holder if leader else ""

    # ── for the one who tells the story ───────────────────────────────────────────────────────────────────────

    @property
    def elapsed_s(self) -> float:
        """Seconds since the load began."""
        return time.time() - self.began_s

    def begin(self) -> None:
        """The load begins now."""
        self.began_s = time.time()
        self.history.clear()
        self.waiting.clear()

    def open_chapter(self, number: int) -> None:
        """Begin a chapter, from 1."""
        self.chapter, self.look = number, self.chapters[number - 1].look
        self.announce(f"chapter {number} of {len(self.chapters)}: {self.chapters[number - 1].title}. {self.look}")

    def mark(self, name: str) -> float:
        """Name this moment; returns it."""
        self.marks.append((time.time(), name))
        return self.marks[-1][0]

    def keep(self, task: asyncio.Task[None]) -> None:
        """What this task raises ends the story."""
        self._tasks.append(task)

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until it holds; raises `PartiError` when it does not in time, and when something else has broken."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self.fleet.check()
            for task in self._tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
            if time.monotonic() > deadline_s:
                raise PartiError(f"{what} did not happen within {timeout_s:g} s; the machine may be too busy")
            await asyncio.sleep(_TICK_S)
