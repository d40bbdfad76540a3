"""One nats-server as a child process on loopback."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import subprocess
import threading
import time
import uuid
from pathlib import Path

from parti.embedded import child, monitor
from parti.embedded.binary import Binary, find_binary
from parti.embedded.blocks import Blocks
from parti.embedded.rundir import RunDir
from parti.errors import EmbeddedServerError

_START_TIMEOUT_S = 30.0
_STOP_GRACE_S = 5.0
_POLL_S = 0.01
_PORT_ATTEMPTS = 5

_started: set[Server] = set()


class Server(Blocks):
    """A nats-server child process on 127.0.0.1, with JetStream in its own store directory.

    Guarantees: after a start, clients connect and JetStream answers, with the streams of an existing store recovered.
    A free port is chosen unless one is given; it stays the same over `kill` and `restart`. A temporary store is
    removed at `stop`, a given `store_dir` is kept. The server ends with this process, on Linux even after a SIGKILL.

    `config` is further nats-server configuration (accounts, TLS, permissions, limits). It may hold passwords: it is
    written readable by this user only, and never logged. A `jetstream {...}` block in it may set limits; leave
    `listen`, `http`, `server_name` and `store_dir` alone.

    Fails with EmbeddedServerError when the server cannot start, quoting the server's own words, and with ServerTooOld
    when the binary is too old. An object is for one thread or task at a time.

        async with Server() as server:
            client = await nats.connect(server.url)
    """

    def __init__(
        self,
        port: int | None = None,
        store_dir: str | os.PathLike[str] | None = None,
        config: str = "",
        binary: str | os.PathLike[str] | None = None,
        jetstream: bool = True,
        name: str | None = None,
    ) -> None:
        """Describe a server; nothing is started or created yet."""
        self.name = name or f"parti-{uuid.uuid4().hex[:12]}"
        self._wanted_port = port
        self._wanted_store = None if store_dir is None else Path(store_dir).absolute()
        self._config = config
        self._wanted_binary = binary
        self._jetstream = jetstream
        self._binary: Binary | None = None
        self._run_dir: RunDir | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._monitor_port: int | None = None
        self._owner_pid = os.getpid()
        self._log_start = 0
        self._cancelled = threading.Event()

    def __repr__(self) -> str:
        """Name and address; never the configuration."""
        place = f"port {self._port}" if self._port else "not started"
        return f"<Server {self.name} {place}>"

    # -- what is known about it ---------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the child process is alive now."""
        return self._process is not None and self._process.poll() is None

    @property
    def port(self) -> int:
        """The client port; still known after `kill`."""
        if self._port is None:
            raise self._not_started()
        return self._port

    @property
    def url(self) -> str:
        """The address for clients, without credentials."""
        return f"nats://{monitor.LOOPBACK}:{self.port}"

    @property
    def monitor_port(self) -> int:
        """The port of the HTTP monitoring endpoints; may change at a restart."""
        if self._monitor_port is None:
            raise self._not_started()
        return self._monitor_port

    @property
    def pid(self) -> int:
        """The process id of the child, dead or alive."""
        if self._process is None:
            raise self._not_started()
        return self._process.pid

    @property
    def version(self) -> str:
        """The version of the binary, for example `2.15.1`."""
        if self._binary is None:
            raise self._not_started()
        return self._binary.version_text

    @property
    def store_dir(self) -> Path:
        """Where JetStream keeps its data."""
        return self._wanted_store or self._own_dir().path / "store"

    @property
    def log_path(self) -> Path:
        """The server's log: in a given `store_dir`, else in the temporary directory that `stop` removes."""
        return (self._wanted_store or self._own_dir().path) / "nats-server.log"

    # -- life, for code without an event loop -------------------------------------------------------------------

    def start_sync(self) -> None:
        """Start and wait until clients and JetStream are served; on failure nothing is left behind."""
        if self.running:
            raise EmbeddedServerError(f"{self} is already running: expected a stopped one; stop it first")
        self._cancelled.clear()
        self._binary = find_binary(self._wanted_binary)
        self._owner_pid = os.getpid()
        self._port = self._port if self._run_dir else self._wanted_port
        fresh = self._run_dir is None
        self._run_dir = self._run_dir or RunDir()
        _started.add(self)
        try:
            self._boot(port_may_lag=not fresh)
        except BaseException:
            self._end(grace_s=0)
            if fresh:
                self._forget()
            raise

    def stop_sync(self) -> None:
        """Stop (SIGTERM, SIGKILL after 5 s) and remove the temporary directory; a second call does nothing."""
        self._end(_STOP_GRACE_S)
        self._forget()

    def kill_sync(self) -> None:
        """End the child with SIGKILL, as a crash would; port and store stay for `restart`."""
        self._end(grace_s=0)

    def restart_sync(self) -> None:
        """Stop if running, then start on the same port and store."""
        self._own_dir()
        self._end(_STOP_GRACE_S)
        self.start_sync()

    # -- the same, for asyncio ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Like `start_sync`, without blocking the event loop; a cancelled start leaves nothing running."""
        await self._start_in_thread(restart=False)

    async def kill(self) -> None:
        """Like `kill_sync`, without blocking the event loop."""
        await asyncio.to_thread(self.kill_sync)

    async def restart(self) -> None:
        """Like `restart_sync`, without blocking the event loop."""
        await self._start_in_thread(restart=True)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _start_in_thread(self, *, restart: bool) -> None:
        work = asyncio.ensure_future(asyncio.to_thread(self.restart_sync if restart else self.start_sync))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread cannot be interrupted, but it looks at this flag, ends the child and returns at once.
            self._cancelled.set()
            await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None:
                self._end(grace_s=0)
                if not restart:
                    self._forget()
            raise

    def _boot(self, *, port_may_lag: bool) -> None:
        fixed_port = self._port
        for attempts_left in reversed(range(_PORT_ATTEMPTS)):
            fresh_port, self._monitor_port = monitor.free_ports(2)
            self._port = fixed_port or fresh_port
            self._launch()
            try:
                self._wait_until_ready()
            except PortTakenError as clash:
                # After a restart even the fixed port is tried again: for a moment a client that reconnects can hold
                # it, when the kernel gives it as the source port of its own connection.
                ours = fixed_port is not None and clash.port == fixed_port and not port_may_lag
                if ours or attempts_left == 0:
                    raise
                self._end(grace_s=0)
            else:
                return

    def _launch(self) -> None:
        run_dir, binary = self._own_dir(), self._binary
        assert binary is not None
        try:
            self.store_dir.mkdir(parents=True, exist_ok=True)
            config = run_dir.write_private("nats-server.conf", self._config_text())
            self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = child.spawn([str(binary.path), "-c", str(config)], self.log_path)
        except OSError as cause:
            raise EmbeddedServerError(
                f"nats-server could not be launched ({cause.strerror}: {cause.filename}); "
                f"expected a store directory that can be written: choose another"
            ) from cause

    def _config_text(self) -> str:
        lines = [
            f"server_name: {_quoted(self.name)}",
            f"listen: {_quoted(f'{monitor.LOOPBACK}:{self._port}')}",
            f"http: {_quoted(f'{monitor.LOOPBACK}:{self._monitor_port}')}",
        ]
        if self._jetstream:
            # The store at the top level, because a later jetstream block replaces this line but not the store.
            lines += [f"store_dir: {_quoted(str(self.store_dir))}", "jetstream: enabled"]
        return "\n".join([*lines, self._config, ""])

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not monitor.is_ready(self.monitor_port, self.name, jetstream=self._jetstream):
            if self._process.poll() is not None:
                raise self._died()
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"nats-server {self.version} did not become ready within {_START_TIMEOUT_S:.0f} s; "
                    f"its last words: {self._last_words()}"
                )
            if self._cancelled.wait(_POLL_S):
                raise EmbeddedServerError("the start of nats-server was cancelled")

    def _died(self) -> EmbeddedServerError:
        words = self._last_words()
        if clash := re.search(r":(\d+): bind: address already in use", words):
            return PortTakenError(int(clash.group(1)))
        return EmbeddedServerError(
            f"nats-server {self.version} did not start: {words}; correct its config or store directory"
        )

    def _last_words(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        # Process id and time say nothing here.
        lines = [re.sub(r"^\[\d+\] \S+ \S+ ", "", line).strip() for line in lines]
        fatal = [line for line in lines if line.startswith(("[FTL]", "[ERR]", "nats-server:"))]
        return " | ".join((fatal or [line for line in lines if line])[-2:]) or "(nothing)"

    def _end(self, grace_s: float) -> None:
        # A forked copy of this object must not end the server of the process that started it.
        if self._process is not None and self._owner_pid == os.getpid():
            child.end(self._process, grace_s)

    def _forget(self) -> None:
        _started.discard(self)
        self._process = self._port = self._monitor_port = None
        if self._run_dir is not None and self._owner_pid == os.getpid():
            self._run_dir.remove()
        self._run_dir = None

    def _own_dir(self) -> RunDir:
        if self._run_dir is None:
            raise self._not_started()
        return self._run_dir

    def _not_started(self) -> EmbeddedServerError:
        return EmbeddedServerError(f"nats-server {self.name} has not been started; use 'async with' or start()")


class PortTakenError(EmbeddedServerError):
    """Another process listens on a port that the server wanted."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on {monitor.LOOPBACK} is already in use: expected a free one; "
            f"choose another port, or none to get a free one"
        )
        self.port = port


def _quoted(text: str) -> str:
    # The server's configuration reads JSON's string form, save \u, which paths do not need.
    return json.dumps(text, ensure_ascii=False)


@atexit.register
def _stop_all() -> None:
    for server in list(_started):
        server.stop_sync()
