"""The worker's side of the demo: an app whose handler writes down when each message began and ended.

`python -m parti.cli.demo.app DIRECTORY URL NAME PARTITIONS SEED` is `parti worker` on this app, in the directory of
the run, whose `parti.toml` has the settings.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
import zlib
from pathlib import Path

import parti
from parti.cli.demo.notes import SUFFIX, ended, started
from parti.cli.demo.traffic import STREAM, SUBJECT, partition_names

_NAME, _PARTITIONS, _SEED = "DEMO_NAME", "DEMO_PARTITIONS", "DEMO_SEED"
_LEAST_S, _MOST_S = 0.001, 0.006
"""What a handler takes: something to be in the middle of when the process is killed."""

app = parti.App(stream=STREAM, subject=SUBJECT, partitions=partition_names(int(os.environ.get(_PARTITIONS, "1"))))


@app.handler
async def process_wafer(message: parti.Message) -> None:
    """Take a few milliseconds, the same for the same message, and note the start and the end."""
    os.write(_notes(), started(message, time.time_ns()))
    await asyncio.sleep(_takes_s(message.seq))
    os.write(_notes(), ended(message, time.time_ns()))


def _takes_s(seq: int) -> float:
    chance = zlib.crc32(f"{os.environ.get(_SEED, '')} {seq}".encode()) / 2**32
    return _LEAST_S + (_MOST_S - _LEAST_S) * chance


@functools.cache
def _notes() -> int:
    # A note is one write to a file opened for appending: whatever ends the process leaves whole lines.
    name = f"{os.environ[_NAME]}{SUFFIX}"
    return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def main(directory: str, url: str, name: str, partitions: str, seed: str) -> int:
    """Run the worker in `directory`, untouched by the settings of whoever runs the demo."""
    for variable in [variable for variable in os.environ if variable.upper().startswith("PARTI_")]:
        del os.environ[variable]
    os.environ.update({_NAME: name, _PARTITIONS: partitions, _SEED: seed})
    from parti.cli.main import main as run  # noqa: PLC0415 - the command imports the demo

    os.chdir(Path(directory))
    return run(["worker", "parti.cli.demo.app:app", "--nats", url, "--log-format", "json"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
