"""Ending a migration where it stands: from where the fleet has what is withheld, and what speaks against it.

Guards that no partition is given to the fleet in silence while its old consumer may go on, or while it is not known
what that one has finished: such a doubt has a name, and has to be confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import msgspec

from parti.core.migration import ConsumerState
from parti.core.retention import WORK_QUEUE
from parti.errors import ConfigError
from parti.model.migration import Holder, OldConsumer

Doubt = Literal["taken", "read", "busy", "gone", "unknown"]
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Around:
    """What is the same for every partition."""

    retention: str
    same_stream: bool
    """False: the stream is gone or was made anew, and positions of the one before mean nothing."""
    returning: bool
    """A rollback has begun and not ended: an old consumer may have handled something that is not recorded."""
    at: datetime


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one partition."""

    partition: str
    old: OldConsumer | None
    """Its record as it will be, with the position that the fleet begins at; None: there is none."""
    doubt: Doubt | None = None
    in_flight_msgs: int = 0


def judge(partition: str, old: OldConsumer | None, state: ConsumerState | None, around: Around) -> Verdict:
    """From where the fleet may have a partition, and what speaks against it; `state`: its old consumer as it is."""
    if old is None:
        return Verdict(partition, None, "unknown")
    doubt = _doubt(old, state, around)
    holder: Holder = "both" if doubt == "read" else "fleet"
    position = max(old.position, _finished(state)) if around.same_stream else 0
    gone = bool(old.consumer) and state is None
    changed = msgspec.structs.replace(old, holder=holder, position=position, removed=gone, at=around.at)
    return Verdict(partition, changed, doubt, state.ack_pending if state else 0)


def _doubt(old: OldConsumer, state: ConsumerState | None, around: Around) -> Doubt | None:
    queue = around.retention == WORK_QUEUE.name
    if state:
        if queue:
            return "taken"
        if not state.stopped:
            return "read"
        return "busy" if state.ack_pending else None
    if not old.consumer or not around.same_stream or queue:
        return None  # nobody has finished anything that is still in the stream
    known = old.holder == "fleet" and old.removed and not around.returning
    return None if known else "gone"


def _finished(state: ConsumerState | None) -> int:
    """Everything below this is surely finished; 0 when nobody can tell."""
    if state is None:
        return 0
    return state.ack_floor + 1 if state.position is None else state.position


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────

_SAID: Mapping[Doubt, Callable[[int, int], str]] = {
    "read": lambda n, _: f"{n:,} old consumer{'s' * (n != 1)} can still be read from",
    "busy": lambda _, msgs: f"{msgs:,} message{' is' if msgs == 1 else 's are'} in flight",
    "gone": lambda n, _: f"{n:,} old consumer{' is' if n == 1 else 's are'} gone",
    "unknown": lambda n, _: f"no record says who reads {n:,} partition{'s' * (n != 1)}",
}
_MEANS: Mapping[Doubt, str] = {
    "read": ", and both sides then handle the same messages",
    "busy": ", and everything above the ack floor is handled again",
    "gone": ", and what they have finished since the last record is handled again",
}


@dataclass(frozen=True, slots=True)
class Abandonment:
    """What an end of the migration comes to."""

    verdicts: tuple[Verdict, ...]

    def check(self, *, confirmed: bool) -> None:
        """Raise `ConfigError` where it cannot be, or where it was not confirmed that messages may be repeated."""
        if taken := [v for v in self.verdicts if v.doubt == "taken"]:
            raise ConfigError(
                f"a worker cannot have the subject of a work-queue that an old consumer has; switch them, or delete "
                f"them first: what is unfinished stays in the stream ({_names(taken)})"
            )
        if self.doubts and not confirmed:
            raise ConfigError(f"this would {self.foreseen}; say --yes if that is meant")

    @property
    def positions(self) -> dict[str, int]:
        """Where the fleet begins, as far as it is known."""
        return {v.partition: v.old.position for v in self.verdicts if v.old and v.old.position}

    @property
    def doubts(self) -> str:
        """What speaks against it, in one line; empty: nothing."""
        said = []
        for doubt in _SAID:
            if found := [v for v in self.verdicts if v.doubt == doubt]:
                text = _SAID[doubt](len(found), sum(v.in_flight_msgs for v in found))
                said.append(f"{text} ({_names(found)}){_MEANS.get(doubt, '')}")
        return "; ".join(said)

    @property
    def foreseen(self) -> str:
        """What it would do, as the end of a sentence."""
        if not self.verdicts:
            return "end the migration; no partition is withheld"
        return f"end the migration and let the fleet have {_partitions(self.verdicts)}{self._although}"

    @property
    def said(self) -> str:
        """What came of it."""
        if not self.verdicts:
            return "no partition is withheld"
        are = "is" if len(self.verdicts) == 1 else "are"
        return f"{_partitions(self.verdicts)} {are} withheld no longer{self._although}"

    @property
    def _although(self) -> str:
        return f", although {self.doubts}" if self.doubts else ""


def _partitions(verdicts: Sequence[Verdict]) -> str:
    return f"{len(verdicts):,} partition{'s' * (len(verdicts) != 1)}"


def _names(verdicts: Sequence[Verdict]) -> str:
    names = [(v.old.consumer if v.old else "") or v.partition for v in verdicts]
    more = len(names) - _NAMED
    return f"{', '.join(names[:_NAMED])}{f' and {more:,} more' if more > 0 else ''}"
