"""Commands whose stdout, stderr or stdin is closed: they end quietly, and workers go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import pytest
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.operations.operators import FLEET
from tests.integration.processes import command, environment, whole_lines, write_app

from parti.cli.streams import is_service

BROKEN = 141


@pytest.fixture
async def fleet(kit: Kit) -> AsyncIterator[list[str]]:
    async with kit.app(Record().handle, ["p0"], **FLEET).running():
        yield ["--nats", kit.url, "--bucket", f"b{kit.root}"]


async def ended_without_reader(*arguments: str) -> tuple[int, str]:
    """Run a command whose stdout has no reader at all: exit code and stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    process = await asyncio.create_subprocess_exec(
        *command(*arguments), stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE, env=environment()
    )
    os.close(writing)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--json"],
        ["top", "--once"],
        ["top", "--once", "--json"],
        ["workers"],
        ["partitions"],
        ["plan"],
        ["doctor", "--json"],
        ["doctor"],
    ],
    ids=" ".join,
)
async def test_a_command_without_a_reader_ends_quietly(fleet: list[str], arguments: list[str]) -> None:
    assert await ended_without_reader(*arguments, *fleet) == (BROKEN, "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["perms", "--help"], ["alerts", "--help"]], ids=" ".join
)
async def test_help_without_a_reader_ends_quietly(arguments: list[str]) -> None:
    assert await ended_without_reader(*arguments) == (BROKEN, "")


async def test_a_refusal_keeps_its_line_and_its_code() -> None:
    code, said = await ended_without_reader("status", "--nats", "nonsense://x")
    assert code == 2
    assert said.startswith("parti: ")
    assert said.count("\n") == 1


FULL = "parti: cannot write to stdout: No space left on device; make room there, or send the output elsewhere\n"


def full_disk() -> BinaryIO:
    return Path("/dev/full").open("wb")


async def ended_on_a_full_disk(*arguments: str) -> tuple[int, str]:
    """Run a command whose stdout is a full disk: exit code and stderr."""
    with full_disk() as full:
        process = await asyncio.create_subprocess_exec(
            *command(*arguments), stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, env=environment()
        )
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["status", "--json"], ["top", "--once"], ["partitions"], ["doctor"]],
    ids=" ".join,
)
async def test_a_command_says_in_a_line_that_its_output_found_no_room(fleet: list[str], arguments: list[str]) -> None:
    assert await ended_on_a_full_disk(*arguments, *fleet) == (1, FULL)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["perms", "--stream", "S", "--role", "observer"], ["init", "--help"]],
    ids=" ".join,
)
async def test_so_does_a_command_that_asks_no_server(arguments: list[str]) -> None:
    assert await ended_on_a_full_disk(*arguments) == (1, FULL)


async def test_what_is_refused_before_it_writes_keeps_its_code_on_a_full_disk() -> None:
    code, said = await ended_on_a_full_disk("perms", "--stream", "A.B")
    assert code == 2
    assert "expected a stream name" in said


WATCHING = """
import asyncio, sys, threading, time
from parti.app.signals import run_interruptibly
from parti.cli.streams import Streams

streams = Streams(service=False)
streams.install()
tidied = []

async def tick():
    while True:
        print("tick", flush=True)
        await asyncio.sleep(0.01)

async def watch():
    task = asyncio.create_task(tick())
    try:
        await asyncio.sleep(60)
    finally:
        tidied.append(True)
        task.cancel()

try:
    run_interruptibly(watch())
except KeyboardInterrupt:
    pass
code = streams.finish(0)
sys.exit(code if tidied else 99)
"""


def test_what_watches_ends_in_order_when_its_reader_has_enough() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WATCHING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"tick\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == BROKEN


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
async def test_streams_that_are_closed_from_the_beginning_are_no_trouble(
    fleet: list[str], closed: tuple[int, ...]
) -> None:
    shut = " ".join(f"{number}>&-" for number in closed)
    script = f'exec "$@" {shut}'
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", script, "sh", *command("workers", "--json", *fleet)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    out, said = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, said) == (0, b"")
    assert (out == b"") is (1 in closed)


@contextmanager
def worker(directory: Path, target: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with pipes for stdout and stderr; ended with the block at the latest."""
    process = subprocess.Popen(
        command("worker", target, "--nats", url, "--log-level", "debug"),
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


@pytest.mark.parametrize("closed", ["stderr", "both"])
async def test_a_worker_whose_logs_nobody_reads_goes_on(kit: Kit, tmp_path: Path, closed: str) -> None:
    target = write_app(tmp_path, kit, ["p0", "p1"], body='print("handling", message.seq, flush=True)', **FLEET)
    with worker(tmp_path, target, kit.url) as process:
        assert process.stdout
        assert process.stderr
        await asyncio.to_thread(process.stderr.readline)  # it has begun to log
        process.stderr.close()
        if closed == "both":
            process.stdout.close()
        handled = tmp_path / "handled"
        for n in range(40):
            await kit.api.publish(kit.subject(f"p{n % 2}"), b"x")
        await eventually(lambda: handled.exists() and len(handled.read_text().splitlines()) == 40)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert len(handled.read_text().splitlines()) == 40


async def test_a_worker_whose_logs_find_no_room_goes_on(kit: Kit, tmp_path: Path) -> None:
    target = write_app(tmp_path, kit, ["p0", "p1"], body='print("handling", message.seq, flush=True)', **FLEET)
    with full_disk() as full:
        process = await asyncio.create_subprocess_exec(
            *command("worker", target, "--nats", kit.url, "--log-level", "debug"),
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=full,
        )
    handled = tmp_path / "handled"
    try:
        for n in range(20):
            await kit.api.publish(kit.subject(f"p{n % 2}"), b"x")
        await eventually(lambda: len(whole_lines(handled)) == 20)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_console_whose_lines_nobody_reads_goes_on(fleet: list[str]) -> None:
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *command("console", "--port", "0", *fleet), stdout=writing, stderr=writing, env=environment()
    )
    os.close(writing)
    with os.fdopen(reading) as lines:
        line = await asyncio.to_thread(lines.readline)
    url = next(word for word in line.split() if word.startswith("http://"))
    place = urlsplit(url)
    for request in (b"nonsense\r\n\r\n", f"GET / HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode()):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.readline(), 20)
        writer.transport.abort()
    assert answer.split()[1] == b"200"
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 20) == 0


@pytest.mark.parametrize(
    ("words", "service"),
    [
        (["worker", "orders:app"], True),
        (["console"], True),
        (["jobs", "run", "media:jobs"], True),
        (["jobs", "ls"], False),
        (["pipeline", "run"], True),
        (["dev", "server"], True),
        (["dev", "demo"], False),
        (["status"], False),
        ([], False),
    ],
)
def test_services_go_on_without_readers(words: list[str], service: bool) -> None:
    assert is_service(words) is service
