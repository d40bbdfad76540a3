"""How fast does the state of a partition travel from one owner to the next?

For each size: `put` stores a snapshot, `get` reads it back and verifies it, and `move` is all of it, through two
keepers on two connections: snapshot in a thread, chunks, pointer, fence, restore in a thread. Chunks go to a file
stream on an embedded server, on loopback. While the largest state moves, a key is written again and again over the
same connection, as leases are: how long that takes is what the rest of a worker notices of a transfer.

    python -m benchmarks.state_transfer
    python -m benchmarks.state_transfer --sizes 1K 1M --rounds 3
    python -m benchmarks.state_transfer --chunk-sizes 64 128 256 512 1000

Passes when states of 1 MB and more move at 10 MB/s at least, the lower end of what was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import RESULTS, LiveLine, write_result
from rich.console import Console
from rich.table import Table

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.jetstream.state_store import CHUNK_BYTES, WINDOW, StateStore
from parti.model.partition import Partition
from parti.telemetry.logs import configure_logging
from parti.worker.state import StateKeeper
from parti.worker.state_exchange import SavedState

console = Console()
UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
PIECE = os.urandom(1_000_000)
PARTITION = Partition("p", "t.p", {})
NAME = "bench"
WANTED_MB_S = 10.0
CHUNK_TEST_BYTES = 64 * UNITS["M"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians of one size."""

    size: int
    rounds: int
    put_ms: float
    get_ms: float
    move_ms: float
    remove_ms: float

    def mb_s(self, milliseconds: float) -> float:
        """Megabytes a second."""
        return round(self.size / 1e3 / milliseconds, 2)


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """Medians of one chunk size."""

    chunk_kib: int
    put_mb_s: float
    get_mb_s: float


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a small write takes, in ms."""

    writes: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Sized:
    """A handler with a state of a given size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.restored = 0

    def snapshot(self, _: Partition) -> Iterator[bytes]:
        """Pieces that cost nothing to make."""
        return pieces(self.size)

    def restore(self, _: Partition, state: SavedState | None) -> None:
        """Count."""
        self.restored = sum(map(len, state or ()))


def pieces(size: int) -> Iterator[bytes]:
    """So many bytes."""
    for at in range(0, size, len(PIECE)):
        yield PIECE[: size - at]


async def async_pieces(size: int) -> AsyncIterator[bytes]:
    """The same for the store."""
    for piece in pieces(size):
        yield piece


@asynccontextmanager
async def connected(url: str, name: str) -> AsyncIterator[Connection]:
    """A connection for the length of a block."""
    connection = await Connection.open(Settings(nats=(url,)), name=name)
    try:
        yield connection
    finally:
        await connection.close()


class Bench:
    """One server, two connections, and the measurements on them."""

    def __init__(self, old: Connection, new: Connection, line: LiveLine) -> None:
        self._old = old
        self._new = new
        self._line = line
        self._fence = 0

    async def sizes(self, sizes: list[int], rounds: int | None) -> list[Outcome]:
        """Measure every size; the smaller it is, the more often."""
        return [await self._size(size, rounds or max(3, min(200, 300 * UNITS["M"] // size))) for size in sizes]

    async def _size(self, size: int, rounds: int) -> Outcome:
        store = await StateStore.open(self._old, NAME, replicas=1)
        times: dict[str, list[float]] = {"put": [], "get": [], "move": [], "remove": []}
        for number in range(rounds):
            self._line.show(f"{size:,} bytes, round {number + 1} of {rounds}")
            began_s = time.perf_counter()
            pointer = await store.put("alone", async_pieces(size), fence=1, position=1)
            stored_s = time.perf_counter()
            read = 0
            async for chunk in store.get(pointer):
                read += len(chunk)
            read_s = time.perf_counter()
            assert read == size
            await store.remove(pointer)
            removed_s = time.perf_counter()
            times["put"].append(stored_s - began_s)
            times["get"].append(read_s - stored_s)
            times["remove"].append(removed_s - read_s)
            times["move"].append(await self.move(size))
        return Outcome(size, rounds, *(round(statistics.median(t) * 1e3, 3) for t in times.values()))

    async def move(self, size: int) -> float:
        """Seconds from the call of `snapshot` at the old owner to the end of `restore` at the new one."""
        old, new = await self._keeper(self._old, size), await self._keeper(self._new, size)
        self._fence += 2
        began_s = time.perf_counter()
        await old[1].save(PARTITION, position=1, fence=self._fence)
        await new[1].load(PARTITION, fence=self._fence + 1)
        took_s = time.perf_counter() - began_s
        assert new[0].restored == size
        await asyncio.gather(old[1].settle(), new[1].settle())
        return took_s

    async def _keeper(self, connection: Connection, size: int) -> tuple[Sized, StateKeeper]:
        handler = Sized(size)
        store = await StateStore.open(connection, NAME, replicas=1)
        bucket = await Bucket.open(JetStreamApi(connection), NAME, replicas=1)
        return handler, StateKeeper(handler, store, bucket)

    async def writes_beside(self, size: int) -> tuple[Latency, Latency]:
        """Small writes over the old owner's connection: with nothing else, and while states move."""
        bucket = await Bucket.open(JetStreamApi(self._old), NAME, replicas=1)
        alone = await self._writes(bucket, asyncio.create_task(asyncio.sleep(3)))
        self._line.show("small writes beside moves")
        return alone, await self._writes(bucket, asyncio.create_task(self._moves(size, 3)))

    async def _moves(self, size: int, count: int) -> None:
        for _ in range(count):
            await self.move(size)

    async def _writes(self, bucket: Bucket, until: asyncio.Task[None]) -> Latency:
        entry = await bucket.get("lease")
        revision = entry.revision if entry else 0
        took_ms: list[float] = []
        while not until.done():
            began_s = time.perf_counter()
            revision = await bucket.put("lease", b"x" * 200, revision=revision)
            took_ms.append((time.perf_counter() - began_s) * 1e3)
            await asyncio.sleep(0.005)
        await until
        cuts = statistics.quantiles(took_ms, n=100)
        return Latency(len(took_ms), round(cuts[49], 2), round(cuts[98], 2), round(max(took_ms), 2))

    async def chunk_sizes(self, sizes_kib: list[int], rounds: int) -> list[ChunkOutcome]:
        """The same state with chunks of different sizes, in turn, so that a busy machine is busy for all."""
        stores = {
            kib: await StateStore.open(self._old, NAME, replicas=1, chunk_bytes=kib * 1024) for kib in sizes_kib
        }
        times: dict[int, list[tuple[float, float]]] = {kib: [] for kib in sizes_kib}
        for number in range(rounds):
            for kib, store in stores.items():
                self._line.show(f"chunks of {kib} KiB, round {number + 1} of {rounds}")
                began_s = time.perf_counter()
                pointer = await store.put("alone", async_pieces(CHUNK_TEST_BYTES), fence=1, position=1)
                stored_s = time.perf_counter()
                async for _ in store.get(pointer):
                    pass
                times[kib].append((stored_s - began_s, time.perf_counter() - stored_s))
                await store.remove(pointer)
        mb = CHUNK_TEST_BYTES / 1e6
        return [
            ChunkOutcome(kib, *(round(mb / statistics.median(column)) for column in zip(*took, strict=True)))
            for kib, took in times.items()
        ]


def _show(outcomes: list[Outcome], chunks: list[ChunkOutcome], latency: tuple[Latency, Latency]) -> None:
    table = Table(title="medians; MB/s (ms)")
    for column in ("state", "rounds", "put", "get", "move", "remove"):
        table.add_column(column, justify="right")
    for o in outcomes:
        figures = [f"{o.mb_s(ms):,.1f} ({ms:,.1f})" for ms in (o.put_ms, o.get_ms, o.move_ms)]
        table.add_row(f"{o.size:,}", str(o.rounds), *figures, f"({o.remove_ms:,.1f})")
    console.print(table)
    if chunks:
        table = Table(title=f"{CHUNK_TEST_BYTES:,} bytes by size of chunk; window of {WINDOW}; MB/s")
        for column in ("KiB", "put", "get"):
            table.add_column(column, justify="right")
        for c in chunks:
            table.add_row(str(c.chunk_kib), f"{c.put_mb_s:,.0f}", f"{c.get_mb_s:,.0f}")
        console.print(table)
    for what, figures_of in zip(("alone", "beside moves"), latency, strict=True):
        console.print(
            f"small write {what}: p50 {figures_of.p50_ms} ms, p99 {figures_of.p99_ms} ms, "
            f"max {figures_of.max_ms} ms, {figures_of.writes} writes"
        )


async def run(options: argparse.Namespace) -> tuple[list[Outcome], list[ChunkOutcome], tuple[Latency, Latency]]:
    """Measure everything on one fresh server."""
    line = LiveLine()
    async with Server() as server, connected(server.url, "old") as old, connected(server.url, "new") as new:
        bench = Bench(old, new, line)
        outcomes = await bench.sizes(options.sizes, options.rounds)
        chunks = await bench.chunk_sizes(options.chunk_sizes, options.rounds or 5)
        latency = await bench.writes_beside(max(options.sizes))
    line.end()
    return outcomes, chunks, latency


def size_of(text: str) -> int:
    """`1K`, `64M`: thousands and millions of bytes."""
    return int(text[:-1]) * UNITS[text[-1].upper()] if text[-1].upper() in UNITS else int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size_of, default=[size_of(s) for s in ("1K", "1M", "64M", "512M")])
    parser.add_argument("--rounds", type=int, help="of each size; unset: 200 of the smallest, 3 of the largest")
    parser.add_argument("--chunk-sizes", nargs="*", type=int, default=[64, 128, 256, 512, 1000], help="in KiB")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON result")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse, run, show, write."""
    options = parse()
    configure_logging("error", "console")
    outcomes, chunks, latency = asyncio.run(run(options))
    _show(outcomes, chunks, latency)
    passed = all(o.mb_s(o.move_ms) >= WANTED_MB_S for o in outcomes if o.size >= UNITS["M"])
    sizes = [
        {
            **asdict(o),
            "put_mb_s": o.mb_s(o.put_ms),
            "get_mb_s": o.mb_s(o.get_ms),
            "move_mb_s": o.mb_s(o.move_ms),
        }
        for o in outcomes
    ]
    result = {
        "chunk_bytes": CHUNK_BYTES,
        "window": WINDOW,
        "wanted_mb_s": WANTED_MB_S,
        "sizes": sizes,
        "chunk_sizes": [asdict(c) for c in chunks],
        "small_write_alone": asdict(latency[0]),
        "small_write_beside_moves": asdict(latency[1]),
        "passed": passed,
    }
    path = write_result("state_transfer", result, options.results)
    console.print("passed" if passed else "FAILED", style="green" if passed else "red")
    console.print(f"written to {path}", soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
