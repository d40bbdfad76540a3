"""What a task of a replay does: it handles the messages of its partitions, each partition in order.

All messages of a partition in a round are in one task, sorted. Each partition is a lane: coroutine handlers run as
many lanes at once as wait at the same time, plain functions one lane to a thread, as in a worker. Before each message
the lane looks whether it may be started (`replay_desk`).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from parti.core.retry import GiveUp, HandlerTimeout, RetryPolicy, after_failure
from parti.core.tracebacks import traceback_of
from parti.jetstream.target import Target
from parti.model.ledger import DEAD_LETTERED, HANDLED
from parti.model.message import Message, Ownership, StoredMessage
from parti.model.partition import Partition
from parti.spark.replay_desk import Desk, Finished, LedgerTo, Reached

RESULT = "partition string, position bigint, handled bigint, dead_lettered bigint"
"""Columns that a task returns: one row for each partition."""
_RESULT = pa.schema(
    [("partition", pa.string()), ("position", pa.int64()), ("handled", pa.int64()), ("dead_lettered", pa.int64())]
)
_LANES_AT_ONCE = 256
_LOOK_S = 0.02
_CHUNK = 1_000
"""Messages that are Python objects at the same time, in each lane."""


@dataclass(frozen=True, slots=True)
class Lot:
    """One partition of a round, as the guest owns it."""

    partition: str
    subject: str
    keys: tuple[tuple[str, str], ...]
    fence: int
    position: int
    condemned: int = 0
    """A message that is not tried any more: too many processes have died in its handler; 0 for none."""
    deaths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Everything that tasks have to know; pickled into the job."""

    target: Target
    desk: str
    """Subject that the driver answers on."""
    number: int
    """Of the round."""
    end: int
    """Everything below it is in the round."""
    stream: str
    worker: str
    lots: Mapping[str, Lot]
    handler: Callable[[Any], Any]
    batches: bool = False
    """The handler takes Arrow batches of one partition instead of messages."""
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_s: float | None = None
    threads: int = 16
    dead_letter_subject: str = "parti.dlq"
    ledger: LedgerTo | None = None


Slices: TypeAlias = list[pa.RecordBatch]


def run_task(work: Work, task: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Handle what is in the batches, sorted by partition and sequence; yields how far each partition has got."""
    slices = by_partition(batches)
    if not slices:
        return
    fences = {partition: lot.fence for partition, lot in work.lots.items()}
    desk = Desk(work.target, work.desk, task, work.number, ledger=work.ledger, fences=fences)
    lanes = [_Lane(work, desk, work.lots[partition], found) for partition, found in slices.items()]
    desk.open(list(slices))
    try:
        _run_lanes(work, lanes)
    except BaseException:
        desk.close(failed=True)
        raise
    desk.close()
    reached = desk.reached.items()
    rows = [[p, r.position, r.handled, r.dead_lettered] for p, r in reached]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    yield pa.RecordBatch.from_arrays(
        [pa.array(column, of.type) for column, of in zip(columns, _RESULT, strict=True)], schema=_RESULT
    )


def by_partition(batches: Iterable[pa.RecordBatch]) -> dict[str, Slices]:
    """The messages of each partition, as slices of the batches, in order."""
    slices: dict[str, Slices] = defaultdict(list)
    for batch in batches:
        runs = pc.run_end_encode(batch.column("partition").cast(pa.string()))
        start = 0
        for end, partition in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
            slices[partition].append(batch.slice(start, end - start))
            start = end
    return dict(slices)


def _run_lanes(work: Work, lanes: list[_Lane]) -> None:
    call = getattr(work.handler, "__call__", None)  # noqa: B004 - an object may be callable by an async method
    if inspect.iscoroutinefunction(work.handler) or inspect.iscoroutinefunction(call):
        asyncio.run(_run_async(lanes))
        return
    threads = min(work.threads, len(lanes))
    if threads == 1:
        for lane in lanes:
            lane.run()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="parti-handler") as pool:
        for done in [pool.submit(lane.run) for lane in lanes]:
            done.result()


async def _run_async(lanes: list[_Lane]) -> None:
    room = asyncio.Semaphore(_LANES_AT_ONCE)

    async def run(lane: _Lane) -> None:
        async with room:
            await lane.run_async()

    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(run(lane))


class _Lane:
    """One partition in one task."""

    def __init__(self, work: Work, desk: Desk, lot: Lot, slices: Slices) -> None:
        self._work = work
        self._desk = desk
        self._lot = lot
        self._slices = slices
        partition = Partition(lot.partition, lot.subject, dict(lot.keys))
        self._id = lot.partition
        self._ownership = Ownership(partition, work.stream, work.worker, lot.fence)

    # ── plain functions ───────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Handle everything, or until the partition is taken away."""
        try:
            if not self._wait():
                return
            reached = self._desk.reached[self._id]
            handle = self._handle_batch if self._work.batches else self._handle_messages
            if all(handle(found, reached) for found in self._slices):
                reached.position = max(reached.position, self._work.end)
        finally:
            self._desk.let_go(self._id)

    def _wait(self) -> bool:
        """Until a handler may be started; False when none is to be."""
        while not self._desk.may_start(self._id):
            if self._desk.refused(self._id):
                return False
            time.sleep(_LOOK_S)
        return True

    def _pause(self, delay_s: float) -> bool:
        """Between two attempts; False when the partition was taken away meanwhile."""
        until_s = time.monotonic() + delay_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self._desk.refused(self._id):
                return False
            time.sleep(min(left_s, 0.1))
        return True

    def _handle_messages(self, found: pa.RecordBatch, reached: Reached) -> bool:
        return all(self._handle(message, reached) for message in self._messages(found, reached.position))

    def _handle(self, message: Message, reached: Reached) -> bool:
        started_us = 0
        while True:
            if not self._desk.may_start(self._id) and not self._wait():
                return False
            started_us = started_us or _now_us()
            if message.seq == self._lot.condemned:
                return self._bury(message, self._why_condemned(), reached, started_us)
            try:
                result = self._work.handler(message)
                if inspect.isawaitable(result):
                    raise TypeError("the handler returned an awaitable; declare it with 'async def'")
            except Exception as error:
                verdict = after_failure(self._work.policy, message.attempt, error)
                if isinstance(verdict, GiveUp):
                    return self._bury(message, verdict.reason, reached, started_us, traceback_of(error))
                if not self._pause(verdict.delay_s):
                    return False
                message.attempt += 1
            else:
                self._finish(message, HANDLED, reached, started_us)
                return True

    # ── coroutines ────────────────────────────────────────────────────────────────────────────────────────────

    async def run_async(self) -> None:
        """As `run`, for a coroutine handler."""
        try:
            if not await self._wait_async():
                return
            reached = self._desk.reached[self._id]
            for found in self._slices:
                for message in self._messages(found, reached.position):
                    if not await self._handle_async(message, reached):
                        return
            reached.position = max(reached.position, self._work.end)
        finally:
            self._desk.let_go(self._id)

    async def _wait_async(self) -> bool:
        while not self._desk.may_start(self._id):
            if self._desk.refused(self._id):
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _handle_async(self, message: Message, reached: Reached) -> bool:
        started_us = 0
        while True:
            if not self._desk.may_start(self._id) and not await self._wait_async():
                return False
            started_us = started_us or _now_us()
            if message.seq == self._lot.condemned:
                why = self._why_condemned()
                return await asyncio.to_thread(self._bury, message, why, reached, started_us)
            try:
                await self._call_async(message)
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled():
                    raise
                # What the handler waited for may have been cancelled: that is its failure like any other.
                verdict = after_failure(self._work.policy, message.attempt, error)
                if isinstance(verdict, GiveUp):
                    trace = traceback_of(error)
                    return await asyncio.to_thread(self._bury, message, verdict.reason, reached, started_us, trace)
                if not await asyncio.to_thread(self._pause, verdict.delay_s):
                    return False
                message.attempt += 1
            else:
                self._finish(message, HANDLED, reached, started_us)
                return True

    async def _call_async(self, message: Message) -> None:
        timeout_s = self._work.timeout_s
        if timeout_s is None:
            await self._work.handler(message)
            return
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._work.handler(message)
        except TimeoutError:
            if limit.expired():
                raise HandlerTimeout(f"handler ran longer than {timeout_s} s") from None
            raise

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────────────

    def _handle_batch(self, found: pa.RecordBatch, reached: Reached) -> bool:
        """One batch: done as a whole, or tried again as a whole; given up, all of its messages are dead letters."""
        seqs = found.column("seq").to_pylist()
        skipped = sum(seq < reached.position for seq in seqs)
        found, seqs = found.slice(skipped), seqs[skipped:]
        if not seqs:
            return True
        batch = found.select(["seq", "subject", "timestamp", "headers", "payload"]).replace_schema_metadata(
            {"partition": self._id, "worker": self._work.worker, "fence": str(self._lot.fence)}
        )
        attempt, received_us, started_us = 1, _now_us(), 0
        while True:
            if not self._desk.may_start(self._id) and not self._wait():
                return False
            started_us = started_us or _now_us()
            try:
                self._work.handler(batch)
            except Exception as error:
                verdict = after_failure(self._work.policy, attempt, error)
                if isinstance(verdict, GiveUp):
                    return self._bury_all(found, verdict.reason, reached, attempt, started_us, traceback_of(error))
                if not self._pause(verdict.delay_s):
                    return False
                attempt += 1
                continue
            finished_us = _now_us()
            for seq in seqs:
                row = Finished(self._id, seq, attempt, HANDLED, received_us, started_us, finished_us)
                self._desk.finish(reached, row)
            return True

    def _bury_all(
        self, found: pa.RecordBatch, reason: str, reached: Reached, attempt: int, started_us: int, traceback: str
    ) -> bool:
        for message in self._messages(found, reached.position):
            message.attempt = attempt
            if not self._bury(message, reason, reached, started_us, traceback):
                return False
        return True

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────

    def _messages(self, found: pa.RecordBatch, position: int) -> Iterator[Message]:
        ownership = self._ownership
        for start in range(0, found.num_rows, _CHUNK):
            part = found.slice(start, _CHUNK)
            names = ("seq", "subject", "headers", "payload")
            stamps = part.column("timestamp").cast(pa.int64()).to_pylist()
            columns = (part.column(name).to_pylist() for name in names)
            for seq, subject, header, payload, stamp_us in zip(*columns, stamps, strict=True):
                if seq < position:
                    continue  # another attempt of this task has finished it
                yield StoredMessage(
                    subject,
                    payload,
                    seq,
                    ownership,
                    header=header,
                    received_s=time.time(),
                    stored_at=datetime.fromtimestamp(stamp_us / 1e6, UTC),
                )

    def _bury(self, message: Message, reason: str, reached: Reached, started_us: int, traceback: str = "") -> bool:
        if not self._desk.bury(self._work.dead_letter_subject, message, reason, traceback):
            return False
        self._finish(message, DEAD_LETTERED, reached, started_us)
        return True

    def _why_condemned(self) -> str:
        deaths = self._lot.deaths
        return f"{deaths} process{'es' * (deaths != 1)} died while handling it"

    def _finish(self, message: Message, outcome: int, reached: Reached, started_us: int) -> None:
        received_us = int(message.received_s * 1e6)
        row = Finished(self._id, message.seq, message.attempt, outcome, received_us, started_us, _now_us())
        self._desk.finish(reached, row)


def _is_cancelled() -> bool:
    """Whether the lane itself is to end, because another one has failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _now_us() -> int:
    return time.time_ns() // 1000
