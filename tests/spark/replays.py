"""What the tests of replays share: a handler that takes notes in any process, a fleet, and rounds without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS

import parti
from parti.app.replay import Outcome, Replay, Request, Rounds
from parti.app.worker import Worker
from parti.core.fleet_view import FleetState
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import RangeReader, Wanted
from parti.spark.replay_task import Work, run_task
from parti.spark.rows import BatchMaker, Layout

NAME = "replay-test"


def noting(
    path: Path, *, rejects: int = 0, worker_s: float = 0.1, guest_s: float = 0.0
) -> Callable[[parti.Message], Awaitable[None]]:
    """A handler that appends to a file, slow in workers, so that a backlog lasts; pickled by value."""
    name = str(path)

    async def handle(message: parti.Message) -> None:
        def note(what: str) -> None:
            who = f"{message.partition.id} {message.seq} {message.fence} {message.worker_id}"
            with Path(name).open("ab", buffering=0) as file:
                file.write(f"{what} {time.time()} {who} 0\n".encode())

        note("start")
        takes_s = guest_s if message.worker_id.startswith("replay-") else worker_s
        if takes_s:
            await asyncio.sleep(takes_s)
        note("end")
        if rejects and message.seq % rejects == 0:
            raise parti.Reject("not this one")

    return handle


def app_of(kit: Kit, handler: Callable[[parti.Message], Any], **settings: Any) -> parti.App:
    # Longer leases than other tests: what is checked here is not how soon a lost one is noticed.
    return kit.app(handler, PARTITIONS, **{**FLEET, "lease_ttl_s": 4.0, "leader_ttl_s": 4.0, **settings})


@contextlib.asynccontextmanager
async def workers(app: parti.App, count: int = 2) -> AsyncIterator[list[Worker]]:
    """So many workers that have shared the partitions."""
    made = [app.worker() for _ in range(count)]
    try:
        for worker in made:
            await worker.start()
        await eventually(lambda: _settled(made))
        yield made
    finally:
        await asyncio.gather(*(worker.stop() for worker in made))


def _settled(made: Sequence[Worker]) -> bool:
    owned = [len(worker.partitions) for worker in made]
    shared = sum(owned) == len(PARTITIONS) and max(owned) - min(owned) <= 1
    return shared and all(worker.state is FleetState.STABLE for worker in made)


def replay_of(app: parti.App, partitions: Sequence[str], **request: Any) -> Replay:
    settings, job = app.job(fleet=True)
    given = {"name": NAME, "choose": lambda found: partitions, "claim_within_s": 20.0, **request}
    return Replay(settings, job, Request(**given))


async def replayed(app: parti.App, partitions: Sequence[str], rounds: Rounds, **request: Any) -> Outcome:
    return await replay_of(app, partitions, **request).run(lambda: rounds)


class LocalRounds:
    """Rounds in this process: what tasks do, without Spark around them."""

    def run(self, work: Work, start: int) -> int:
        results = list(run_task(work, f"local-{os.getpid()}-{work.number}", _batches(work, start)))
        return sum(sum(r.column("handled").to_pylist() + r.column("dead_lettered").to_pylist()) for r in results)

    def cancel(self) -> None:
        """A task hears that it may not go on when it asks."""


def _batches(work: Work, start: int) -> Iterable[pa.RecordBatch]:
    with BlockingClient.open(work.target, name="test") as client:
        created = client.stream_info(work.stream)["created"]
    wanted = Wanted(stream=work.stream, created=created, start=start, end=work.end)
    reader = RangeReader(work.target, wanted, name="test")
    maker = BatchMaker(Layout(work.stream, headers="raw"))
    table = pa.Table.from_batches([maker.make(chunk) for chunk in reader.chunks()])
    partitions = {lot.subject: lot.partition for lot in work.lots.values()}
    table = table.append_column(
        "partition",
        pa.array([partitions.get(subject) for subject in table.column("subject").to_pylist()], pa.string()),
    )
    table = table.filter(pc.is_valid(table.column("partition")))
    positions = [work.lots[p].position for p in table.column("partition").to_pylist()]
    table = table.filter(pc.greater_equal(table.column("seq"), pa.array(positions, pa.int64())))
    ordered: pa.Table = table.sort_by([("partition", "ascending"), ("seq", "ascending")])
    found: list[pa.RecordBatch] = ordered.combine_chunks().to_batches()
    return found
