"""Lanes on a real event loop, without a server: everything around them is replaced by recorders."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from parti.core.lane import Lane
from parti.core.retry import RetryPolicy
from parti.model.message import Message
from parti.model.partition import Template
from parti.telemetry.metrics import Metrics
from parti.worker.lanes import Lanes
from parti.worker.runners import AsyncRunners, Runners, ThreadRunners

TEMPLATE = Template("dc.{p}")
QUICK = RetryPolicy(attempts=3, backoff_s=(0.002,))
BOUND_S = 3.0


def reply(seq: int, deliveries: int = 1) -> bytes:
    return b"$JS.ACK.DC.c.%d.%d.%d.1700000000000000000.0" % (deliveries, seq, seq)


def seq_of(reply: bytes) -> int:
    return int(reply.split(b".")[5])


class Signal:
    """Wakes whoever waits for something to become true."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def fire(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not true():
                self._changed.clear()
                await self._changed.wait()


class Acks:
    """Writes down what an AckWriter would send."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.acked: list[int] = []
        self.alive: list[int] = []
        self.given_back: list[tuple[int, float]] = []

    def ack(self, reply: bytes) -> None:
        self.acked.append(seq_of(reply))
        self._signal.fire()

    def in_progress(self, reply: bytes) -> None:
        self.alive.append(seq_of(reply))

    def give_back(self, reply: bytes, delay_s: float) -> None:
        self.given_back.append((seq_of(reply), delay_s))
        self._signal.fire()


class Letters:
    """A dead-letter stream that may be closed for a while."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[tuple[int, str, int]] = []
        self.asked = 0

    async def send(self, message: Message, reason: str, traceback: str = "") -> None:
        self.asked += 1
        self._signal.fire()
        await self.open.wait()
        self.sent.append((message.seq, reason, message.attempt))
        self._signal.fire()


class Bench:
    """Lanes with everything around them replaced by recorders."""

    def __init__(self, kind: type[Lanes] = Lanes, *, policy: RetryPolicy = QUICK, each_subject: bool = False) -> None:
        self.signal = Signal()
        self.acks = Acks(self.signal)
        self.letters = Letters(self.signal)
        self.metrics = Metrics("w0")
        acks: Any = self.acks
        self.lanes = kind(
            template=TEMPLATE,
            stream="DC",
            worker_id="w0",
            policy=policy,
            acks=acks,
            dead_letters=self.letters,
            metrics=self.metrics,
            each_subject=each_subject,
        )
        self.runners: Runners | None = None
        self.starts: list[tuple[str, int, int]] = []
        self.ends: list[int] = []
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()

    def own(self, *ids: str, at: dict[str, int] | None = None) -> None:
        positions = at or {}
        subjects = {p.subject: p for p in TEMPLATE.partitions(ids)}

        def position_of(partition_id: str, subject: str) -> int:
            return max(positions.get(partition_id, 0), self.lanes.roster.known_position(partition_id))

        self.lanes.roster.own(subjects, position_of)

    def send(self, partition_id: str, *seqs: int, deliveries: int = 1) -> None:
        for seq in seqs:
            self.lanes.deliver(f"dc.{partition_id}".encode(), reply(seq, deliveries), None, b"x", seq)
        if self.runners:
            self.runners.kick()

    def began(self, message: Message) -> None:
        partition_id = message.partition.id
        self.starts.append((partition_id, message.seq, message.attempt))
        for key in (partition_id, "total"):
            self.at_once[key] += 1
            self.most_at_once[key] = max(self.most_at_once[key], self.at_once[key])
        self.signal.fire()

    def ended(self, message: Message) -> None:
        self.ends.append(message.seq)
        for key in (message.partition.id, "total"):
            self.at_once[key] -= 1
        self.signal.fire()

    def started(self, partition_id: str | None = None) -> list[int]:
        return [seq for pid, seq, _ in self.starts if partition_id in (None, pid)]

    def lane(self, partition_id: str) -> Lane:
        found = self.lanes.roster.lanes[partition_id]
        assert isinstance(found, Lane)
        return found

    def positions(self) -> dict[str, int]:
        return dict(self.lanes.roster.positions())

    async def until(self, true: Callable[[], object]) -> None:
        await self.signal.until(true)

    async def acked(self, *seqs: int) -> None:
        await self.until(lambda: set(seqs) <= set(self.acks.acked))

    def run_async(self, handler: Callable[[Message], Any], timeout_s: float | None = None) -> AsyncRunners:
        async def observed(message: Message) -> None:
            self.began(message)
            try:
                await handler(message)
            finally:
                self.ended(message)

        self.runners = runners = AsyncRunners(self.lanes, observed, timeout_s)
        return runners

    def run_threads(
        self, handler: Callable[[Message], Any], threads: int = 4, timeout_s: float | None = None
    ) -> ThreadRunners:
        lock = threading.Lock()

        def observed(message: Message) -> Any:
            with lock:
                self.began(message)
            try:
                return handler(message)
            finally:
                with lock:
                    self.ended(message)

        self.runners = runners = ThreadRunners(self.lanes, observed, timeout_s, threads)
        return runners

    def run_failing(self, kind: str, seq: int, error: Exception) -> None:
        """Have handlers of this kind ("async" or "plain") fail at one message, and succeed at all others."""

        def handler(message: Message) -> None:
            if message.seq == seq:
                raise error

        async def coroutine(message: Message) -> None:
            handler(message)

        if kind == "async":
            self.run_async(coroutine)
        else:
            self.run_threads(handler)

    async def overdue_checks(self, count: int) -> None:
        """Wait until somebody has looked this often for handlers that run too long."""
        looked, look = 0, self.lanes.running_lanes

        def counted() -> list[Lane]:
            nonlocal looked
            looked += 1
            self.signal.fire()
            return look()

        self.lanes.running_lanes = counted  # type: ignore[method-assign]
        await self.until(lambda: looked > count)

    async def close(self) -> None:
        if self.runners:
            async with asyncio.timeout(BOUND_S):
                await self.runners.stop()
        self.lanes.failures.cancel_dead_letters()
        await self.lanes.failures.settle_dead_letters()
        for thread in getattr(self.runners, "_threads", []):
            await asyncio.to_thread(thread.join, BOUND_S)


async def nothing(message: Message) -> None:
    """Handle a message without waiting."""


def gates(*seqs: int) -> dict[int, asyncio.Event]:
    return {seq: asyncio.Event() for seq in seqs}


def behind_gates(doors: dict[int, asyncio.Event]) -> Callable[[Message], Any]:
    async def handler(message: Message) -> None:
        if message.seq in doors:
            await doors[message.seq].wait()

    return handler
