"""The app of the replay benchmark: workers, the replay and its tasks all import it; the environment says what it is.

Each handled message is one line in a file of the process: partition, sequence, fence, worker, nanoseconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import parti

STREAM, TEMPLATE = "REPLAY", "replay.{key}"
CHOSEN, OTHERS = os.environ.get("BENCH_CHOSEN", "200"), os.environ.get("BENCH_OTHERS", "50")
NOTES = os.environ.get("BENCH_NOTES", "")
_files: dict[int, int] = {}

chosen = [f"c{n}" for n in range(int(CHOSEN))]
others = [f"o{n}" for n in range(int(OTHERS))]
app = parti.App(stream=STREAM, subject=TEMPLATE, partitions=[*chosen, *others])


def _file() -> int:
    """Of this process: tasks are forked, and must not share one."""
    pid = os.getpid()
    if pid not in _files:
        path = Path(NOTES) / f"{pid}.notes"
        _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return _files[pid]


@app.handler
async def handle(message: parti.Message) -> None:
    """Note it."""
    line = f"{message.partition.id} {message.seq} {message.fence} {message.worker_id} {time.time_ns()}\n"
    os.write(_file(), line.encode())
