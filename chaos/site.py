"""Where a run takes place: a server or a cluster, a stream, workers, a publisher, and what is noted of them."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet import Observer, Place, observing

from chaos.checker import IN_FLIGHT_SLACK_S, Findings, check
from chaos.faults import Faults
from chaos.handler_options import LOOP, HandlerOptions
from chaos.notes import NOTES, PUBLISHED, Notes
from chaos.workers import Publisher, Workers
from parti.config import Settings
from parti.embedded import Cluster, Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.partition import Template

RETENTIONS = ("limits", "interest", "workqueue")
STREAM = "CHAOS"
TEMPLATE = "chaos.{p}"
_JOIN_S = 90.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a run."""

    seed: int
    retention: str = "limits"
    workers: int = 4
    """Processes."""
    ids: int = 0
    """Worker ids, if fewer than processes: some share one."""
    partitions: int = 20
    rate: float = 400.0
    """Messages a second, over all partitions."""
    takes_ms: tuple[float, float] = (0.0, 4.0)
    ttl_s: float = 2.0
    nodes: int = 1
    max_consumers: int = -1
    """Of the stream; without a limit of its own the server refuses the 1,001st."""
    drain_s: float = 60.0
    """Longest wait until all that was published is handled."""
    keep: Path | None = None
    """Where notes and logs are kept; a run with violations keeps them in any case."""
    template: str = TEMPLATE
    """With further keys besides `{p}` a partition spans all of their values."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the workers."""

    @property
    def names(self) -> tuple[str, ...]:
        """The partitions."""
        return tuple(f"p{n}" for n in range(self.partitions))

    @property
    def partition_ids(self) -> tuple[str, ...]:
        """The partitions as parti knows them: the name, and `*` for each further key."""
        further = ".*" * (len(Template(self.template).keys) - 1)
        return tuple(f"{name}{further}" for name in self.names)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the workers: windows are short, so that more happens in less time."""
        return {
            "replicas": self.nodes,
            "lease_ttl_s": self.ttl_s,
            "leader_ttl_s": self.ttl_s,
            "cold_start_window_s": 1.0,
            "scale_window_s": 0.5,
            "min_rebalance_interval_s": 0.5,
            **self.further,
        }

    @property
    def in_flight_s(self) -> float:
        """How long a finished message may wait for its position to be stored."""
        return float(Settings().progress_interval_s) + IN_FLIGHT_SLACK_S


def add_load_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """The options that all programs share; `defaults` replace those of `Load`."""
    known = {**{name: Load.__dataclass_fields__[name].default for name in _OPTIONS}, **defaults}
    parser.add_argument("--seed", type=int, default=1, help="chooses victims, targets and moments")
    parser.add_argument("--retention", choices=RETENTIONS, default=known["retention"])
    parser.add_argument("--workers", type=int, default=known["workers"])
    parser.add_argument("--partitions", type=int, default=known["partitions"])
    parser.add_argument("--rate", type=float, default=known["rate"], help="messages a second in all")
    parser.add_argument(
        "--takes-ms", type=float, nargs=2, default=known["takes_ms"], metavar=("LEAST", "MOST"), help="of a handler"
    )
    parser.add_argument("--ttl", dest="ttl_s", type=float, default=known["ttl_s"], help="lease in seconds")
    parser.add_argument("--keep", type=Path, help="directory for notes and logs, which are removed otherwise")
    parser.add_argument("--results", type=Path, help="directory for the JSON result (benchmarks/results)")


_OPTIONS = ("retention", "workers", "partitions", "rate", "takes_ms", "ttl_s")


def load_of(options: argparse.Namespace, **more: Any) -> Load:
    """The size that the command line asks for."""
    given = {name: getattr(options, name) for name in ("seed", "keep", *_OPTIONS)}
    return Load(**{**given, "takes_ms": tuple(options.takes_ms), **more})


class Site:
    """A running fleet under load; made by `open_site`."""

    def __init__(self, load: Load, server: Server | Cluster, directory: Path, observer: Observer) -> None:
        self.load = load
        self.server = server
        self.directory = directory
        self.observer = observer
        self.notes = Notes(directory)
        handler = HandlerOptions(
            stream=STREAM,
            template=load.template,
            partitions=load.partition_ids,
            notes=str(directory),
            takes_ms=load.takes_ms,
            seed=load.seed,
        )
        self.workers = Workers(directory, observer.place, server.url, handler, load.settings)
        self.faults = Faults(self.workers)
        self.publisher = Publisher("pub", directory, observer.place, server.url)
        self.began_ns = time.time_ns()
        self.evidence = load.keep is not None
        """Whether notes and logs stay when the run is over."""
        self._clock_ns = time.time_ns() - time.monotonic_ns()

    @property
    def bucket(self) -> Bucket:
        """The control plane's bucket."""
        return self.observer.plane.bucket

    @property
    def cluster(self) -> Cluster:
        """The servers of a run with several nodes."""
        assert isinstance(self.server, Cluster)
        return self.server

    def even_rates(self) -> dict[str, float]:
        """The same for every partition."""
        return dict.fromkeys(self.load.names, self.load.rate / self.load.partitions)

    async def start(self, start: Callable[[int], object] | None = None) -> None:
        """Start all workers, wait until they own everything, then begin to publish.

        In that order: a stream with interest retention drops what comes before its consumers are there. `start`
        starts the worker of a slot if it needs more than the usual.
        """
        for slot in range(self.load.workers):
            (start or self.workers.start)(slot)
        await self._await_fleet()
        self.publisher.set_rates(self.even_rates())
        await self.until(lambda: all(p in self.notes.calls for p in self.load.names), 30.0)
        self.began_ns = time.time_ns()

    async def _await_fleet(self) -> None:
        deadline_s = time.monotonic() + _JOIN_S
        while problem := self.observer.unsettled(self.load.partition_ids, self.load.ids or self.load.workers):
            crashed = self.workers.crashed()
            if crashed or time.monotonic() >= deadline_s:
                raise RuntimeError(f"the fleet did not come up: {problem}; {'; '.join(crashed) or 'all workers run'}")
            await asyncio.sleep(_POLL_S)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Read notes until the condition holds; False when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.notes.poll()
            if condition():
                return True
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)

    async def rest(self, seconds: float) -> None:
        """Let it run, reading notes."""
        await self.until(lambda: False, seconds)

    async def finish(self, *, empty_within_s: float = 0.0) -> Ending:
        """Stop publishing, wait until all is handled, let the workers leave, and judge.

        `empty_within_s`: wait so long for a stream that removes what is acknowledged to be empty.
        """
        crashed = self.workers.crashed()
        published = await self.publisher.stop()
        await self.until(lambda: not self.notes.unfinished, self.load.drain_s)
        # What is handled twice for no reason may come a little later.
        await self.rest(1.0)
        crashed += [text for text in self.workers.crashed() if text not in crashed]
        dead_letters = await self._dead_letters()
        left = await self._left(empty_within_s if self.load.retention != "limits" else 0.0)
        waiting = await self._waiting() if left and empty_within_s else []
        codes = await self.workers.end_all()
        self.notes.poll(everything=True)
        jump_s = abs(time.time_ns() - time.monotonic_ns() - self._clock_ns) / 1e9
        findings = check(self.notes, self.faults.interruptions(), in_flight_s=self.load.in_flight_s)
        return Ending(findings, published, codes, crashed, dead_letters, left, jump_s, waiting)

    async def _left(self, within_s: float) -> int:
        deadline_s = time.monotonic() + within_s
        while (left := (await self.observer.api.stream_info(STREAM)).messages) and time.monotonic() < deadline_s:
            await self.rest(0.2)
        return left

    async def _waiting(self) -> list[str]:
        names = await self.observer.api.consumer_names(STREAM)
        raw = [await self.observer.api.call(f"CONSUMER.INFO.{STREAM}.{name}") for name in names]
        return [
            f"{info['name']}: {info['num_pending']} to come, {info['num_ack_pending']} not acknowledged, all up to "
            f"{info['ack_floor']['stream_seq']} are"
            for info in raw
        ]

    async def _dead_letters(self) -> int:
        names = await self.observer.api.stream_names()
        infos = [await self.observer.api.stream_info(name) for name in names if name == "parti-dlq"]
        return sum(info.last_seq for info in infos)

    def close(self) -> None:
        """End all processes."""
        self.publisher.close()
        self.workers.close()
        self.notes.close()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    findings: Findings
    all_published: bool
    """Whether everything that was sent was acknowledged in the end."""
    exit_codes: list[int]
    crashed: list[str]
    """Workers that ended by themselves."""
    dead_letters: int
    left: int
    """Messages in the stream when all were handled: none where the server removes what is acknowledged."""
    clock_jump_s: float
    """By how much the wall clock, which orders the notes, was set during the run."""
    waiting: list[str] = field(default_factory=list)
    """What the consumers say of messages that were left although the stream should be empty."""


@asynccontextmanager
async def open_site(load: Load) -> AsyncIterator[Site]:
    """Start servers, make the stream and the bucket, and watch; nothing else runs yet."""
    directory = load.keep or Path(tempfile.mkdtemp(prefix="parti-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    for old in (path for ending in (NOTES, PUBLISHED, LOOP, ".log") for path in directory.glob(f"*{ending}")):
        old.unlink()
    server: Server | Cluster = Server() if load.nodes == 1 else Cluster(load.nodes)
    async with server:
        # Whoever connects to one node of a cluster learns of the others.
        first = server.url.partition(",")[0]
        place = Place(first, STREAM, load.template, bucket="chaos", prefix="chaos")
        await _create(first, load, place)
        async with observing(place) as observer:
            site = Site(load, server, directory, observer)
            try:
                yield site
            except BaseException:
                site.evidence = True
                print(f"notes and logs are in {directory}")
                raise
            finally:
                site.close()
                if not site.evidence:
                    shutil.rmtree(directory, ignore_errors=True)


async def _create(url: str, load: Load, place: Place) -> None:
    connection = await Connection.open(Settings(nats=(url,)), name="chaos")
    try:
        api = JetStreamApi(connection)
        config = {
            "name": STREAM,
            "subjects": [Template(load.template).pattern],
            "retention": load.retention,
            "storage": "file",
            "allow_direct": True,
            "num_replicas": load.nodes,
            "max_consumers": load.max_consumers,
        }
        await api.call(f"STREAM.CREATE.{STREAM}", config)
        await Bucket.open(api, place.bucket, replicas=load.nodes)
    finally:
        await connection.close()
