"""The jobs that a worker has in hand: from their receipt over their handlers to their acknowledgement.

Each delivery becomes one task, never a thread. The task claims the job's record, calls the handler, stores how it
ended, and only then acknowledges, again and again until the server confirms it. Meanwhile heartbeats tell the server
that the job is being worked on, from its receipt on, also while it waits for slots.

Guards: a job that is in hand is not started twice, however often it is delivered; a job that has ended here is
acknowledged and not started again; whatever happens in a handler ends in exactly one of done, retry, failed,
cancelled and given back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from parti.core.job_claims import Cancel, Condemn, Elsewhere, Skip, Start, Verdict
from parti.core.retry import GiveUp, RetryPolicy, after_failure, describe
from parti.core.tracebacks import traceback_of
from parti.errors import ConnectionFailed, PartiError
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.dead_letters import DeadLetterStream
from parti.jetstream.wire import Wire
from parti.jobs.board import JobBoard
from parti.jobs.calls import Calls
from parti.jobs.job import Held, Job
from parti.jobs.scheduler import WeightedScheduler
from parti.model.headers import parse_reply
from parti.model.job import JobState
from parti.model.message import Message, Ownership
from parti.model.partition import Partition
from parti.model.safe_text import text_of
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import owned, report_death

_log = structlog.get_logger("parti.jobs.hand")

_REMEMBERED = 10_000
"""Jobs that have ended here and are recognised without a look at their records."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 2.0
_MISHAPS, _MISHAP_S = 5, 0.25
"""A job that could not be claimed or settled so often, for reasons that nobody has foreseen, is dead-lettered."""
_SAY_S = 5.0
_NEXT_TRY_S = 1.0
_UNCONFIRMED_TRIES, _UNCONFIRMED_S = 3, 10.0
"""An answer that was not confirmed so often, for so long, is not repeated: its job would keep a place for ever."""
_TICK_S = 0.25
"""How often, at least, it is looked what the server and the records have to be told."""


@dataclass(frozen=True, slots=True)
class HandPorts:
    """What the hand works with."""

    connection: Connection
    wire: Wire
    board: JobBoard
    calls: Calls
    scheduler: WeightedScheduler
    dead_letters: DeadLetterStream
    metrics: Metrics
    resources: object = None
    """What the app's lifespan has opened."""
    health: Health | None = None


class Hand:
    """All jobs in hand of one worker."""

    def __init__(
        self, ports: HandPorts, *, stream: str, durable: str, worker_id: str, policy: RetryPolicy, heartbeat_s: float
    ) -> None:
        self._ports = ports
        self._stream = stream
        self._durable = durable
        self._worker_id = worker_id
        self._policy = policy
        self._heartbeat_s = heartbeat_s
        self._held: dict[int, Held] = {}
        self._ended: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._cancels: set[int] = set()
        self._mishaps: dict[int, int] = {}
        """How often a job could not be claimed or settled for a reason that nobody has foreseen."""
        self._reporting: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Lock()
        self._last: asyncio.Event | None = None
        self._leaving = False
        self._steps = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.finished = 0
        """Jobs done, failed or cancelled here."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when a job has left the hand."""
        self.on_unheard: Callable[[], None] = lambda: None
        """Called when the answer to a delivery is not confirmed: the consumer may be gone."""
        ports.metrics.set_probe("parti_jobs_held", lambda: len(self._held))
        ports.metrics.set_probe("parti_jobs_running", lambda: self.running)

    @property
    def count(self) -> int:
        """Jobs in hand."""
        return len(self._held)

    @property
    def running(self) -> int:
        """Handlers that run now."""
        return sum(held.calling is not None for held in tuple(self._held.values()))

    @property
    def leaving(self) -> bool:
        """Whether nothing more is started."""
        return self._leaving

    @property
    def sign(self) -> int | None:
        """A number that grows with every job that is claimed or leaves; None unless jobs wait and none has started.

        One that runs, waits for slots or is being settled has started: how long that takes is its own affair.
        """
        due = self._held and not self._leaving and not any(held.started_s for held in self._held.values())
        connected = self._ports.connection.state is ConnectionState.CONNECTED
        return self._steps if due and connected else None

    # ── deliveries ────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
        """Take a delivery: a new job, one that is here already, or one that has ended here."""
        info = parse_reply(reply)
        self._ports.metrics.redeliveries.value += info.deliveries > 1
        held = self._held.get(info.stream_seq)
        if held is not None and parse_reply(held.reply).timestamp_ns != info.timestamp_ns:
            _log.info("the stream was made anew; a job waits until the one of its number has ended", job=held.job.id)
            self._answer(reply, _nak(_NEXT_TRY_S))
            return
        if held is not None:
            self._ports.metrics.jobs_recognised.inc()
            _log.info("delivered again while it is in hand; not started twice", job=held.job.id)
            held.reply = reply
            self._tell(held, b"+WPI")
            return
        if (info.stream_seq, info.timestamp_ns) in self._ended:
            self._ports.metrics.jobs_ended.inc("repeated")
            self._answer(reply, b"+ACK")
            return
        if self._leaving:
            self._ports.metrics.jobs_ended.inc("given_back")
            self._answer(reply, b"-NAK")
            return
        name = text_of(subject)
        ownership = Ownership(Partition(name, name, {}), self._stream, self._worker_id)
        message = Message(name, payload, info.stream_seq, ownership, reply, header, time.time())
        job = Job(message, self._durable, self._ports.scheduler, lambda: self._mark(info.stream_seq))
        job.resources = self._ports.resources
        held = Held(job)
        held.before, self._last = self._last, held.claimed
        self._held[held.seq] = held
        self._idle.clear()
        held.task = owned(self._carry_out(held), "job", self._ports.health)

    def _mark(self, seq: int) -> None:
        held = self._held.get(seq)
        if held is not None:
            held.dirty = True

    def cancel(self, seq: int) -> None:
        """An operator does not want this job any more, be it here, or still to come."""
        self._cancels.add(seq)
        held = self._held.get(seq)
        if held is not None and held.started_s and not held.job.cancelled:
            _log.info("cancelled by an operator", job=held.job.id)
            held.job.cancel()
            if held.calling is not None and self._ports.calls.on_loop:
                held.calling.cancel()  # a plain function looks at `job.cancelled`

    # ── the life of a job ─────────────────────────────────────────────────────────────────────────────────────

    async def _carry_out(self, held: Held) -> None:
        try:
            verdict = await self._claim(held)
            if isinstance(verdict, Start):
                await self._attempt(held, verdict)
            elif isinstance(verdict, Skip):
                _log.info("ended before, acknowledged", job=held.job.id, state=verdict.state.value)
                await self._settle(held, b"+ACK", "repeated")
            elif isinstance(verdict, Elsewhere):
                _log.info("runs elsewhere, given back", job=held.job.id, at=verdict.worker, delay_s=verdict.delay_s)
                await self._settle(held, _nak(verdict.delay_s), "elsewhere")
            elif isinstance(verdict, Cancel):
                await self._cancelled(held)
            else:
                await self._give_up(held, verdict)
        except ConnectionFailed:
            pass  # closed for good: whoever closed it knows
        except Exception as error:
            await self._put_aside(held, error)
        finally:
            held.claimed.set()
            self._steps += 1
            self._ports.board.forget(held)
            if self._held.get(held.seq) is held:
                del self._held[held.seq]
            if not self._held:
                self._idle.set()
            self.on_room()

    async def _put_aside(self, held: Held, error: Exception) -> None:
        """An error that nobody has foreseen keeps a job from being claimed or settled: try again later, then give up.

        Left alone it would come back after ack_wait, and again, and take a place that others need.
        """
        held.claimed.set()
        tries = self._mishaps[held.seq] = self._mishaps.pop(held.seq, 0) + 1
        if len(self._mishaps) > _REMEMBERED:
            del self._mishaps[next(iter(self._mishaps))]
        what = f"could not settle {held.job.id}"
        report_death("job", error, self._ports.health, what, signals=False)
        try:
            if tries < _MISHAPS:
                await self._settle(held, _nak(_MISHAP_S * 2**tries), "retry")
                return
            await self._ports.dead_letters.send(held.job.message, f"parti could not settle it: {describe(error)}")
            self._ports.metrics.dead_letters.inc()
            self.finished += 1
            await self._settle(held, b"+ACK", "failed")
        except ConnectionFailed:
            pass
        except Exception as again:
            report_death("job", again, self._ports.health, f"{what}, which will be delivered again", signals=False)

    async def _record(self, writing: Awaitable[None]) -> None:
        """Write how a job ended. Records are a convenience: one that cannot be written keeps no job from its end."""
        try:
            await writing
        except ConnectionFailed:
            raise
        except Exception as error:
            report_death("job-record", error, self._ports.health, "could not write a record", signals=False)

    async def _claim(self, held: Held) -> Verdict:
        """Claims run side by side, but their jobs start in the order of delivery."""
        verdict = await self._ports.board.claim(held, lambda: held.seq in self._cancels)
        self._steps += 1
        if held.before is not None:
            await held.before.wait()
            held.before = None
        held.claimed.set()
        return verdict

    async def _attempt(self, held: Held, start: Start) -> None:
        held.job.attempt = held.job.message.attempt = start.attempt
        if start.alone:
            async with self._alone:
                if not self._leaving:
                    await self._ports.board.note_running(held)
                await self._run(held, start)
        else:
            await self._run(held, start)

    async def _run(self, held: Held, start: Start) -> None:
        """Call the handler and do what follows from how it ended."""
        job, ports = held.job, self._ports
        if self._leaving:
            await self._give_back(held)
            return
        if held.seq in self._cancels:
            await self._cancelled(held)
            return
        error: BaseException | None = None
        held.started_s = time.time()
        began_s = time.monotonic()
        _log.info("job started", job=job.id, attempt=job.attempt, subject=job.subject)
        held.calling = asyncio.get_running_loop().create_task(ports.calls.call(job), name=f"parti-call-{job.id}")
        try:
            await asyncio.wait({held.calling})
            error = asyncio.CancelledError() if held.calling.cancelled() else held.calling.exception()
        except asyncio.CancelledError:
            # The worker leaves for good while the handler runs.
            if not held.calling.done():
                held.calling.cancel()
                await asyncio.wait({held.calling}, timeout=1.0)
            raise
        finally:
            held.calling = None
        took_s = time.monotonic() - began_s
        ports.metrics.jobs_duration.observe(took_s)
        if error is None:
            await self._record(ports.board.finish(held, JobState.DONE))
            self.finished += 1
            await self._settle(held, b"+ACK", "done")
            _log.info("job done, acknowledged", job=job.id, took_s=round(took_s, 3))
        elif job.cancelled:
            await self._cancelled(held)
        elif job.interrupted or (self.leaving and isinstance(error, asyncio.CancelledError)):
            await self._give_back(held)
        else:
            await self._failed(held, start, error)

    async def _failed(self, held: Held, start: Start, error: BaseException) -> None:
        decision = after_failure(self._policy, start.failures + 1, error)
        if isinstance(decision, GiveUp):
            await self._give_up(held, decision, failed=True, traceback=traceback_of(error))
            return
        _log.warning(
            "job failed, will be tried again",
            job=held.job.id,
            attempt=held.job.attempt,
            error=describe(error),
            delay_s=decision.delay_s,
            **_trace_field(traceback_of(error)),
        )
        reason, delay_s = describe(error), decision.delay_s
        await self._record(self._ports.board.give_back(held, reason, failed=True, delay_s=delay_s))
        await self._settle(held, _nak(decision.delay_s), "retry")

    async def _give_up(
        self, held: Held, verdict: GiveUp | Condemn, *, failed: bool = False, traceback: str = ""
    ) -> None:
        _log.error(
            "job failed for good, dead-lettered",
            job=held.job.id,
            subject=held.job.subject,
            reason=verdict.reason,
            **_trace_field(traceback),
        )
        letter = await self._ports.dead_letters.send(held.job.message, verdict.reason, traceback)
        self._ports.metrics.dead_letters.inc()
        ended = self._ports.board.finish(
            held, JobState.FAILED, failed=failed, error=verdict.reason, dead_letter=letter
        )
        await self._record(ended)
        self.finished += 1
        await self._settle(held, b"+ACK", "failed")

    async def _cancelled(self, held: Held) -> None:
        await self._record(self._ports.board.finish(held, JobState.CANCELLED))
        self.finished += 1
        await self._settle(held, b"+ACK", "cancelled")
        _log.info("job cancelled", job=held.job.id)

    async def _give_back(self, held: Held) -> None:
        _log.info("job given back", job=held.job.id)
        await self._record(self._ports.board.give_back(held, "given back by a worker that left"))
        await self._settle(held, b"-NAK", "given_back")

    # ── what the server is told ───────────────────────────────────────────────────────────────────────────────

    async def _settle(self, held: Held, answer: bytes, outcome: str) -> None:
        """Answer the newest delivery until the server confirms it; repeating an answer does no harm.

        A consumer that was deleted and made again does not confirm answers to its earlier deliveries. Such a job
        comes again, and is recognised then.
        """
        if answer == b"+ACK":
            self._ended[(held.seq, parse_reply(held.reply).timestamp_ns)] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        self._ports.metrics.jobs_ended.inc(outcome)
        connection, delay_s, tries, failing_s = self._ports.connection, _RETRY_MIN_S, 0, 0.0
        while not held.orphaned:
            try:
                await connection.wait_connected()
                await connection.request(held.reply.decode(), answer, timeout_s=5.0)
                if answer == b"+ACK":
                    self._ports.metrics.acks.inc()
                return
            except PartiError as error:
                if connection.closed:
                    raise
                _log.debug("answer not confirmed, will try again", job=held.job.id, error=str(error))
                now_s = time.monotonic()
                failing_s, tries = failing_s if tries else now_s, tries + 1
                if tries >= _UNCONFIRMED_TRIES and now_s - failing_s >= _UNCONFIRMED_S:
                    _log.warning("answer not confirmed; the job is answered when it comes again", job=held.job.id)
                    return
                self.on_unheard()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, _RETRY_MAX_S)

    def _answer(self, reply: bytes, answer: bytes) -> None:
        self._ports.wire.write(b"PUB %b %d\r\n%b\r\n" % (reply, len(answer), answer))

    def _tell(self, held: Held, answer: bytes) -> None:
        if not held.orphaned and self._ports.wire.write(b"PUB %b %d\r\n%b\r\n" % (held.reply, len(answer), answer)):
            held.told_s = time.monotonic()
            self._ports.metrics.jobs_heartbeats.inc()

    async def beat(self) -> None:
        """Send heartbeats and write progress, for as long as the worker runs."""
        tick_s = min(_TICK_S, self._heartbeat_s / 4)
        expected_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s - expected_s > self._heartbeat_s:
                _log.warning(
                    "heartbeats are late: something blocks the event loop; do such work in a plain function",
                    late_s=round(now_s - expected_s, 1),
                )
            silent = [held for held in self._held.values() if now_s - held.told_s >= self._heartbeat_s - tick_s]
            for held in silent:
                self._tell(held, b"+WPI")
                held.dirty = True
            if silent:
                _log.debug("sent heartbeats", jobs=len(silent))
            if not self._reporting:
                report = self._ports.board.report_due(tuple(self._held.values()))
                owned(report, "job-report", self._ports.health, keep=self._reporting, signals=False)
            expected_s = time.monotonic() + tick_s
            await asyncio.sleep(tick_s)

    def stream_replaced(self) -> None:
        """The stream was deleted and made anew: answers for jobs in hand would count for others of their numbers."""
        for held in self._held.values():
            held.orphaned = True

    def reconnected(self, state: ConnectionState) -> None:
        """The outage may have used up most of ack_wait: tell the server at once."""
        if state is ConnectionState.CONNECTED:
            for held in self._held.values():
                self._tell(held, b"+WPI")

    # ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────

    def leave(self) -> None:
        """Start nothing more; what has not begun is given back at once."""
        self._leaving = True
        for held in tuple(self._held.values()):
            held.job.leave()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the jobs that run; those that are left are interrupted and given back. True when none was."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
            return True
        except TimeoutError:
            pass
        rest = [held for held in self._held.values() if held.calling is not None]
        _log.warning("jobs still run and are given back", jobs=[held.job.id for held in rest][:10], count=len(rest))
        for held in rest:
            if held.calling is not None:
                held.calling.cancel()
        if self._ports.connection.closed:
            return False
        try:
            async with asyncio.timeout(_SAY_S):
                await self._idle.wait()
        except TimeoutError:
            pass
        return False

    async def stop(self) -> None:
        """End every task; what was not settled will be delivered again."""
        tasks = [*self._reporting, *(held.task for held in self._held.values() if held.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nak(delay_s: float) -> bytes:
    return b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK"


def _trace_field(traceback: str) -> dict[str, str]:
    return {"exception": traceback} if traceback else {}
