"""Commands: the command line in this process, on a server whose buckets and streams hold hostile records."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz.raw import Raw, RawClient, as_subject
from fuzz.target import Target, WrongError
from fuzz.targets.jobs import seeds as job_seeds
from fuzz.targets.letters import seeds as letter_seeds
from fuzz.targets.screen import check_clean, screen
from fuzz.targets.situations import single_records, whole_fleet
from parti.cli.main import main
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.history import history_pattern, history_stream
from parti.model.job import BUCKET_SUFFIX

_SETTINGS = Settings()
_STREAMS = {
    "S": ["s.*"],
    _SETTINGS.dead_letter_stream: [f"{_SETTINGS.dead_letter_subject}.>"],
    history_stream(_SETTINGS.bucket): [history_pattern(_SETTINGS.bucket)],
}
_COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("top", "--once"),
    ("top", "--json"),
    ("workers",),
    ("workers", "w-0"),
    ("workers", "--json"),
    ("partitions",),
    ("partitions", "--json"),
    ("explain", "p0"),
    ("explain", "p0", "--json"),
    ("plan", "--join", "1"),
    ("dlq", "ls"),
    ("dlq", "ls", "--json"),
    ("dlq", "show", "1"),
    ("dlq", "show", "1", "--json"),
    ("jobs", "ls", "--all"),
    ("jobs", "ls", "--all", "--json"),
)
_LETTERS, _JOBS = (12, 13, 14, 15), (16, 17)
_server: list[tuple[str, RawClient, frozenset[str]]] = []


def one(data: bytes) -> None:
    """Put a fleet into the bucket, lines of the input over it, and run a command."""
    ((url, client, streams),) = _server
    number, body = (data[0] if data else 0) % len(_COMMANDS), data[1:]
    lines = (*whole_fleet().split(b"\n"), *body.split(b"\n")[:10])
    for stream in streams:
        client.publish([Raw(b"$JS.API.STREAM.PURGE." + stream.encode())])
    client.publish([_message(line) for line in lines])
    _run([*_COMMANDS[number], "--nats", url])


def _message(line: bytes) -> Raw:
    """A record as its writer would publish it: `letter`, `history.…`, `jobs.…`, or a key of the fleet."""
    key, _, value = line.partition(b" ")
    key = as_subject(key, 200)
    bucket = _SETTINGS.bucket.encode()
    if key == b"letter":
        subject = f"{_SETTINGS.dead_letter_subject}.S.s.p0".encode()
        return Raw(subject, value[:100], b"NATS/1.0\r\n" + value.replace(b"\\r\\n", b"\r\n")[:60_000] + b"\r\n\r\n")
    if key.startswith(b"history."):
        return Raw(bucket + b"-" + key, value)
    if key.startswith((b"jobs.", b"cancel.")):
        return Raw(b"$KV.%b%b.%b" % (_SETTINGS.prefix.encode(), BUCKET_SUFFIX.encode(), key), value)
    return Raw(b"$KV.%b.%b" % (bucket, key), value)


def _run(arguments: list[str]) -> None:
    before, errors = sys.stderr, io.StringIO()
    sys.stderr = errors
    try:
        with screen():
            code = main(arguments)
    finally:
        sys.stderr = before
    if code not in {0, 1, 2}:
        raise WrongError(f"parti {' '.join(arguments[:-2])} ends with {code}")
    if "Traceback" in errors.getvalue():
        raise WrongError(f"parti {' '.join(arguments[:-2])} shows a traceback")
    check_clean(errors.getvalue(), "on stderr")


@contextmanager
def opened() -> Iterator[None]:
    """A server with the streams and buckets of a fleet; settings of this machine play no part."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PARTI_")}
    place, loop = Path.cwd(), asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="parti-fuzz-") as empty:
        server = Server()
        loop.run_until_complete(server.__aenter__())
        try:
            names = loop.run_until_complete(_prepare(server.url))
            os.chdir(empty)
            with RawClient(server.url) as client:
                _server.append((server.url, client, names))
                yield
        finally:
            _server.clear()
            os.chdir(place)
            os.environ.update(kept)
            loop.run_until_complete(server.__aexit__(None, None, None))
            loop.close()


async def _prepare(url: str) -> frozenset[str]:
    connection = await Connection.open(Settings(nats=(url,)), name="fuzz")
    api = JetStreamApi(connection)
    for name, subjects in _STREAMS.items():
        config = {"name": name, "subjects": subjects, "storage": "memory", "allow_direct": True}
        await api.call(f"STREAM.CREATE.{name}", config)
    await ControlPlane.open(connection, api, _SETTINGS.bucket, replicas=1)
    bucket = await Bucket.open(api, f"{_SETTINGS.prefix}{BUCKET_SUFFIX}", replicas=1)
    await connection.close()
    return frozenset({*_STREAMS, f"KV_{_SETTINGS.bucket}", bucket.stream} - {"S"})


def seeds() -> list[bytes]:
    """Each command on a whole fleet, with one record over it."""
    records = [bytes((number,)) + record for number in range(12) for record in single_records()]
    jobs = [bytes((number,)) + job for number in _JOBS for job in job_seeds()]
    blocks = [block[2:].replace(b"\r\n", b"\\r\\n") for block in letter_seeds()[:3]]
    letters = [bytes((number,)) + b"letter " + block for number in _LETTERS for block in blocks]
    return [*(bytes((number,)) for number in range(len(_COMMANDS))), *records, *jobs, *letters]


TARGET = Target("commands", one, seeds, opened)
