"""What becomes of a message whose handler raised: another attempt, or the dead-letter stream.

A message that no attempt could handle is finished only when it is stored as a dead letter; until then its lane
waits. What fails at present can be asked for, for the heartbeat.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

import structlog

from parti.core.lane import Lane, Phase
from parti.core.retry import GiveUp, HandlerTimeout, RetryPolicy, TryAgain, after_failure, describe
from parti.core.tracebacks import traceback_of
from parti.model.message import Message
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import Supervised, supervise

_log = structlog.get_logger("parti.lanes")
_MOST_FAILING = 100


class DeadLetters(Protocol):
    """Where messages go that no attempt could handle."""

    async def send(self, message: Message, reason: str, traceback: str = "") -> None:
        """Return only when the message is stored; keep trying until then. `traceback`: of its last attempt."""


class Retries(Protocol):
    """The lanes, which carry out what is decided here."""

    def try_again(self, lane: Lane, message: Message, decision: TryAgain) -> None:
        """Have the message handled again after a delay."""

    def still_fails(self, partition_id: str, seq: int) -> bool:
        """Whether a message that has failed is still to be handled here."""

    def buried(self, lane: Lane, message: Message) -> None:
        """The message is stored as a dead letter: it is finished, and its lane goes on."""


class Failures:
    """Decides after each failure, sends dead letters and remembers what fails now, of so many partitions."""

    def __init__(self, lanes: Retries, policy: RetryPolicy, dead_letters: DeadLetters, metrics: Metrics) -> None:
        self.health: Health | None = None
        """Told of dead letters that fail in a way that nobody has foreseen."""
        self._lanes = lanes
        self._policy = policy
        self._dead_letters = dead_letters
        self._metrics = metrics
        self._failing: dict[str, tuple[int, str]] = {}
        self._tasks: set[Supervised] = set()
        self._burying: set[Lane] = set()

    def failed(self, lane: Lane, message: Message, error: BaseException) -> None:
        """The handler of a message raised: have it tried again, or dead-letter it."""
        decision = after_failure(self._policy, message.attempt, error)
        if isinstance(error, HandlerTimeout):
            self._metrics.handler_failures.inc("timeout")
        if isinstance(decision, GiveUp):
            self._metrics.handler_failures.inc(decision.outcome)
            self._bury_soon(lane, message, decision.reason, traceback_of(error))
        else:
            self._metrics.handler_failures.inc("retry")
            self._note(message, describe(error))
            _log.warning(
                "handler failed, will retry",
                error=describe(error),
                delay_s=decision.delay_s,
                **log_fields(message),
                **trace_field(traceback_of(error)),
            )
            self._lanes.try_again(lane, message, decision)

    def gives_up(self, message: Message, error: BaseException) -> bool:
        """Whether the message is not to be tried again after this failure."""
        return isinstance(after_failure(self._policy, message.attempt, error), GiveUp)

    def pause_s(self, attempts: int) -> float:
        """The wait after so many failed attempts."""
        return self._policy.delay_s(attempts)

    def failed_after_release(self, message: Message, error: BaseException) -> None:
        """The handler of a message raised whose partition was released: the next owner tries it again."""
        _log.warning(
            "handler failed after its partition was released",
            error=describe(error),
            **log_fields(message),
            **trace_field(traceback_of(error)),
        )

    def overdue(self, lane: Lane, running_s: float) -> None:
        """A handler that cannot be interrupted has run longer than it should: say so."""
        self._metrics.handler_failures.inc("timeout")
        _log.error(
            "handler exceeds its timeout and cannot be interrupted; its partition waits",
            running_s=round(running_s, 1),
            **log_fields(lane.waiting[0]),
        )

    def start_over(self) -> None:
        """The stream was made anew: what failed is gone."""
        self._failing.clear()

    # ── what fails now ────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, message: Message, error: str) -> None:
        self._failing.pop(message.partition.id, None)
        self._failing[message.partition.id] = (message.seq, f"message {message.seq}, try {message.attempt}: {error}")
        if len(self._failing) > _MOST_FAILING:
            del self._failing[next(iter(self._failing))]

    def failing_now(self) -> dict[str, str]:
        """Partitions whose head has failed and is to be tried again: which message, how often, and why."""
        for partition_id, (seq, _) in list(self._failing.items()):
            if not self._lanes.still_fails(partition_id, seq):
                del self._failing[partition_id]
        return {partition_id: text for partition_id, (_, text) in self._failing.items()}

    # ── dead letters ──────────────────────────────────────────────────────────────────────────────────────────

    def bury_head(self, lane: Lane, reason: str) -> None:
        """Dead-letter the head of a lane that is held, without starting it."""
        lane.phase = Phase.RUNNING
        self._bury_soon(lane, lane.waiting[0], reason)

    def buries(self, lane: Lane) -> bool:
        """Whether the head of a lane is on its way to the dead-letter stream."""
        return lane in self._burying

    def _bury_soon(self, lane: Lane, message: Message, reason: str, traceback: str = "") -> None:
        self._burying.add(lane)
        supervise(partial(self._bury, lane, message, reason, traceback), "dead-letter", self.health, keep=self._tasks)

    async def _bury(self, lane: Lane, message: Message, reason: str, traceback: str) -> None:
        # Whatever the stream raises: until the letter is stored, the lane does not go on.
        await self._dead_letters.send(message, reason, traceback)
        self._burying.discard(lane)
        self._metrics.dead_letters.inc()
        _log.error("message dead-lettered", reason=reason, **log_fields(message), **trace_field(traceback))
        self._lanes.buried(lane, message)

    async def settle_dead_letters(self) -> None:
        """Wait for dead letters that are on their way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cancel_dead_letters(self) -> None:
        """Give up on dead letters that are on their way; their messages stay unfinished."""
        for task in self._tasks:
            task.cancel()


def log_fields(message: Message) -> dict[str, object]:
    """What a log line says of a message: where it is, never what it contains."""
    return {
        "stream": message.stream,
        "seq": message.seq,
        "subject": message.subject,
        "partition": message.partition.id,
        "attempt": message.attempt,
    }


def trace_field(traceback: str) -> dict[str, str]:
    """The field of a log line that shows a traceback, if there is one."""
    return {"exception": traceback} if traceback else {}
