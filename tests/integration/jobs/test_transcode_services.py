"""The transcode example with what else it can talk to: clamd, and an S3 endpoint that checks signatures."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from examples.transcode.clamd import Clamd, ScanFailed
from examples.transcode.manifest import decode
from examples.transcode.s3 import S3Store
from examples.transcode.sigv4 import Credentials, sign
from examples.transcode.stores import Gone, StoreFailed
from tests.integration.conftest import eventually
from tests.integration.jobs.media import Media

import parti
from parti.model.job import JobState

EICAR = b"X5O!P%@AP[4\\PZX54(P^)7CC)7}$" + b"EICAR-STANDARD-ANTIVIRUS-TEST-FILE!$H+H*"


# ── clamd ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class FakeClamd:
    """Speaks INSTREAM; answers what it finds, or what it is told to."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.seen: list[bytes] = []
        self.takes = 1 << 30
        self.serving: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        try:
            await self.answer(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            self.serving.discard(asyncio.current_task())

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readuntil(b"\0") == b"zINSTREAM\0"
        data = b""
        while (length := struct.unpack("!L", await reader.readexactly(4))[0]) and len(data) <= self.takes:
            data += await reader.readexactly(length)
        self.seen.append(data)
        found = b"stream: Eicar-Test-Signature FOUND" if EICAR in data else b"stream: OK"
        if len(data) > self.takes:
            found = b"INSTREAM size limit exceeded. ERROR"
        answer = self.answers.pop(0) if self.answers else found
        if answer:
            writer.write(answer + b"\0")


@asynccontextmanager
async def clamd_at(port: int = 0) -> AsyncIterator[tuple[FakeClamd, int]]:
    fake = FakeClamd()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", port)
    async with server:
        yield fake, server.sockets[0].getsockname()[1]
    await eventually(lambda: not fake.serving)


async def test_a_clean_file_passes_over_tcp_and_over_a_unix_socket(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 4000)  # several chunks
    async with clamd_at() as (fake, port):
        await Clamd(f"tcp://127.0.0.1:{port}").check(file)
        assert fake.seen == [file.read_bytes()]
        server = await asyncio.start_unix_server(fake.serve, tmp_path / "clamd.ctl")
        async with server:
            await Clamd(f"unix://{tmp_path / 'clamd.ctl'}").check(file)


async def test_an_infected_file_is_rejected_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(EICAR)
    async with clamd_at() as (_, port):
        with pytest.raises(parti.Reject, match="infected: Eicar-Test-Signature"):
            await Clamd(f"tcp://127.0.0.1:{port}").check(file)


async def test_a_clamd_that_cannot_tell_has_not_cleared_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 3_000_000)
    async with clamd_at() as (fake, port):
        clamd = Clamd(f"tcp://127.0.0.1:{port}")
        fake.answers = [b"INSTREAM: Can't allocate memory. ERROR", b"", b"what?"]
        for words in ("Can't allocate memory", "gave no answer", "what?"):
            with pytest.raises(ScanFailed, match=words):
                await clamd.check(file)
        fake.takes = 1_000_000
        with pytest.raises(ScanFailed):  # it stops reading in the middle
            await clamd.check(file)
    with pytest.raises(ScanFailed, match="cannot be reached"):
        await clamd.check(file)
    with pytest.raises(ScanFailed, match="cannot be reached"):
        await Clamd(f"unix://{tmp_path / 'nobody'}").check(file)


async def test_an_infected_upload_is_a_dead_letter_and_its_neighbour_is_done(media: Media, tmp_path: Path) -> None:
    infected = tmp_path / "infected.mp4"
    infected.write_bytes((media.files / "tiny.mp4").read_bytes() + EICAR)
    await media.store.upload(media.uploads, "infected.mp4", infected, "")
    await media.upload("tiny.mp4")
    async with clamd_at() as (fake, port), media.app(clamd=f"tcp://127.0.0.1:{port}").running():
        record = await media.ended(await media.send("infected.mp4", "tiny.mp4"))
        assert len(fake.seen) == 2
    assert record.error == "1 of 2 objects failed: infected.mp4: infected: Eicar-Test-Signature"
    assert (await media.manifests()).keys() == {"tiny.mp4"}


async def test_while_clamd_is_down_jobs_wait_and_none_becomes_a_dead_letter(media: Media) -> None:
    await media.upload("tiny.mp4")
    async with clamd_at() as (_, port):
        pass  # gone, and its port known
    async with media.app(clamd=f"tcp://127.0.0.1:{port}", backoff_s=(0.05,)).running():
        seq = await media.send("tiny.mp4")

        async def tried_twice() -> bool:
            record = await media.jobs.record(seq)
            return record is not None and record.failures >= 2

        await eventually(tried_twice)
        record = await media.jobs.record(seq)
        assert record is not None
        assert not record.state.final
        assert await media.jobs.letters() == 0
        async with clamd_at(port) as (fake, _):
            fake.answers = [b"INSTREAM: Can't allocate memory. ERROR"]
            record = await media.ended(seq)
            assert len(fake.seen) == 2
    assert record.state is JobState.DONE
    assert record.failures >= 3
    assert await media.jobs.letters() == 0


# ── S3 ────────────────────────────────────────────────────────────────────────────────────────────────────────────

CREDENTIALS = Credentials("test-key", "test-secret", "eu-test-1")


@dataclass
class FakeS3:
    """Keeps objects in memory; refuses every request whose signature or payload digest is wrong."""

    objects: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    refused: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class S3Handler(BaseHTTPRequestHandler):
    fake: FakeS3
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def trusted(self, body: bytes) -> bool:
        """Sign again what has come, and compare."""
        digest = self.headers["x-amz-content-sha256"]
        given = self.headers["Authorization"]
        names = given.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        headers = {name: self.headers[name] for name in names if not name.startswith("x-amz-")}
        at = datetime.strptime(self.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        path = unquote(self.path)
        expected = sign(CREDENTIALS, self.command, path, headers, payload_sha256=digest, at=at)["Authorization"]
        fresh = abs((datetime.now(UTC) - at).total_seconds()) < 900
        return fresh and "host" in names and given == expected and hashlib.sha256(body).hexdigest() == digest

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.fake.faults.pop(0) if self.fake.faults else ""
        path = unquote(self.path)
        if not self.trusted(body):
            self.fake.refused += 1
            self.answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
        elif fault == "busy":
            self.answer(503, b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "short":
            self.answer(200, b"half", length=8)
            self.close_connection = True
        elif fault == "silent":
            self.close_connection = True
        elif self.command == "PUT":
            self.fake.objects[path] = body
            self.fake.types[path] = self.headers["Content-Type"]
            self.answer(200)
        elif path not in self.fake.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.answer(200, self.fake.objects[path])

    do_GET = do_HEAD = do_PUT = serve  # noqa: N815 - named by the library

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    fake = FakeS3()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (S3Handler,), {"fake": fake}))
    fake.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


async def test_objects_are_written_and_read_with_signed_requests(s3: FakeS3, tmp_path: Path) -> None:
    store = S3Store(s3.url, CREDENTIALS)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 5000)
    key = "some dir/ä & b+c=1 (2)~.mp4"
    assert await store.size("uploads", key) is None
    await store.upload("uploads", key, file, "video/mp4")
    assert s3.objects == {f"/uploads/{key}": file.read_bytes()}
    assert s3.types == {f"/uploads/{key}": "video/mp4"}
    assert await store.size("uploads", key) == file.stat().st_size
    into = BytesIO()
    await store.download("uploads", key, into)
    assert into.getvalue() == file.read_bytes()
    with pytest.raises(Gone):
        await store.download("uploads", "other", into)
    assert s3.refused == 0


async def test_what_goes_wrong_with_requests_may_work_later(s3: FakeS3) -> None:
    s3.objects["/b/k"] = b"12345678"
    store = S3Store(s3.url, CREDENTIALS)
    s3.faults = ["busy", "short", "silent"]
    for words in ("503 Service Unavailable SlowDown", "bytes are missing|IncompleteRead", "failed"):
        with pytest.raises(StoreFailed, match=words):
            await store.download("b", "k", BytesIO())
    wrong = S3Store(s3.url, Credentials("test-key", "another", "eu-test-1"))
    with pytest.raises(StoreFailed, match=r"403 Forbidden SignatureDoesNotMatch; check the credentials") as caught:
        await wrong.download("b", "k", BytesIO())
    assert "another" not in str(caught.value)
    with pytest.raises(StoreFailed, match="403"):
        await wrong.size("b", "k")
    nobody = S3Store("http://127.0.0.1:1", CREDENTIALS)
    with pytest.raises(StoreFailed, match="Connection refused"):
        await nobody.size("b", "k")
    into = BytesIO()
    await store.download("b", "k", into)
    assert into.getvalue() == b"12345678"


async def test_a_download_that_is_cancelled_lets_its_thread_go(tmp_path: Path) -> None:
    """It waits for a server that never answers."""
    asked = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()  # until the other side closes
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        store = S3Store(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", CREDENTIALS)
        task = asyncio.create_task(store.download("b", "k", BytesIO()))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await ended.wait()


async def test_a_job_with_its_objects_behind_an_s3_endpoint(
    media: Media, s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS.secret_key)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    s3.objects[f"/{media.uploads}/my trip/a+b.mkv"] = (media.files / "clip.mkv").read_bytes()
    s3.faults = ["busy"]
    app = media.app(s3_endpoint=s3.url, s3_region=CREDENTIALS.region, backoff_s=(0.05,))
    async with app.running():
        record = await media.ended(await media.send("my trip/a+b.mkv"))
    assert (record.state, record.attempt) == (JobState.DONE, 2)  # the first met a busy store
    made = {path: data for path, data in s3.objects.items() if path.startswith(f"/{media.results}/")}
    assert sorted(path.rpartition("/")[2] for path in made) == ["144p.mp4", "240p.mp4", "manifest.json"]
    (manifest,) = (decode(data) for path, data in made.items() if path.endswith(".json"))
    assert {f"/{media.results}/{r.key}": r.bytes for r in manifest.results} == {
        path: len(data) for path, data in made.items() if path.endswith(".mp4")
    }
    assert s3.refused == 0
