"""The ledger of a worker: a row for each finished message, durable before anybody can rely on its being finished.

Two things tell the world that a message is finished: its acknowledgement, because the consumer's ack floor counts as
a position after a restart, and the position itself, wherever it is stored. So acknowledgements are held with the
batch of rows that they belong to and are written when the ledger stream has stored it, and whoever is about to store
a position, save a state or set the consumer back asks `durable` first.

While the ledger stream takes nothing, no handler is started: the worker stands still, says so by the health signal
`ledger`, and goes on when the stream is back.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeAlias

import structlog

from parti.config import Settings
from parti.errors import ApiError, ConfigError
from parti.jetstream.api import JetStreamApi
from parti.model.ledger import BATCHES_AT_ONCE, LedgerBatch, encode_batch, ledger_stream, ledger_subject
from parti.model.message import Ownership
from parti.model.subjects import within
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import Supervised, report_death, supervise
from parti.worker.acks import AckWriter

_log = structlog.get_logger("parti.ledger")

Row: TypeAlias = tuple[Ownership, int, int, float, float, float, int]
"""Ownership, sequence and attempt, received (wall clock), started and finished (`time.perf_counter`), outcome.

What is needed of a message, taken while it is at hand: to keep it would cost more than the rest of the ledger."""

_SIGNAL = _TASK = "ledger"
_EVERY_S = 0.05
"""Longest time that a row, and the acknowledgement with it, waits for others."""
_MOST_ROWS = 500
_BATCHES_PER_WINDOW = 3
"""Acknowledgements that are held count against MaxAckPending: the window is cut into so many batches, so that one
fills while others are on their way."""
"""A batch is published when all but the last few before it are stored: a hole that a crash leaves in a chain that is
not closed is among its last numbers."""
_MOST_BATCHES, _FEW_BATCHES = 16, 4
"""With so many batches waiting to be stored no handler is started, until there are few."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 1.0
_ANSWER_S = 2.0
"""After this a batch is published again; the stream recognises one that it has."""
_WAIT_S = 1.0
_KEEP_S = 30 * 86_400
_SAME_ID_S = 120
_ROOM = 4096
"""Bytes of a message that are left for its headers."""
_CLOCK_STEP_S = 0.1
_OVERLAP = 10065
_NANOSECONDS = 1_000_000_000


def ledger_stream_of(settings: Settings, stream: str) -> str:
    """The stream that takes the rows of a stream's messages."""
    return settings.ledger_stream or ledger_stream(stream)


async def ensure_ledger_stream(api: JetStreamApi, settings: Settings, stream: str) -> None:
    """Create the ledger stream when it is missing; raises `ConfigError` when it cannot serve as one."""
    name, subject = ledger_stream_of(settings, stream), ledger_subject(settings.prefix, stream, "*")
    if name == stream:
        raise ConfigError(f"ledger_stream={name} is the stream whose messages are handled; name another one")
    config = {
        "name": name,
        "subjects": [subject],
        "storage": "file",
        "retention": "limits",
        # A ledger that lost its oldest rows to make room would be none: whoever limits its size has workers wait.
        "discard": "new",
        "max_age": _KEEP_S * _NANOSECONDS,
        "duplicate_window": _SAME_ID_S * _NANOSECONDS,
        "num_replicas": settings.replicas,
        "compression": "s2",
        "allow_direct": True,
    }
    try:
        info = await api.ensure_stream(config)
    except ApiError as error:
        if error.code != _OVERLAP:
            raise
        raise ConfigError(
            f"ledger stream {name!r} cannot be made: another stream takes {subject!r}; name that one as "
            f"ledger_stream, or choose another prefix"
        ) from None
    if not within(subject, info.subjects):
        raise ConfigError(f"stream {name!r} exists but does not take {subject!r}; choose another ledger_stream")
    if info.retention != "limits":
        raise ConfigError(
            f"stream {name!r} has {info.retention} retention, where rows are gone once they are read; use a "
            f"ledger_stream with limits retention"
        )


@dataclass(slots=True, eq=False)
class _Pending:
    """A batch that is on its way, and what waits for it."""

    message_id: str
    payload: bytes
    rows: int
    replies: list[bytes]
    sealed_s: float
    before: tuple[asyncio.Future[None], ...]
    """What is `done` of the last few before it, the oldest first."""
    done: asyncio.Future[None]
    """It and all before it are stored."""
    stored: bool = False
    failing: bool = False


@dataclass(slots=True)
class Chain:
    """Which batches these are: one chain for each run of a process under a worker id."""

    stream: str
    worker: str
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    stream_created: str = ""
    number: int = 0


class HeldAcks:
    """Holds acknowledgements until the ledger says that they may be written."""

    def __init__(self, acks: AckWriter) -> None:
        self.held: list[bytes] = []
        """Always this very list: whoever acknowledges most may keep its `append`."""
        self.direct = acks
        """Writes at once."""

    def ack(self, reply: bytes) -> None:
        """A message is finished: acknowledge it when all rows up to now are stored."""
        self.held.append(reply)

    def in_progress(self, reply: bytes) -> None:
        """Tell the server that a message is still being worked on."""
        self.direct.in_progress(reply)

    def give_back(self, reply: bytes, delay_s: float) -> None:
        """Ask the server to deliver a message again after a delay."""
        self.direct.give_back(reply, delay_s)


class Ledger:
    """Gathers rows and held acknowledgements, publishes them in batches, and tells what is durable.

    Batches are published several at a time, but count as stored in their order: an acknowledgement that was asked for
    after a row never goes out before it. A batch that may or may not have been stored is published again under the
    same message id. `on_stuck(True)` is called when nothing may be started, `on_stuck(False)` when it may again.
    """

    def __init__(
        self,
        api: JetStreamApi,
        acks: AckWriter,
        metrics: Metrics,
        health: Health,
        settings: Settings,
        *,
        stream: str,
        max_payload: int,
    ) -> None:
        assert settings.worker_id
        self.acks = HeldAcks(acks)
        self.on_stuck: Callable[[bool], None] = lambda stuck: None
        self.rows: list[Row] = []
        """What has not been sealed; always this very list."""
        self.limit = max(1, min(_MOST_ROWS, settings.max_ack_pending // _BATCHES_PER_WINDOW))
        """So many rows are a batch."""
        self.sample = settings.ledger_sample if settings.ledger == "sampled" else 1
        self._api = api
        self._metrics = metrics
        self._health = health
        self._chain = Chain(stream, settings.worker_id)
        self._subject = ledger_subject(settings.prefix, stream, settings.worker_id)
        self._ledger_stream = ledger_stream_of(settings, stream)
        self._max_payload = max_payload - _ROOM
        self._pending: deque[_Pending] = deque()
        self._tasks: set[Supervised] = set()
        self._sealing: Supervised | None = None
        self._loop = asyncio.get_running_loop()
        self._wall_s = _wall_offset_s()
        self._stuck = False
        self._trouble = False

    @property
    def process(self) -> str:
        """The name of this run in the ledger."""
        return self._chain.process

    # ── the life of a chain ───────────────────────────────────────────────────────────────────────────────────────

    def open(self, stream_created: str) -> None:
        """Begin the chain: until its first batch is stored, nothing is started."""
        self._chain.stream_created = stream_created
        if self._sealing is None:
            self._sealing = supervise(self._keep_sealing, _TASK, self._health)
        if not self._chain.number:
            self._be_stuck(True)
            self._publish_soon([], [])

    def start_over(self, stream_created: str) -> None:
        """The stream was made anew: rows so far are of the old one, and its deliveries are not to be acknowledged."""
        self.acks.held.clear()
        for pending in self._pending:
            pending.replies.clear()
        self.seal()
        self._chain.stream_created = stream_created

    async def close(self, *, closed: bool, timeout_s: float = _WAIT_S) -> bool:
        """Store what is left; `closed`: end the chain in good order. True when all of it is stored."""
        stored = await self.durable(timeout_s)
        if stored and closed and self._chain.number:
            self._publish_soon([], [], closed=True)
            stored = await self.durable(timeout_s)
        if self._sealing:
            self._sealing.cancel()
            self._sealing = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not stored:
            _log.warning("the ledger lacks its last rows; their messages will be handled again", rows=self._unstored)
        return stored

    async def durable(self, timeout_s: float = _WAIT_S) -> bool:
        """Whether everything that has been recorded so far is stored; waits for it for a while."""
        self.seal()
        if not self._pending:
            return True
        last = self._pending[-1].done
        await asyncio.wait([last], timeout=timeout_s)
        return last.done()

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server that messages whose acknowledgement has been held for so long are still in hand."""
        limit_s = time.perf_counter() - older_than_s
        for pending in self._pending:
            if pending.sealed_s <= limit_s:
                for reply in pending.replies:
                    self.acks.in_progress(reply)

    # ── sealing ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_sealing(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            self.seal()

    def seal(self) -> None:
        """Send off what has gathered."""
        held = self.acks.held
        if not self.rows and not held:
            return
        rows, replies = self.rows[:], held[:]
        self.rows.clear()
        held.clear()
        if rows:
            self._publish_soon(rows, replies)
        elif self._pending:
            self._pending[-1].replies += replies
        else:
            self.acks.direct.ack_all(replies)

    def _publish_soon(self, rows: Sequence[Row], replies: list[bytes], *, closed: bool = False) -> None:
        payload = encode_batch(self._batch(rows, closed))
        if len(payload) > self._max_payload and len(rows) > 1:
            half = len(rows) // 2
            self._publish_soon(rows[:half], [])
            self._publish_soon(rows[half:], replies, closed=closed)
            return
        message_id = f"{self._chain.process}:{self._chain.number}"
        self._chain.number += 1
        before = tuple([other.done for other in self._pending][-BATCHES_AT_ONCE:])
        done: asyncio.Future[None] = self._loop.create_future()
        pending = _Pending(message_id, payload, len(rows), replies, time.perf_counter(), before, done)
        self._pending.append(pending)
        supervise(partial(self._store, pending), _TASK, self._health, keep=self._tasks)
        if len(self._pending) > _MOST_BATCHES:
            self._be_stuck(True)

    def _batch(self, rows: Sequence[Row], closed: bool) -> LedgerBatch:
        chain = self._chain
        head = (chain.stream, chain.stream_created, chain.worker, chain.process, chain.number, closed)
        if not rows:
            return LedgerBatch(*head)
        # The wall clock as it was, so that times of one process can be compared; unless it has been set.
        if abs(time.time() - time.perf_counter() - self._wall_s) > _CLOCK_STEP_S:
            self._wall_s = _wall_offset_s()
        wall_us = self._wall_s * 1e6
        owned, seqs, attempts, received_s, started_s, finished_s, outcomes = zip(*rows, strict=True)
        # By identity, and in as few steps as possible: this runs for every message.
        keys = list(map(id, owned))
        ownerships = dict(zip(keys, owned, strict=True))
        places = dict(zip(ownerships, count(), strict=False))
        return LedgerBatch(
            *head,
            tuple([ownership.partition.id for ownership in ownerships.values()]),
            tuple([ownership.fence for ownership in ownerships.values()]),
            array("I", map(places.__getitem__, keys)),
            array("q", seqs),
            array("I", attempts),
            array("B", outcomes),
            array("q", map(int, [at_s * 1e6 for at_s in received_s])),
            array("q", map(int, [at_s * 1e6 + wall_us for at_s in started_s])),
            array("q", map(int, [at_s * 1e6 + wall_us for at_s in finished_s])),
        )

    # ── storing ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _store(self, pending: _Pending) -> None:
        """Publish a batch until it is stored; all later ones wait for it, so nothing may end this before."""
        await self._publish(pending)
        self._stored(pending)

    async def _publish(self, pending: _Pending) -> None:
        headers = {"Nats-Msg-Id": pending.message_id, "Nats-Expected-Stream": self._ledger_stream}
        delay_s = _RETRY_MIN_S
        while True:
            if pending.before and (self._trouble or len(pending.before) == BATCHES_AT_ONCE):
                # In trouble one after the other, else within a window: a batch that is stored while an older one is
                # not leaves a hole after a crash.
                await asyncio.wait([pending.before[-1 if self._trouble else 0]])
            try:
                await self._api.publish(self._subject, pending.payload, headers=headers, timeout_s=_ANSWER_S)
                break
            except Exception as error:  # whatever it is, nothing may go on without these rows
                pending.failing = True
                self._failed(error)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
            delay_s = min(2 * delay_s, _RETRY_MAX_S)

    def _failed(self, error: Exception) -> None:
        self._metrics.ledger_failures.inc()
        self._health.raise_signal(_SIGNAL, f"ledger stream {self._ledger_stream!r} takes no rows: {error}")
        self._be_stuck(True)
        if not self._trouble:
            self._trouble = True
            _log.error(
                "the ledger takes no rows; nothing is started or acknowledged until it does",
                ledger_stream=self._ledger_stream,
                error=str(error),
            )

    def _stored(self, pending: _Pending) -> None:
        """A batch is stored: what waited for it and for all before it may go on."""
        pending.stored, pending.failing = True, False
        metrics = self._metrics
        metrics.ledger_rows.inc(pending.rows)
        metrics.ledger_bytes.inc(len(pending.payload))
        metrics.ledger_duration.observe(time.perf_counter() - pending.sealed_s)
        while self._pending and self._pending[0].stored:
            first = self._pending.popleft()
            if not first.done.done():
                first.done.set_result(None)
            try:
                if first.replies:
                    self.acks.direct.ack_all(first.replies)
            except Exception as error:  # they are delivered again and recognised; later batches must not wait
                report_death(_TASK, error, self._health, "could not acknowledge, and goes on", signals=False)
        if self._trouble and not any(other.failing for other in self._pending):
            self._trouble = False
            self._health.clear(_SIGNAL)
            _log.info("the ledger takes rows again", ledger_stream=self._ledger_stream)
        if not self._trouble and len(self._pending) <= _FEW_BATCHES:
            self._be_stuck(False)

    def _be_stuck(self, stuck: bool) -> None:
        if stuck is not self._stuck:
            self._stuck = stuck
            self.on_stuck(stuck)

    @property
    def _unstored(self) -> int:
        return sum(pending.rows for pending in self._pending)


def _wall_offset_s() -> float:
    """What to add to `time.perf_counter`; the largest of some, because an interruption makes it too small."""
    return max(time.time() - time.perf_counter() for _ in range(5))
