"""The small HTTP server behind `metrics_port`: `/metrics` for Prometheus, `/healthz` for probes.

Each connection has a thread, so their number is bounded, and so is the time that one may take to ask and to read.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import structlog
from prometheus_client.exposition import choose_encoder

from parti.errors import ConfigError
from parti.telemetry.health import Health
from parti.telemetry.log_rate import LogRate
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.telemetry.http")

_REFUSAL = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 27\r\n\r\n"
    b"too many connections; wait\n"
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What the server grants to all clients together, and to each."""

    connections: int = 32
    request_s: float = 5.0
    """A request that is not complete so long after its connection was made is given up."""
    answer_s: float = 10.0
    """An answer that is not taken within this time is given up."""


class MetricsServer:
    """Serves `/metrics` and `/healthz` from a daemon thread, apart from the event loop.

    A busy loop therefore still answers its probes. `/healthz` is 200 while healthy, else 503, with JSON that holds
    the state and its reasons. It has no authentication: listen on a private address. Use it as a context manager
    or call `start` and `stop`.
    """

    def __init__(
        self,
        metrics: Metrics,
        health: Health,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: HttpLimits | None = None,
    ) -> None:
        self._limits = limits or HttpLimits()
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
            self._server = _Server(self._host, self._port, self._metrics, self._health, self._limits)
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
    request_queue_size = 128
    """Connections that wait to be accepted: one more is tried again after a second, too late for a probe."""
    block_on_close = False  # a slow client must not hold up the end of the worker

    def __init__(self, host: str, port: int, metrics: Metrics, health: Health, limits: HttpLimits) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.metrics = metrics
        self.health = health
        self.limits = limits
        self._lock = threading.Lock()
        # By connection, oldest first: until when it may ask. Those that are being answered are not in here.
        self._asking: dict[socket.socket, float] = {}
        self._connections = 0
        self._rate = LogRate()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own version looks up the host's full name, which can take seconds without DNS.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # no file descriptors are left: the caller would try again at once, and for ever
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, at the cost of the connection that has waited longest without asking."""
        with self._lock:
            full = self._connections >= self.limits.connections
            oldest = next(iter(self._asking), None) if full else None
            # The thread of a connection that was ended needs a moment to notice it.
            refused = full and (oldest is None or self._connections >= 2 * self.limits.connections)
            if refused:
                oldest = None
            if oldest is not None:
                del self._asking[oldest]
            if not refused:
                self._asking[request] = time.monotonic() + self.limits.request_s
                self._connections += 1
        if full:
            self._tell(
                "too many connections to the metrics server", closed="the new one" if refused else "an idle one"
            )
        if oldest is not None:
            _end(oldest)
        if refused:
            with contextlib.suppress(OSError):
                request.send(_REFUSAL, socket.MSG_DONTWAIT)
            super().shutdown_request(request)
            return
        super().process_request(request, client_address)  # the caller closes a connection that gets no thread

    def answers(self, request: socket.socket) -> bool:
        """Note that a request is complete; False: it was given up before."""
        with self._lock:
            return self._asking.pop(request, None) is not None

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._asking.pop(request, None)
            self._connections -= 1
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Give up who takes too long to ask; called ten times a second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._asking.items() if until <= now]
            for request in late:
                del self._asking[request]
        for request in late:
            _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            self._tell("metrics request failed", client=str(client_address), exc_info=error)

    def _tell(self, event: str, **fields: Any) -> None:
        left_out = self._rate.passes(event)
        if left_out is not None:
            _log.warning(event, **fields, **({"left_out": left_out} if left_out else {}))


def _end(connection: socket.socket) -> None:
    """Wake the thread that reads from a connection: it finds its end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "parti"
    sys_version = ""

    def setup(self) -> None:
        # Counts for one read, and for all of one answer; reads together are bounded by the server.
        self.request.settimeout(self.server.limits.answer_s)
        super().setup()

    def do_GET(self) -> None:
        if not self.server.answers(self.connection):
            return
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
        # A worker in the state `degraded` may well handle most of its partitions: the reason tells.
        state = "healthy" if not reasons else "degraded" if reasons.keys() == {"fleet"} else "unhealthy"
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
