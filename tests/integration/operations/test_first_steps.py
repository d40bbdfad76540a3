"""`parti init` and `parti bench`: a new user's first commands, typed exactly as they are printed."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.integration.conftest import Kit, eventually
from tests.integration.operations.operators import Operator
from tests.integration.processes import environment

from parti.embedded.monitor import free_ports


class Typed:
    """A command that somebody typed in a directory, with the commands of this installation on the path."""

    def __init__(self, line: str, directory: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._log = directory / f"{abs(hash(line))}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                shlex.split(line),
                cwd=directory,
                env=environment(PATH=path, PYTHONUNBUFFERED="1"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()


def free_port() -> int:
    return free_ports(1)[0]


async def test_what_init_prints_works_as_it_is_printed(operator: Operator, tmp_path: Path) -> None:
    directory = tmp_path / "shop"
    url = f"nats://127.0.0.1:{free_port()}"
    code, text = await operator.type("init", str(directory), "--nats", url)
    assert code == 0
    server, send, work = (line.strip() for line in text.splitlines() if line.startswith("  "))
    assert server == f"parti dev server --port {url.rpartition(':')[2]}"
    with ExitStack() as typed:
        first = Typed(server, directory)
        typed.callback(first.end)
        await eventually(lambda: "is ready" in first.text, 20)
        second = Typed(send, directory)
        assert await asyncio.to_thread(second.process.wait, 20) == 0, second.text
        third = Typed(work, directory)
        typed.callback(third.end)
        await eventually(lambda: third.text.count(" order ") == 30, 20)
        for customer in ("ada", "bob", "cy"):
            lines = [line for line in third.text.splitlines() if line.startswith(customer)]
            assert lines == [f"{customer} order {n}" for n in range(1, 11)]
        assert third.end() == 0, third.text
    assert first.process.returncode == 0


async def test_a_bench_leaves_nothing_behind(kit: Kit, operator: Operator) -> None:
    before = await kit.api.stream_names()
    answer = await operator.ask("bench", "--nats", kit.url, "--messages", "2000", "--rounds", "1")
    assert set(answer) == {
        *("server", "messages", "subjects", "size", "rounds", "published_per_s", "fetched_per_s", "handled_per_s"),
        "ratio",
    }
    assert answer["ratio"] > 0
    assert answer["handled_per_s"][0] > 0
    assert await kit.api.stream_names() == before


def test_a_bench_brings_its_own_server() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parti", "bench", "--messages", "1000", "--rounds", "1", "--json"],
        env=environment(PARTI_NATS="nats://127.0.0.1:1", PARTI_TLS_HOSTNAME="nowhere"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["server"] == "embedded"


def test_completion_installs_itself_for_the_shell_at_hand(tmp_path: Path) -> None:
    parti = Path(sys.executable).parent / "parti"
    done = subprocess.run(
        ["bash", "-c", f"{parti} --install-completion; exit $?"],
        env=environment(HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    assert "_parti_completion" in (tmp_path / ".bash_completions" / "parti.sh").read_text()
