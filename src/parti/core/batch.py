"""How many messages to ask for, and when to ask for none."""

from __future__ import annotations

from dataclasses import dataclass

_SLOW_BACKLOG_S = 1.0
"""Work queued for longer than this is better left on the server, where it can still move to another worker."""


@dataclass(frozen=True, slots=True)
class Load:
    """What happened since the last look."""

    finished: int
    elapsed_s: float
    waiting: int


def after_fill(batch: int, *, held: int, ceiling: int) -> int:
    """The batch after a pull came back full: twice as large if the handlers keep up with the present one."""
    return max(1, min(ceiling, batch * 2 if held <= batch else batch))


def after_a_while(batch: int, load: Load, *, ceiling: int) -> int:
    """The batch after a look at the handlers: half as large when more than a second of work has piled up."""
    if load.elapsed_s > 0 and load.waiting > load.finished / load.elapsed_s * _SLOW_BACKLOG_S:
        return max(1, batch // 2)
    return max(1, min(batch, ceiling))


def pull_size(batch: int, *, limit: int, inflight: int, credit: int) -> int:
    """How many messages the next pull may ask for; 0 means do not pull now.

    `inflight` messages are here and unacknowledged, `credit` more may come on standing pulls. Asking for a
    handful at a time would cost a request per message, so small room is left alone while other pulls stand.
    """
    room = limit - inflight - credit
    if room <= 0:
        return 0
    if credit and room < max(1, min(batch, limit) // 2):
        return 0
    return min(batch, room)
