"""How `parti jobs` draws jobs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from parti.cli.jobs import draw
from parti.jobs.desk import Line, Picture
from parti.model.job import JobRecord, JobState


@pytest.mark.parametrize("width", [100, 120])
def test_a_narrow_screen_takes_from_what_a_job_is_doing_and_from_nothing_else(width: int) -> None:
    record = JobRecord(
        stream="S",
        seq=1234,
        subject="s",
        published_ns=1,
        state=JobState.RUNNING,
        worker="host-4711",
        percent=42,
        slots=14,
        phrase="a video with a long name " * 5,
        started_s=1.0,
        finished_s=46.0,
    )
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(Picture([Line("parti-jobs.1234", record)]), "here"))
    assert isinstance(console.file, io.StringIO)
    line = console.file.getvalue().rstrip().splitlines()[-1]
    words = line.split()
    assert [words[0], words[1], *words[3:9]] == [
        "parti-jobs.1234",
        "running",
        "42",
        "14",
        "1",
        "45",
        "s",
        "host-4711",
    ]
    assert line.endswith("…")
    assert len(line) <= width
