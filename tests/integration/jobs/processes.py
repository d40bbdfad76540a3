"""`parti jobs run` as a real process, with an app that writes down what it does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.integration.jobs.kit import JobKit
from tests.integration.processes import EXIT_S, command, environment, whole_lines

APP = """
import asyncio
import os
import time

import parti

jobs = parti.jobs.JobApp(stream={stream!r}, subject={subject!r}, **{settings!r})
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(word, job):
    os.write(journal, f"{{word}} {{job.seq}} {{job.attempt}} {{os.getpid()}}\\n".encode())


@jobs.handler
{define} handle(job):
    note("start", job)
    {body}
    note("done", job)
"""

WORK = """
    async with job.slots(job.json.get('cost', 1)):
        note("work", job)
        await asyncio.sleep(job.json.get('seconds', 0))
""".strip()


def write_app(directory: Path, jobs: JobKit, *, body: str = WORK, plain: bool = False, **settings: Any) -> str:
    """Write a module with an app and return it as `module:app`."""
    settings = {k: v for k, v in {**jobs.settings, **settings}.items() if k not in {"nats", "log_level"}}
    text = APP.format(
        stream=jobs.stream,
        subject=f"{jobs.prefix}.>",
        settings=settings,
        journal=str(directory / "journal"),
        define="def" if plain else "async def",
        body=body,
    )
    (directory / "media.py").write_text(text)
    return "media:jobs"


class JobProcess:
    """A running `parti jobs run`, ended with the block at the latest."""

    def __init__(self, directory: Path, target: str, url: str, *options: str) -> None:
        self._directory = directory
        self.process = subprocess.Popen(
            command("jobs", "run", target, "--nats", url, *options),
            cwd=directory,
            env=environment(PARTI_LOG_LEVEL="error"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def journal(self) -> list[tuple[str, int, int, int]]:
        """Word, sequence, attempt and process of everything that happened, over all processes of the directory."""
        lines = whole_lines(self._directory / "journal")
        return [(word, int(seq), int(attempt), int(pid)) for word, seq, attempt, pid in map(str.split, lines)]

    def seqs(self, word: str) -> list[int]:
        return [seq for found, seq, _, _ in self.journal if found == word]

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(EXIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(EXIT_S)
        assert self.process.stderr
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        assert self.process.stderr
        if not self.process.stderr.closed:
            print(self.process.communicate(timeout=EXIT_S)[1])
