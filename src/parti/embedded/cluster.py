"""Several nats-servers on loopback that form one JetStream cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2s
from pathlib import Path

from parti.embedded import monitor
from parti.embedded.blocks import Blocks
from parti.embedded.server import PortTakenError, Server
from parti.errors import EmbeddedServerError

_ELECTION_TIMEOUT_S = 40.0
_POLL_S = 0.05
_START_ATTEMPTS = 3


class Cluster(Blocks):
    """Embedded servers `n1`, `n2`, ... with routes between them and one JetStream meta group.

    Guarantees: after a start every node takes clients, a meta leader exists and it sees all other nodes as current.
    All of what Server guarantees holds for each node. With `store_dir` node i keeps its data in `store_dir/ni`; with
    `port` the nodes take that port and the following ones; `config` is added to each node's configuration.

    Fails like Server, and with EmbeddedServerError when no leader is elected within 40 s.

        async with Cluster() as cluster:
            client = await nats.connect(cluster.urls)
    """

    def __init__(
        self,
        size: int = 3,
        config: str = "",
        *,
        port: int | None = None,
        store_dir: str | os.PathLike[str] | None = None,
        binary: str | os.PathLike[str] | None = None,
    ) -> None:
        """Describe a cluster; nothing is started or created yet."""
        if size < 2:
            raise EmbeddedServerError(f"a cluster of {size} makes no sense: expected 2 or more; use Server for one")
        self.size = size
        self._config = config
        self._port = port or None
        self._store = None if store_dir is None else Path(store_dir).absolute()
        self._binary = binary
        self._cancelled = threading.Event()
        self._servers: tuple[Server, ...] = ()

    @property
    def servers(self) -> tuple[Server, ...]:
        """The nodes, also those that were killed; empty before the start and after the stop."""
        return self._servers

    @property
    def urls(self) -> list[str]:
        """The addresses of all nodes, as a client's `servers` option takes them."""
        return [server.url for server in self._servers]

    @property
    def url(self) -> str:
        """The addresses of all nodes in one text, separated by commas."""
        return ",".join(self.urls)

    def meta_leader(self) -> int | None:
        """The index of the running node that leads the JetStream meta group, or None while there is none."""
        for index, server in enumerate(self._servers):
            if server.running and monitor.meta_leader(server.monitor_port) == server.name:
                return index
        return None

    # -- life, for code without an event loop -------------------------------------------------------------------

    def start_sync(self) -> None:
        """Start all nodes and wait for the meta leader; on failure nothing is left behind."""
        if self._servers:
            raise EmbeddedServerError("the cluster is already running: expected a stopped one; stop it first")
        self._cancelled.clear()
        try:
            self._start_nodes()
            self._wait_for_quorum()
        except BaseException:
            self.stop_sync()
            raise

    def stop_sync(self) -> None:
        """Stop all nodes and remove their temporary directories; a second call does nothing."""
        servers, self._servers = self._servers, ()
        self._together([server.stop_sync for server in servers])

    def kill_sync(self, index: int) -> None:
        """End one node with SIGKILL; its port and store stay for `restart`."""
        self._servers[index].kill_sync()

    def restart_sync(self, index: int) -> None:
        """Start one node again on its port and store.

        Returns once the meta leader sees every running node as current; without a majority of running nodes there can
        be no leader, so then it returns as soon as the node takes clients.
        """
        self._cancelled.clear()
        self._servers[index].restart_sync()
        self._wait_for_quorum()

    # -- the same, for asyncio ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Like `start_sync`, without blocking the event loop; a cancelled start leaves nothing running."""
        await self._in_thread(self.start_sync, on_cancel=self.stop_sync)

    async def kill(self, index: int) -> None:
        """Like `kill_sync`, without blocking the event loop."""
        await asyncio.to_thread(self.kill_sync, index)

    async def restart(self, index: int) -> None:
        """Like `restart_sync`, without blocking the event loop."""
        await self._in_thread(lambda: self.restart_sync(index), on_cancel=lambda: None)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], None], on_cancel: Callable[[], None]) -> None:
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._cancelled.set()
            await asyncio.wait([running])
            with contextlib.suppress(EmbeddedServerError):
                running.result()
            on_cancel()
            raise

    def _start_nodes(self) -> None:
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            route_ports = monitor.free_ports(self.size)
            self._servers = self._describe_nodes(route_ports)
            try:
                self._together([server.start_sync for server in self._servers])
            except PortTakenError as clash:
                # A route port can be lost to another process between choosing and using it.
                if clash.port not in route_ports or attempts_left == 0:
                    raise
                self.stop_sync()
            else:
                return

    def _describe_nodes(self, route_ports: list[int]) -> tuple[Server, ...]:
        # A name of its own keeps two clusters apart when one's old route port becomes the other's; with a kept store
        # it must stay the same, since streams remember the cluster they were placed in.
        name = blake2s(str(self._store or uuid.uuid4()).encode(), digest_size=6).hexdigest()
        # All routes listed on all nodes: the meta group counts them to know how many peers to expect.
        routes = ", ".join(f"nats://{monitor.LOOPBACK}:{port}" for port in route_ports)
        return tuple(
            Server(
                port=None if self._port is None else self._port + index,
                store_dir=None if self._store is None else self._store / f"n{index + 1}",
                config=f"cluster {{ name: parti-{name}, listen: '{monitor.LOOPBACK}:{route_port}', "
                f"routes: [{routes}] }}\n{self._config}",
                binary=self._binary,
                name=f"n{index + 1}",
            )
            for index, route_port in enumerate(route_ports)
        )

    def _wait_for_quorum(self) -> None:
        running = [server for server in self._servers if server.running]
        if 2 * len(running) <= self.size:
            return
        deadline = time.monotonic() + _ELECTION_TIMEOUT_S
        while not _agreed(running):
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the {len(running)} running nodes of the cluster did not agree on a meta leader within "
                    f"{_ELECTION_TIMEOUT_S:.0f} s; look at {self._servers[0].log_path}"
                )
            if self._cancelled.wait(_POLL_S):
                raise EmbeddedServerError("the start of the cluster was cancelled")

    def _together(self, steps: list[Callable[[], None]]) -> None:
        """Run the steps at the same time, let all end, then raise the first failure."""
        if not steps:
            return
        with ThreadPoolExecutor(len(steps)) as pool:
            outcomes = [pool.submit(step) for step in steps]
        for outcome in outcomes:
            outcome.result()


def _agreed(servers: list[Server]) -> bool:
    """Whether all nodes are healthy, name the same leader, it is one of them, and it sees the others as current."""
    if not all(monitor.knows_meta(server.monitor_port) for server in servers):
        return False
    leaders = {monitor.meta_leader(server.monitor_port) for server in servers}
    names = {server.name for server in servers}
    if len(leaders) != 1 or not leaders <= names:
        return False
    leader = next(server for server in servers if server.name in leaders)
    return monitor.current_peers(leader.monitor_port) >= names - {leader.name}
