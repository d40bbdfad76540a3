"""Objects behind an S3 endpoint, such as MinIO: signed requests with the standard library, in threads."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import os
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from io import BufferedReader
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from examples.transcode.sigv4 import EMPTY_SHA256, Credentials, quote_path, sign
from examples.transcode.stores import STALL_S, Gone, Sink, StoreFailed

from parti.errors import ConfigError

_CHUNK = 256 * 1024
_CODE = re.compile(rb"<Code>([A-Za-z0-9]+)</Code>")
_T = TypeVar("_T")


def credentials_of_environment(region: str) -> Credentials:
    """`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, if there is one, `AWS_SESSION_TOKEN`."""
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        raise ConfigError("an S3 endpoint needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment")
    return Credentials(key, secret, region, os.environ.get("AWS_SESSION_TOKEN", ""))


class S3Store:
    """Buckets at one endpoint, which are part of the path: `https://host/bucket/key`."""

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        url = urlsplit(endpoint)
        self._host = url.netloc
        self._credentials = credentials
        self._kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection

    async def size(self, bucket: str, key: str) -> int | None:
        """Bytes of an object, None when there is none."""

        def look(request: _Request) -> int | None:
            answer = request.send("HEAD")
            if answer.status == HTTPStatus.NOT_FOUND:
                return None
            request.check(answer)
            return int(answer.headers["Content-Length"])

        return await self._run(look, bucket, key)

    async def download(self, bucket: str, key: str, into: Sink) -> None:
        """Write the object's bytes into something."""

        def read(request: _Request) -> None:
            answer = request.send("GET")
            if answer.status == HTTPStatus.NOT_FOUND:
                raise Gone(bucket, key)
            request.check(answer)
            while chunk := answer.read(_CHUNK):
                into.write(chunk)
            if answer.length:  # http.client does not complain when an answer is cut off between two reads
                raise StoreFailed(f"{answer.length} bytes are missing")

        await self._run(read, bucket, key)

    async def upload(self, bucket: str, key: str, path: Path, content_type: str) -> None:
        """Store a file as an object; the bucket must exist."""

        def write(request: _Request) -> None:
            with path.open("rb") as file:
                request.check(request.send("PUT", file, content_type))

        await self._run(write, bucket, key)

    async def _run(self, work: Callable[[_Request], _T], bucket: str, key: str) -> _T:
        connection = self._kind(self._host, timeout=STALL_S, blocksize=_CHUNK)
        request = _Request(connection, self._credentials, self._host, f"/{bucket}/{key}")
        try:
            return await asyncio.to_thread(request.run, work)
        except (OSError, http.client.HTTPException, StoreFailed) as error:
            raise StoreFailed(f"{request.method} {bucket}/{key} at {self._host} failed: {error!s}") from error
        finally:
            request.abort()  # the thread of a cancelled job ends at its next read or write


class _Request:
    """One request on a connection of its own."""

    def __init__(
        self, connection: http.client.HTTPConnection, credentials: Credentials, host: str, path: str
    ) -> None:
        self.method = ""
        self._connection = connection
        self._credentials = credentials
        self._host = host
        self._path = path
        self._aborted = False

    def run(self, work: Callable[[_Request], _T]) -> _T:
        try:
            return work(self)
        finally:
            self._connection.close()

    def send(
        self, method: str, body: BufferedReader | None = None, content_type: str = ""
    ) -> http.client.HTTPResponse:
        self.method = method
        headers = {"Host": self._host}
        digest = EMPTY_SHA256
        if body is not None:
            digest = hashlib.file_digest(body, "sha256").hexdigest()
            headers |= {"Content-Length": str(body.tell()), "Content-Type": content_type}
            body.seek(0)
        signed = sign(self._credentials, method, self._path, headers, payload_sha256=digest, at=datetime.now(UTC))
        self._connection.connect()
        if self._aborted:  # before there was a socket that could be shut down
            raise StoreFailed("it was cancelled")
        self._connection.request(method, quote_path(self._path), body=body, headers=signed)
        return self._connection.getresponse()

    def check(self, answer: http.client.HTTPResponse) -> None:
        """Raise what the store answers instead of doing it."""
        if answer.status == HTTPStatus.OK:
            return
        code = _CODE.search(answer.read(_CHUNK))
        said = f" {code[1].decode()}" if code else ""
        hint = "; check the credentials" if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} else ""
        raise StoreFailed(f"the store answers {answer.status} {answer.reason}{said}{hint}")

    def abort(self) -> None:
        """Let whoever waits for the socket go on with an error; nothing happens when it is closed."""
        self._aborted = True
        try:
            if (sock := self._connection.sock) is not None:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
