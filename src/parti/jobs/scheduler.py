"""The weighted scheduler: slots that coroutines and threads wait for in one fair queue.

The decisions are `parti.core.admission`; this adds the waiting. Everything that changes is changed under one lock and
takes microseconds, so it may be used from any number of threads and event loops at once.

Guards: slots are given back whenever a block ends: by return, exception, cancellation or timeout, and also when the
event loop that was to use them is gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType

import structlog

from parti.core.admission import Admission, LookAhead, Stage, Ticket
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.jobs.scheduler")


class WeightedScheduler:
    """`max_capacity` slots; whoever acquires more than there are gets all of them.

    Example:
        scheduler = WeightedScheduler(14)

        async with scheduler.acquire(4):          # in a coroutine
            ...
        with scheduler.acquire_sync(4):           # in a thread
            ...

    Do not acquire while you hold slots: two that do can wait for each other for ever. Ask for the sum instead.
    """

    def __init__(
        self, max_capacity: int = 14, *, look_ahead: LookAhead | None = None, metrics: Metrics | None = None
    ) -> None:
        """`look_ahead`: how far small ones may overtake; `STRICT` for not at all. ValueError for no capacity."""
        self._lock = threading.Lock()
        self._admission = Admission(max_capacity, look_ahead)
        self._waiters: dict[Ticket, _Waiter] = {}
        self._metrics = metrics
        self._busy_s = 0.0
        self._since_s = time.monotonic()
        if metrics:
            metrics.set_probe("parti_jobs_slots_used", lambda: self.current_usage)
            metrics.set_probe("parti_jobs_slots", lambda: self.max_capacity)
            metrics.set_probe("parti_jobs_slot_queue", lambda: self.waiting)

    @property
    def max_capacity(self) -> int:
        """How many slots there are."""
        return self._admission.capacity

    @property
    def current_usage(self) -> int:
        """Slots in use now."""
        return self._admission.used

    @property
    def usage_percent(self) -> float:
        """Slots in use, of a hundred."""
        return 100.0 * self.current_usage / self.max_capacity

    @property
    def waiting(self) -> int:
        """How many wait for slots."""
        return self._admission.waiting

    @property
    def slot_seconds(self) -> float:
        """Slots in use multiplied by time, since the start: what utilisation is computed from."""
        with self._lock:
            return self._busy_s + self._admission.used * (time.monotonic() - self._since_s)

    def acquire(self, cost: int, priority: int = 0, *, label: str = "") -> Acquisition:
        """Slots for the length of an `async with` block; higher priorities first. ValueError for a cost below 1.

        Cancelling while it waits is safe. `label` says in the log whom they are for.
        """
        return Acquisition(self, cost, priority, label)

    def acquire_sync(
        self, cost: int, priority: int = 0, *, timeout_s: float | None = None, label: str = ""
    ) -> SyncAcquisition:
        """The same for a `with` block in a thread; TimeoutError when it is not its turn within `timeout_s`."""
        return SyncAcquisition(self, cost, priority, label, timeout_s)

    # ── for acquisitions ──────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, waiter: _Waiter) -> bool:
        """Put it into the queue; True when it is its turn at once."""
        with self._lock:
            now_s = time.monotonic()
            waiter.ticket = ticket = self._admission.ask(waiter.cost, waiter.priority, now_s=now_s)
            self._waiters[ticket] = waiter
            woken = self._admit(now_s)
        self._wake(woken, but=waiter)
        return ticket.stage is Stage.GRANTED

    def _end(self, waiter: _Waiter) -> None:
        """Give back what it has, or leave the queue."""
        with self._lock:
            now_s = time.monotonic()
            self._count(now_s)
            self._admission.cancel(waiter.ticket)
            self._waiters.pop(waiter.ticket, None)
            woken = self._admit(now_s)
        self._wake(woken)

    def _admit(self, now_s: float) -> list[_Waiter]:
        self._count(now_s)
        woken = [self._waiters.pop(ticket) for ticket in self._admission.admit(now_s)]
        if self._metrics:
            for waiter in woken:
                self._metrics.jobs_slot_wait.observe(now_s - waiter.ticket.asked_s)
        return woken

    def _wake(self, waiters: list[_Waiter], but: _Waiter | None = None) -> None:
        """Tell those whose turn it is, except the one that is told by the return of its call."""
        for waiter in waiters:
            self._report(waiter)
            if waiter is not but:
                waiter.wake()

    def _count(self, now_s: float) -> None:
        self._busy_s += self._admission.used * (now_s - self._since_s)
        self._since_s = now_s

    def _report(self, waiter: _Waiter) -> None:
        ticket, used, capacity = waiter.ticket, self._admission.used, self._admission.capacity
        got = f"{ticket.slots} {'slot' if ticket.slots == 1 else 'slots'} (cost {ticket.cost})"
        _log.info(
            f"acquired {got}, usage {used}/{capacity} {100 * used / capacity:.0f} %",
            **({"job": waiter.label} if waiter.label else {}),
            waited_s=round((ticket.granted_s or 0.0) - ticket.asked_s, 3),
            waiting=self._admission.waiting,
        )


class _Waiter:
    """One acquisition, from its question to its end."""

    __slots__ = ("cost", "label", "priority", "scheduler", "ticket")

    def __init__(self, scheduler: WeightedScheduler, cost: int, priority: int, label: str) -> None:
        scheduler._admission.slots_of(cost)  # what is wrong is said where it was written
        self.scheduler = scheduler
        self.cost = cost
        self.priority = priority
        self.label = label
        self.ticket: Ticket

    @property
    def slots(self) -> int:
        """How many slots it gets."""
        return self.scheduler._admission.slots_of(self.cost)

    def wake(self) -> None:
        """Its turn has come."""
        raise NotImplementedError

    def _begin(self) -> bool:
        if hasattr(self, "ticket"):
            raise RuntimeError("this acquisition was used before; call acquire() for each block")
        return self.scheduler._ask(self)


class Acquisition(_Waiter):
    """What `acquire` returns: use it in `async with`, once."""

    __slots__ = ("_future", "_loop")

    async def __aenter__(self) -> Acquisition:
        """Wait for the slots."""
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        if not self._begin():
            try:
                await self._future
            except BaseException:
                self.scheduler._end(self)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
        self.scheduler._end(self)

    def wake(self) -> None:
        """Its turn has come: tell the loop that waits."""
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            self.scheduler._end(self)  # the loop is closed: nobody will use them

    def _resolve(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def abandon(self, reason: BaseException) -> None:
        """Raise `reason` where it waits; nothing happens if it has its slots. On its event loop only."""
        if not self._future.done() and self.ticket.stage is Stage.WAITING:
            self._future.set_exception(reason)


class SyncAcquisition(_Waiter):
    """What `acquire_sync` returns: use it in `with`, once."""

    __slots__ = ("_abandoned", "_event", "_timeout_s")

    def __init__(
        self, scheduler: WeightedScheduler, cost: int, priority: int, label: str, timeout_s: float | None
    ) -> None:
        super().__init__(scheduler, cost, priority, label)
        self._timeout_s = timeout_s
        self._event = threading.Event()
        self._abandoned: BaseException | None = None

    def __enter__(self) -> SyncAcquisition:
        """Wait for the slots."""
        if not self._begin():
            try:
                self._wait()
            except BaseException:
                self.scheduler._end(self)
                raise
        return self

    def _wait(self) -> None:
        if not self._event.wait(self._timeout_s):
            raise TimeoutError(
                f"no {self.slots} slots within {self._timeout_s:g} s: {self.scheduler.current_usage} of "
                f"{self.scheduler.max_capacity} are in use"
            )
        if self._abandoned is not None:
            raise self._abandoned

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
        self.scheduler._end(self)

    def wake(self) -> None:
        """Its turn has come."""
        self._event.set()

    def abandon(self, reason: BaseException) -> None:
        """Raise `reason` in the thread that waits; nothing happens if it has its slots."""
        if hasattr(self, "ticket") and self.ticket.stage is Stage.WAITING:
            self._abandoned = reason
            self._event.set()
