"""The hot mirror: when a worker reads a copy of its stream in memory, and what may be dropped from that copy.

On file storage the server searches the whole subject index of a block for each message of a consumer with several
filters, once the consumer lags by more messages than the stream has subjects: 2,200 msg/s with 2,000 subjects, and
a fleet that has fallen behind never catches up. In memory the same filters give 49,000 msg/s. A mirror has the
stream's own sequences, so positions mean the same on both, and changing over is nothing but a new session.

Guards NoLoss and Order: a mirror never drops a message by itself. When it is full it stops following (`discard` is
`new`), and workers go back to the stream. What nobody needs is trimmed by the fleet, in this order: the trimmer
writes down how far it is going to trim, reads the floors of all workers, and trims to the lowest of these; a worker
that begins on the mirror stores its floor, reads how far trimming may go, and begins there or above. So either the
trimmer sees the worker's floor or the worker sees the trimmer's mark. What lies below is read from the stream itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
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
_STUCK_S = 2.0
_STUCK = "the mirror follows its stream no longer, as when it was full (hot_mirror_max_bytes)"
_ALMOST = 1_000
"""A copy that lags by fewer messages than this is there: the rest arrives while the session begins."""
_TRIM_AT = 0.1
_PRESSED = 0.8


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
        """Whether those who are far behind should make room."""
        return mirror.size > _PRESSED * self.max_bytes or mirror.age_s > self.max_age_s


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


def safe_start(mirror: MirrorState, bounds: Bounds) -> int:
    """The lowest sequence at which somebody may begin on the mirror without standing in the way of trimming.

    Under pressure a quarter is given up, and no more: what is skipped has to be fed from the stream, subject by
    subject, which takes the server ten times as long as the mirror would.
    """
    oldest = (mirror.last_seq + 1 - mirror.begins) // 4
    return mirror.begins + (oldest if bounds.pressed(mirror) else 0)


def trim_to(mirror: MirrorState, floors: Iterable[int], bounds: Bounds) -> int:
    """How far the mirror can be trimmed: to the lowest floor, once that is worth it; 0 for not now."""
    lowest = min((*floors, mirror.last_seq + 1))
    gain = max(0, lowest - mirror.begins)
    # Counted in messages as if all were of one size; a little lag costs nothing and spares many small trims.
    worth = mirror.messages and gain * mirror.size > _TRIM_AT * bounds.max_bytes * mirror.messages
    return lowest if worth else 0


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
    floor: int
    """Below it, this worker needs nothing from the mirror."""
    mirror: MirrorState | None


class Chooser:
    """Decides where one worker reads; `mode` is `on` or `auto`."""

    def __init__(self, mode: str, bounds: Bounds) -> None:
        self._mode = mode
        self._bounds = bounds
        self._lagging_since_s: float | None = None
        self._busy_s: float | None = None
        self._before: Look | None = None
        self._still_since_s: float | None = None
        self._left_s = float("-inf")

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
        follows = mirror is None or known is None or mirror.last_seq != known.last_seq
        if follows or (mirror is not None and mirror.last_seq >= look.last_seq):
            self._still_since_s = None
        elif self._still_since_s is None:
            self._still_since_s = look.now_s

    def _outside(self, look: Look) -> Advice:
        mirror = look.mirror
        if mirror and mirror.origin_created != look.created:
            return Advice(Move.REBUILD, "the mirror copies a stream that is gone")
        if mirror and self._is_stuck(look):
            return Advice(Move.REBUILD, _STUCK)
        wanted = self._why_enter(look)
        if not wanted or look.now_s - self._left_s < _STUCK_S:
            return Advice(Move.STAY)
        if mirror is None:
            return Advice(Move.MAKE, wanted)
        there = mirror.last_seq + _ALMOST > look.last_seq
        return Advice(Move.ENTER, wanted) if there else Advice(Move.STAY)

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
            return Advice(Move.LEAVE, "the mirror is gone, as after a restart of the server")
        if mirror.origin_created != look.created:
            return Advice(Move.REBUILD, "the stream was made anew")
        if self._is_stuck(look):
            return Advice(Move.REBUILD, _STUCK)
        assert self._busy_s is not None
        if self._mode == AUTO and look.now_s - self._busy_s > _QUIET_S:
            return Advice(Move.LEAVE, f"less than {_QUIET_RATE:g} msg/s for {_QUIET_S / 60:g} minutes")
        if self._bounds.pressed(mirror) and look.floor < safe_start(mirror, self._bounds):
            return Advice(Move.MAKE_ROOM, "too far behind for the mirror; the stream itself is read for a while")
        return Advice(Move.STAY)

    def _is_stuck(self, look: Look) -> bool:
        since_s = self._still_since_s
        return since_s is not None and look.now_s - since_s >= _STUCK_S
