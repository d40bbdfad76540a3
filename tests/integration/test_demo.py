"""The demo tells its story on real processes, shows it, proves it, and leaves nothing running."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from parti.cli.main import main

COMMAND = [sys.executable, "-m", "parti.cli.main", "dev", "demo"]
SMALL = ("--seconds", "5", "--workers", "2", "--partitions", "8", "--no-audit")
PATIENCE_S = 150.0
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)

Shown: TypeAlias = tuple[subprocess.CompletedProcess[str], Path]


def surroundings(cwd: Path, **variables: str) -> dict[str, str]:
    """An environment with a temporary directory of its own, to see what is left there."""
    (cwd / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(cwd / "tmp"), **variables}


def run_demo(*options: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user would."""
    return subprocess.run(
        [*COMMAND, *options],
        cwd=cwd,
        env=surroundings(cwd, **variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# -- the whole of it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """One whole demo, in a directory whose settings, like those of the environment, are for another server."""
    directory = tmp_path_factory.mktemp("demo")
    (directory / "parti.toml").write_text('token = "for another server"\nstart = "new"\n')
    return run_demo(*SMALL, cwd=directory, PARTI_NATS="nats://127.0.0.1:1", PARTI_USER="somebody"), directory


def test_the_fleet_grows_loses_a_worker_lets_one_go_and_keeps_every_promise(shown: Shown) -> None:
    done, _ = shown
    assert done.returncode == 0, done.stdout + done.stderr
    chapters = re.findall(r"^chapter (\d) of 6: ([a-z ,]+)\.", done.stdout, re.MULTILINE)
    assert [number for number, _ in chapters] == list("123456")
    assert re.search(r"^ +\d+\.\d s  worker-2 joined", done.stdout, re.MULTILINE)
    assert re.search(r"SIGKILL to worker-\d \(pid \d+", done.stdout)
    assert re.search(r"worker-\d was stopped and left with code 0", done.stdout)
    verdicts = dict(re.findall(r"^([A-Z]\w+) .* (\d+)  held", done.stdout, re.MULTILINE))
    assert set(verdicts) >= {"NoLoss", "Order", "OneOwner", "NoRepeatOnPlannedMove", "BoundedRepeatOnCrash"}
    assert set(verdicts.values()) == {"0"}
    assert "Every promise was kept" in done.stdout
    for reason in ("join", "SIGKILL", "drain"):
        assert re.search(rf"^{reason} +\d+ +[\d,]+ ms", done.stdout, re.MULTILINE), reason


def test_without_the_audit_one_line_says_so(shown: Shown) -> None:
    done, _ = shown
    assert done.stdout.count("The audit in Spark was left out: --no-audit was given\n") == 1


def test_without_a_terminal_the_output_is_plain_text(shown: Shown) -> None:
    done, _ = shown
    assert not re.search(r"[^\n\x20-\x7e]", done.stdout)
    assert done.stderr == ""


def test_it_leaves_the_report_and_what_it_was_made_from_and_nothing_else(shown: Shown) -> None:
    done, directory = shown
    expected = ["parti-demo-report-data", "parti-demo-report.html", "parti.toml", "tmp"]
    assert sorted(path.name for path in directory.iterdir()) == expected
    assert list((directory / "tmp").iterdir()) == []
    assert sorted(path.name for path in (directory / "parti-demo-report-data").iterdir()) == ["store", "workers"]
    assert "Report: parti-demo-report.html\n" in done.stdout


def test_the_report_names_the_moments_and_needs_nothing_from_elsewhere(shown: Shown) -> None:
    _, directory = shown
    page = (directory / "parti-demo-report.html").read_text()
    for mark in (r"\+1 worker", r"SIGKILL worker-\d", r"drain worker-\d", "load ends"):
        assert re.search(f"{mark}</text>", page), mark
    assert "Every promise was kept" in page
    assert "parti audit --nats nats://127.0.0.1:4222 --stream DC" in page
    assert not re.search(r"<script|<link|<img|\ssrc=|url\(|@import", page)


# Both signals end it by the same handler.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_terminal_sees_who_owns_what_and_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *SMALL],
        cwd=tmp_path,
        env=surroundings(tmp_path, TERM="xterm-256color"),
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = ""
    deadline = time.monotonic() + PATIENCE_S
    started: list[psutil.Process] = []
    try:
        while time.monotonic() < deadline and select.select([ours], [], [], PATIENCE_S)[0]:
            try:
                seen += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # how Linux says that the other side is closed
                break
            # Once the third worker has joined, everything is there that could be left behind.
            if not started and "joined" in seen:
                started = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(number)
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert re.search(r"\x1b\[[\d;]*48;5;\d+m etch01\.c1 ", seen), "a cell has the colour of its owner"
    assert "2 of 6" in seen
    assert "\x1b[?1049l" in seen, "the terminal is given back"
    assert "interrupted: server and workers are stopped, nothing was written" in seen
    assert len(started) >= 4, "a server and three workers"
    assert all(gone(each) for each in started)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--seconds", "1"], "--seconds is 1: expected 5 to 600"),
        (["--workers", "1"], "--workers is 1: expected 2 to 8"),
        (["--partitions", "3"], "--partitions is 3: expected 4 to 400"),
        (["--partitions", "many"], "--partitions"),
        (["--seed", "-1"], "--seed is -1: expected 0 to"),
        (["--report", "nowhere/report.html"], "there is no directory nowhere"),
        (["--report", "mine"], "--report mine is a directory"),
        (["--report", "mine.html"], "mine-data is there and was not left by a demo"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    complaint: str,
) -> None:
    for name in ("mine", "mine-data"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["dev", "demo", *options]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert complaint in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-data"]


def test_without_a_server_binary_it_says_so(tmp_path: Path) -> None:
    done = run_demo(cwd=tmp_path, PARTI_NATS_SERVER="missing")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no nats-server at 'missing'" in done.stderr
