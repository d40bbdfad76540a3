"""Records that could not be read: counted, and told once.

Readers look again and again, and somebody may write nonsense again and again: each refused value counts once, and
each key is in the log at most once in a while.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from parti.errors import DecodeError
from parti.telemetry.instruments import LabelledCounter

_log = structlog.get_logger("parti.records")

KINDS = (
    *("assignment", "claims", "fleet", "health", "history", "ids", "jobs", "leader", "load"),
    *("mirror", "orders", "progress", "standby", "state", "other"),
)
"""First words of the keys that records lie under; the label values of the metric."""
_AGAIN_S = 60.0
_KEYS = 4096


@dataclass(slots=True)
class _Known:
    revision: int
    said_s: float


class Refusals:
    """What the readers of one process have refused."""

    def __init__(self, counter: LabelledCounter, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def note(self, key: str, revision: int, error: DecodeError, then: str = "it is ignored") -> None:
        """A value was refused; `then` says what its reader does instead."""
        known = self._known.get(key)
        if known and known.revision == revision:
            return
        kind = key.partition(".")[0]
        self._counter.inc(kind if kind in KINDS else "other")
        now_s = self._clock()
        if known is None or now_s - known.said_s >= _AGAIN_S:
            known = _Known(revision, now_s)
            _log.error(f"a record is unreadable; {then}", key=key, revision=revision, error=str(error))
        known.revision = revision
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > _KEYS:
            self._known.popitem(last=False)
