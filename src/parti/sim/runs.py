"""Many seeds: run them in batches, and say in a value that can be sent between processes how each batch went."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from parti.sim.bugs import plant
from parti.sim.history import Outcome
from parti.sim.loop import CURRENT
from parti.sim.scenario import make_scenario
from parti.sim.substitution import simulation
from parti.sim.world import World

_BATCH = 10


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant."""

    seed: int
    complaints: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """What some seeds came to."""

    seeds: int = 0
    messages: int = 0
    calls: int = 0
    holdings: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in another tally."""
        self.seeds += other.seeds
        self.messages += other.messages
        self.calls += other.calls
        self.holdings += other.holdings
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.failures += other.failures


def run_seeds(seeds: Iterable[int], *, bug: str | None = None, retention: str | None = None) -> Tally:
    """Run these seeds one after the other, in this process."""
    tally, began_s = Tally(), time.process_time()
    with simulation() as patches:
        if bug:
            plant(bug, patches)
        for seed in seeds:
            outcome = World(make_scenario(seed, retention=retention)).run()
            tally.add(Tally(1, outcome.messages, outcome.calls, outcome.holdings, outcome.virtual_s))
            if not outcome.good:
                tally.failures.append(Failure(seed, tuple(outcome.complaints)))
    gc.collect()
    tally.cpu_s = time.process_time() - began_s
    return tally


def run_verbosely(seed: int, *, bug: str | None = None, retention: str | None = None) -> Outcome:
    """Run one seed and keep its whole timeline, with what parti logs."""
    logger = _TimelineLogger()
    with simulation(logger) as patches:
        if bug:
            plant(bug, patches)
        logger.world = World(make_scenario(seed, retention=retention), keep_timeline=True)
        outcome = logger.world.run()
        logger.world = None
    return outcome


class _TimelineLogger:
    """A logger whose lines become part of the timeline."""

    def __init__(self) -> None:
        self.world: World | None = None

    def debug(self, event: str, **fields: object) -> None:
        """Note a line, whatever its level."""
        if self.world is not None:
            process = CURRENT.get()
            shown = " ".join(f"{name}={str(value)[:200]}" for name, value in fields.items() if name != "exc_info")
            self.world.history.note(f"log: {event} {shown}".rstrip(), getattr(process, "name", ""))

    info = warning = error = exception = critical = debug


def run_in_processes(
    seeds: Sequence[int], processes: int, *, bug: str | None = None, retention: str | None = None
) -> Iterator[Tally]:
    """Run the seeds in so many processes and yield the tally of each batch as it is done."""
    with _pool(processes) as pool:
        todo = iter(_batches(seeds))
        running: set[Future[Tally]] = set()
        try:
            while True:
                # Never all of them at once: a queue of ten thousand could not be left quickly.
                for batch in islice(todo, 2 * processes - len(running)):
                    running.add(pool.submit(run_seeds, batch, bug=bug, retention=retention))
                if not running:
                    return
                done = next(as_completed(running))
                running.remove(done)
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_one_in_process(seed: int, *, bug: str | None = None, retention: str | None = None) -> Outcome:
    """Run one seed, with its timeline, as the same seed runs among many."""
    with _pool(1) as pool:
        return pool.submit(run_verbosely, seed, bug=bug, retention=retention).result()


def _pool(processes: int) -> ProcessPoolExecutor:
    # Whatever order a set of strings has, it is to have the same in each run.
    os.environ["PYTHONHASHSEED"] = "0"
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"))


def _batches(seeds: Sequence[int]) -> Iterator[Sequence[int]]:
    return (seeds[begin : begin + _BATCH] for begin in range(0, len(seeds), _BATCH))
