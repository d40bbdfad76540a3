"""A fleet under hostile input: a server, workers, a job worker, a console, and somebody who writes what he likes.

One round: hostile messages and jobs are published as raw bytes, hostile values are put over records of the bucket,
and ordinary messages go to control partitions meanwhile. At its end every control message was handled in order, every
hostile one was handled or dead-lettered, every job has ended, and all views can be drawn. What a round does follows
from seed and number alone; a round that fails is kept as a file that `--replay` does again.

Records that decide (claims, leases, positions) are overwritten with what is no record: one that is valid and lies
about a position cannot be told from a true one. All others are overwritten with anything. The record of the fleet is
left alone: whoever changes what all agree on stops them, and an operator has to mend it. Orders that cannot be read
are removed by `parti doctor --repair orders` before the round is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import parti
from fuzz.engine import Outcome
from fuzz.feed import Feed
from fuzz.hostile import BYTES
from fuzz.mutation import mutate
from fuzz.raw import Raw, RawClient, as_subject
from fuzz.target import Crashes, WrongError
from fuzz.targets.records import EXAMPLES
from fuzz.targets.screen import check_clean
from fuzz.targets.situations import ODD_NAMES, single_records
from parti.config import Settings
from parti.console.server import prepare, running_console, url_of
from parti.coordination.control_plane import ControlPlane
from parti.embedded import Server
from parti.errors import NotFound, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.chunks import Wanted
from parti.jetstream.connection import Connection
from parti.jetstream.letters import Letters
from parti.jetstream.ranges import RangeReader
from parti.jetstream.target import Target
from parti.jobs import Job, JobApp
from parti.model.fleet import encode
from parti.spark.rows import BatchMaker, Layout
from parti.telemetry.logs import configure_logging

STREAM, JOBS = "FUZZ", "FUZZJOBS"
CONTROL = tuple(f"c{n}" for n in range(4))
HOSTILE = tuple(f"h{n}" for n in range(6))
WORKERS = 3
MESSAGES, RECORDS, JOB_COUNT, CONTROLS = 120, 40, 20, 100
SETTLE_S = 40.0
"""How long a round may take to handle all that was published, once publishing has ended."""
_DECIDE = ("claims", "assignment", "ids", "leader", "progress", "orders")
_QUICK: dict[str, Any] = {
    "fleet": True,
    "lease_ttl_s": 2.0,
    "leader_ttl_s": 2.0,
    "cold_start_window_s": 0.1,
    "scale_window_s": 0.2,
    "min_rebalance_interval_s": 0.2,
    "progress_interval_s": 0.1,
    "backoff_s": (0.02,),
    "attempts": 2,
    "drain_timeout_s": 5.0,
    "log_level": "critical",
}
_JOBS_QUICK: dict[str, Any] = {
    "heartbeat_interval_s": 0.5,
    "ack_wait_minutes": 0.1,
    "fetch_timeout_s": 0.5,
    "backoff_s": (0.05,),
    "attempts": 2,
    "drain_timeout_s": 5.0,
    "log_level": "critical",
}
_VIEWS = (
    ("status",),
    ("status", "--json"),
    ("top", "--once"),
    ("workers",),
    ("explain", "c0.*"),
    ("dlq", "ls"),
    ("dlq", "show", "1"),
    ("jobs", "ls", "--all"),
)


class _MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def fail_as_told(data: bytes) -> None:
    """Raise what a payload asks for, with its text."""
    feed = Feed(data)
    kind = feed.byte() % 6
    if kind < 2:
        return
    text = feed.text()
    raise (ValueError(text), parti.Reject(text), _MuteError(), parti.Retry(0.02, text))[kind - 2]


@dataclass
class Seen:
    """What handlers have been called with."""

    seqs: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    done: set[int] = field(default_factory=set)

    async def handle(self, message: parti.Message) -> None:
        """Handle a message: those of control partitions always work."""
        _ = (message.headers, message.context)
        partition = message.partition.id.partition(".")[0]
        self.seqs[partition].append(message.seq)
        if partition in HOSTILE:
            fail_as_told(message.data)
        self.done.add(message.seq)


async def handle_job(job: Job) -> None:
    """Do a job, or fail as it says."""
    _ = (job.headers, job.subject)
    job.progress(50, Feed(job.data[1:]).text())
    fail_as_told(job.data)


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────────────────────


def hostile_message(chance: random.Random, root: bytes) -> Raw:
    """A message that a server may take or refuse; its last token is of any bytes."""
    token = as_subject(_bytes(chance, 60) or b"x").replace(b".", b"_")
    if chance.random() < 0.05:
        token *= 4_000 // len(token)
    block = None
    if chance.random() < 0.6:
        lines = b"".join(chance.choice(BYTES)[:6_000] for _ in range(chance.randrange(8)))
        if chance.random() < 0.05:
            lines = b"A: " + b"x" * 64_800 + b"\r\n"
        first = b"NATS/1.0" if chance.random() < 0.9 else b"NATS/1.0 " + _bytes(chance, 20).translate(None, b"\r\n")
        block = first + b"\r\n" + lines + b"\r\n\r\n"
    return Raw(root + b"." + token, _bytes(chance, 80), block)


def _bytes(chance: random.Random, most: int) -> bytes:
    found = chance.randbytes(chance.randrange(most))
    return found + chance.choice(BYTES)[:6_000] if chance.random() < 0.3 else found


def hostile_record(chance: random.Random, bucket: str) -> Raw:
    """A value over a record of the bucket."""
    line = chance.choice([line for line in single_records() if not line.startswith(b"fleet ")])
    key, _, value = line.partition(b" ")
    kind, _, name = key.partition(b".")
    if name and kind not in {b"leader"}:
        names = [b"w-0", b"worker-0", b"worker-1", b"c0.=2A", b"h0.=2A", b"nobody", b"old.consumers", *ODD_NAMES]
        key = kind + b"." + chance.choice(names)
    if chance.random() < 0.1:
        key = b"progress.worker-%d" % chance.randrange(WORKERS)
    if chance.random() < 0.1:
        key, value = b"state." + chance.choice([b"c0.=2A", b"x"]), encode(next(iter(EXAMPLES.values())))
    if chance.random() < 0.1:
        key = kind + b"." + as_subject(_bytes(chance, 20) or b"x", 100)
    value = mutate(value, chance, [])
    if key.partition(b".")[0].decode() in _DECIDE:
        value = chance.choice(
            [b"\xff\xfe{}", b"[" * 1_500, b'{"a":' * 1_500, b"null", b"", b"{", b"[]", b'"\xed\xa0\x80"']
        )
    return Raw(b"$KV." + bucket.encode() + b"." + key, value)


# ── a round ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Scene:
    """A running fleet."""

    url: str
    api: JetStreamApi
    connection: Connection
    settings: Settings
    seen: Seen
    console: str


@asynccontextmanager
async def open_scene(directory: Path) -> AsyncIterator[Scene]:
    """Start everything."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(store_dir=directory))
        settings = Settings(nats=(server.url,), console_port=0)
        connection = await Connection.open(settings, name="fuzz")
        stack.push_async_callback(connection.close)
        api = JetStreamApi(connection)
        for name, root in ((STREAM, "f"), (JOBS, "j")):
            retention = "limits" if name == STREAM else "workqueue"
            config = {"name": name, "subjects": [f"{root}.>"], "storage": "memory", "retention": retention}
            await api.call(f"STREAM.CREATE.{name}", {**config, "allow_direct": True})
        seen = Seen()
        names = [f"{name}.*" for name in (*CONTROL, *HOSTILE)]
        for _ in range(WORKERS):
            app = parti.App(stream=STREAM, subject="f.{p}.{k}", partitions=names, nats=server.url, **_QUICK)
            app.handler(seen.handle)
            await stack.enter_async_context(app.running())
        jobs = JobApp(stream=JOBS, subject="j.>", nats=server.url, **_JOBS_QUICK)
        jobs.handler(handle_job)
        await stack.enter_async_context(jobs.running())
        plane = await ControlPlane.open(connection, api, settings.bucket, replicas=1)
        listener, access = prepare(settings)
        await stack.enter_async_context(running_console(plane, settings, listener, access, look_s=0.5))
        yield Scene(server.url, api, connection, settings, seen, url_of(listener))


async def play(scene: Scene, chance: random.Random) -> int:
    """Send everything, then look whether all is well; returns how many hostile inputs there were."""
    sent: dict[str, list[int]] = defaultdict(list)
    hostile: dict[int, bytes] = {}
    inputs = 0
    with RawClient(scene.url) as client:

        def publish(messages: Sequence[Raw]) -> list[int]:
            return client.publish(messages)

        for _ in range(10):
            batch = [hostile_message(chance, b"f." + chance.choice(HOSTILE).encode()) for _ in range(MESSAGES // 10)]
            found = await asyncio.to_thread(publish, batch)
            hostile |= {seq: each.subject for seq, each in zip(found, batch, strict=True) if seq}
            records = [hostile_record(chance, scene.settings.bucket) for _ in range(RECORDS // 10)]
            await asyncio.to_thread(publish, records)
            strays = [hostile_message(chance, root) for root in (b"parti.dlq." + STREAM.encode(), b"parti-history")]
            await asyncio.to_thread(publish, strays)
            jobs = [hostile_message(chance, b"j") for _ in range(JOB_COUNT // 10)]
            await asyncio.to_thread(publish, jobs)
            controls = [(chance.choice(CONTROL), number) for number in range(CONTROLS // 10)]
            raw = [Raw(f"f.{name}.{number}".encode(), b"control") for name, number in controls]
            for (name, _), seq in zip(controls, await asyncio.to_thread(publish, raw), strict=True):
                sent[name].append(seq)
            inputs += len(batch) + len(records) + len(jobs) + len(strays)
    await _repair(scene)
    await _settled(scene, sent, hostile)
    await _check_jobs(scene)
    await _check_views(scene)
    await _check_rows(scene)
    return inputs


async def _repair(scene: Scene) -> None:
    """Do what an operator is told to do: without orders that can be read, what has no owner rests."""
    code, _, errors = await _parti(scene, "doctor", "--repair", "orders")
    if code not in {0, 2}:
        raise WrongError(f"parti doctor --repair orders ends with {code}: {errors.decode(errors='replace')[-300:]}")


async def _parti(scene: Scene, *arguments: str) -> tuple[int | None, bytes, bytes]:
    command = [sys.executable, "-m", "parti", *arguments, "--nats", scene.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = await process.communicate()
    return process.returncode, output, errors


async def _until(condition: Callable[[], Awaitable[str]], seconds: float) -> None:
    """Wait until nothing is missing; raises with what still is."""
    ends_s = time.monotonic() + seconds
    while missing := await condition():
        if time.monotonic() > ends_s:
            raise WrongError(missing)
        await asyncio.sleep(0.1)


async def _settled(scene: Scene, sent: dict[str, list[int]], hostile: dict[int, bytes]) -> None:
    async def missing() -> str:
        late = {name: sorted(set(seqs) - set(scene.seen.seqs[name])) for name, seqs in sent.items()}
        if any(late.values()):
            return f"control messages were not handled: { ({n: s[:3] for n, s in late.items() if s}) }"
        buried = await _buried(scene)
        left = sorted(seq for seq in hostile if seq not in scene.seen.done and seq not in buried)
        if left:
            first = f"{left[0]} on {hostile[left[0]][:60]!r}"
            return f"{len(left)} hostile messages were neither handled nor dead-lettered, the first is {first}"
        return ""

    await _until(missing, SETTLE_S)
    for name, seqs in sent.items():
        firsts = list(dict.fromkeys(seq for seq in scene.seen.seqs[name] if seq in set(seqs)))
        if firsts != sorted(firsts):
            raise WrongError(f"the order of {name} is broken")


async def _buried(scene: Scene) -> set[int]:
    try:
        letters = await Letters.open(scene.connection, scene.api, scene.settings.dead_letter_stream)
    except PartiError:
        return set()
    return {letter.origin_seq async for letter in letters.all() if letter.stream == STREAM and letter.worker}


async def _check_jobs(scene: Scene) -> None:
    async def missing() -> str:
        info = await scene.api.stream_info(JOBS)
        return f"{info.messages} jobs have not ended" if info.messages else ""

    await _until(missing, SETTLE_S)


async def _check_views(scene: Scene) -> None:
    for view in _VIEWS:
        code, output, errors = await _parti(scene, *view)
        said = f"parti {' '.join(view)}"
        if code not in {0, 1, 2} or b"Traceback" in errors:
            raise WrongError(f"{said} ends with {code}: {errors.decode(errors='replace')[-300:]}")
        check_clean((output + errors).decode(), f"in the output of {said}")
    host, _, port = scene.console.removeprefix("http://").rstrip("/").partition(":")
    for path in ("/", "/events"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10):
            status = await reader.readline()
        writer.close()
        if b" 200 " not in status:
            raise WrongError(f"the console answers {status.decode(errors='replace').strip()} to {path}")


async def _check_rows(scene: Scene) -> None:
    """The Spark source reads every message, as rows."""
    info = await scene.api.stream_info(STREAM)

    def read() -> int:
        wanted = Wanted(stream=STREAM, created=info.created, start=1, end=info.last_seq + 1)
        maker = BatchMaker(Layout(STREAM, "parsed", template="f.{p}.{k}"))
        reader = RangeReader(Target(servers=(scene.url,)), wanted, name="fuzz")
        return sum(maker.make(chunk).num_rows for chunk in reader.chunks())

    rows = await asyncio.to_thread(read)
    if rows != info.messages:
        raise WrongError(f"the Spark source has {rows} rows of {info.messages} messages")


async def play_round(seed: int, number: int) -> int:
    """One round on a fleet of its own; returns how many hostile inputs there were."""
    chance = random.Random(f"fleet {seed} {number}")
    with tempfile.TemporaryDirectory(prefix="parti-fuzz-") as directory:
        async with open_scene(Path(directory)) as scene:
            return await play(scene, chance)


# ── the program ───────────────────────────────────────────────────────────────────────────────────────────────────


def main_of(options: argparse.Namespace, directory: Path) -> int:
    """Play rounds until the time is used up, or one again; 1 when one failed."""
    configure_logging("critical")
    if options.replay is not None:
        again = json.loads(options.replay.read_text())
        asyncio.run(play_round(again["seed"], again["round"]))
        print(f"fleet: round {again['round']} of seed {again['seed']} does no harm")
        return 0
    outcome, crashes = Outcome("fleet", "rounds on a server"), Crashes(directory)
    began_s, number = time.monotonic(), 0
    while time.monotonic() - began_s < options.seconds and (
        options.inputs is None or outcome.inputs < options.inputs
    ):
        try:
            outcome.inputs += asyncio.run(play_round(options.seed, number))
        except (WrongError, PartiError, NotFound, OSError, TimeoutError, msgspec.MsgspecError) as error:
            crashes.note(json.dumps({"seed": options.seed, "round": number}).encode(), error)
            outcome.inputs += MESSAGES + RECORDS + JOB_COUNT
            print(f"fleet, round {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        number += 1
    outcome.seconds = time.monotonic() - began_s
    outcome.crashes = dict(crashes.found)
    outcome.files = {where: str(path) for where, path in crashes.files.items()}
    outcome.write(directory / "result.json")
    from fuzz.run import line_of  # noqa: PLC0415 - which imports this module

    print(f"{line_of(outcome)}\n    {number} rounds")
    return 1 if crashes.found else 0
