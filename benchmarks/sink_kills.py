"""Kill a streaming query in the middle of its batches, again and again, and look for what its sink did to the stream.

    python -m benchmarks.sink_kills --kills 10 --files 40 --rows 20000

A query reads files of numbered rows, one file a batch, and publishes them with `format("jetstream")`. It runs in a
session of its own, Python, JVM and tasks, all of which get SIGKILL while a batch is half published; then it is
started again from its checkpoint. In the end the stream is read back: every number once, none missing, the rows of
each task in order, and nothing that was not in the files. Exit code 1 if not, or if a kill did not find a batch half
published.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, LiveLine, write_result
from rich.console import Console
from rich.table import Table

from parti.embedded import Server
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import RangeReader, Wanted
from parti.jetstream.target import Target
from parti.model.headers import parse_headers
from parti.spark.session import local_session

STREAM = "SINK"
_WINDOW_S = 3600
_STALL_S = 240.0
_POLL_S = 0.005
console = Console()


# ── the query, in a process of its own ────────────────────────────────────────────────────────────────────────────


def run_query(url: str, directory: Path) -> None:
    """Publish every file, a batch each, until none is left."""
    with local_session("sink-kills", cores=2) as spark:
        rows = spark.readStream.schema("n bigint, text string").option("maxFilesPerTrigger", 1)
        query = (
            rows.json(str(directory / "in"))
            .selectExpr("concat('sink.', n % 50) AS subject", "concat(n, ' ', text) AS payload")
            .writeStream.format("jetstream")
            .options(servers=url, stream=STREAM, checkpointLocation=str(directory / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


class QueryProcess:
    """The running query; a kill takes everything that it has started."""

    def __init__(self, url: str, directory: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.sink_kills", "--query", url, str(directory)]
        with (directory / "query.log").open("ab") as log:
            self._process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL to driver, JVM and tasks; the tasks have a process group of their own, but no session."""
        for pid in _session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _session(leader: int) -> list[int]:
    """The processes of a session, those that start others first."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(ValueError, ProcessLookupError, PermissionError):
            if os.getsid(int(path.name)) == leader:
                found.append(int(path.name))
    return sorted(found)


# ── the kills ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Findings:
    """What the stream holds, against what the files hold."""

    rows: int
    stored: int
    missing: int
    twice: int
    strange: int
    out_of_order: int
    kills_in_a_batch: int

    @property
    def clean(self) -> bool:
        """Whether every row is there once, in order."""
        return not (self.missing or self.twice or self.strange or self.out_of_order)


def write_files(directory: Path, files: int, rows: int) -> None:
    """Write numbered rows, so many to a file."""
    (directory / "in").mkdir()
    for file in range(files):
        numbers = range(file * rows, (file + 1) * rows)
        text = "".join(json.dumps({"n": n, "text": "x" * 200}) + "\n" for n in numbers)
        path = directory / "in" / f"{file:05}.json"
        path.write_text(text)
        # Spark takes files in the order of their times.
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))


def run_kills(kills: int, files: int, rows: int) -> Findings:
    """Start, kill and restart the query, then let it finish and compare."""
    line = LiveLine()
    with Server() as server, tempfile.TemporaryDirectory() as name:
        directory, target = Path(name), Target(servers=(server.url,))
        write_files(directory, files, rows)
        in_a_batch = 0
        with BlockingClient.open(target, name="kills") as client:
            config = {"name": STREAM, "subjects": ["sink.>"], "duplicate_window": int(_WINDOW_S * 1e9)}
            client.api(f"STREAM.CREATE.{STREAM}", config)
            for kill in range(1, kills + 1):
                # In the middle of a file, so that the batch is half published.
                goal = (kill * files // (kills + 1)) * rows + rows // 3
                process = QueryProcess(server.url, directory)
                try:
                    _wait_for(client, process, goal, line, f"kill {kill}", directory)
                finally:
                    process.kill()
                in_a_batch += _settled(client) % rows != 0
            process = QueryProcess(server.url, directory)
            try:
                _wait_for(client, process, None, line, "the end", directory)
            finally:
                process.kill()
        line.end()
        return _compare(target, files, rows, in_a_batch)


def _stored(client: BlockingClient) -> int:
    return int(client.stream_info(STREAM)["state"]["messages"])


def _settled(client: BlockingClient) -> int:
    """How many are stored once the server has taken what the killed one had sent."""
    before = -1
    while (stored := _stored(client)) != before:
        before = stored
        time.sleep(0.1)
    return stored


def _wait_for(
    client: BlockingClient, process: QueryProcess, goal: int | None, line: LiveLine, what: str, directory: Path
) -> None:
    """Wait for so many messages, or for the end of the query."""
    seen, moved_s = -1, time.monotonic()
    while time.monotonic() < moved_s + _STALL_S:
        stored = _stored(client)
        if goal is not None and stored >= goal:
            return
        code = process.code
        if code == 0 and goal is None:
            return
        if code is not None:
            raise RuntimeError(f"the query ended with {code}: {(directory / 'query.log').read_text()[-2000:]}")
        if stored > seen:
            seen, moved_s = stored, time.monotonic()
        line.show(f"{stored:,} messages stored, waiting for {what}")
        time.sleep(_POLL_S)
    raise RuntimeError(f"nothing was stored for {_STALL_S:g} s, waiting for {what}")


def _compare(target: Target, files: int, rows: int, in_a_batch: int) -> Findings:
    with BlockingClient.open(target, name="kills") as client:
        info = client.stream_info(STREAM)
    wanted = Wanted(stream=STREAM, created=info["created"], start=1, end=int(info["state"]["last_seq"]) + 1)
    numbers: list[int] = []
    last: dict[str, int] = {}
    swapped = 0
    for chunk in RangeReader(target, wanted, name="kills").chunks():
        numbers += [int(payload.split(b" ")[0]) for payload in chunk.payloads]
        for header in chunk.headers:
            # Query, batch, partition, row, digest: the rows of a task come in their order.
            task, row, _ = parse_headers(header or b"")["Nats-Msg-Id"].rsplit(".", 2)
            swapped += int(row) < last.get(task, 0)
            last[task] = int(row)
    counts = Counter(numbers)
    return Findings(
        rows=files * rows,
        stored=len(numbers),
        missing=sum(n not in counts for n in range(files * rows)),
        twice=sum(count > 1 for count in counts.values()),
        strange=sum(not 0 <= n < files * rows for n in counts),
        out_of_order=swapped,
        kills_in_a_batch=in_a_batch,
    )


def _show(result: dict[str, Any], passed: bool) -> None:
    table = Table(title=f"{result['kills']} SIGKILLs of a streaming query under {result['rows']:,} rows")
    table.add_column("what")
    table.add_column("found", justify="right")
    table.add_column("expected", justify="right")
    table.add_row("stored", f"{result['stored']:,}", f"{result['rows']:,}")
    for name in ("missing", "twice", "strange", "out_of_order"):
        table.add_row(name.replace("_", " "), f"{result[name]:,}", "0")
    table.add_row("kills in the middle of a batch", f"{result['kills_in_a_batch']}", f"{result['kills']}")
    table.add_row("time", f"{result['elapsed_s']:.0f} s", "")
    console.print(table)
    console.print("passed" if passed else "FAILED", style="green" if passed else "red")


def main() -> int:
    """Parse, run, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--files", type=int, default=40, help="batches, more than twice as many as kills")
    parser.add_argument("--rows", type=int, default=20_000, help="rows in a file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    parser.add_argument("--query", nargs=2, metavar=("URL", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.query:
        run_query(options.query[0], Path(options.query[1]))
        return 0
    if options.files < 2 * options.kills:
        parser.error("--files: at least twice as many as --kills, so that each kill meets another batch")
    started_s = time.monotonic()
    findings = run_kills(options.kills, options.files, options.rows)
    result = {"kills": options.kills, **asdict(findings), "elapsed_s": round(time.monotonic() - started_s, 1)}
    passed = findings.clean and findings.kills_in_a_batch == options.kills
    _show(result, passed)
    path = write_result("sink_kills", {**result, "passed": passed}, options.results)
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
