"""Runs the demo and draws its screen."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote_plus

from examples.transcode.demo.check import Outcome, find_faults
from examples.transcode.demo.picture import draw, measure
from examples.transcode.demo.uploads import Happening, make_happenings
from examples.transcode.ffmpeg import Ffmpeg, Video, find_ffmpeg
from examples.transcode.ladder import RUNGS
from examples.transcode.manifest import Manifest, decode
from examples.transcode.media import MP4
from examples.transcode.settings import TranscodeSettings
from examples.transcode.stores import NatsStore
from rich.console import Console
from rich.live import Live
from rich.table import Table

from parti.cli.jobs import draw as draw_jobs
from parti.config import Settings
from parti.embedded import Server
from parti.errors import NotFound, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Entry
from parti.jobs.desk import JobDesk
from parti.model.job import JobRecord, JobState, decode_job
from parti.telemetry.logs import configure_logging

_ROOT = Path(__file__).parents[3]
_UPLOADS, _RESULTS = "uploads", "transcoded"
_CAPACITY = 14
_START_S, _WORK_S, _LEAVE_S, _POLL_S = 30.0, 150.0, 30.0, 0.1
_INTERRUPTED = 130


class _DemoError(Exception):
    """The demo came to no result; says why."""


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code says how it went."""
    parser = _Parser(
        prog="demo-transcode",
        description="Show a transcode worker at work: uploads, events, results, dead letters, and a check of it all.",
        epilog="Exit codes: 0 everything was as expected, 1 it was not, 2 the demo could not start, 130 interrupted.",
    )
    picture = Path("build/transcode-slots.svg")
    parser.add_argument("--picture", type=Path, default=picture, help="where the picture of the slots goes")
    parser.add_argument("--small", action="store_true", help="with tiny videos, in a few seconds")
    given = parser.parse_args(arguments)
    configure_logging("error")
    console = Console(highlight=False)
    try:
        given.picture.parent.mkdir(parents=True, exist_ok=True)
        happenings, outcome = asyncio.run(_run(console, find_ffmpeg(), given.small))
        title = f"{_CAPACITY} slots, {len(happenings)} jobs, one worker"
        given.picture.write_text(draw(outcome.pieces, _CAPACITY, title))
    except asyncio.CancelledError:
        console.print("interrupted: server, worker and files are gone")
        return _INTERRUPTED
    except _DemoError as error:
        console.print(f"[red]The demo failed:[/] {error}", soft_wrap=True)
        return 1
    except (PartiError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    _summarise(console, happenings, outcome, given.picture)
    faults = find_faults(happenings, outcome)
    for fault in faults:
        console.print(f"[red]Not as expected:[/] {fault}", soft_wrap=True)
    if not faults:
        console.print("Everything is as expected.")
    return 1 if faults else 0


# ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _run(console: Console, ffmpeg: str, small: bool) -> tuple[Sequence[Happening], Outcome]:
    task = asyncio.current_task()
    assert task
    for number in (signal.SIGINT, signal.SIGTERM):
        # Once only: a second Ctrl-C must not interrupt the tidying up, which is bounded.
        asyncio.get_running_loop().add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    with tempfile.TemporaryDirectory(prefix="parti-transcode-") as name:
        directory = Path(name)
        console.print(f"videos   made with {ffmpeg.rpartition('/')[2]}")
        happenings = await asyncio.to_thread(make_happenings, directory, small=small)
        async with Server() as server, _connected(server.url) as connection:
            console.print(f"server   nats-server {server.version} with JetStream at {server.url}")
            return happenings, await _show(console, connection, server.url, directory, happenings)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    # Constructed without the usual sources: the user's own settings are for another server.
    connection = await Connection.open(Settings.model_construct(nats=(url,)), name="demo-transcode")
    try:
        yield connection
    finally:
        await connection.close()


async def _show(
    console: Console, connection: Connection, url: str, directory: Path, happenings: Sequence[Happening]
) -> Outcome:
    api, own = JetStreamApi(connection), TranscodeSettings.model_construct()
    store = NatsStore(connection, Settings.model_construct(nats=(url,)))
    work = directory / "work"
    work.mkdir()
    async with _worker(url, directory, work) as worker:
        desk = JobDesk(connection, "parti")
        await _ready(api, desk, worker)
        console.print(f"worker   process {worker.pid}: parti jobs run examples.transcode.app:jobs")
        samples = {sample.key: sample for happening in happenings for sample in happening.samples}
        for sample in samples.values():
            await store.upload(_UPLOADS, sample.key, sample.path, "")
        seqs = [await api.publish(own.subject, _event(happening)) for happening in happenings]
        console.print(f"events   {len(seqs)} about {len(samples)} files\n")
        await _follow(console, desk, worker, seqs)
        records = [await _record(desk, seq) for seq in seqs]
        manifests, results = await _collect(connection, store, directory)
        letters = (await api.stream_info("parti-dlq")).messages
    if worker.returncode:
        raise _DemoError(f"the worker left with exit code {worker.returncode}")
    if left := [path.name for path in work.iterdir()]:
        raise _DemoError(f"the worker left files behind: {left}")
    return Outcome(records, manifests, results, letters, _CAPACITY)


def _event(happening: Happening) -> bytes:
    """As MinIO sends it: keys are quoted as in a form."""
    records = [
        {
            "eventVersion": "2.0",
            "eventSource": "minio:s3",
            "eventName": happening.name,
            "s3": {
                "bucket": {"name": _UPLOADS},
                "object": {"key": quote_plus(sample.key), "size": sample.path.stat().st_size},
            },
        }
        for sample in happening.samples
    ]
    return json.dumps({"EventName": happening.name, "Records": records}).encode()


@asynccontextmanager
async def _worker(url: str, directory: Path, work: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A worker process of its own, untouched by the settings of whoever runs the demo."""
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(("PARTI_", "TRANSCODE_"))}
    environment = {
        **kept,
        "PYTHONPATH": str(_ROOT),
        "PARTI_LOG_LEVEL": "warning",
        "PARTI_JOBS_REPORT_INTERVAL_S": "0.2",
        "PARTI_SUPERVISOR_PID": str(os.getpid()),  # it leaves when this process is gone
        "TRANSCODE_WORK_DIR": str(work),
    }
    command = [sys.executable, "-m", "parti", "jobs", "run", "examples.transcode.app:jobs", "--nats", url]
    command += ["--max-capacity", str(_CAPACITY)]
    with (directory / "worker.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - it starts in no time
            command, cwd=directory, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _ready(api: JetStreamApi, desk: JobDesk, worker: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and worker.poll() is None:
        try:
            await desk.bucket.info()
            await api.consumer_info("MEDIA", "parti-jobs")
            return
        except NotFound:
            await asyncio.sleep(_POLL_S)
    raise _DemoError(f"the worker did not start: {_said(worker)}")


def _said(worker: subprocess.Popen[bytes]) -> str:
    return f"exit code {worker.returncode}" if worker.poll() is not None else f"not within {_START_S:g} s"


async def _follow(console: Console, desk: JobDesk, worker: subprocess.Popen[bytes], seqs: Sequence[int]) -> None:
    """Show the jobs until all have ended, as `parti jobs top` does."""
    entries: dict[str, Entry] = {}
    changed = asyncio.Event()
    watch = desk.watch(entries, changed)
    await watch.start()
    deadline_s = time.monotonic() + _WORK_S
    shown: set[int] = set()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    try:
        with live or nullcontext():
            while len(shown) < len(seqs):
                if worker.poll() is not None or time.monotonic() > deadline_s:
                    raise _DemoError(f"{len(seqs) - len(shown)} jobs have not ended; worker: {_said(worker)}")
                changed.clear()
                picture = await desk.picture(entries)
                if live:
                    live.update(draw_jobs(picture, "jobs"), refresh=True)
                for line in picture.lines:
                    if line.record.state.final and line.record.seq not in shown:
                        shown.add(line.record.seq)
                        if not live:
                            console.print(f"job {line.id} {line.record.state.value}", soft_wrap=True)
                if len(shown) < len(seqs):
                    try:
                        async with asyncio.timeout(1.0):
                            await changed.wait()
                    except TimeoutError:
                        pass
                    await asyncio.sleep(_POLL_S)
    finally:
        await watch.stop()


async def _record(desk: JobDesk, seq: int) -> JobRecord:
    _, _, entry = await desk.find(str(seq), "parti-jobs")
    record = decode_job(entry.value) if entry and entry.value else None
    if record is None:
        raise _DemoError(f"there is no record of job {seq}")
    return record


async def _collect(
    connection: Connection, store: NatsStore, directory: Path
) -> tuple[dict[str, Manifest], dict[str, tuple[int, Video]]]:
    """Read everything in the bucket of results back, and look into it."""
    manifests: dict[str, Manifest] = {}
    results: dict[str, tuple[int, Video]] = {}
    ffmpeg = Ffmpeg(TranscodeSettings.model_construct())
    bucket = await connection.client.jetstream().object_store(_RESULTS)
    for info in await bucket.list(ignore_deletes=True):
        path = directory / "result"
        with path.open("wb") as file:
            await store.download(_RESULTS, info.name, file)
        if info.name.endswith(".json"):
            manifest = decode(path.read_bytes())
            manifests[manifest.source.key] = manifest
        else:
            results[info.name] = (path.stat().st_size, await ffmpeg.probe(path, MP4))
    return manifests, results


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────


def _summarise(console: Console, happenings: Sequence[Happening], outcome: Outcome, picture: Path) -> None:
    names = [rung.name for rung in RUNGS if any(piece.name == rung.name for piece in outcome.pieces)]
    table = _table("job", "file", "is", *names)
    for column in table.columns[3:]:
        column.justify = "right"
    for happening, record in zip(happenings, outcome.records, strict=True):
        for number, sample in enumerate(happening.samples):
            head = str(record.seq) if number == 0 else ""
            made = outcome.manifests.get(sample.key) if happening.created else None
            sizes = {result.name: result.bytes for result in made.results} if made else {}
            cells = (f"{sizes[name] / 1000:,.0f}" if name in sizes else "" for name in names)
            table.add_row(head, sample.key, _outcome(happening, made), *cells)
    letters = _table("job", "dead letter: reason")
    for record in outcome.records:
        if record.state is JobState.FAILED:
            letters.add_row(str(record.seq), record.error)
    usage = measure(outcome.pieces)
    console.print()
    console.print(table)
    console.print("sizes in kB\n", style="dim")
    console.print(letters)
    console.print(
        f"\n{len(outcome.pieces)} pieces of work in {usage.seconds:.1f} s, up to {usage.side_by_side} side by side; "
        f"{usage.mean / _CAPACITY:.0%} of {_CAPACITY} slots in use on average, {usage.most} at most. Over time:",
        soft_wrap=True,
    )
    console.print(f"  {picture}\n", soft_wrap=True)


def _table(*titles: str) -> Table:
    table = Table(*titles, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table


def _outcome(happening: Happening, made: Manifest | None) -> str:
    if not happening.created:
        return "[dim]skipped[/]"
    return f"[green]{made.source.type.removeprefix('video/').removeprefix('x-')}[/]" if made else "[red]refused[/]"


if __name__ == "__main__":
    sys.exit(main())
