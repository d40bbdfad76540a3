"""The hot mirror: when a worker reads a copy of its stream in memory, and what may be dropped from that copy.

On file storage the server searches the whole subject index of a block for each message of a consumer with several
filters, once the consumer lags by more messages than the stream has subjects: 2,200 msg/s with 2,000 subjects, and
a fleet that has fallen behind never catches up. In memory the same filters give 49,000 msg/s. A mirror has the
stream's own sequences, so positions mean the same on both, and changing over is nothing but a new session.

A mirror is a *window* that moves along the stream. As long as it has room it follows the end of the stream; full, it
stops (`discard` is `new`), everybody reads to its end, and its keeper makes it anew from there. So a backlog of any
length is read at the speed of memory, one window after the other. Stragglers, at most a fifth of the workers, are not
waited for: what they lack is read from the stream itself.

Guards NoLoss and Order: a mirror never drops a message by itself. What nobody needs is trimmed by its keeper, in this
order: it writes down how far it is going to trim, reads what all workers need, and trims to the lowest of these; a
worker that begins on the mirror stores what it needs, reads how far trimming may go, and begins there or above. So
either the keeper sees the worker's need or the worker sees the keeper's mark.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parti.core.retention import LIMITS

OFF, ON, AUTO = "off", "on", "auto"
ORIGIN = "parti.origin.created"
"""Metadata of a mirror: creation time of the stream that it copies. A stream made anew has other messages."""

_MANY_SUBJECTS = 200
"""With fewer, the search costs less than 50 us a message."""
_LASTS_S = 1.0
"""A lag that is gone sooner is nobody's business."""
_QUIET_S = 600.0
_QUIET_RATE = 500.0
"""Messages a second that any stream serves, whatever the filters."""
_BACK_AFTER_S = 2.0
_REMADE_S = 5.0
_STUCK_S = 2.0
_FORSAKEN_S = 15.0
"""A mirror that stands still for so long has no keeper: whoever notices makes it anew."""
_FORSAKEN = f"the mirror has not followed its stream for {_FORSAKEN_S:g} s, and nobody looks after it"
_ALMOST = 1_000
"""A copy that lags by fewer messages than this is there: the rest arrives while the session begins."""
_AHEAD = 10_000
"""Messages that make a copy worth reading although it has not reached the end of the stream."""
_TRIM_AT = 0.1
_PRESSED = 0.8
_FULL = 0.95
_STRAGGLERS = 5
"""One worker in so many is not waited for."""
_PATIENCE_S = 5.0
"""How long stragglers are waited for, and twice that half of the workers."""


@dataclass(frozen=True, slots=True)
class MirrorState:
    """A hot mirror as its leader describes it."""

    first_seq: int
    last_seq: int
    messages: int
    size: int
    """Bytes."""
    age_s: float
    """Of its oldest message."""
    origin_created: str
    start: int = 1
    """Where copying began: nothing below will ever be there."""
    consumers: int = 0

    @property
    def begins(self) -> int:
        """The first sequence that it holds or will hold."""
        return max(self.first_seq if self.messages else self.last_seq + 1, self.start)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large and how old a mirror may get."""

    max_bytes: int
    max_age_s: float

    def pressed(self, mirror: MirrorState) -> bool:
        """Whether stragglers should make room."""
        return mirror.size > _PRESSED * self.max_bytes or mirror.age_s > self.max_age_s

    def filled(self, mirror: MirrorState, stream_last_seq: int) -> bool:
        """Whether there is enough in it to begin reading.

        Who reads at the heels of the copying is given messages one by one, which takes twice as long.
        """
        return 2 * mirror.size > self.max_bytes or mirror.last_seq + _ALMOST > stream_last_seq

    def full(self, mirror: MirrorState) -> bool:
        """Whether it is as good as full."""
        return mirror.size > _FULL * self.max_bytes


def mirror_name(prefix: str, stream: str, alone: str = "") -> str:
    """Name of the mirror; a worker that is not in a fleet (`alone`: its id) has one of its own."""
    return "-".join(part for part in (prefix, alone, "hot", stream) if part)


def mirror_config(
    name: str, origin: str, origin_created: str, *, start: int, max_bytes: int, replicas: int
) -> dict[str, Any]:
    """The configuration of a mirror that begins at sequence `start`."""
    return {
        "name": name,
        "storage": "memory",
        "mirror": {"name": origin, "opt_start_seq": max(1, start)},
        "max_bytes": max_bytes,
        # Full, it stops. To drop the oldest would be to drop, unseen, what somebody has not been given yet.
        "discard": "new",
        "num_replicas": replicas,
        "allow_direct": True,
        "metadata": {ORIGIN: origin_created},
        "description": "parti's copy of recent messages; made, trimmed and deleted by parti",
    }


def why_not(retention: str, storage: str, *, ordered: bool, one_filter: bool = False) -> str:
    """Why a stream must not, or need not, be read through a mirror; empty when it may be."""
    if retention != LIMITS.name:
        return (
            f"the stream has {retention} retention, where messages leave it by being acknowledged to its own "
            f"consumers, and a mirror's acknowledgements do not count"
        )
    if not ordered:
        return "messages are handled out of order (ordered=false), which needs acknowledgements by the stream itself"
    if storage == "memory":
        return "the stream is in memory already"
    if one_filter:
        return "every subject is read, through one wildcard, and the server need not search for messages"
    return ""


# ── keeping it ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What the keeper of a mirror does next."""

    trim: int = 0
    """Drop everything below, after the announcement; 0: nothing."""
    room: int = 0
    """Have those who need something older begin here, and read the rest from the stream; 0: nobody."""
    remake: int = 0
    """Delete it and make it anew, beginning here; 0: leave it."""
    drop: bool = False
    """Delete it: nobody reads it, and it is of no use as it is."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a mirror."""

    needs: Sequence[int]
    """For each worker the lowest sequence that it may have to be given."""
    unread: Sequence[int] = ()
    """For each consumer on the mirror how much of it has not been delivered; asked for only when it stands still."""

    def needed(self, spare: int) -> int:
        """The lowest need, not counting that of so many stragglers; 0 when there are no workers."""
        needs = sorted(self.needs)
        return needs[min(spare, len(needs) - 1)] if needs else 0

    @property
    def stragglers(self) -> int:
        """How many need not be waited for."""
        return len(self.needs) // _STRAGGLERS


def trim_to(mirror: MirrorState, needs: Iterable[int], bounds: Bounds) -> int:
    """How far the mirror can be trimmed: to the lowest need, once that is worth it; 0 for not now."""
    lowest = min((*needs, mirror.last_seq + 1))
    gain = max(0, lowest - mirror.begins)
    # Counted in messages as if all were of one size; a little lag costs nothing and spares many small trims.
    worth = mirror.messages and gain * mirror.size > _TRIM_AT * bounds.max_bytes * mirror.messages
    return lowest if worth else 0


class Keeper:
    """Decides what is done with a mirror, look by look.

    Stragglers are given up only after a while: what they lack has to be searched for in the stream, which takes the
    server ten times as long, and workers that wake up from a stall do not all wake at once.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._held_back_since_s: float | None = None
        self._still_since_s: float | None = None
        self._through_since_s: float | None = None
        self._last_seq = -1

    def stands_still(self, mirror: MirrorState, stream_last_seq: int, now_s: float) -> bool:
        """Whether it has stopped behind its stream, as a full one does. To be asked at each look, first of all."""
        moved, self._last_seq = mirror.last_seq != self._last_seq, mirror.last_seq
        if moved or mirror.last_seq >= stream_last_seq:
            self._still_since_s = self._through_since_s = None
            return False
        self._still_since_s = now_s if self._still_since_s is None else self._still_since_s
        return self._bounds.full(mirror) or now_s - self._still_since_s >= _STUCK_S

    def follows(self, mirror: MirrorState, readers: Readers, now_s: float) -> Upkeep:
        """What to do with a mirror that follows its stream."""
        most = readers.needed(readers.stragglers)
        quarter = mirror.begins + (mirror.last_seq + 1 - mirror.begins) // 4
        held_back = self._bounds.pressed(mirror) and most > quarter > min(readers.needs, default=0)
        if not held_back:
            self._held_back_since_s = None
        elif self._held_back_since_s is None:
            self._held_back_since_s = now_s
        since_s = self._held_back_since_s
        lasting = since_s is not None and now_s - since_s >= _PATIENCE_S
        return Upkeep(trim=trim_to(mirror, readers.needs, self._bounds), room=most if lasting else 0)

    def has_stopped(self, mirror: MirrorState, readers: Readers, now_s: float) -> Upkeep:
        """What to do with one that stands still: made anew, it goes on once nearly all have read it to its end."""
        if not mirror.consumers:
            return Upkeep(drop=True)
        reading = sum(bool(unread) for unread in readers.unread)
        if 2 * reading > len(readers.unread):
            self._through_since_s = None
            return Upkeep()
        if self._through_since_s is None:
            self._through_since_s = now_s
        waited_s = now_s - self._through_since_s
        if not reading:
            start = readers.needed(0)
        elif waited_s >= _PATIENCE_S and reading <= readers.stragglers:
            start = readers.needed(readers.stragglers)
        elif waited_s >= 2 * _PATIENCE_S:
            start = readers.needed(len(readers.needs) // 2)
        else:
            return Upkeep()
        # Who was given everything need not have finished it, or told so; a window that begins where the last one did
        # would not get anywhere.
        if start > mirror.begins + (mirror.last_seq - mirror.begins) // 2:
            return Upkeep(remake=min(start, mirror.last_seq + 1))
        return Upkeep(remake=mirror.last_seq + 1 if waited_s >= 2 * _PATIENCE_S or not mirror.messages else 0)


# ── whether to use it ─────────────────────────────────────────────────────────────────────────────────────────────


class Move(enum.Enum):
    """What a worker does about the mirror."""

    STAY = "stay"
    MAKE = "make"
    """Make sure that the mirror is there; read on where it reads now."""
    ENTER = "enter"
    LEAVE = "leave"
    REBUILD = "rebuild"
    """Leave, and delete the mirror: it is of no use to anybody."""
    MAKE_ROOM = "make room"
    """Begin anew, further ahead; what lies between is read from the stream."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A move, and the reason for the log."""

    move: Move
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What a worker sees at one moment."""

    now_s: float
    last_seq: int
    """Of the stream itself."""
    subjects: int
    """In the stream."""
    created: str
    filters: int
    reached: int
    """One past the last message that was delivered."""
    waiting: bool
    """Messages are there that were not delivered yet."""
    need: int
    """Below it, this worker needs nothing from the mirror."""
    mirror: MirrorState | None
    room: int = 0
    """Those who need something older are asked to begin here."""
    remaking: bool = False
    """Its keeper is about to make the mirror anew."""


class Chooser:
    """Decides where one worker reads; `mode` is `on` or `auto`."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._lagging_since_s: float | None = None
        self._busy_s: float | None = None
        self._before: Look | None = None
        self._still_since_s: float | None = None
        self._left_s = self._seen_s = float("-inf")

    def advise(self, look: Look, *, inside: bool) -> Advice:
        """What to do now; `inside`: the worker reads from the mirror."""
        self._note(look)
        advice = self._inside(look) if inside else self._outside(look)
        if advice.move in {Move.LEAVE, Move.REBUILD}:
            self._left_s = look.now_s
        self._before = look
        return advice

    def _note(self, look: Look) -> None:
        before, behind = self._before, look.last_seq + 1 - look.reached
        lagging = look.waiting and look.filters > 1 and behind > look.subjects >= _MANY_SUBJECTS
        self._lagging_since_s = (self._lagging_since_s or look.now_s) if lagging else None
        elapsed_s = look.now_s - before.now_s if before else 0.0
        rate = (look.last_seq - before.last_seq) / elapsed_s if before and elapsed_s > 0 else _QUIET_RATE
        if self._busy_s is None or lagging or rate >= _QUIET_RATE:
            self._busy_s = look.now_s
        mirror, known = look.mirror, before.mirror if before else None
        self._seen_s = look.now_s if mirror else self._seen_s
        follows = mirror is None or known is None or mirror.last_seq != known.last_seq
        if follows or (mirror is not None and mirror.last_seq >= look.last_seq):
            self._still_since_s = None
        elif self._still_since_s is None:
            self._still_since_s = look.now_s

    def _outside(self, look: Look) -> Advice:
        mirror = look.mirror
        if mirror and mirror.origin_created != look.created:
            return Advice(Move.REBUILD, "the mirror copies a stream that is gone")
        if mirror and self._forsaken(look):
            return Advice(Move.REBUILD, _FORSAKEN)
        wanted = self._why_enter(look)
        if not wanted or look.now_s - self._left_s < _BACK_AFTER_S:
            return Advice(Move.STAY)
        if mirror is None:
            return Advice(Move.STAY if self._comes_back(look) else Move.MAKE, wanted)
        there = mirror.last_seq + _ALMOST > look.last_seq
        ahead = mirror.last_seq - max(look.reached, mirror.begins) > _AHEAD
        return Advice(Move.ENTER, wanted) if there or ahead else Advice(Move.STAY)

    def _why_enter(self, look: Look) -> str:
        if self._mode == ON:
            return "hot_mirror=on"
        since_s = self._lagging_since_s
        if since_s is not None and look.now_s - since_s >= _LASTS_S:
            behind = look.last_seq + 1 - look.reached
            return (
                f"{behind} messages behind with {look.filters} filters on a file stream of {look.subjects} "
                f"subjects, where the server searches long for each message"
            )
        # Filtered reading of the stream goes well only as long as nobody lags; others have found that out.
        return "others of this fleet read from it" if look.mirror and look.mirror.consumers else ""

    def _inside(self, look: Look) -> Advice:
        mirror = look.mirror
        if mirror is None:
            gone = Advice(Move.LEAVE, "the mirror is gone, as after a restart of the server")
            return Advice(Move.STAY) if self._comes_back(look) else gone
        if mirror.origin_created != look.created:
            return Advice(Move.REBUILD, "the stream was made anew")
        if self._forsaken(look):
            return Advice(Move.REBUILD, _FORSAKEN)
        assert self._busy_s is not None
        if self._mode == AUTO and look.now_s - self._busy_s > _QUIET_S:
            return Advice(Move.LEAVE, f"less than {_QUIET_RATE:g} msg/s for {_QUIET_S / 60:g} minutes")
        if look.need < look.room:
            return Advice(Move.MAKE_ROOM, "far behind the others; what this worker lacks is read from the stream")
        return Advice(Move.STAY)

    def _comes_back(self, look: Look) -> bool:
        return look.remaking and look.now_s - self._seen_s < _REMADE_S

    def _forsaken(self, look: Look) -> bool:
        since_s = self._still_since_s
        return since_s is not None and look.now_s - since_s >= _FORSAKEN_S
