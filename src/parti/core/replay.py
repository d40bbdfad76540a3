"""Partitions that a guest has, and which task of a round may handle each of them: the driver's side of a replay.

Tasks run elsewhere. Each asks again and again whether it may go on, and says how far it has got; the answer holds for
a while that never outlasts the lease. So a task that nobody hears of any more has stopped starting handlers before
anybody else may begin, and another attempt of the task goes on where that one was.

Guards OneOwner inside a replay: of each partition one task at a time has permission, and only for a round that runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from parti.core.lease import NEVER_S
from parti.model.fleet import Grant
from parti.model.records import Amount, Count, decode_plain


@dataclass(slots=True)
class Holding:
    """One partition in the hands of a guest."""

    partition: str
    fence: int
    position: int
    suspect: int = 0
    """A message in whose handler processes have died; 0 for none."""
    deaths: int = 0
    task: str = ""
    """Who has permission; empty for nobody."""
    until_s: float = NEVER_S
    """When that permission ends."""
    last: str = ""
    """Who had it last: what that one says counts until somebody else has begun."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a task says."""

    task: str
    round: Count
    holds: tuple[str, ...] = ()
    """Partitions that it wants to go on with; none: it is done."""
    at: Mapping[str, Count] = field(default_factory=dict)
    """Positions that it has reached."""
    handled: Count = 0
    """Messages, since the task began."""
    dead_lettered: Count = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a task may do, counted from when it sent its question."""

    for_s: Amount = 0.0
    keep: Mapping[str, Count] = field(default_factory=dict)
    """Partitions that it may handle, and their positions."""
    wait: tuple[str, ...] = ()
    """Partitions that another task had: ask again until that permission has ended."""


def encode(message: Ask | Answer) -> bytes:
    """Serialise what a task and the driver say to each other."""
    return json.dumps(asdict(message), separators=(",", ":")).encode()


def decode_ask(data: bytes) -> Ask:
    """Read a question; raises `DecodeError` on anything else."""
    return decode_plain(data, Ask)


def decode_answer(data: bytes) -> Answer:
    """Read an answer; raises `DecodeError` on anything else."""
    return decode_plain(data, Answer)


class Holdings:
    """All partitions of a guest, over all rounds and all holdings of its worker id."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        """Messages handled and dead-lettered by each task."""
        self._round = 0
        self._round_end = 0
        """Everything below it is handled in this round; 0: no round runs."""
        self._fences: Mapping[str, int] = {}
        """What this round is about, and under which fence tokens."""
        self._asked: set[str] = set()
        """Partitions that have messages in this round: a task has asked for them, whatever it was told."""
        self._held: dict[str, Holding] = {}
        self._leaving: dict[str, Holding] = {}
        """Let go, but a task may still handle them."""
        self._known: dict[str, int] = {}

    @property
    def held(self) -> Mapping[str, Holding]:
        """Partitions that may be handled."""
        return self._held

    @property
    def positions(self) -> Mapping[str, int]:
        """Of everything that was ever held here: below them all is finished, whoever has it now."""
        return self._known

    @property
    def handled(self) -> int:
        """Messages that handlers have finished, in all rounds."""
        return sum(handled for handled, _ in self._counts.values())

    @property
    def dead_lettered(self) -> int:
        """Messages that were given up, in all rounds."""
        return sum(dead for _, dead in self._counts.values())

    # ── what the rebalancer says ──────────────────────────────────────────────────────────────────────────────

    def grant(self, grants: Mapping[str, Grant]) -> None:
        """Hold exactly these; what is new begins at the position that is known best."""
        for partition in self._held.keys() - grants.keys():
            self._leaving[partition] = self._held.pop(partition)
        for partition, grant in grants.items():
            held = self._held.get(partition)
            if held is None or held.fence != grant.fence_token:
                position = max(grant.position, self._known.get(partition, 0))
                self._known[partition] = position
                self._held[partition] = Holding(partition, grant.fence_token, position, grant.suspect, grant.deaths)

    def know(self, positions: Mapping[str, int]) -> None:
        """Take in positions that were stored before."""
        for partition, position in positions.items():
            self._known[partition] = max(position, self._known.get(partition, 0))

    def lose(self) -> None:
        """The lease has ended: nothing is held, and no answer lets a task go on."""
        self._held.clear()
        self._leaving.clear()

    def busy(self, now_s: float) -> tuple[str, ...]:
        """Partitions that were let go and that a task may still be handling."""
        self._leaving = {p: held for p, held in self._leaving.items() if held.task and held.until_s > now_s}
        return tuple(self._leaving)

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_round(self, partitions: Iterable[str], end: int) -> int:
        """A round begins over these of what is held, up to `end`; returns its number."""
        self._counts = {"": (self.handled, self.dead_lettered)}
        self._round += 1
        self._round_end = end
        self._fences = {p: self._held[p].fence for p in partitions}
        self._asked = set()
        return self._round

    def end_round(self, *, complete: bool) -> None:
        """Nobody gets permission any more.

        `complete`: every message of the round was read and given to a task, and all tasks have ended well; so what no
        task has asked for has no message in it.
        """
        for partition, fence in self._fences.items():
            held = self._held.get(partition)
            if complete and held and held.fence == fence and partition not in self._asked:
                self._reach(held, self._round_end)
        self._round_end = 0

    def free_at_s(self) -> float:
        """When the last permission ends, should nobody say that it is done before."""
        return max((h.until_s for h in (*self._held.values(), *self._leaving.values()) if h.task), default=NEVER_S)

    # ── what tasks say ────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, ask: Ask, now_s: float, permitted_until_s: float) -> Answer:
        """Take in how far a task has got, and tell it what it may go on with."""
        self._counts[ask.task] = (ask.handled, ask.dead_lettered)
        for partition, position in ask.at.items():
            held = self._held.get(partition) or self._leaving.get(partition)
            if held and held.last == ask.task:  # otherwise somebody else goes on from an earlier position
                self._reach(held, position)
        if ask.round == self._round:
            self._asked.update(ask.holds)
        for_s = max(0.0, permitted_until_s - now_s)
        keep, wait = {}, []
        for partition in ask.holds if self._runs(ask) and for_s else ():
            held = self._held.get(partition)
            if held is None or held.fence != self._fences.get(partition):
                continue
            if held.task not in {"", ask.task} and held.until_s > now_s:
                wait.append(partition)
                continue
            held.task = held.last = ask.task
            held.until_s = now_s + for_s
            keep[partition] = held.position
        for held in (*self._held.values(), *self._leaving.values()):
            # What it was refused it may still be handling, until it says otherwise or its permission ends.
            if held.task == ask.task and held.partition not in ask.holds:
                held.task, held.until_s = "", NEVER_S
        return Answer(for_s if keep or wait else 0.0, keep, tuple(wait))

    def _runs(self, ask: Ask) -> bool:
        return bool(self._round_end) and ask.round == self._round

    def _reach(self, held: Holding, position: int) -> None:
        held.position = max(held.position, position)
        self._known[held.partition] = max(held.position, self._known.get(held.partition, 0))
