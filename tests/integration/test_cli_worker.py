"""`parti worker` as its users meet it: real processes, signals, exit codes and one clear line for each mistake."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.integration.conftest import Kit, eventually, merge
from tests.integration.processes import WorkerProcess, command, environment, write_app
from tests.pace import unhindered_s

import parti
from parti.cli.main import main
from parti.embedded import Server

PARTITIONS = [f"p{n}" for n in range(10)]
SECRET = "s3cret-never-shown"


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=30, check=False
    )


# ── a worker's life ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_handles_messages_until_sigterm_and_exits_with_0(kit: Kit, tmp_path: Path) -> None:
    sent = await kit.publish(PARTITIONS, 10)
    with WorkerProcess(tmp_path, write_app(tmp_path, kit, PARTITIONS), kit.url) as worker:
        await eventually(lambda: len(worker.handled) >= 100)
        sent = merge(sent, await kit.publish(PARTITIONS, 10))
        await eventually(lambda: len(worker.handled) >= 200)
        assert worker.terminate() == 0
        assert worker.by_partition == sent


async def test_sigterm_lets_the_running_handler_finish_and_nothing_is_repeated(kit: Kit, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    body = f"while os.path.exists({str(hold)!r}): await asyncio.sleep(0.01)"
    target = write_app(tmp_path, kit, ["a"], body=body)
    sent = await kit.publish(["a"], 5)
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: len(worker.started) == 1)
        worker.signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.process.wait(0.3)
        assert worker.handled == []
        hold.unlink()
        assert await asyncio.to_thread(worker.wait) == 0
        assert worker.handled == worker.started == [("a", sent["a"][0])]
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: len(worker.handled) == 5)
        assert worker.terminate() == 0
        assert worker.by_partition == sent


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_second_signal_leaves_at_once(kit: Kit, tmp_path: Path, number: signal.Signals) -> None:
    target = write_app(tmp_path, kit, ["a"], body="await asyncio.sleep(60)")
    sent = await kit.publish(["a"])
    with WorkerProcess(tmp_path, target, kit.url, "--log-level", "info") as worker:
        await eventually(lambda: len(worker.started) == 1)
        worker.signal(number)
        assert worker.process.stderr
        while "draining" not in await asyncio.to_thread(worker.process.stderr.readline):
            assert worker.process.poll() is None
        worker.signal(number)
        started_s = unhindered_s()
        assert await asyncio.to_thread(worker.wait) == 128 + number
        assert unhindered_s() - started_s < 3
        assert worker.handled == []
        assert worker.started == [("a", sent["a"][0])]


async def test_what_does_not_finish_in_time_exits_with_1_and_comes_again(kit: Kit, tmp_path: Path) -> None:
    body = "await asyncio.sleep(0 if os.path.exists('go') else 60)"
    target = write_app(tmp_path, kit, ["a"], body=body, drain_timeout_s=0.1)
    sent = await kit.publish(["a"])
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: len(worker.started) == 1)
        assert await asyncio.to_thread(worker.terminate) == 1
    (tmp_path / "go").touch()
    with WorkerProcess(tmp_path, target, kit.url) as worker:
        await eventually(lambda: worker.handled == [("a", sent["a"][0])])
        assert worker.terminate() == 0


async def test_sigterm_while_the_server_cannot_be_reached_ends_the_worker(kit: Kit, tmp_path: Path) -> None:
    target = write_app(tmp_path, kit, ["a"])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with WorkerProcess(tmp_path, target, f"nats://127.0.0.1:{silent.getsockname()[1]}") as worker:
            connection, _ = await asyncio.to_thread(silent.accept)
            with connection:
                assert await asyncio.to_thread(worker.terminate) in {0, 1}
            assert worker.process.stderr
            assert "Traceback" not in worker.process.stderr.read()


# ── mistakes ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Mistake:
    """What somebody did wrong, and what the one line must mention."""

    says: tuple[str, ...]
    app: str = "parti.App(stream=STREAM, subject=TEMPLATE, partitions=['a'])"
    target: str = "orders:app"
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    toml: str = ""
    url: str = ""
    handler: bool = True


MISTAKES: dict[str, Mistake] = {
    "unknown stream": Mistake(("'NOPE'", "does not exist"), app="parti.App(stream='NOPE', subject=TEMPLATE)"),
    "subject outside the stream": Mistake(
        ("'elsewhere.{p}'", "outside"), app="parti.App(stream=STREAM, subject='elsewhere.{p}')"
    ),
    "partition that does not fit the template": Mistake(
        ("'a.b'", "2 values"), app="parti.App(stream=STREAM, subject=TEMPLATE, partitions=['a.b'])"
    ),
    "template partly outside": Mistake(("partly", "{a}"), app="parti.App(stream=STREAM, subject='{a}.{b}')"),
    "501 subjects": Mistake(
        ("501", "500"),
        app="parti.App(stream=STREAM, subject=TEMPLATE, partitions=[f'p{n}' for n in range(501)])",
        options=("--solo",),
    ),
    "overlap": Mistake(("'*'", "'a'"), app="parti.App(stream=STREAM, subject=TEMPLATE, partitions=['*', 'a'])"),
    "unreachable server": Mistake(("could not connect", "1.0 s"), url="nats://127.0.0.1:1"),
    "unknown option": Mistake(("--bogus", "parti worker --help"), options=("--bogus",)),
}

# Found before anything is connected: no process of their own is needed to show it.
EARLY_MISTAKES: dict[str, Mistake] = {
    "stream name": Mistake(("'a b'",), app="parti.App(stream='a b', subject=TEMPLATE)"),
    "malformed template": Mistake(("'dc.x{p}'", "whole token"), app="parti.App(stream=STREAM, subject='dc.x{p}')"),
    "empty token": Mistake(("'dc..x'", "empty token"), app="parti.App(stream=STREAM, subject='dc..x')"),
    "wildcard in the template": Mistake(("'dc.*'", "wildcard"), app="parti.App(stream=STREAM, subject='dc.*')"),
    "partitions as text": Mistake(
        ("'abc'", "list"), app="parti.App(stream=STREAM, subject=TEMPLATE, partitions='abc')"
    ),
    "two handlers": Mistake(
        ("already",), app="parti.App(stream=STREAM, subject=TEMPLATE)\napp.handler(lambda message: None)"
    ),
    "missing app": Mistake(("'application'",), target="orders:application"),
    "something else than an app": Mistake(("'STREAM'", "str"), target="orders:STREAM"),
    "no colon": Mistake(("MODULE:APP",), target="orders"),
    "module that fails": Mistake(("ZeroDivisionError",), app="1 / 0"),
    "module that fails in many lines": Mistake(
        ("RuntimeError", "one two"), app="exec('raise RuntimeError(\"one\\\\ntwo\")')"
    ),
    "no handler": Mistake(("no handler", "@app.handler"), handler=False),
    "missing module": Mistake(("'nowhere'",), target="nowhere:app"),
    "two ways to authenticate": Mistake(
        ("token", "password"), env={"PARTI_TOKEN": SECRET, "PARTI_USER": "ann", "PARTI_PASSWORD": SECRET}
    ),
    "heartbeat longer than the pull": Mistake(
        ("pull_heartbeat_s=20", "pull_expires_s=30", "environment"), env={"PARTI_PULL_HEARTBEAT_S": "20"}
    ),
    "parti.toml that is no TOML": Mistake(("parti.toml", "TOML"), toml="attempts = \n"),
    "no server address": Mistake(("nats",), url="http://example"),
    "inactive threshold": Mistake(("inactive_threshold_s=5", "lost_after_s"), toml="inactive_threshold_s = 5\n"),
    "batch larger than the room": Mistake(("pull_batch=50", "max_ack_pending=10"), toml="max_ack_pending = 10\n"),
    "setting of the wrong kind": Mistake(("attempts", "environment"), env={"PARTI_ATTEMPTS": "many"}),
    "unknown setting in the app": Mistake(
        ("'worker_ip'", "worker_id"), app="parti.App(stream=STREAM, subject=TEMPLATE, worker_ip='x')"
    ),
    "unknown key in parti.toml": Mistake(("'attempt'", "attempts"), toml="attempt = 3\n"),
    "metrics port that is no number": Mistake(("--metrics-port",), options=("--metrics-port", "x")),
    "metrics port out of range": Mistake(("metrics_port", "65535"), options=("--metrics-port", "70000")),
}


def explain(result: subprocess.CompletedProcess[str], says: tuple[str, ...]) -> None:
    """One line on stderr that says what is wrong, nothing on stdout, exit code 2."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("parti: ")
    for text in says:
        assert text in lines[0]
    assert SECRET not in lines[0]
    assert (result.returncode, result.stdout) == (2, "")


def write_mistake(directory: Path, mistake: Mistake, stream: str, template: str, module: str = "orders") -> None:
    handler = "@app.handler\nasync def handle(message):\n    pass\n" if mistake.handler else ""
    (directory / f"{module}.py").write_text(
        f"import parti\nSTREAM, TEMPLATE = {stream!r}, {template!r}\napp = {mistake.app}\n{handler}"
    )
    (directory / "parti.toml").write_text(mistake.toml)


@pytest.fixture
def mistaken(tmp_path: Path, kit: Kit) -> Callable[[Mistake], subprocess.CompletedProcess[str]]:
    def make(mistake: Mistake) -> subprocess.CompletedProcess[str]:
        write_mistake(tmp_path, mistake, kit.stream, kit.template)
        names = {f"PARTI_{k.upper()}": str(v) for k, v in kit.settings.items() if isinstance(v, str)}
        env = {**names, "PARTI_NATS": mistake.url or kit.url, "PARTI_CONNECT_TIMEOUT_S": "1"}
        return run("worker", mistake.target, *mistake.options, cwd=tmp_path, **{**env, **mistake.env})

    return make


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_costs_one_clear_line_and_exit_code_2(
    name: str, mistaken: Callable[[Mistake], subprocess.CompletedProcess[str]]
) -> None:
    explain(await asyncio.to_thread(mistaken, MISTAKES[name]), MISTAKES[name].says)


@pytest.mark.parametrize("name", EARLY_MISTAKES)
def test_an_early_mistake_costs_one_clear_line_and_exit_code_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake, module = EARLY_MISTAKES[name], f"orders_{uuid.uuid4().hex}"
    write_mistake(tmp_path, mistake, "S", "s.{p}", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for variable, value in {"PARTI_NATS": mistake.url, **mistake.env}.items():
        monkeypatch.setenv(variable, value)
    code = main(["worker", mistake.target.replace("orders", module), *mistake.options])
    out, err = capsys.readouterr()
    explain(subprocess.CompletedProcess([], code, out, err), mistake.says)


async def test_a_metrics_port_in_use_is_a_mistake_too(
    mistaken: Callable[[Mistake], subprocess.CompletedProcess[str]],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        explain(
            await asyncio.to_thread(mistaken, Mistake((), options=("--metrics-port", port))),
            (f"metrics_port={port}", "in use"),
        )


async def test_wrong_credentials_are_named_without_being_shown(
    mistaken: Callable[[Mistake], subprocess.CompletedProcess[str]], nats_server_factory: Callable[..., Server]
) -> None:
    server = nats_server_factory(config=f'authorization {{ user: ann, password: "{SECRET}-right" }}')
    url = server.url.replace("nats://", f"nats://ann:{SECRET}@")
    explain(await asyncio.to_thread(mistaken, Mistake((), url=url)), ("refused", "credentials"))


async def test_a_server_without_jetstream_is_named(
    mistaken: Callable[[Mistake], subprocess.CompletedProcess[str]], nats_server_factory: Callable[..., Server]
) -> None:
    server = nats_server_factory(jetstream=False)
    explain(await asyncio.to_thread(mistaken, Mistake((), url=server.url)), ("JetStream", "not enabled"))


async def test_a_mistake_is_one_line_at_the_usual_log_level_too(
    mistaken: Callable[[Mistake], subprocess.CompletedProcess[str]],
) -> None:
    mistake = Mistake((), app="parti.App(stream='NOPE', subject=TEMPLATE)", env={"PARTI_LOG_LEVEL": "info"})
    explain(await asyncio.to_thread(mistaken, mistake), ("'NOPE'", "does not exist"))


# ── help ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_version_is_one_line(tmp_path: Path) -> None:
    result = run("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"parti {parti.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--help",), 0, ("worker", "dev", "--version")),
        ((), 2, ("worker", "dev", "--version")),
        (("worker", "--help"), 0, ("MODULE:APP", "--nats", "--worker-id", "--metrics-port", "SIGTERM", "Exit codes")),
    ],
    ids=["parti --help", "parti", "parti worker --help"],
)
def test_help_names_what_there_is(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = run(*arguments, cwd=tmp_path, COLUMNS="100", TERM="dumb")
    assert (result.returncode, result.stderr) == (code, "")
    for word in words:
        assert word in result.stdout
    assert not re.search(r"Traceback|\bNone\b", result.stdout)


def test_the_installed_command_is_the_same(tmp_path: Path) -> None:
    installed = Path(sys.executable).parent / "parti"
    result = subprocess.run(
        [installed, "--version"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout == f"parti {parti.__version__}\n"
    assert os.access(installed, os.X_OK)
