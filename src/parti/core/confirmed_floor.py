"""The confirmed floor: below it, no acknowledgement can have been lost.

An acknowledgement is not durable when it is sent. One that is dropped while the connection is down, or that reached
the server less than about 50 ms before it was killed (nats-server 2.15), leaves its message in a work-queue
or interest stream. If the consumer then goes on at the position, the server never delivers that message again, and it
stays for ever. So a new session begins at the confirmed floor instead: what is stored between it and the position is
delivered once more, recognised as finished, and acknowledged again. On a work-queue just those messages are left
whose acknowledgement was lost, so this costs nothing.

An acknowledgement may also be stuck on its way, with the server still heard well: that shows only when pings are not
answered any more. So what was acknowledged is confirmed when a connection that is broken would have been given up.
"""

from __future__ import annotations

from collections import deque

SETTLE_S = 5.0
"""How long, at the least, a session has to last until what was acknowledged in it counts as stored."""


class ConfirmedFloor:
    """Follows the floor of one consumer, `settle_s` behind; a session that ends earlier confirms nothing.

    >>> floor = ConfirmedFloor()
    >>> floor.begin(10)
    10
    >>> floor.note(0.0, 50), floor.note(6.0, 90), floor.begin(95)
    (None, None, 50)
    """

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        """`settle_s`: how long it takes to notice that nothing gets through to the server."""
        self._settle_s = max(SETTLE_S, settle_s)
        self._value = 0
        self._notes: deque[tuple[float, int]] = deque()

    def begin(self, position: int) -> int:
        """Begin a session of which all below `position` is finished; returns the sequence to go back to."""
        self._value = min(position, self._value or position)
        self._notes.clear()
        return self._value

    def note(self, now_s: float, floor: int) -> None:
        """The session goes on, and all below `floor` is acknowledged."""
        self._notes.append((now_s, floor))
        while self._notes[0][0] <= now_s - self._settle_s:
            self._value = max(self._value, self._notes.popleft()[1])

    def start_over(self) -> None:
        """The stream is another one: nothing that is known holds."""
        self._value = 0
        self._notes.clear()
