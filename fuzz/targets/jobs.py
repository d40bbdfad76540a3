"""Job records: read from their bucket, listed on the screen and in the console."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from fuzz.target import Target
from fuzz.targets.screen import screen
from parti.cli.control import open_console
from parti.cli.jobs import draw
from parti.console import picture
from parti.errors import ConfigError
from parti.jobs.desk import Line, Picture, Queue
from parti.model.job import JobRecord, JobState, decode_job, encode_job, parse_key

_QUEUE = Queue("JOBS", "parti-jobs", 3, 1, 14, 30.0)


def one(data: bytes) -> None:
    """One record for each line, `key value`."""
    lines: list[Line] = []
    for line in data.split(b"\n")[:20]:
        key, _, value = line.partition(b" ")
        name = key.decode("utf-8", "replace")
        try:
            parse_key(name)
        except ConfigError:
            name = "parti-jobs.1"
        record = decode_job(value)
        if record is not None:
            lines.append(Line(name, record, silent=len(lines) % 2 == 1))
    with screen():
        counts = Counter(line.record.state.value for line in lines)
        open_console().print(draw(Picture(lines, (_QUEUE,), counts), "bucket parti-jobs", room=5))
    reading = picture.Reading(jobs={line.id: line for line in lines}, queues=(_QUEUE,))
    picture.draw(reading, picture.Colours(), datetime.now(UTC))


def seeds() -> list[bytes]:
    """Jobs in each state."""
    found = [
        b"jobs.parti-jobs.%d " % number
        + encode_job(
            JobRecord(
                stream="JOBS",
                seq=number,
                subject="jobs.a",
                published_ns=1,
                state=state,
                worker="w-0",
                percent=12.5,
                phrase="reading",
                started_s=1.7e9,
                finished_s=1.7e9 + 5,
                next_s=1.7e9 + 9,
                error="ValueError: x",
                slots=2,
            )
        )
        for number, state in enumerate(JobState, start=1)
    ]
    return [*found, b"\n".join(found), b"cancel.parti-jobs.7 {}"]


TARGET = Target("jobs", one, seeds)
