"""Listens, and serves the console of one fleet until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from parti.config import Settings
from parti.console.access import Access, Proxies, is_loopback, read_access
from parti.console.connections import BACKLOG, BoundedConfig, Connection, Limits, Places, limits_of_this_process
from parti.console.hub import MOST_BROWSERS, Hub
from parti.console.watcher import LOOK_S, Watcher
from parti.console.web import build_web
from parti.coordination.control_plane import ControlPlane
from parti.errors import ConfigError, ConsoleEnded
from parti.telemetry.log_rate import limited_loggers
from parti.telemetry.tasks import bound_to, owned

_GRACE_S = 2
_STUCK_MS = 30_000
"""A connection whose other end takes nothing for so long is given up by the kernel."""


def prepare(settings: Settings) -> tuple[socket.socket, Access]:
    """Read the secrets and take the port, before anything else is done; raises `ConfigError`."""
    access = read_access(
        settings.console_token_file,
        settings.console_basic_auth_file,
        readable=settings.console_allow_readable_files,
    )
    return _listen(settings.console_host, settings.console_port, access), access


def _listen(host: str, port: int, access: Access) -> socket.socket:
    place = f"console_host={host!r} and console_port={port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"{place} is no address of this machine; use 127.0.0.1, or an address of it") from None
    if not access.required and not is_loopback(str(address[0])):
        raise ConfigError(
            f"console_host={host!r} can be reached from elsewhere, and nobody would be asked for a secret; name one "
            f"with --token-file or --basic-auth-file, or listen on 127.0.0.1"
        )
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_MS)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{place} cannot be listened on: {error.strerror or error}; choose another port (0 = any free one) or "
            f"stop what uses it"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    shown = "localhost" if host in {"0.0.0.0", "::"} else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"


class _Server(uvicorn.Server):
    """Uvicorn, which is told by us when to end, and does not wait for browsers that would look for ever."""

    def __init__(self, app: ASGIApp, hub: Hub, limits: Limits) -> None:
        config = BoundedConfig(
            app,
            # Paths and errors are ours to log; what uvicorn would say of a browser that was dropped is no error.
            log_config=None,
            log_level=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=Connection,
            backlog=BACKLOG,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.places = Places(limits)
        super().__init__(config)
        self.up = asyncio.Event()
        self._hub = hub

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.close()
        await super().shutdown(sockets)


@asynccontextmanager
async def serving(
    app: ASGIApp, hub: Hub, listener: socket.socket, limits: Limits | None = None
) -> AsyncIterator[None]:
    """Answer requests for the length of the block, which is cancelled by `ConsoleEnded` when that ends before it."""
    with limited_loggers("uvicorn.error", "asyncio"):
        async with _serving(_Server(app, hub, limits or limits_of_this_process()), listener):
            yield


@asynccontextmanager
async def _serving(server: _Server, listener: socket.socket) -> AsyncIterator[None]:
    task = owned(_serve(server, listener), "console-http")
    try:
        async with bound_to(task, ConsoleEnded("the console's HTTP server has ended by itself; start it again")):
            await server.up.wait()
            yield
    finally:
        server.should_exit = True
        await asyncio.wait([task])


async def _serve(server: _Server, listener: socket.socket) -> None:
    try:
        await server.serve([listener])
    except SystemExit as error:  # by which uvicorn leaves when it cannot start; it would end the event loop
        raise RuntimeError(f"uvicorn ended with {error!r}") from error


@asynccontextmanager
async def running_console(
    plane: ControlPlane, settings: Settings, listener: socket.socket, access: Access, *, look_s: float = LOOK_S
) -> AsyncIterator[Hub]:
    """The console of a fleet for the length of the block; yields its browsers."""
    limits = limits_of_this_process()
    hub = Hub(most=min(MOST_BROWSERS, limits.streams))
    watcher = Watcher(plane, settings, hub, look_s)
    web = build_web(hub, watcher, access, Proxies(settings.console_trusted_proxies))
    async with watcher.running(), serving(web, hub, listener, limits):
        yield hub


async def serve(
    plane: ControlPlane, settings: Settings, listener: socket.socket, access: Access, on_started: Callable[[], None]
) -> None:
    """Serve the console of a fleet until SIGINT or SIGTERM."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C is an exception there
            loop.add_signal_handler(number, ended.set)
    async with running_console(plane, settings, listener, access):
        on_started()
        await ended.wait()
