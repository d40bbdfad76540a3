"""SIGTERM and SIGINT sent to real commands that run Spark on a real stream: they stop, say so, and can go on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.processes import command, environment

from parti.embedded import Server
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.spark.tables import Table

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("java")]

EXIT_S = 60.0
MESSAGES = 400
# A session of seconds: Java's second compiler would take longer than it saves.
QUICK = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
ENDLESS = ("--every", "100ms")
TOML = """
nats = "{url}"

[pipeline]
stream = "{stream}"
lake = "lake"
max_offsets_per_trigger = 10
"""


@pytest.fixture
def place(nats_server: Server, stream_name: str, tmp_path: Path) -> Path:
    """A directory with a parti.toml, for a stream that takes forty batches."""
    with BlockingClient.open(Target(servers=(nats_server.url,)), name="test") as client:
        config = {"name": stream_name, "subjects": [f"{stream_name}.>"], "storage": "memory", "allow_direct": True}
        client.api(f"STREAM.CREATE.{stream_name}", config)
        for number in range(MESSAGES):
            client.request(f"{stream_name}.a", str(number).encode())
    (tmp_path / "parti.toml").write_text(TOML.format(url=nats_server.url, stream=stream_name))
    return tmp_path


class Run:
    """A command, in a process group with its Java."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.said: list[str] = []

    def reaches(self, text: str) -> None:
        """Wait until it says this."""
        assert self._process.stdout
        for line in self._process.stdout:
            self.said.append(line)
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}: {self.said}, {self.ends()}")

    def gets(self, *numbers: signal.Signals) -> None:
        """As from a terminal or a service manager: every process of the group gets them."""
        for number in numbers:
            os.killpg(self._process.pid, number)

    def ends(self) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr, without what Java says of itself whenever it starts."""
        said, complained = self._process.communicate(timeout=EXIT_S)
        self.said.append(said)
        lines = [line for line in complained.splitlines() if "incubator modules" not in line]
        return self._process.returncode, "\n".join(lines)


@contextmanager
def running(place: Path, *arguments: str) -> Iterator[Run]:
    process = subprocess.Popen(
        command(*arguments, "--master", "local[2]"),
        cwd=place,
        env=environment(**QUICK),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield Run(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


BRONZE = ("pipeline", "run", "bronze")


def taken(place: Path) -> int:
    """How many messages the table has: each once, and without a gap."""
    commits = Table(None, str(place / "lake"), "bronze").commits()
    ends = [commit.meta["offsets"]["end"]["next"] for commit in commits]
    assert [commit.meta["seq_min"] for commit in commits] == [1, *ends[:-1]]
    assert sum(commit.rows for commit in commits) == ends[-1] - 1
    return int(ends[-1] - 1)


def stops(place: Path, number: signal.Signals, code: int, *options: str) -> int:
    """Run until a batch is in the table and the next one has begun, and send the signal; returns what was taken."""
    with running(place, *BRONZE, *options) as run:
        run.reaches("bronze: batch")
        run.gets(number)
        assert run.ends() == (code, f"parti: {number.name} stopped bronze; the same command goes on where it was")
        assert "Done" not in "".join(run.said)
    return taken(place)


def test_a_run_that_gets_sigterm_with_its_java_stops_and_says_so_in_one_line(place: Path) -> None:
    assert 10 <= stops(place, signal.SIGTERM, 0, *ENDLESS) < MESSAGES


@pytest.mark.slow
def test_a_run_that_was_stopped_is_gone_on_with_and_a_second_signal_ends_it_without_a_word(place: Path) -> None:
    first = stops(place, signal.SIGINT, 1)
    second = stops(place, signal.SIGTERM, 1)
    assert 10 <= first < second < MESSAGES
    with running(place, *BRONZE, *ENDLESS) as run:
        run.reaches("bronze: batch")
        run.gets(signal.SIGINT, signal.SIGTERM)
        assert run.ends() == (128 + signal.SIGTERM, "")
    assert second < taken(place) < MESSAGES


SLOW = """
import time


def row(message):
    open({begun!r}, "w").close()
    time.sleep({seconds})
"""


def test_a_table_that_is_not_finished_is_not_left_behind(place: Path, stream_name: str) -> None:
    begun = place / "begun"
    os.mkfifo(begun)
    (place / "slow.py").write_text(SLOW.format(begun=str(begun), seconds=2 * EXIT_S))
    table = ("replay", "table", "--stream", stream_name, "--handler", "slow:row", "--output", "lake/t")
    with running(place, *table, "--schema", "n int") as run:
        begun.read_bytes()
        run.gets(signal.SIGINT)
        code = 128 + signal.SIGINT
        assert run.ends() == (code, "parti: SIGINT stopped the replay; no table is left behind")
    assert not (place / "lake" / "t").exists()


@pytest.mark.slow
def test_a_compaction_that_is_stopped_changes_no_row(place: Path) -> None:
    stops(place, signal.SIGINT, 1)
    before = taken(place)
    with running(place, "pipeline", "compact") as run:
        run.reaches("starting Spark")
        run.gets(signal.SIGTERM)
        stopped = "the compaction; what is done stays done, and the same command does the rest"
        assert run.ends() == (128 + signal.SIGTERM, f"parti: SIGTERM stopped {stopped}")
    assert taken(place) == before
