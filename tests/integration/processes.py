"""`parti worker` as a real process, with an app that writes down what it handles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.integration.conftest import Kit

EXIT_S = 20.0

APP = """
import asyncio
import os

import parti

app = parti.App(stream={stream!r}, subject={template!r}, partitions={partitions!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
started = os.open({started!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(file, message):
    os.write(file, f"{{message.partition.id}} {{message.seq}}\\n".encode())


@app.handler
async def handle(message):
    note(started, message)
    {body}
    note(journal, message)
"""


def write_app(directory: Path, kit: Kit, partitions: Iterable[str], *, body: str = "pass", **settings: Any) -> str:
    """Write a module with an app and return it as `module:app`."""
    settings = {**kit.settings, **settings}
    settings = {k: v for k, v in settings.items() if k not in {"nats", "log_level"}}
    text = APP.format(
        stream=kit.stream,
        template=kit.template,
        partitions=list(partitions),
        settings=settings,
        journal=str(directory / "handled"),
        started=str(directory / "started"),
        body=body,
    )
    (directory / "orders.py").write_text(text)
    return "orders:app"


def environment(**extra: str) -> dict[str, str]:
    """This process' environment without any setting of parti but those given."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PARTI_")} | extra


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "parti.cli.main", *arguments]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process writes; none if there is no file yet.

    The last one may be on its way: a line that crosses into another page of the file is seen in part for a moment.
    """
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


class WorkerProcess:
    """A running `parti worker`, ended with the block at the latest."""

    def __init__(self, directory: Path, target: str, url: str, *options: str, **variables: str) -> None:
        """`variables`: what its environment has besides."""
        self._directory = directory
        self.process = subprocess.Popen(
            command("worker", target, "--nats", url, *options),
            cwd=directory,
            env=environment(**{"PARTI_LOG_LEVEL": "error", **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _read(self, name: str) -> list[tuple[str, int]]:
        return [(partition, int(seq)) for partition, seq in map(str.split, whole_lines(self._directory / name))]

    @property
    def started(self) -> list[tuple[str, int]]:
        """Handler calls that began, over all processes of this directory."""
        return self._read("started")

    @property
    def handled(self) -> list[tuple[str, int]]:
        """Handler calls that ended."""
        return self._read("handled")

    @property
    def by_partition(self) -> dict[str, list[int]]:
        """Sequences whose handler began, in order, by partition."""
        seen: dict[str, list[int]] = defaultdict(list)
        for partition, seq in self.started:
            seen[partition].append(seq)
        return dict(seen)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(EXIT_S)

    def terminate(self) -> int:
        """SIGTERM, and the exit code that follows."""
        self.signal()
        return self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        out, err = self.process.communicate(timeout=EXIT_S)
        print(out, err)
