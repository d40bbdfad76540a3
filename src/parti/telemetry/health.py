"""Whether this worker is healthy, and if not, why: a set of named signals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from parti.model.safe_text import one_line

_log = structlog.get_logger("parti.telemetry.health")


class Health:
    """Named signals, each with its reason; healthy while none is raised.

    Readers in any thread see one consistent snapshot without taking a lock. Raising and clearing are idempotent.

    >>> health = Health()
    >>> health.raise_signal("pull", "no heartbeat for 4 s")
    >>> health.healthy, dict(health.reasons)
    (False, {'pull': 'no heartbeat for 4 s'})
    """

    __slots__ = ("_callbacks", "_lock", "_reasons", "on_task_death")

    def __init__(self) -> None:
        self.on_task_death: Callable[[str], None] = lambda task: None
        """Called with the name of each background task that has died, whether it is started again or not."""
        self._lock = threading.Lock()
        # Replaced as a whole, never changed in place: that is what makes reads without a lock safe.
        self._reasons: Mapping[str, str] = MappingProxyType({})
        self._callbacks: tuple[Callable[[Health], None], ...] = ()

    @property
    def healthy(self) -> bool:
        """True while no signal is raised."""
        return not self._reasons

    @property
    def reasons(self) -> Mapping[str, str]:
        """Read-only snapshot of the raised signals: name to reason."""
        return self._reasons

    def raise_signal(self, name: str, reason: str) -> None:
        """Report the problem `name`; a signal raised before takes the new reason."""
        self._replace(name, one_line(reason))

    def clear(self, name: str) -> None:
        """Report that the problem `name` is over; nothing happens if it was not raised."""
        self._replace(name, None)

    def on_change(self, callback: Callable[[Health], None]) -> None:
        """Call `callback(health)` after each change, in the thread that made it.

        It should read the current state, since another change may have followed. What it raises is logged and
        otherwise ignored.
        """
        with self._lock:
            self._callbacks = (*self._callbacks, callback)

    def _replace(self, name: str, reason: str | None) -> None:
        with self._lock:
            if self._reasons.get(name) == reason:
                return
            reasons = {key: value for key, value in self._reasons.items() if key != name}
            if reason is not None:
                reasons[name] = reason
            self._reasons = MappingProxyType(reasons)
            callbacks = self._callbacks
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("health callback failed", signal=name)
