"""Dead letters as an operator reads them: listed, counted, one of them in full."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from parti.core.dead_letter import Letter, is_original
from parti.errors import ConfigError, NotFound
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.direct import Stored
from parti.jetstream.scan import scan
from parti.jetstream.waiting import Waiting
from parti.model.headers import parse_headers
from parti.setting_types import is_stream_name

_SAME_S = 0.001
"""Two times of one message may differ by this: one of them was a floating-point number on its way."""


@dataclass(frozen=True, slots=True)
class Original:
    """The message that became a dead letter, as it was."""

    header: bytes | None
    data: bytes


class Letters:
    """The dead-letter stream, for reading; made by `await Letters.open(...)`."""

    def __init__(self, connection: Connection, api: JetStreamApi, info: StreamInfo) -> None:
        self.info = info
        self.name = info.name
        self.connection = connection
        self.api = api

    @classmethod
    async def open(cls, connection: Connection, api: JetStreamApi, stream: str) -> Letters:
        """Find the stream; raises `ConfigError` when there is none."""
        try:
            return cls(connection, api, await api.stream_info(stream))
        except NotFound:
            raise ConfigError(
                f"there is no dead-letter stream {stream!r} here: no worker has ever run, or it has another name; "
                f"name it with --stream or the setting dead_letter_stream"
            ) from None

    async def all(self, start: int = 1) -> AsyncGenerator[Letter, None]:
        """Every letter from a sequence on, oldest first, without payloads."""
        async with aclosing(scan(self.connection, self.api, self.name, start=start)) as found:
            async for each in found:
                if not is_original(each.subject):
                    yield Letter(each.seq, each.stored_at, each.headers)

    async def get(self, seq: int) -> tuple[Letter, bytes] | None:
        """One letter with its payload; None when there is none."""
        found = await self.stored(self.name, seq)
        return None if found is None or is_original(found.subject) else (letter_of(found), found.data)

    async def original(self, letter: Letter) -> Original | None:
        """The message that a letter was made of, as far as it is kept somewhere; None when it is gone."""
        if letter.original is not None:
            size, where = letter.original
            # What somebody else wrote into a header is not believed: only originals are read, each once.
            if len(set(where)) < len(where):
                return None
            parts: list[bytes] = []
            for seq in where:
                stored = await self.stored(self.name, seq)
                if stored is None or not is_original(stored.subject):
                    return None
                parts.append(stored.data)
            whole = b"".join(parts)
            return Original(whole[:size] or None, whole[size:])
        found = await self.stored(letter.stream, letter.origin_seq) if is_stream_name(letter.stream) else None
        return Original(found.header, found.data) if found and _is_same(letter, found) else None

    async def stored(self, stream: str, seq: int) -> Stored | None:
        """The message with this very sequence in a stream; None when it is gone."""
        try:
            found = await self.api.next_on_subject(stream, ">", seq)
        except NotFound:
            return None
        return found if found is not None and found.seq == seq else None

    async def count_of(self, stream: str, subject: str) -> int:
        """How many letters there are of a subject (wildcards allowed) of a stream."""
        totals = await Waiting(self.connection, self.api, self.info).totals(self._subject(stream, subject))
        return sum(totals.values())

    async def last_of(self, stream: str, subject: str) -> Letter | None:
        """The newest letter of a subject (wildcards allowed) of a stream."""
        body = {"last_by_subj": self._subject(stream, subject)}
        try:
            answer = await self.api.call(f"STREAM.MSG.GET.{self.name}", body)
        except NotFound:
            return None
        found = await self.stored(self.name, int(answer["message"]["seq"]))
        return letter_of(found) if found and not is_original(found.subject) else None

    def _subject(self, stream: str, subject: str) -> str:
        root = next((s.removesuffix(".>") for s in self.info.subjects if s.endswith(".>")), "parti.dlq")
        return f"{root}.{stream}.{subject}"


def letter_of(found: Stored) -> Letter:
    """A stored message as a dead letter."""
    return Letter(found.seq, found.stored_at, parse_headers(found.header) if found.header else {})


def _is_same(letter: Letter, found: Stored) -> bool:
    """Whether a message is the one of the letter, and not one of a stream that was made anew."""
    try:
        published = datetime.fromisoformat(letter.headers.get("Parti-Published", ""))
        return abs((published - found.stored_at).total_seconds()) <= _SAME_S
    except (ValueError, TypeError):
        return True
