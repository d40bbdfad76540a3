"""The small HTTP server behind `metrics_port`: `/metrics` for Prometheus, `/healthz` for probes."""

from __future__ import annotations

import json
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import structlog
from prometheus_client.exposition import choose_encoder

from parti.errors import ConfigError
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.telemetry.http")


class MetricsServer:
    """Serves `/metrics` and `/healthz` from a daemon thread, apart from the event loop.

    A busy loop therefore still answers its probes. `/healthz` is 200 while healthy, else 503, with JSON that holds
    the state and its reasons. It has no authentication: listen on a private address. Use it as a context manager
    or call `start` and `stop`.
    """

    def __init__(self, metrics: Metrics, health: Health, host: str = "127.0.0.1", port: int = 0) -> None:
        self._metrics = metrics
        self._health = health
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port in use; before `start`, the one asked for."""
        return int(self._server.server_address[1]) if self._server else self._port

    def start(self) -> None:
        """Listen and serve; raises `ConfigError` when the address cannot be used. Starting twice does nothing."""
        if self._server is not None:
            return
        try:
            self._server = _Server(self._host, self._port, self._metrics, self._health)
        except OSError as error:
            raise ConfigError(
                f"metrics_host={self._host!r} and metrics_port={self._port} cannot be listened on: "
                f"{error.strerror or error}; choose another port (0 = any free one) or stop what uses it"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="parti-metrics", daemon=True
        )
        self._thread.start()
        _log.info("serving metrics and health", host=self._host, port=self.port)

    def stop(self) -> None:
        """Stop listening and close the port; stopping twice does nothing."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None

    def __enter__(self) -> MetricsServer:
        """Start serving."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a slow client must not hold up the end of the worker

    def __init__(self, host: str, port: int, metrics: Metrics, health: Health) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.metrics = metrics
        self.health = health
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own version looks up the host's full name, which can take seconds without DNS.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            _log.exception("metrics request failed", client=str(client_address))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "parti"
    sys_version = ""
    timeout = 10  # a client that sends nothing must not keep its thread

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/healthz":
            self._healthz()
        else:
            self._reply(HTTPStatus.NOT_FOUND, b"not found; try /metrics or /healthz\n", "text/plain")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _metrics(self) -> None:
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        except (ValueError, TypeError):  # an Accept header with a version that is not a number
            encode, content_type = choose_encoder("")
        self._reply(HTTPStatus.OK, encode(self.server.metrics.registry), content_type)

    def _healthz(self) -> None:
        reasons = self.server.health.reasons  # read once: state and reasons must agree
        state = "unhealthy" if reasons else "healthy"
        body = json.dumps({"state": state, "reasons": dict(reasons)}).encode() + b"\n"
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        self._reply(status, body, "application/json")

    def _reply(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent: probes and scrapes would drown the log."""
