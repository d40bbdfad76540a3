"""The job that a handler gets: what it is about, slots for its work, and a way to say how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec

from parti.core.retry import Reject
from parti.jobs.scheduler import Acquisition, SyncAcquisition, WeightedScheduler
from parti.model.job import JobState, job_id
from parti.model.message import Message
from parti.model.safe_text import one_line

_MAX_PHRASE = 200


class JobInterrupted(BaseException):  # no Exception: handlers catch those
    """Raised where a job asks or waits for slots: it was cancelled, or is given back because its worker leaves."""


class Job:
    """One job, as handed to a handler.

    It is acknowledged when the handler has returned, and from its receipt until then the server is told that it is
    being worked on. Work that takes cores goes into `async with job.slots(cost)`, piece by piece; in a plain
    function, `with job.slots_sync(cost)`.

    Example:
        @jobs.handler
        async def handle(job: Job) -> None:
            for number, record in enumerate(job.records):
                async with job.slots(4):
                    await transcode(record)
                job.progress(100 * (number + 1) / len(job.records), record["s3"]["object"]["key"])
    """

    def __init__(
        self, message: Message, durable: str, scheduler: WeightedScheduler, changed: Callable[[], None] = lambda: None
    ) -> None:
        self.message = message
        self.attempt = 1
        """1, and one more after each attempt that failed or whose process died."""
        self.resources: Any = None
        """What the app's lifespan has opened for this worker; None without one."""
        self._durable = durable
        self._scheduler = scheduler
        self._changed = changed
        self._asking: set[Acquisition | SyncAcquisition] = set()
        self._holding: set[Acquisition | SyncAcquisition] = set()
        self._began = False
        self._interrupted: JobInterrupted | None = None
        self._refused: JobInterrupted | None = None
        self._cancelled = False
        self._percent = 0.0
        self._phrase = ""

    # ── what it is about ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def id(self) -> str:
        """What the command line calls it: consumer and stream sequence."""
        return job_id(self._durable, self.message.seq)

    @property
    def subject(self) -> str:
        """The subject of its message."""
        return self.message.subject

    @property
    def seq(self) -> int:
        """The stream sequence of its message."""
        return self.message.seq

    @property
    def data(self) -> bytes:
        """The payload of its message."""
        return self.message.data

    @property
    def headers(self) -> Mapping[str, str]:
        """The publisher's headers."""
        return self.message.headers

    @property
    def published_at(self) -> datetime:
        """When the server stored its message (UTC)."""
        return self.message.published_at

    @property
    def worker_id(self) -> str:
        """The worker that has it."""
        return self.message.worker_id

    @cached_property
    def json(self) -> Any:
        """The payload as JSON; `parti.Reject`, so a dead letter at once, when it is none."""
        try:
            return msgspec.json.decode(self.data)
        except (ValueError, RecursionError) as error:
            raise Reject(f"the payload of {len(self.data)} bytes is no JSON: {error}") from None

    @property
    def records(self) -> list[Any]:
        """What is to be done: the list `Records` of an object-store event, a JSON list, or the one document."""
        found = self.json
        if isinstance(found, dict) and isinstance(found.get("Records"), list):
            return list(found["Records"])
        return list(found) if isinstance(found, list) else [found]

    # ── what it does ──────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def slots(self, cost: int, priority: int = 0) -> AsyncIterator[int]:
        """Slots for one piece of work; gives how many it got. Pieces of one job and of others share them.

        Do not ask while you hold some in the same piece of work: ask for the sum.
        """
        acquisition = self._scheduler.acquire(cost, priority, label=self.id)
        self._ask(acquisition)
        try:
            async with acquisition:
                self._have(acquisition)
                yield acquisition.slots
        finally:
            self._let_go(acquisition)

    @contextmanager
    def slots_sync(self, cost: int, priority: int = 0) -> Iterator[int]:
        """The same for a plain function, which runs in a thread."""
        acquisition = self._scheduler.acquire_sync(cost, priority, label=self.id)
        self._ask(acquisition)
        try:
            with acquisition:
                self._have(acquisition)
                yield acquisition.slots
        finally:
            self._let_go(acquisition)

    def progress(self, percent: float, phrase: str = "") -> None:
        """Say how far it is, from 0 to 100, and in a few words with what; from any thread, as often as you like.

        It is written down about once a second at most.
        """
        self._percent = min(100.0, max(0.0, float(percent)))
        self._phrase = one_line(str(phrase), _MAX_PHRASE)
        self._changed()

    @property
    def cancelled(self) -> bool:
        """Whether an operator has cancelled it. A coroutine is interrupted; a plain function should look at this."""
        return self._cancelled

    # ── for its worker ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> JobState:
        """Waiting while it has asked for slots and has none, else running."""
        return JobState.WAITING if self._asking and not self._holding else JobState.RUNNING

    @property
    def held_slots(self) -> int:
        """Slots that its pieces of work have now."""
        return sum(each.slots for each in tuple(self._holding))

    @property
    def interrupted(self) -> bool:
        """Whether it was told to stop."""
        return self._interrupted is not None or self._cancelled

    def cancel(self) -> None:
        """An operator does not want it any more; on the event loop."""
        self._cancelled = True
        self._interrupt(JobInterrupted("the job was cancelled"))

    def leave(self) -> None:
        """The worker leaves: a job that has not had any slots yet is interrupted where it waits for its first."""
        if not self._began:
            self._refused = JobInterrupted("the worker leaves, and the job has not begun")
            if self._asking:
                self._interrupt(self._refused)

    def _interrupt(self, reason: JobInterrupted) -> None:
        self._interrupted = self._refused = reason
        for acquisition in tuple(self._asking):
            acquisition.abandon(reason)

    def _ask(self, acquisition: Acquisition | SyncAcquisition) -> None:
        if self._refused is not None:
            self._interrupted = self._refused
            raise self._refused
        self._asking.add(acquisition)
        self._changed()

    def _have(self, acquisition: Acquisition | SyncAcquisition) -> None:
        self._holding.add(acquisition)
        self._asking.discard(acquisition)
        self._began = True
        self._changed()

    def _let_go(self, acquisition: Acquisition | SyncAcquisition) -> None:
        self._asking.discard(acquisition)
        self._holding.discard(acquisition)
        self._changed()

    def __repr__(self) -> str:
        return f"<Job {self.id} attempt {self.attempt}, {self.subject}, {len(self.data)} bytes>"


class Held:
    """A job in the hand of a worker: what the worker has to know of it."""

    __slots__ = (
        "before",
        "calling",
        "claimed",
        "dirty",
        "job",
        "lock",
        "orphaned",
        "reply",
        "revision",
        "started_s",
        "superseded",
        "task",
        "told_s",
        "written_s",
    )

    def __init__(self, job: Job) -> None:
        self.job = job
        self.reply = job.message.reply
        """Where to acknowledge: the newest delivery."""
        self.before: asyncio.Event | None = None
        """Set when the job that was delivered before has been claimed: jobs start in the order of their delivery."""
        self.claimed = asyncio.Event()
        self.calling: asyncio.Task[None] | None = None
        """The running handler."""
        self.task: asyncio.Task[None] | None = None
        """Everything from its claim to its acknowledgement."""
        self.lock = asyncio.Lock()
        """One write of its record at a time."""
        self.revision = 0
        self.dirty = False
        self.orphaned = False
        """Its stream is no more: it is neither acknowledged nor kept alive."""
        self.superseded = False
        """Another worker has claimed it since, because this one was cut off for too long: it tells how far it is."""
        self.written_s = 0.0
        self.started_s = 0.0
        """By the clock on the wall; 0 before it has started."""
        self.told_s = time.monotonic()
        """When the server last heard of it."""

    @property
    def seq(self) -> int:
        """The stream sequence of its message."""
        return self.job.message.seq
