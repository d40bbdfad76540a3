"""Kill the bronze ingest again and again in the middle of a batch while messages flow, and look for the damage.

    python -m benchmarks.ingest_kills --kills 10 --rate 2000

The ingest is the real command, `parti pipeline run bronze --every 100ms`, in a process group of its own: SIGKILL hits
Python and the JVM at once. Of three kills two come when the checkpoint has a batch that the table has not, one just
after a commit. A publisher goes on all the time. In the end the ingest catches up, and the table is compared with
the stream: each sequence once, none missing, every payload as it was sent. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from benchmarks.report import RESULTS, LiveLine, write_result
from rich.console import Console
from rich.table import Table

from parti.embedded import Server
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target

STREAM = "KILLS"
_PATIENCE_S = 400.0
_FAILURES = 3
_TICK_S = 0.005
console = Console()


class Publisher(threading.Thread):
    """Publishes numbers at a steady rate, and waits for each to be stored."""

    def __init__(self, url: str, rate: float) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self._url = url
        self._rate = rate
        self._ended = threading.Event()

    def run(self) -> None:
        """Publish until told to stop."""
        with BlockingClient.open(Target(servers=(self._url,)), name="publisher") as client:
            started_s = time.monotonic()
            while not self._ended.is_set():
                if self.sent < self._rate * (time.monotonic() - started_s):
                    client.request(f"kills.{self.sent % 20}", str(self.sent).encode())
                    self.sent += 1
                else:
                    time.sleep(_TICK_S)

    def end(self) -> int:
        """Stop; returns how many messages were stored."""
        self._ended.set()
        self.join()
        return self.sent


class Run:
    """One run: a server, a publisher in this process, and one ingest after the other."""

    def __init__(self, kills: int, rate: float, directory: Path) -> None:
        self.kills = kills
        self.rate = rate
        self.lake = directory / "lake"
        self.log = directory / "ingest.log"
        self.killed: list[str] = []
        self.failed = 0
        self.line = LiveLine()

    def measure(self) -> dict[str, Any]:
        """Run to the end and compare."""
        began_s = time.monotonic()
        with Server() as server:
            with BlockingClient.open(Target(servers=(server.url,)), name="setup") as client:
                config = {"name": STREAM, "subjects": ["kills.*"], "storage": "file", "allow_direct": True}
                client.api(f"STREAM.CREATE.{STREAM}", config)
            publisher = Publisher(server.url, self.rate)
            publisher.start()
            for number in range(self.kills):
                self.line.show(f"kill {number + 1} of {self.kills}, {publisher.sent:,} messages sent")
                self._kill_one(server.url, number)
            sent = publisher.end()
            self._finish(server.url)
        self.line.end()
        found = {"kills": self.kills, "rate": self.rate, "killed": Counter(self.killed), "failed": self.failed}
        found.update(self._compare(sent))
        return {**found, "elapsed_s": round(time.monotonic() - began_s, 1)}

    def _start(self, url: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "parti", "pipeline", "run", "bronze", *options]
        place = ["--stream", STREAM, "--lake", str(self.lake), "--nats", url, "--master", "local[2]"]
        with self.log.open("ab") as log:
            return subprocess.Popen([*command, *place], stdout=log, stderr=log, start_new_session=True)

    def _kill_one(self, url: str, number: int) -> None:
        """Start the ingest, wait until it works on a batch, and kill everything that belongs to it."""
        process = self._start(url, "--every", "100ms")
        before = self._committed()
        middle = number % 3 != 2
        deadline_s = time.monotonic() + _PATIENCE_S
        try:
            while True:
                if process.poll() is not None:
                    # Spark gives up when a machine is so busy that a Python task takes more than 10 s to start.
                    self.failed += 1
                    process = self._start(url, "--every", "100ms")
                if time.monotonic() > deadline_s or self.failed > _FAILURES:
                    raise RuntimeError(f"the ingest did not get going: {self.log.read_text()[-2000:]}")
                begun, committed = self._begun(), self._committed()
                # Two kills of three come while a batch is under way, one just after a commit.
                if committed > before and (begun > committed if middle else begun == committed):
                    break
                time.sleep(_TICK_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # Looked at again, because the ingest went on until it was dead.
        self.killed.append("in a batch" if self._begun() > self._committed() else "between batches")

    def _finish(self, url: str) -> None:
        while self._start(url, "--once").wait(_PATIENCE_S):
            self.failed += 1
            if self.failed > _FAILURES:
                raise RuntimeError(f"the last ingest failed: {self.log.read_text()[-2000:]}")

    def _begun(self) -> int:
        """The newest batch that Spark has planned."""
        return _newest(self.lake / "_checkpoints/bronze/offsets", lambda name: int(name) if name.isdecimal() else -1)

    def _committed(self) -> int:
        """The newest batch that the table has."""
        return _newest(self.lake / "bronze", lambda name: int(name[-12:]) if name.startswith("commit=") else -1)

    def _compare(self, sent: int) -> dict[str, Any]:
        """Read the table as anybody would who knows Parquet, and nothing of commits."""
        rows = ds.dataset(self.lake / "bronze", format="parquet").to_table(columns=["seq", "payload"])
        found = Counter(rows["seq"].to_pylist())
        pairs = zip(rows["seq"].to_pylist(), rows["payload"].to_pylist(), strict=True)
        return {
            "messages": sent,
            "rows": rows.num_rows,
            "missing": sum(seq not in found for seq in range(1, sent + 1)),
            "repeated": sum(times - 1 for times in found.values()),
            "altered": sum(int(payload) != seq - 1 for seq, payload in pairs),
            "staged": len(list((self.lake / "_staging").iterdir())),
            "batches": self._committed() + 1,
        }


def _newest(directory: Path, number: Callable[[str], int]) -> int:
    try:
        return max((number(path.name) for path in directory.iterdir()), default=-1)
    except FileNotFoundError:
        return -1


def passed(result: dict[str, Any]) -> bool:
    """Whether each message is there once, and enough kills hit a batch to mean something."""
    clean = not any(result[name] for name in ("missing", "repeated", "altered", "staged"))
    return clean and result["rows"] == result["messages"] and result["killed"]["in a batch"] > 0


def main() -> int:
    """Parse, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rate", type=float, default=2000, help="messages published a second")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parti-kills-") as directory:
        result = Run(options.kills, options.rate, Path(directory)).measure()
    good = passed(result)
    table = Table(title=f"{result['kills']} SIGKILLs of the ingest under {result['messages']:,} messages")
    table.add_column("what")
    table.add_column("found", justify="right")
    table.add_column("expected", justify="right")
    table.add_row("rows", f"{result['rows']:,}", f"{result['messages']:,}")
    for name in ("missing", "repeated", "altered", "staged"):
        table.add_row(name, f"{result[name]:,}", "0")
    for when, times in result["killed"].items():
        table.add_row(f"killed {when}", str(times), "")
    table.add_row("ended by itself and started again", str(result["failed"]), "")
    console.print(table)
    console.print("passed" if good else "FAILED", style="green" if good else "red")
    path = write_result("ingest_kills", {**result, "passed": good}, options.results)
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
