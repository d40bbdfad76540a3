"""The ways to lay partitions out over streams and consumers that `benchmarks.approaches` compares.

A, B and C are the approaches of the design document that parti began with; P is what it wanted to leave:

    P         one stream, a durable consumer for each partition
    A         many streams by the hash of the subject, a durable consumer for each partition
    B         the same streams, a durable consumer for each worker on each stream on which it has partitions
    C         one stream, a durable consumer with many FilterSubjects for each worker
    C+mirror  the same consumers on a mirror of the stream in memory

Subjects are the same everywhere, `ap.<hash>.p<number>`, so that the same load fits all. Pure: what is to exist on the
server, and what has to change there when a worker leaves; nothing is sent from here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ONE, HOT = "ONE", "HOT"
MIRROR_BYTES = 256 << 20
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """How many partitions, workers and, where there are many, streams."""

    partitions: int = 2_000
    workers: int = 25
    streams: int = 100


@dataclass(frozen=True, slots=True)
class Consumer:
    """A durable pull consumer and the worker that pulls from it."""

    stream: str
    name: str
    subjects: tuple[str, ...]
    worker: int

    @property
    def key(self) -> tuple[str, str]:
        """What it is on the server."""
        return self.stream, self.name

    def config(self) -> dict[str, Any]:
        """As the server wants it; the same for all topologies but for the filter."""
        one = len(self.subjects) == 1
        return {
            "name": self.name,
            "durable_name": self.name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": 30 * _SECOND,
            "max_ack_pending": 500,
            "max_waiting": 256,
            **({"filter_subject": self.subjects[0]} if one else {"filter_subjects": list(self.subjects)}),
        }


@dataclass(frozen=True, slots=True)
class Change:
    """What a new layout asks of the server and of the workers."""

    create: tuple[Consumer, ...]
    update: tuple[Consumer, ...]
    delete: tuple[Consumer, ...]
    pull: tuple[Consumer, ...]
    """Consumers from which their worker has to pull anew: created, changed, or another worker's until now."""

    @property
    def requests(self) -> int:
        """Calls to the server's API."""
        return len(self.create) + len(self.update) + len(self.delete)


class Topology:
    """One layout of partitions over streams and consumers."""

    def __init__(self, key: str, title: str, size: Size, streams: list[dict[str, Any]], home: Home) -> None:
        self.key = key
        self.title = title
        self.size = size
        self.streams = streams
        """Configurations of the streams, in the order in which they have to be created."""
        self.subjects = tuple(subject_of(number, size.streams) for number in range(size.partitions))
        self._home = home
        self.consumers = self._consumers({n: n % size.workers for n in range(size.partitions)})

    @property
    def names(self) -> list[str]:
        """The streams."""
        return [str(stream["name"]) for stream in self.streams]

    @property
    def mirrors(self) -> dict[str, str]:
        """Mirror and what it mirrors."""
        return {s["name"]: s["mirror"]["name"] for s in self.streams if "mirror" in s}

    def _consumers(self, owners: Mapping[int, int]) -> dict[tuple[str, str], Consumer]:
        found: dict[tuple[str, str], Consumer] = {}
        for number, worker in owners.items():
            stream, name = self._home(number, worker)
            before = found.get((stream, name))
            subjects = (*(before.subjects if before else ()), self.subjects[number])
            found[stream, name] = Consumer(stream, name, subjects, worker)
        return found

    def of_worker(self, worker: int) -> list[int]:
        """Its partitions at first."""
        return list(range(worker, self.size.partitions, self.size.workers))

    def without(self, leaver: int) -> Change:
        """Share out the partitions of a worker that leaves, and compare."""
        owners = {n: n % self.size.workers for n in range(self.size.partitions)}
        others = [worker for worker in range(self.size.workers) if worker != leaver]
        for index, number in enumerate(self.of_worker(leaver)):
            owners[number] = others[index % len(others)]
        old, new = self.consumers, self._consumers(owners)
        create = tuple(c for key, c in new.items() if key not in old)
        update = tuple(c for key, c in new.items() if key in old and set(c.subjects) != set(old[key].subjects))
        delete = tuple(c for key, c in old.items() if key not in new)
        others_until_now = tuple(c for key, c in new.items() if key in old and c.worker != old[key].worker)
        return Change(create, update, delete, (*create, *update, *others_until_now))


Home = Callable[[int, int], tuple[str, str]]
"""Stream and consumer of a partition, by its number and its worker."""


def group_of(number: int, streams: int) -> int:
    """The stream of a partition where there are many, by its hash."""
    return zlib.crc32(b"p%d" % number) % streams


def subject_of(number: int, streams: int) -> str:
    """The subject of a partition."""
    return f"ap.{group_of(number, streams)}.p{number}"


def _file(name: str, subjects: str) -> dict[str, Any]:
    return {"name": name, "subjects": [subjects], "storage": "file"}


def _per_partition(size: Size) -> Topology:
    title = "one stream, a consumer for each partition"
    # Without a limit of its own, nats-server 2.15 refuses a stream's 1,001st consumer (error 10026).
    stream = {**_file(ONE, "ap.>"), "max_consumers": 2 * size.partitions}
    return Topology("P", title, size, [stream], lambda number, _worker: (ONE, f"p{number}"))


def _many_streams(size: Size) -> Topology:
    def home(number: int, _worker: int) -> tuple[str, str]:
        return f"S{group_of(number, size.streams)}", f"p{number}"

    return Topology("A", "many streams, a consumer for each partition", size, _groups(size), home)


def _hybrid(size: Size) -> Topology:
    def home(number: int, worker: int) -> tuple[str, str]:
        return f"S{group_of(number, size.streams)}", f"worker-{worker}"

    return Topology("B", "many streams, a consumer for each worker on each", size, _groups(size), home)


def _per_worker(size: Size) -> Topology:
    title = "one stream, a consumer for each worker"
    return Topology("C", title, size, [_file(ONE, "ap.>")], lambda _number, worker: (ONE, f"worker-{worker}"))


def _on_a_mirror(size: Size) -> Topology:
    mirror = {"name": HOT, "storage": "memory", "max_bytes": MIRROR_BYTES, "mirror": {"name": ONE}}
    title = "the same on a mirror in memory"
    streams = [_file(ONE, "ap.>"), mirror]
    return Topology("C+mirror", title, size, streams, lambda _number, worker: (HOT, f"worker-{worker}"))


def _groups(size: Size) -> list[dict[str, Any]]:
    return [_file(f"S{group}", f"ap.{group}.*") for group in range(size.streams)]


TOPOLOGIES: dict[str, Callable[[Size], Topology]] = {
    "P": _per_partition,
    "A": _many_streams,
    "B": _hybrid,
    "C": _per_worker,
    "C+mirror": _on_a_mirror,
}
