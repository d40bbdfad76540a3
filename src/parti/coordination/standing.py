"""What a worker is doing, and who is told when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from parti.coordination.hooks import Hooks, call_hooks
from parti.core.fleet_view import FleetState
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import owned

_log = structlog.get_logger("parti.manager")

_SIGNAL = "fleet"
_FLEET_WIDE = {FleetState.STABLE, FleetState.SCALING, FleetState.REBALANCING, FleetState.EMERGENCY}
"""States that every worker takes over from the rebalancer, which has said so already."""


class Standing:
    """The state of one worker: in its metrics, its health, its log, and told to the application's hooks."""

    def __init__(self, metrics: Metrics, health: Health, hooks: Hooks, worker_id: Callable[[], str]) -> None:
        self.state = FleetState.INIT
        self._metrics = metrics
        self._health = health
        self._hooks = hooks
        self._worker_id = worker_id
        self._degraded_by = ""
        self._telling: set[asyncio.Future[None]] = set()

    def set(self, state: FleetState, reason: str) -> None:
        """Be in a state from now on; nothing happens if it was already, but for another reason to be degraded."""
        before, self.state = self.state, state
        worse, self._degraded_by = self._degraded_by, reason if state is FleetState.DEGRADED else ""
        if before is state and worse == self._degraded_by:
            return
        if state is FleetState.DEGRADED:
            self._health.raise_signal(_SIGNAL, f"degraded: {reason}")
        else:
            self._health.clear(_SIGNAL)
        if before is state:
            _log.warning("worker is degraded for another reason", worker=self._worker_id(), reason=reason)
            return
        self._metrics.fleet_state.set(state)
        tell = _log.debug if state in _FLEET_WIDE else _log.warning if state is FleetState.DEGRADED else _log.info
        tell(f"worker {state}", worker=self._worker_id(), before=before.value, reason=reason)
        if self._hooks.on_state_changed:
            self._tell(before, state)

    def _tell(self, before: FleetState, state: FleetState) -> None:
        hooks, worker_id = self._hooks.on_state_changed, self._worker_id()
        call = call_hooks(hooks, (before, state), worker_id=worker_id, metrics=self._metrics)
        owned(call, "state-hook", self._health, keep=self._telling, signals=False)

    async def told(self, timeout_s: float) -> None:
        """Return when the hooks have ended that were called so far."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=timeout_s)
