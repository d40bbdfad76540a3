"""What publishers and handlers wrote down, read while it grows.

A run of an hour leaves millions of lines: a call is kept as five numbers in columns, 40 bytes, and becomes an object
only when its partition is looked at.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

NOTES = ".notes"
PUBLISHED = ".published"
_CHUNK = 1 << 20
_LIST_S = 0.1
_QUIET_S = 10.0
_QUIET_LOOK_S = 1.0


class Call(NamedTuple):
    """One call of a handler."""

    seq: int
    fence: int
    process: int
    """Index in `Notes.processes`."""
    start_ns: int
    end_ns: int
    """0: it never ended."""


class Calls:
    """The calls of one partition, in the order in which they were read."""

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns = tuple(array("q") for _ in range(5))

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, call: Call) -> int:
        """Append; returns the row."""
        for column, value in zip(self._columns, call, strict=True):
            column.append(value)
        return len(self) - 1

    def end(self, row: int, end_ns: int) -> None:
        """Note the end of a call."""
        self._columns[4][row] = end_ns

    def refence(self, fence_of: Callable[[Call], int]) -> None:
        """Replace the fence of every call."""
        for row, call in enumerate(list(self.since(0))):
            self._columns[1][row] = fence_of(call)

    def since(self, row: int) -> Iterator[Call]:
        """The calls from a row on."""
        return (Call(*(column[n] for column in self._columns)) for n in range(row, len(self)))

    def by_start(self) -> list[Call]:
        """All calls in the order of their starts."""
        return sorted(map(Call._make, zip(*self._columns, strict=True)), key=lambda call: call.start_ns)


@dataclass(slots=True)
class Process:
    """A process that noted something."""

    name: str
    pid: int = 0
    workers: list[str] = field(default_factory=list)
    """The worker ids that it had, in order."""
    open_rows: dict[tuple[str, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class _Reading:
    """A file, and when to look at it again."""

    name: str
    file: BinaryIO
    grew_s: float
    next_s: float = 0.0


class Tail:
    """Files of a directory that grow, line by line.

    Files of processes that are long gone are many after some hundred kills: whatever has not grown for a while is
    looked at once a second only.
    """

    def __init__(self, directory: Path, suffix: str) -> None:
        self._directory = directory
        self._suffix = suffix
        self._readings: dict[Path, _Reading] = {}
        self._listed_s = 0.0

    def lines(self, *, everything: bool = False) -> Iterator[tuple[str, list[list[str]]]]:
        """What was added, as (file, split lines), in portions; a line that is not whole yet stays for later."""
        now_s = time.monotonic()
        if everything or now_s >= self._listed_s + _LIST_S:
            self._listed_s = now_s
            for path in sorted(self._directory.glob(f"*{self._suffix}")):
                if path not in self._readings:
                    name = path.name.removesuffix(self._suffix)
                    self._readings[path] = _Reading(name, path.open("rb"), now_s)
        for reading in self._readings.values():
            if everything or now_s >= reading.next_s:
                for portion in _whole_lines(reading.file):
                    reading.grew_s = now_s
                    yield reading.name, portion
                reading.next_s = now_s + (_QUIET_LOOK_S if now_s > reading.grew_s + _QUIET_S else 0.0)

    def close(self) -> None:
        """Read no more."""
        for reading in self._readings.values():
            reading.file.close()


def _whole_lines(file: BinaryIO) -> Iterator[list[list[str]]]:
    while chunk := file.read(_CHUNK):
        whole = chunk[: chunk.rfind(b"\n") + 1]
        file.seek(len(whole) - len(chunk), os.SEEK_CUR)
        if not whole:
            return
        yield [line.split() for line in whole.decode().splitlines()]


class Notes:
    """Everything that handlers noted and publishers saw acknowledged, as far as `poll` has read."""

    def __init__(self, directory: Path) -> None:
        self.processes: list[Process] = []
        self.calls: dict[str, Calls] = {}
        self.latest: dict[str, tuple[int, int]] = {}
        """By partition: when its last handler started, and the index of the process."""
        self.sent: dict[str, dict[int, int]] = {}
        """By partition: acknowledged sequences, and when each was first sent."""
        self.unfinished: set[int] = set()
        """Acknowledged to a publisher, and no handler has ended."""
        self.finished = 0
        """Ends of handlers."""
        self.raised: set[int] = set()
        """Messages whose handler raised: each must become a dead letter."""
        self.stray = 0
        """Ends without a start: a line is missing."""
        self._index: dict[str, int] = {}
        self._done = bytearray()
        self._notes = Tail(directory, NOTES)
        self._published = Tail(directory, PUBLISHED)

    def poll(self, *, everything: bool = False) -> None:
        """Read what was added to the files; `everything` leaves no file for later."""
        for name, lines in self._notes.lines(everything=everything):
            self._take_notes(name, lines)
        for _, lines in self._published.lines(everything=everything):
            self._take_published(lines)

    def close(self) -> None:
        """Read no more."""
        self._notes.close()
        self._published.close()

    @property
    def acknowledged(self) -> int:
        """Messages that publishers saw acknowledged."""
        return sum(map(len, self.sent.values()))

    def process_index(self, name: str) -> int:
        """The index of a process; -1 when it noted nothing."""
        return self._index.get(name, -1)

    def rows(self) -> dict[str, int]:
        """How many calls of each partition were read: a mark for `Calls.since`."""
        return {partition: len(calls) for partition, calls in self.calls.items()}

    def _take_notes(self, name: str, lines: list[list[str]]) -> None:
        index = self._index.setdefault(name, len(self.processes))
        if index == len(self.processes):
            self.processes.append(Process(name))
        process = self.processes[index]
        for what, ns, partition, seq, fence, worker, pid in lines:
            if what == "S":
                process.pid = int(pid)
                if not process.workers or process.workers[-1] != worker:
                    process.workers.append(worker)
                calls = self.calls.setdefault(partition, Calls())
                self.latest[partition] = max(self.latest.get(partition, (0, 0)), (int(ns), index))
                process.open_rows[partition, int(seq)] = calls.add(Call(int(seq), int(fence), index, int(ns), 0))
            elif (row := process.open_rows.pop((partition, int(seq)), None)) is not None:
                self.calls[partition].end(row, int(ns))
                self._finish(int(seq))
                if what == "R":
                    self.raised.add(int(seq))
            else:
                self.stray += 1

    def _finish(self, seq: int) -> None:
        self.finished += 1
        if seq >= len(self._done):
            self._done.extend(bytes(max(seq + 1 - len(self._done), len(self._done), 1024)))
        self._done[seq] = 1
        self.unfinished.discard(seq)

    def _take_published(self, lines: list[list[str]]) -> None:
        for seq_text, partition, sent_ns, _acked_ns in lines:
            seq = int(seq_text)
            self.sent.setdefault(partition, {})[seq] = int(sent_ns)
            if seq >= len(self._done) or not self._done[seq]:
                self.unfinished.add(seq)
