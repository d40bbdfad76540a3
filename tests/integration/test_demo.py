"""The demo shows what it claims, finds faults, and leaves nothing behind."""

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

from parti.cli.demo import app as demo_app
from parti.cli.demo.check import Findings, Note, Stored, compare, percentiles, read_notes
from parti.cli.demo.traffic import make_messages

COMMAND = [sys.executable, "-m", "parti.cli.main", "dev", "demo"]
PATIENCE_S = 40.0

Shown: TypeAlias = tuple[subprocess.CompletedProcess[str], Path]


def run_demo(*options: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user would, with a temporary directory of its own to see what it leaves there."""
    environment = {**os.environ, "TMPDIR": str(cwd), **variables}
    return subprocess.run(
        [*COMMAND, *options],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def figures(output: str) -> dict[str, str]:
    """Return the summary's rows, by name."""
    return {m[1]: m[2] for m in re.finditer(r"^([a-z][a-z0-9 ]*?) {3,}([\d.,]+(?: \S+)?) {2,}", output, re.MULTILINE)}


def offspring(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


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
    options = ("--messages", "6000", "--partitions", "60")
    return run_demo(*options, cwd=directory, PARTI_NATS="nats://127.0.0.1:1", PARTI_USER="somebody"), directory


def test_every_message_is_handled_once_and_in_order(shown: Shown) -> None:
    done, _ = shown
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(done.stdout)
    assert found["published"] == found["handled"] == "6,000"
    assert (found["lost"], found["repeated"], found["out of order"]) == ("0", "0", "0")
    assert found["partitions"] == "60"
    assert found["throughput"].endswith("msg/s")
    assert {"duration", "latency p50"} <= found.keys()


def test_without_a_terminal_the_output_is_plain_text(shown: Shown) -> None:
    done, _ = shown
    assert not re.search(r"[^\n\x20-\x7e]", done.stdout)
    assert done.stderr == ""


def test_it_leaves_nothing_behind(shown: Shown) -> None:
    _, directory = shown
    assert [file.name for file in directory.iterdir()] == ["parti.toml"]


def test_a_terminal_sees_progress_bars(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*COMMAND, "--messages", "1000"], cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs, text=True
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and select.select([ours], [], [], PATIENCE_S)[0]:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        seen += chunk
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    text = seen.decode()
    assert "\x1b[?25l" in text, "the cursor is hidden while bars are drawn"
    assert "\x1b[?25h" in text, "and shown again"
    assert re.search(r"handled +.*━.* 1,000", text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "--messages", "200000"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        while not process.stdout.readline().startswith("traffic"):
            assert process.poll() is None
        started = offspring(process)
        assert len(started) >= 2
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted" in output
    assert errors == ""
    assert all(gone(each) for each in started)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--messages", "1"], "--messages is 1: expected 2 to 1000000"),
        (["--partitions", "0"], "--partitions is 0: expected 1 to 100000"),
        (["--partitions", "many"], "--partitions"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, options: list[str], complaint: str) -> None:
    done = run_demo(*options, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert complaint in done.stderr


def test_without_a_server_binary_it_says_so(tmp_path: Path) -> None:
    done = run_demo(cwd=tmp_path, PARTI_NATS_SERVER="missing")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no nats-server at 'missing'" in done.stderr


# -- its judgement ------------------------------------------------------------------------------------------------

STREAM = [Stored(1, "a", 11), Stored(2, "b", 12), Stored(3, "a", 13), Stored(4, "b", 14)]


def notes(*calls: tuple[int, int]) -> list[Note]:
    return [Note(seq, fingerprint, 0.0, 0.0) for seq, fingerprint in calls]


def test_all_handled_in_the_order_of_their_partition_is_flawless() -> None:
    found = compare(4, STREAM, notes((2, 12), (1, 11), (3, 13), (4, 14)))
    assert found == Findings(published=4, handled=4, lost=0, repeated=0, out_of_order=0, partitions=2)
    assert found.flawless


@pytest.mark.parametrize(
    ("calls", "lost", "repeated", "out_of_order"),
    [
        ([(1, 11), (2, 12), (3, 13)], 1, 0, 0),
        ([(1, 11), (2, 12), (3, 13), (4, 14), (3, 13)], 0, 1, 0),
        ([(3, 13), (1, 11), (2, 12), (4, 14)], 0, 0, 1),
        ([(1, 11), (2, 12), (3, 99), (4, 14)], 1, 1, 0),
        ([], 4, 0, 0),
    ],
    ids=["lost", "repeated", "out of order", "wrong content", "nothing at all"],
)
def test_each_fault_is_found(calls: list[tuple[int, int]], lost: int, repeated: int, out_of_order: int) -> None:
    found = compare(4, STREAM, notes(*calls))
    assert (found.lost, found.repeated, found.out_of_order) == (lost, repeated, out_of_order)
    assert not found.flawless


def test_a_message_that_was_acknowledged_and_is_not_in_the_stream_is_lost() -> None:
    assert compare(5, STREAM, notes((1, 11), (2, 12), (3, 13), (4, 14))).lost == 1


def test_notes_survive_the_file_and_a_half_written_end() -> None:
    kept = [Note(1, 2, 3.5, 4.5), Note(5, 6, 7.5, 8.5)]
    assert read_notes(b"".join(note.pack() for note in kept) + b"\0") == kept


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([float(n) for n in range(1, 101)], (50, 99)) == {50: 50.0, 99: 99.0}
    assert percentiles([7.0], (50, 99)) == {50: 7.0, 99: 7.0}
    assert percentiles([], (50,)) == {}


def test_messages_reach_every_partition_and_are_always_the_same() -> None:
    made = make_messages(1000, 30, demo_app.app.template)
    assert made == make_messages(1000, 30, demo_app.app.template)
    assert len({message.subject for message in made}) == 30
    for message in made:
        demo_app.app.template.parse(message.subject.decode())
