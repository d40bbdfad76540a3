"""What a worker tells of itself: metrics and health that follow its connection, served over HTTP."""

from __future__ import annotations

import structlog

from parti.config import Settings
from parti.errors import PermissionDenied
from parti.jetstream.connection import Connection, ConnectionState
from parti.telemetry.health import Health
from parti.telemetry.http import MetricsServer
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.vitals")


class Vitals:
    """Metrics and health of one worker, of partitions or of jobs.

    A lost connection and a denied subject show in both. Nothing is served before `serve`, nor after `stop`, which may
    be called at any time.
    """

    def __init__(self, worker_id: str, *, per_partition: bool = False) -> None:
        self.metrics = Metrics(worker_id, per_partition=per_partition)
        self.health = Health()
        self.health.on_task_death = self.metrics.task_deaths.inc
        self._server: MetricsServer | None = None

    @property
    def port(self) -> int | None:
        """Port that serves `/metrics` and `/healthz`, or None."""
        return self._server.port if self._server else None

    def follow(self, connection: Connection) -> None:
        """Report the state of this connection from now on."""
        connection.on_state(self._on_state)
        connection.on_permission_denied(self._on_denied)
        self.metrics.connection_state.set(connection.state.value)

    def serve(self, settings: Settings) -> None:
        """Serve `/metrics` and `/healthz` if a port is set; `ConfigError` when it cannot be listened on."""
        if settings.metrics_port is not None:
            self._server = MetricsServer(self.metrics, self.health, settings.metrics_host, settings.metrics_port)
            self._server.start()

    def stop(self) -> None:
        """Close the port."""
        if self._server:
            self._server.stop()

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        self.metrics.connection_state.set(state.value)
        if state is ConnectionState.CONNECTED:
            self.metrics.reconnects.inc()
            self.health.clear("connection")
        else:
            self.health.raise_signal("connection", f"{state.value}: {reason}")

    def _on_denied(self, denied: PermissionDenied) -> None:
        if denied.subject.startswith("$SRV."):
            _log.warning("this worker is not shown by `nats micro`", reason=str(denied))
        else:
            self.health.raise_signal("permissions", str(denied))
