"""A fleet of real `parti worker` processes, and the stream that it works on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet import Place

from parti.config import Settings
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection

_APP = """
import parti

app = parti.App(stream={stream!r}, subject={template!r}, partitions={partitions!r})


@app.handler
async def handle(message):
    pass
"""


class Processes:
    """`parti worker` processes of one app; ended with the block at the latest."""

    def __init__(self, place: Place, partitions: Sequence[str], settings: Mapping[str, Any], directory: Path) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self._url = place.url
        self._directory = directory
        self._count = 0
        text = _APP.format(stream=place.stream, template=place.template, partitions=list(partitions))
        (directory / "fleet_app.py").write_text(text)
        lines = {**settings, "bucket": place.bucket, "prefix": place.prefix}.items()
        # Of what settings are made of, JSON and TOML write the same.
        (directory / "parti.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines))

    def start(self, number: int) -> None:
        """Start some more."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")}
        for _ in range(number):
            command = [sys.executable, "-m", "parti", "worker", "fleet_app:app", "--nats", self._url]
            with (self._directory / f"log-{self._count}").open("wb") as log:
                self.running.append(
                    subprocess.Popen(
                        [*command, "--log-format", "json"],
                        cwd=self._directory,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            self._count += 1

    def end(self, pids: Sequence[int], number: signal.Signals) -> list[subprocess.Popen[bytes]]:
        """Signal some; they are no longer among those that run."""
        going = [process for process in self.running if process.pid in pids]
        self.running = [process for process in self.running if process not in going]
        for process in going:
            process.send_signal(number)
        return going

    def complaints(self) -> Counter[str]:
        """What the workers have logged as warning or error, with how often."""
        found: Counter[str] = Counter()
        for path in sorted(self._directory.glob("log-*")):
            for line in path.read_text().splitlines():
                entry = _parsed(line)
                if entry.get("level") not in {"info", "debug"}:
                    text = entry.get("event", line)
                    found[f"{text}: {why}" if (why := entry.get("error") or entry.get("reason")) else str(text)] += 1
        return found

    def close(self) -> None:
        """Kill what is left."""
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()


def _parsed(line: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict):
            return entry
    return {}


@contextmanager
def worker_processes(place: Place, partitions: Sequence[str], settings: Mapping[str, Any]) -> Iterator[Processes]:
    """A directory with an app in it, and processes of that app."""
    with tempfile.TemporaryDirectory(prefix="parti-fleet-") as name:
        processes = Processes(place, partitions, settings, Path(name))
        try:
            yield processes
        finally:
            processes.close()


async def create_stream(url: str, name: str, subjects: str, storage: str = "file") -> None:
    """Make the stream whose partitions are shared out."""
    connection = await Connection.open(Settings(nats=(url,)), name="benchmark")
    try:
        config = {"name": name, "subjects": [subjects], "storage": storage, "allow_direct": True}
        await JetStreamApi(connection).call(f"STREAM.CREATE.{name}", config)
    finally:
        await connection.close()
