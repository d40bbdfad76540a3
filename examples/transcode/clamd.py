"""Asks clamd, the daemon of ClamAV, about a file: its command INSTREAM over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from urllib.parse import urlsplit

import parti

_CHUNK = 256 * 1024
_CONNECT_S = 5.0
_ANSWER_S = 300.0


class ScanFailed(Exception):  # noqa: N818 - named for what happened
    """clamd could not be reached, or could not tell; the same question may be answered later."""


class Clamd:
    """A clamd at `tcp://HOST:PORT` or `unix:///PATH`."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def check(self, path: Path) -> None:
        """Return when clamd finds nothing in the file; `parti.Reject` when it does, `ScanFailed` when it cannot tell.

        So no file gets past a clamd that is down.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await self._connect()
        except (OSError, TimeoutError) as error:
            raise ScanFailed(f"clamd at {self.address} cannot be reached: {str(error) or 'no answer'}") from None
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await _ask(reader, writer, path)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise ScanFailed(f"clamd at {self.address} gave no answer: {str(error) or 'none in time'}") from None
        finally:
            writer.transport.abort()  # all is said; a clamd that has stopped reading must not hold it open
        _judge(answer, self.address)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self.address)
        if url.scheme == "unix":
            return await asyncio.open_unix_connection(url.path)
        return await asyncio.open_connection(url.hostname, url.port)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: Path) -> str:
    """Chunks with their length before them, an empty one at the end; the answer ends with a zero byte."""
    writer.write(b"zINSTREAM\0")
    try:
        with path.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK):
                writer.write(struct.pack("!L", len(chunk)) + chunk)
                await writer.drain()
        writer.write(struct.pack("!L", 0))
        await writer.drain()
    except ConnectionError:
        pass  # it has heard enough, such as more than it takes: what it says is in its answer
    return (await reader.readuntil(b"\0")).rstrip(b"\0").decode(errors="replace")


def _judge(answer: str, address: str) -> None:
    said = answer.removeprefix("stream: ")
    if said == "OK":
        return
    if said.endswith(" FOUND"):
        raise parti.Reject(f"infected: {said.removesuffix(' FOUND')}")
    raise ScanFailed(f"clamd at {address} answers: {said}")
