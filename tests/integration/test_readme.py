"""The README's example works as it is written, and the permissions that the documents list are enough."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parti.embedded.monitor import free_ports

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE_S = 30.0


def blocks(language: str, text: str = README) -> list[str]:
    return [code for found, code in FENCE.findall(text) if found == language]


def free_port() -> int:
    return free_ports(1)[0]


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


def test_both_pages_that_show_the_example_give_the_same_commands() -> None:
    assert blocks("sh") == blocks("sh", (ROOT / "examples" / "README.md").read_text())


@pytest.mark.timeout(120)  # six processes one after the other, with the settings that everybody has at first
def test_the_example_runs_as_written_and_a_restarted_worker_goes_on_where_it_was(tmp_path: Path) -> None:
    port = free_port()
    serving, using = blocks("sh")
    for name in ("orders.py", "send.py"):
        text = (ROOT / "examples" / name).read_text()
        (tmp_path / name).write_text(text.replace("4222", str(port)))
    commands = [line.replace("4222", str(port)) for line in (serving + using).splitlines()]
    environment = [line for line in commands if line in {". .venv/bin/activate", "cd examples"}]
    assert environment == [". .venv/bin/activate", ". .venv/bin/activate", "cd examples"]
    server, send, worker = (line for line in commands if line not in environment)
    with started(server, tmp_path) as running:
        assert read_lines(running, 1) == [f"nats://127.0.0.1:{port}"]
        for _ in range(2):
            with started(send, tmp_path) as sending:
                _, errors = sending.communicate(timeout=PATIENCE_S)
                assert sending.returncode == 0, errors
            with started(worker, tmp_path) as working:
                handled = read_lines(working, 30)
                working.send_signal(signal.SIGINT)
                rest, errors = working.communicate(timeout=PATIENCE_S)
                assert (working.returncode, rest) == (0, ""), errors
            for customer in ("ada", "bob", "cy"):
                orders = [line for line in handled if line.startswith(customer)]
                assert orders == [f"{customer} order {number}" for number in range(1, 11)]
        stop(running)


def test_parti_is_installed_as_a_command() -> None:
    assert shutil.which("parti", path=str(Path(sys.executable).parent))
