"""Being pinned: what a client of a pinned group knows, and which id it sends with its pulls.

    UNPINNED --message with id x--> PINNED x --reconnected--> UNSURE x --message with id x--> PINNED x
    PINNED x, UNSURE x --423 for a pull with x; leader change; consumer gone; left--> UNPINNED
    PINNED x, UNSURE x --message with id y--> PINNED y (x was lost without a word)

The server decides, and tells late: a client that was stopped, or cut off, or whose pull still stands, believes in a
pin that somebody else has by now. So a pin says who *should* work, never that nobody else does. Guards that an id
that was lost is neither sent nor believed again, however late its messages and statuses arrive.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

_REMEMBERED = 16


class PinState(enum.StrEnum):
    """What a client may believe."""

    UNPINNED = "unpinned"
    PINNED = "pinned"
    UNSURE = "unsure"
    """Pinned before a disconnect; the id is still sent, and the server's answer decides."""


@dataclass(frozen=True, slots=True)
class PinChange:
    """A pin was taken or lost."""

    taken: bool
    pin_id: str
    reason: str


class Pin:
    """The pin of one client in one group. All methods are told what happened and return what changed by it."""

    __slots__ = ("_lost", "id", "sure")

    def __init__(self) -> None:
        self.id = ""
        """What to send with every pull; empty: none."""
        self.sure = True
        self._lost: deque[str] = deque(maxlen=_REMEMBERED)

    @property
    def state(self) -> PinState:
        """What this client may believe now."""
        if not self.id:
            return PinState.UNPINNED
        return PinState.PINNED if self.sure else PinState.UNSURE

    def on_message(self, pin_id: str) -> tuple[PinChange, ...]:
        """A message came that carries this id; empty: none, which says nothing."""
        if not pin_id or pin_id in self._lost:
            return ()
        if pin_id == self.id:
            self.sure = True
            return ()
        lost = self._lose("another pin was given")
        self.id, self.sure = pin_id, True
        return (*lost, PinChange(True, pin_id, "first message"))

    def on_status(self, code: int, text: str, sent_id: str) -> tuple[PinChange, ...]:
        """A pull that was sent with `sent_id` (empty: none) was answered with a status."""
        if code == 423:
            return self._lose(f"{code} {text}".strip()) if sent_id and sent_id == self.id else ()
        said = text.lower()
        # The pin lives in the memory of the consumer's leader.
        if code == 409 and ("leadership change" in said or "consumer deleted" in said):
            return self._lose(f"{code} {text}")
        return ()

    def on_leave(self) -> tuple[PinChange, ...]:
        """This client pulls no more."""
        return self._lose("left")

    def on_reconnect(self) -> None:
        """The connection was lost and is back: the pin may be, too, and asking with its id does no harm."""
        self.sure = not self.id

    def _lose(self, reason: str) -> tuple[PinChange, ...]:
        if not self.id:
            return ()
        lost, self.id, self.sure = self.id, "", True
        self._lost.append(lost)
        return (PinChange(False, lost, reason),)
