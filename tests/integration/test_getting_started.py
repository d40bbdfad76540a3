"""Every block of code on the page for beginners does what the page says."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from tests.integration.test_readme import PATIENCE_S, ROOT, blocks, read_lines, started, stop
from tests.pace import unhindered_s

import parti
from parti.config import load_settings
from parti.embedded import Server

pytest_plugins = ["pytester"]

PAGE = (ROOT / "docs" / "getting-started.md").read_text()
APP, LISTED, CONFIGURED, TEST = blocks("python", PAGE)
RUN, RUN_CONFIGURED = blocks("sh", PAGE)
(TOML,) = blocks("toml", PAGE)
STATUS, *OTHERS = blocks("", PAGE)


@pytest.fixture
def server(nats_server_factory: Callable[..., Server]) -> Server:
    """A server of the test's own: the page uses names that other tests may use too."""
    return nats_server_factory()


@pytest.fixture
async def shop(server: Server, tmp_path: Path) -> Path:
    """A directory with the page's app, and its stream with one order for each of three customers."""
    client = await nats.connect(server.url)
    stream = client.jetstream()
    await stream.add_stream(name="ORDERS", subjects=["orders.*.*"])
    for customer in ("ada", "bob", "cy"):
        await stream.publish(f"orders.eu.{customer}", json.dumps({"number": 1}).encode())
    (tmp_path / "orders.py").write_text(APP)
    await client.close()
    return tmp_path


async def test_the_app_runs_with_the_commands_of_the_page(shop: Path, server: Server) -> None:
    command = RUN.strip().replace("nats://127.0.0.1:4222", server.url)
    assert command != RUN.strip()
    with started(command, shop) as working:
        handled = sorted(read_lines(working, 3))
        deadline_s = unhindered_s() + PATIENCE_S
        # Its messages are handled before its next heartbeat tells that it is stable.
        while "worker-0  stable" not in (asked := ask_status(shop, server.url)):
            assert unhindered_s() < deadline_s, asked
        stop(working)
    assert [line.split()[0] for line in handled] == ["ada", "bob", "cy"]
    for word in ("partitions   3: 3 owned", "worker-0  stable"):
        assert word in STATUS
        assert word in asked


def ask_status(directory: Path, url: str) -> str:
    with started(f"parti status --nats {url}", directory) as asking:
        said, errors = asking.communicate(timeout=PATIENCE_S)
        assert asking.returncode == 0, errors + said
    return said


async def test_settings_by_environment(shop: Path, server: Server) -> None:
    command = RUN_CONFIGURED.strip()
    assert command.startswith("PARTI_ATTEMPTS=5 PARTI_HANDLER_TIMEOUT_S=20 parti worker ")
    with started(f"env PARTI_NATS={server.url} {command}", shop) as working:
        assert len(read_lines(working, 3)) == 3
        stop(working)


def test_settings_by_file_and_argument_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    exec(CONFIGURED, given)
    app = given["app"]
    assert isinstance(app, parti.App)
    assert app.overrides == tomllib.loads(TOML) == {"attempts": 5, "handler_timeout_s": 20}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parti.toml").write_text(TOML)
    settings = load_settings()
    assert (settings.attempts, settings.handler_timeout_s) == (5, 20)


async def test_partitions_by_name() -> None:
    given: dict[str, object] = {}
    exec(LISTED, given)
    app = given["app"]
    assert isinstance(app, parti.App)
    assert isinstance(app.source, parti.Static)
    assert [partition.id for partition in app.template.partitions(app.source.partitions)] == [
        "eu.ada",
        "eu.bob",
        "us.*",
    ]


def test_the_test_of_the_page_passes(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(orders=APP, test_orders=TEST)
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_nothing_on_the_page_is_left_untried() -> None:
    assert OTHERS == []
    kinds = PAGE.count("```") // 2
    assert kinds == len([APP, LISTED, CONFIGURED, TEST, RUN, RUN_CONFIGURED, TOML, STATUS])
    assert subprocess.run(["sh", "-n", "-c", RUN + RUN_CONFIGURED], check=False).returncode == 0
