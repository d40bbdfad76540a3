"""Many workers in few processes: how a large fleet fits on a small machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks.audit import MSG_ID, Handled
from benchmarks.fleet import Place

import parti
from parti.app.worker import Worker
from parti.core.fleet_view import Decision, FleetView
from parti.core.planner import Planner
from parti.errors import PartiError
from parti.jetstream.kv import Bucket, Write
from parti.telemetry.logs import configure_logging

_RETRY_S = 0.5


@dataclass(slots=True)
class Costs:
    """What the control plane has cost a process."""

    cpu_s: float = 0.0
    batches: list[tuple[int, float]] = field(default_factory=list)
    """Claims in each batch that was written, and how long that took."""
    plans_s: list[float] = field(default_factory=list)
    """CPU time of each decision of the planner."""
    unclean: int = 0
    """Workers that have left without having stored everything."""
    failures: list[str] = field(default_factory=list)
    """Why workers did not start."""


class Host:
    """Some workers of one app, in this process and on this event loop."""

    def __init__(self, place: Place, partitions: Sequence[str], settings: Mapping[str, Any]) -> None:
        self.journal: list[Handled] = []
        self.workers: list[Worker] = []
        self.unclean = 0
        """Workers that could not store everything when they left."""
        self.failures: list[str] = []
        """Why workers did not start."""
        self._app = parti.App(
            stream=place.stream,
            subject=place.template,
            partitions=partitions,
            nats=place.url,
            bucket=place.bucket,
            prefix=place.prefix,
            **settings,
        )
        self._app.handler(self._handle)

    async def _handle(self, message: parti.Message) -> None:
        self.journal.append(Handled(message.subject, message.seq, message.headers.get(MSG_ID, ""), time.monotonic()))

    async def resize(self, number: int) -> None:
        """Start or stop workers, all at once, until there are so many; the newest go first."""
        missing, old = number - len(self.workers), self.workers[number:]
        new = await asyncio.gather(*(self._start() for _ in range(missing)))
        self.workers = [*self.workers[:number], *new]
        self.unclean += (await asyncio.gather(*(worker.stop() for worker in old))).count(False)

    async def _start(self) -> Worker:
        """Start a worker; one that cannot start is followed by another, as under a supervisor."""
        while True:
            worker = self._app.worker()
            try:
                await worker.start()
            except PartiError as error:
                self.failures.append(str(error))
                await asyncio.sleep(_RETRY_S)
            else:
                return worker


def host(pipe: Pipe, place: Place, partitions: Sequence[str], settings: Mapping[str, Any]) -> None:
    """The process of a host: a number of workers comes in, the costs so far go out; None ends it."""
    configure_logging("error", "console")
    asyncio.run(_host(pipe, place, partitions, settings))


async def _host(pipe: Pipe, place: Place, partitions: Sequence[str], settings: Mapping[str, Any]) -> None:
    costs = Costs()
    count_costs(costs)
    mine = Host(place, partitions, settings)
    while (number := await asyncio.to_thread(pipe.recv)) is not None:
        await mine.resize(number)
        costs.cpu_s, costs.unclean, costs.failures = time.process_time(), mine.unclean, mine.failures
        pipe.send((len(mine.journal), costs))
    await mine.resize(0)
    pipe.send(mine.journal)


def count_costs(costs: Costs) -> None:
    """Take the time of batches and decisions in this process from now on."""
    write, step = Bucket.write, Planner.step

    async def timed_write(self: Bucket, writes: Sequence[Write], *, timeout_s: float = 5.0) -> list[int]:
        began_s = time.perf_counter()
        try:
            return await write(self, writes, timeout_s=timeout_s)
        finally:
            if claims := sum(w.key.startswith("claims.") for w in writes):
                costs.batches.append((claims, time.perf_counter() - began_s))

    def timed_step(self: Planner, view: FleetView) -> Decision:
        began_s = time.thread_time()
        try:
            return step(self, view)
        finally:
            costs.plans_s.append(time.thread_time() - began_s)

    Bucket.write = timed_write  # type: ignore[method-assign]
    Planner.step = timed_step  # type: ignore[method-assign]


class Hosts:
    """Host processes: the first for the rebalancer alone, the others share the rest."""

    def __init__(self, number: int, place: Place, partitions: Sequence[str], settings: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for _ in range(number + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=host, args=(theirs, place, partitions, settings), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    async def resize(self, number: int) -> tuple[int, list[Costs]]:
        """Make the fleet that large; returns how many messages were handled, and what it has cost each process."""
        lead, rest = (1, number - 1) if number else (0, 0)
        others = len(self._pipes) - 1
        sizes = [lead, *(rest // others + (n < rest % others) for n in range(others))]
        answers = await asyncio.to_thread(self._ask, sizes)
        return sum(handled for handled, _ in answers), [costs for _, costs in answers]

    async def start_rebalancer(self) -> None:
        """Start the one worker of the first process, before there are others."""
        await asyncio.to_thread(self._ask, [1, *(0 for _ in self._pipes[1:])])

    async def end(self) -> list[Handled]:
        """Stop all workers; returns what was handled, in the order in which handlers began."""
        journals = await asyncio.to_thread(self._ask, [None for _ in self._pipes])
        return sorted((entry for journal in journals for entry in journal), key=lambda entry: entry.at_s)

    def _ask(self, questions: Sequence[int | None]) -> list[Any]:
        for pipe, question in zip(self._pipes, questions, strict=True):
            pipe.send(question)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
