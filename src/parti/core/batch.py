"""How many messages to ask for, and when to ask for none."""

from __future__ import annotations

from dataclasses import dataclass

# Work queued for longer than this is better left on the server, where it can still move to another worker.
_SLOW_BACKLOG_S = 1.0
_FAST_BACKLOG_S = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """What happened since the last look."""

    finished: int
    elapsed_s: float
    waiting: int
    filled_pulls: int


def next_batch(batch: int, load: Load, *, ceiling: int) -> int:
    """Adapt the batch size to what the handlers can take.

    It doubles while pulls come back full and the lanes drain quickly, and halves when more than a second of work
    has piled up. An idle stream leaves it alone.
    """
    if load.elapsed_s <= 0:
        return batch
    rate = load.finished / load.elapsed_s
    backlog_s = load.waiting / rate if rate > 0 else (float("inf") if load.waiting else 0.0)
    if backlog_s > _SLOW_BACKLOG_S:
        return max(1, batch // 2)
    if load.filled_pulls and backlog_s < _FAST_BACKLOG_S:
        return max(1, min(ceiling, batch * 2))
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
