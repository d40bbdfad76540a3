"""Applying assignments: what a worker is told to own, brought into force step by step.

Two loops, because one must not wait for the other. Letting go is quick and others wait for it: it happens as soon as
an assignment arrives. Telling the server what the consumer carries may take a while, is coalesced, and always goes
for the newest assignment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

import structlog

from parti.coordination.control_plane import ControlPlane
from parti.coordination.fleet_parts import FleetParts
from parti.coordination.hooks import ErrorHooks, Hooks, WorkerConsumerUpdater, call_hooks, hook_name
from parti.coordination.worker_ids import Seat
from parti.core.fleet_view import count_of, names_of
from parti.errors import PartiError
from parti.model.fleet import Assignment
from parti.model.partition import Partition
from parti.strategies.ordering import natural_order

_log = structlog.get_logger("parti.duty")
_RETRY_S = 0.5
_OVERDUE_S = 5.0
"""An assignment that is not in force after so long is a problem that people should know of."""
_LOOK_AGAIN_S = 5.0
"""How soon partitions that could not be taken are looked at again."""
_BUSY_S = 0.2
"""How soon positions that could not be stored are tried again, with partitions to give away."""


class ReadingSide(WorkerConsumerUpdater, Protocol):
    """What the manager needs of whoever reads and handles."""

    async def seated(self, seat: Seat, plane: ControlPlane) -> None:
        """This process holds a worker id now: get ready to read under it, but start nothing yet."""

    def permit(self, until_s: float) -> None:
        """Handlers may be started until this moment of the monotonic clock; `-inf`: not at all."""

    async def refuse(self, partitions: Sequence[Partition]) -> Mapping[str, str]:
        """Which of these partitions, the most important ones first, cannot be read, by id, and why."""
        ...

    def let_go(self, keep: Sequence[Partition], told: Callable[[], None]) -> bool:
        """Start nothing more in partitions that are not among `keep`, and begin at once with new ones that are ready.

        Returns whether that is all it takes for others to get them, once `settle` names them no longer; otherwise the
        consumer has to be updated first. `told` is called when a handler that still ran has ended.
        """
        ...

    async def settle(self) -> Sequence[str]:
        """Store the positions; returns the partitions that were let go and whose handler still runs."""

    def report(self) -> Mapping[str, Any]:
        """Fields of `HealthRecord` that the reading side knows."""


class StandbySide(Protocol):
    """What the manager needs of the reading side of a process that stands by, or may have to step down."""

    def stand_by(self, worker_id: str, *, alive: bool, replaced: bool) -> None:
        """This process waits for a worker id. Told again and again.

        `alive`: somebody else holds it firmly. `replaced`: somebody else has held it since this process did.
        """

    async def hand_over(self) -> None:
        """Start nothing more, let running handlers finish, store the positions: the worker id is about to go."""


class Duty:
    """What one holding of a worker id has been told, and how far that has got.

    `changed` is called whenever there is something to report; with True when an assignment has come into force.
    """

    def __init__(
        self,
        parts: FleetParts,
        reading: ReadingSide,
        hooks: Hooks,
        errors: ErrorHooks,
        changed: Callable[[bool], None],
    ) -> None:
        self.offered: Assignment | None = None
        """The newest assignment."""
        self.begun: Assignment | None = None
        """The newest assignment that the reading side has been told of."""
        self.partitions: tuple[Partition, ...] = ()
        """What this worker owns now."""
        self.busy: tuple[str, ...] = ()
        """Partitions that were let go and that others must not get yet."""
        self.settled_version = 0
        """Of the assignment: what it took away has been let go, but for the busy ones; positions are stored."""
        self.ready_version = 0
        """Of the assignment: all of its partitions, incoming ones included, are being read."""
        self.ready = asyncio.Event()
        """Set once a first assignment has come into force."""
        self.refused: Mapping[str, str] = {}
        """Partitions of the assignment that are not taken, by id, and why."""
        self.stopping = False
        self._parts = parts
        self._reading = reading
        self._hooks = hooks
        self._errors = errors
        self._changed = changed
        self._worker_id = ""
        self._told: tuple[Partition, ...] = ()
        self._taken: tuple[Partition, ...] = ()
        """What is taken of `begun`."""
        self._applied: Assignment | None = None
        self._applied_taken: tuple[Partition, ...] = ()
        self._failure = ""
        """Why the assignment could not be applied, at the last attempt."""
        self._called = ""
        """The hook that has been called and has not returned."""
        self._overdue: asyncio.TimerHandle | None = None
        self._is_overdue = False
        self._news = asyncio.Event()
        self._to_apply = asyncio.Event()

    def begin(self, worker_id: str) -> None:
        """A worker id is held from now on; whatever was told before counts no more."""
        self._worker_id = worker_id
        self.offered = self.begun = self._applied = None
        self.refused = {}
        self.settled_version = self.ready_version = 0

    def end(self) -> None:
        """The worker id is lost."""
        self.begun = self._applied = None
        self.refused = {}
        self._in_time()

    def close(self) -> None:
        """This process leaves: nothing is expected of it any more."""
        self._in_time()

    async def give_up(self) -> None:
        """Nothing is owned any more, and the application is told so."""
        old, self._told, self.partitions = self._told, (), ()
        if old:
            await self._tell_application(old, ())

    def offer(self, assignment: Assignment) -> None:
        """Take in an assignment for this holding of the id."""
        self.offered = assignment
        self._news.set()

    def began_under(self, incarnation: int) -> bool:
        """Whether an assignment for this holding of the id is in force."""
        return self._applied is not None and self._applied.incarnation == incarnation

    @property
    def trouble(self) -> str:
        """What of the assignment is not in force, and why; empty when nothing is wrong."""
        if self._is_overdue:
            hook = f"the hook {self._called!r} has not returned" if self._called else ""
            why = hook or self._failure or "it takes too long"
            return f"the assignment could not be applied, and the last one stays: {why}"
        if not self.refused:
            return ""
        by_reason: dict[str, list[str]] = {}
        for partition, why in self.refused.items():
            by_reason.setdefault(why, []).append(partition)
        return "; ".join(
            f"{count_of(len(names))} assigned but not taken ({names_of(names)}): {why}"
            for why, names in by_reason.items()
        )

    def runs(self) -> Iterator[Coroutine[Any, Any, None]]:
        """The loops; they end only by an error, or cancelled."""
        return iter((self._keep_letting_go(), self._keep_applying()))

    # ── letting go ────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_letting_go(self) -> None:
        while True:
            self._news.clear()
            offered = self.offered
            if offered is not None and offered is not self.begun and not self.stopping:
                await self._begin(offered, await self._refuse(offered))
                continue
            if self.busy:
                await self._settle(self.settled_version)
            try:
                async with asyncio.timeout(_BUSY_S if self.busy else _LOOK_AGAIN_S if self.refused else None):
                    await self._news.wait()
            except TimeoutError:
                await self._look_again()

    async def _look_again(self) -> None:
        """Take partitions that could not be taken before, if they can be now."""
        if not self.refused or self.begun is None or self.begun is not self.offered or self.stopping:
            return
        begun = self.begun
        if (refused := await self._refuse(begun)) != self.refused and begun is self.offered:
            await self._begin(begun, refused)

    async def _refuse(self, assignment: Assignment) -> Mapping[str, str]:
        """What cannot be taken of an assignment; what is owned already comes before what is not."""
        owned = {partition.id for partition in self.partitions}
        wanted = {partition.id: partition for partition in self._partitions_of(assignment)}
        order = sorted(natural_order(wanted), key=lambda partition: partition not in owned)
        try:
            return await self._reading.refuse([wanted[partition] for partition in order])
        except PartiError as error:
            _log.warning("it is not known yet what can be taken", error=str(error))
            return self.refused

    async def _begin(self, offered: Assignment, refused: Mapping[str, str]) -> None:
        """First the application's hooks, then the reading side lets go; the rest is for the other loop."""
        new = tuple(p for p in self._partitions_of(offered) if p.id not in refused)
        if new != self._told or self._applied is None:
            old, self._told = self._told, new
            await self._tell_application(old, new)
        self.begun, self._taken, self.refused = offered, new, refused
        if self._pending:
            self._expect()
        released = self._reading.let_go(new, self._news.set)
        self._to_apply.set()
        if released:
            await self._settle(offered.version)

    async def _tell_application(self, old: tuple[Partition, ...], new: tuple[Partition, ...]) -> None:
        """Call the hooks for assignments, and wait for each: the application prepares for what is new."""
        self._expect()  # one that does not return keeps the assignment from coming into force
        try:
            for hook in self._hooks.on_assignment_changed:
                self._called = hook_name(hook)
                await call_hooks((hook,), (old, new), worker_id=self._worker_id, metrics=self._parts.metrics)
        finally:
            self._called = ""

    async def _settle(self, version: int) -> None:
        """Store positions, and report what has been let go."""
        self.busy = tuple(await self._reading.settle())
        self.settled_version = max(version, self.settled_version)
        self._changed(False)

    # ── applying ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _keep_applying(self) -> None:
        while True:
            self._to_apply.clear()
            begun = self.begun
            if begun is None or not self._pending or self.stopping:
                await self._to_apply.wait()
            elif not await self._apply(begun, self._taken):
                await asyncio.sleep(_RETRY_S)

    @property
    def _pending(self) -> bool:
        """Whether what has begun is not in force."""
        return self.begun is not self._applied or self._taken is not self._applied_taken

    def _expect(self) -> None:
        """From now on something should be in force soon."""
        if self._overdue is None and not self._is_overdue:
            self._overdue = asyncio.get_running_loop().call_later(_OVERDUE_S, self._late)

    def _late(self) -> None:
        """What has begun is not in force, and nothing else has come into force for a while."""
        self._overdue, self._is_overdue = None, True
        self._changed(False)

    def _in_time(self) -> None:
        """An assignment is in force, or none needs to be."""
        self._failure, self._is_overdue = "", False
        if self._overdue:
            self._overdue.cancel()
            self._overdue = None

    async def _apply(self, begun: Assignment, new: tuple[Partition, ...]) -> bool:
        try:
            await self._reading.update_worker_consumer(self._worker_id, new)
        except Exception as error:
            if self.stopping:
                return False
            # Of parti, or of an updater that is not: it is tried again either way.
            why = str(error) or repr(error)
            if why != self._failure:
                self._failure = why
                _log.error("the assignment could not be applied; the last one stays", error=why)
                self._changed(False)
            self._errors.tell(error, self._worker_id)
            return False
        gained, lost = len(set(new) - set(self.partitions)), len(set(self.partitions) - set(new))
        self.partitions = new
        self._applied, self._applied_taken = begun, new
        self._in_time()
        if self._called or self._pending:
            self._expect()
        self._parts.metrics.assignment_changes.inc()
        _log.info(
            "owns",
            worker=self._worker_id,
            partitions=len(new),
            gained=gained,
            lost=lost,
            incoming=len(begun.incoming),
            version=begun.version,
            term=begun.term,
        )
        self.ready_version = begun.version
        self.ready.set()
        self._changed(True)
        await self._settle(begun.version)
        if self.busy:
            self._news.set()  # the other loop looks after it; it may have ended while positions were stored
        return True

    def _partitions_of(self, assignment: Assignment) -> tuple[Partition, ...]:
        return tuple(sorted(self._parts.template.partitions(assignment.partitions), key=lambda p: p.id))
