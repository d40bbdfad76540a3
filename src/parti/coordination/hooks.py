"""What an application may hang on the fleet's events."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import structlog

from parti.core.fleet_view import FleetState
from parti.model.partition import Partition
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import owned

_log = structlog.get_logger("parti.hooks")
_ERRORS_WAIT = 100
"""So many errors wait for a hook that has not returned."""

AssignmentHook: TypeAlias = Callable[[Sequence[Partition], Sequence[Partition]], Awaitable[None] | None]
StateHook: TypeAlias = Callable[[FleetState, FleetState], Awaitable[None] | None]
ErrorHook: TypeAlias = Callable[[Exception], Awaitable[None] | None]

current_worker_id: ContextVar[str] = ContextVar("parti_worker_id")
"""The id of the worker that a hook is called for."""


class WorkerConsumerUpdater(Protocol):
    """Applies a new full set of partitions for a worker; idempotent, and skips what has not changed."""

    async def update_worker_consumer(self, worker_id: str, partitions: Sequence[Partition]) -> None:
        """Make the worker read exactly these partitions."""


@dataclass(slots=True)
class Hooks:
    """Functions of the application, async or not; one that raises is logged and never stops the worker."""

    on_assignment_changed: list[AssignmentHook] = field(default_factory=list)
    """Called with the old and the new partitions, before reading follows the new ones."""
    on_state_changed: list[StateHook] = field(default_factory=list)
    """Called with the old and the new state of this worker."""
    on_error: list[ErrorHook] = field(default_factory=list)
    """Called with each error that parti met in the background and survived."""


def hook_name(function: Callable[..., Any]) -> str:
    """What a hook is called in logs and reasons."""
    return getattr(function, "__name__", repr(function))


async def call_hooks(
    functions: Sequence[Callable[..., Any]], arguments: tuple[object, ...], *, worker_id: str, metrics: Metrics
) -> None:
    """Call them one after the other with the worker's id in the context; errors are logged and counted."""
    token = current_worker_id.set(worker_id)
    try:
        for function in functions:
            try:
                result = function(*arguments)
                if inspect.isawaitable(result):
                    await result
            except Exception as error:
                metrics.hook_failures.inc()
                _log.exception("a hook failed", hook=hook_name(function), error=repr(error))
    finally:
        current_worker_id.reset(token)


class ErrorHooks:
    """Calls the hooks for errors, one error after the other, in tasks: a hook that hangs holds up nothing else."""

    def __init__(self, hooks: Hooks, metrics: Metrics, health: Health) -> None:
        self._hooks = hooks
        self._metrics = metrics
        self._health = health
        self._turn = asyncio.Lock()
        self._telling: set[asyncio.Future[None]] = set()

    def tell(self, error: Exception, worker_id: str) -> None:
        """Have the hooks called with an error; returns at once."""
        if len(self._telling) >= _ERRORS_WAIT:
            _log.warning("an error hook has not returned; it is not told of this error", error=str(error))
        elif self._hooks.on_error:
            owned(self._call(error, worker_id), "error-hook", self._health, keep=self._telling, signals=False)

    async def _call(self, error: Exception, worker_id: str) -> None:
        async with self._turn:
            await call_hooks(self._hooks.on_error, (error,), worker_id=worker_id, metrics=self._metrics)

    async def told(self, timeout_s: float) -> None:
        """Return when the hooks have been called with all errors so far."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=timeout_s)
