"""The README's example works as it is written, and the permissions that the documents list are enough."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

import parti
from parti.embedded import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE_S = 30.0


def blocks(language: str, text: str = README) -> list[str]:
    return [code for found, code in FENCE.findall(text) if found == language]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(command: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command of the README with the `parti` and `python` of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(directory)}
    process = subprocess.Popen(
        shlex.split(command),
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors


def test_the_python_in_the_readme_is_the_example() -> None:
    files = [(ROOT / "examples" / name).read_text() for name in ("orders.py", "send.py")]
    *example, table = blocks("python")
    assert example == files
    assert 'format("jetstream")' in table  # what the walk-through runs


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_the_example_runs_as_written(tmp_path: Path, page: str) -> None:
    port = free_port()
    serving, using = blocks("sh", (ROOT / page).read_text())
    for name in ("orders.py", "send.py"):
        text = (ROOT / "examples" / name).read_text()
        (tmp_path / name).write_text(text.replace("4222", str(port)))
    commands = [line.replace("4222", str(port)) for line in (serving + using).splitlines()]
    environment = [line for line in commands if line in {". .venv/bin/activate", "cd examples"}]
    assert environment == [". .venv/bin/activate", ". .venv/bin/activate", "cd examples"]
    server, send, worker = (line for line in commands if line not in environment)
    with started(server, tmp_path) as running:
        assert read_lines(running, 1) == [f"nats://127.0.0.1:{port}"]
        with started(send, tmp_path) as sending:
            _, errors = sending.communicate(timeout=PATIENCE_S)
            assert sending.returncode == 0, errors
        with started(worker, tmp_path) as working:
            handled = read_lines(working, 30)
            stop(working)
        for customer in ("ada", "bob", "cy"):
            orders = [line for line in handled if line.startswith(customer)]
            assert orders == [f"{customer} order {number}" for number in range(1, 11)]
        stop(running)


def test_a_restarted_worker_goes_on_where_it_was(tmp_path: Path) -> None:
    port = free_port()
    for name in ("orders.py", "send.py"):
        text = (ROOT / "examples" / name).read_text()
        (tmp_path / name).write_text(text.replace("4222", str(port)))
    worker = f"parti worker orders:app --nats nats://127.0.0.1:{port}"
    with started(f"parti dev server --port {port}", tmp_path) as running:
        read_lines(running, 2)
        for _ in range(2):
            with started("python send.py", tmp_path) as sending:
                sending.communicate(timeout=PATIENCE_S)
                assert sending.returncode == 0
            with started(worker, tmp_path) as working:
                assert len(set(read_lines(working, 30))) == 30
                working.send_signal(signal.SIGINT)
                rest, _ = working.communicate(timeout=PATIENCE_S)
                assert rest == ""
        stop(running)


async def test_the_permissions_listed_are_all_that_a_worker_needs(nats_server_factory: Callable[..., Server]) -> None:
    table = (ROOT / "docs" / "operating.md").read_text().split("## Credentials")[1]
    subjects = re.findall(r"`((?:\$|parti\.dlq\.)[^`]+)`", table.split("and to subscribe")[0])
    assert len(subjects) > 10
    allowed = ", ".join(f'"{subject}"' for subject in subjects)
    worker = f'{{user: w, password: x, permissions: {{publish: [{allowed}], subscribe: ["_INBOX.>", "$SRV.>"]}}}}'
    config = f"accounts: {{A: {{jetstream: enabled, users: [{{user: admin, password: x}}, {worker}]}}}}"
    url = nats_server_factory(config=config).url
    client = await nats.connect(url, user="admin", password="x")
    stream = client.jetstream()
    await stream.add_stream(name="ORDERS", subjects=["orders.*.*"])
    for customer, order in (("ada", b"1"), ("ada", b"bad"), ("ada", b"2"), ("bob", b"3")):
        await stream.publish(f"orders.eu.{customer}", order)
    wanted = ["eu.ada"]
    source = parti.Callback(lambda: list(wanted), refresh_s=0.1)
    app = parti.App(stream="ORDERS", subject="orders.{region}.{customer}", partitions=source)
    handled: asyncio.Queue[bytes] = asyncio.Queue()

    @app.handler
    async def handle(message: parti.Message) -> None:
        if message.data == b"bad":
            raise parti.Reject("bad order")
        handled.put_nowait(message.data)

    async with asyncio.timeout(PATIENCE_S), app.running(nats=url, user="w", password="x") as running:
        assert [await handled.get(), await handled.get()] == [b"1", b"2"]
        wanted.append("eu.bob")
        assert await handled.get() == b"3"
        assert running.health.healthy
    assert (await stream.stream_info("parti-dlq")).state.messages == 1
    assert (await stream.consumer_info("ORDERS", "parti-worker-0")).num_ack_pending == 0
    await client.close()


def test_parti_is_installed_as_a_command() -> None:
    assert shutil.which("parti", path=str(Path(sys.executable).parent))
