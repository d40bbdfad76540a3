"""What a worker does with a job that is delivered to it, by the record that it finds.

The server delivers a job again when it was not acknowledged in time; and, after a crash of the server, whatever it
has forgotten. So a delivery alone says little: the job may be done, may run elsewhere at this moment, or may be what
has killed the process that had it. The record tells. It is claimed by compare-and-set before the handler starts, so
that of two workers with the same job one starts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from parti.model.job import JobRecord, JobState

_ALIVE = 0.8
"""A worker counts as alive for this share of ack_wait after its last sign: the server waits for the whole of it, from
a heartbeat that is at most a tenth of ack_wait older than the sign."""
_SOONEST_S = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """Run it."""

    attempt: int = 1
    failures: int = 0
    crashes: int = 0
    alone: bool = False
    """One more death of its process would condemn it: no other such job may run beside it."""


@dataclass(frozen=True, slots=True)
class Skip:
    """It has ended before: acknowledge it."""

    state: JobState


@dataclass(frozen=True, slots=True)
class Cancel:
    """An operator does not want it any more."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another process runs it: give it back, and look again after `delay_s`."""

    worker: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Condemn:
    """It has taken too many processes with it: dead-letter it."""

    crashes: int
    reason: str


Verdict: TypeAlias = Start | Skip | Cancel | Elsewhere | Condemn


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who asks, and by which rules."""

    incarnation: str
    ack_wait_s: float
    crash_limit: int


def judge(
    record: JobRecord | None, published_ns: int, claimant: Claimant, *, cancelled: bool, now_s: float
) -> Verdict:
    """Decide about a delivery; `published_ns` is the time of the message, `cancelled` what an operator has asked."""
    if record is None or record.published_ns != published_ns:
        return Cancel() if cancelled else Start()
    if record.state.final:
        return Skip(record.state)
    stranger = bool(record.worker) and record.incarnation != claimant.incarnation
    silent_s = max(0.0, now_s - record.seen_s)
    # A clock that is far ahead says nothing: the job would wait until that time has come.
    if stranger and abs(now_s - record.seen_s) < _ALIVE * claimant.ack_wait_s:
        return Elsewhere(record.worker, max(_SOONEST_S, claimant.ack_wait_s - silent_s))
    if cancelled:
        return Cancel()
    crashes = record.crashes + (stranger and record.state is JobState.RUNNING)
    if crashes >= claimant.crash_limit and crashes > record.crashes:
        return Condemn(crashes, f"the process of its worker died {crashes} times while it ran, last {record.worker}")
    attempt = record.failures + crashes + 1
    return Start(attempt, record.failures, crashes, alone=crashes >= max(1, claimant.crash_limit - 1))
