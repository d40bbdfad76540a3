"""The newest messages of a small stream, kept up to date by reading on from where the last look ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from parti.errors import NotFound
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.scan import Scanned, scan

T = TypeVar("T")
_WIDE = 10
"""A stream with holes is read from so many times further back than is kept."""


class Tail(Generic[T]):
    """Holds the last `most` messages of a stream; `refresh` brings it up to date.

    `decode` makes a value of a message, or None of one that is not to be shown. With `exact`, messages that are
    removed from the middle vanish here too. A stream that was made anew begins anew.
    """

    def __init__(
        self,
        connection: Connection,
        api: JetStreamApi,
        stream: str,
        decode: Callable[[Scanned], T | None],
        *,
        most: int,
        payload: bool = False,
        exact: bool = False,
    ) -> None:
        self.stream = stream
        self.total = 0
        """Messages in the stream."""
        self.missing = False
        """There is no such stream."""
        self.newest: dict[int, T] = {}
        """By sequence, oldest first; replaced, never changed."""
        self._connection = connection
        self._api = api
        self._decode = decode
        self._most = most
        self._payload = payload
        self._exact = exact
        self._created = ""
        self._last = 0

    async def refresh(self) -> bool:
        """Read what is new; True when anything has changed. Raises what requests raise."""
        before, total_before = self.newest, self.total
        try:
            info = await self._api.stream_info(self.stream)
        except NotFound:
            self._forget()
            self.missing, self.total = True, 0
            return bool(before) or bool(total_before)
        if info.created != self._created or info.last_seq < self._last:
            self._forget()
        removed = info.messages < self.total + info.last_seq - self._last
        if self._exact and self._last and removed:
            self._forget()
        self._created, self.missing = info.created, False
        found = {seq: value for seq, value in self.newest.items() if seq >= info.first_seq}
        if info.last_seq > self._last and info.messages:
            back = self._most * _WIDE if self._exact else self._most
            start = max(self._last + 1, info.last_seq - back + 1, info.first_seq)
            session = scan(self._connection, self._api, self.stream, start=start, payload=self._payload)
            async with aclosing(session) as messages:
                async for message in messages:
                    if message.seq > info.last_seq:
                        break  # it came since: the next look counts it
                    value = self._decode(message)
                    if value is not None:
                        found[message.seq] = value
        self._last = info.last_seq
        self.total = info.messages
        kept = dict(list(found.items())[-self._most :])
        if kept != before:
            self.newest = kept
        return kept != before or self.total != total_before

    def _forget(self) -> None:
        self.newest, self._last, self._created = {}, 0, ""
