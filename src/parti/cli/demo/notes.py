"""What the demo's handlers write down, a file for each process: the first witness.

A line for each start and each end of a handler call, times in nanoseconds of the wall clock:

    S <time> <partition> <seq> <fence> <worker> <when the stream stored it> <fingerprint>
    E <time> <seq>
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import parti

SUFFIX = ".notes"


def fingerprint(subject: str, data: bytes) -> int:
    """By which a message in the stream and a note of it are recognised as the same."""
    return zlib.crc32(data, zlib.crc32(subject.encode()))


def started(message: parti.Message, now_ns: int) -> bytes:
    """The note of a start."""
    stored_ns = round(message.published_at.timestamp() * 1e6) * 1000
    where = f"{message.partition.id} {message.seq} {message.fence} {message.worker_id}"
    return f"S {now_ns} {where} {stored_ns} {fingerprint(message.subject, message.data)}\n".encode()


def ended(message: parti.Message, now_ns: int) -> bytes:
    """The note of an end."""
    return f"E {now_ns} {message.seq}\n".encode()


@dataclass(slots=True)
class Call:
    """One call of a handler."""

    process: str
    partition: str
    seq: int
    fence: int
    worker: str
    stored_ns: int
    fingerprint: int
    start_ns: int
    end_ns: int = 0
    """0: it never ended."""


@dataclass(slots=True)
class Notes:
    """The notes of a run, read as they grow."""

    directory: Path
    calls: list[Call] = field(default_factory=list)
    """In the order in which they were read."""
    finished: Counter[str] = field(default_factory=Counter)
    """Ended calls of each process."""
    done: set[int] = field(default_factory=set)
    """Sequences whose handler has ended at least once."""
    _read: dict[Path, int] = field(default_factory=dict)
    _open: dict[tuple[str, int], Call] = field(default_factory=dict)

    def poll(self) -> list[Call]:
        """Read what is new; returns the calls that have started."""
        begin = len(self.calls)
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                # A line that is being written is left for the next time.
                whole = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole[0]) + len(whole[1])
            for line in whole[0].decode().splitlines():
                self._take(path.stem, line.split())
        return self.calls[begin:]

    def _take(self, process: str, words: list[str]) -> None:
        if words[0] == "S":
            _, at, partition, seq, fence, worker, stored, mark = words
            call = Call(process, partition, int(seq), int(fence), worker, int(stored), int(mark), int(at))
            self.calls.append(call)
            self._open[process, call.seq] = call
        else:
            _, at, seq = words
            call = self._open.pop((process, int(seq)))
            call.end_ns = int(at)
            self.finished[process] += 1
            self.done.add(call.seq)
