"""Reads small streams by requests alone, for users who may not make consumers (`read_by = "requests"`).

A consumer delivers to a subject that its maker names, and whoever may make one may also change those of others. So
users in an account of their own are not given that right, and ask the stream's leader for one message after the
other. Slower than a consumer, at about 0.2 ms a message, and never stale.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import structlog

from parti.errors import PartiError
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.direct import Stored
from parti.jetstream.kv import Entry
from parti.model.headers import parse_headers
from parti.model.subjects import within
from parti.telemetry.tasks import owned

_log = structlog.get_logger("parti.watch")

_AT_ONCE = 32
"""Parts of a range that are read at the same time."""
_BLOCK = 1 << 14
"""Sequences that are read before their messages are passed on, where a stream has no holes."""
_POLL_S = 0.2
_MISSED_POLLS_S = 5.0
_PASSES = 20
"""Most looks until a state counts as whole, when there is always something new."""


async def read_on(
    api: JetStreamApi, stream: str, start: int = 1, subject: str = ">", *, payload: bool = True
) -> AsyncGenerator[Stored, None]:
    """The messages from `start` on, in order, up to what is there when the end is reached.

    Without `payload` they have none: it is not kept while the others of a block are read, either.

    Raises `NotFound` when there is no such stream, and what requests raise.
    """
    seq = start
    for _ in range(_PASSES):
        info = await api.stream_info(stream)
        seq = max(seq, info.first_seq)
        if not info.messages or seq > info.last_seq:
            return
        for begin, end in pairwise(_blocks(seq, info)):
            for message in await _read_block(api, stream, subject, begin, end, payload=payload):
                yield message
        seq = info.last_seq + 1


def _blocks(seq: int, info: StreamInfo) -> list[int]:
    """Bounds of what is read at once: wider where there are holes."""
    holes = (info.last_seq - info.first_seq + 1) // max(1, info.messages)
    return [*range(seq, info.last_seq + 1, _BLOCK * max(1, holes)), info.last_seq + 1]


async def _read_block(
    api: JetStreamApi, stream: str, subject: str, begin: int, end: int, *, payload: bool
) -> list[Stored]:
    """All messages in `[begin, end)`, read in several places at the same time."""
    step = max(1, -(-(end - begin) // _AT_ONCE))
    parts = list(pairwise([*range(begin, end, step), end]))
    try:
        async with asyncio.TaskGroup() as tasks:
            read = partial(_read_part, api, stream, subject, payload=payload)
            found = [tasks.create_task(read(first, last)) for first, last in parts]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [message for part in found for message in part.result()]


async def _read_part(
    api: JetStreamApi, stream: str, subject: str, begin: int, end: int, *, payload: bool
) -> list[Stored]:
    messages: list[Stored] = []
    while begin < end:
        message = await api.next_on_subject(stream, subject, begin)
        if message is None or message.seq >= end:
            break
        messages.append(message if payload else replace(message, data=b""))
        begin = message.seq + 1
    return messages


class PolledSession:
    """One session of a watch that makes no consumer; see `WatchSession` for what is promised."""

    consumer = ""
    """There is none to delete."""

    def __init__(
        self,
        api: JetStreamApi,
        bucket_name: str,
        keys: tuple[str, ...],
        on_value: Callable[[str, Entry], None],
        on_change: Callable[[], None],
    ) -> None:
        self.keys = keys
        self.complete = False
        self.trouble = ""
        self._api = api
        self._stream = f"KV_{bucket_name}"
        self._prefix = f"$KV.{bucket_name}."
        self._on_value = on_value
        self._on_change = on_change
        self._seq = 1
        self._heard_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def silent_at_s(self) -> float:
        """When the session is in doubt if no look ends until then, on the clock of the event loop."""
        return self._heard_s + _MISSED_POLLS_S

    async def open(self) -> None:
        """Find out whether the bucket may be read; raises PartiError."""
        await self._api.next_on_subject(self._stream, f"{self._prefix}>", 1)

    def confirm(self) -> None:
        """Begin to look and to pass on what is found."""
        self._heard_s = asyncio.get_running_loop().time()
        self._task = owned(self._run(), "polled-watch")

    def doubt(self, reason: str) -> None:
        """Pass on nothing more: something may be missing."""
        if not self.trouble:
            self.trouble = reason
            self._on_change()

    async def close(self) -> None:
        """Stop looking; never raises."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        try:
            while not self.trouble:
                await self._look()
                if not self.complete:
                    self.complete = True
                    self._on_change()
                await asyncio.sleep(_POLL_S)
        except PartiError as error:
            self.doubt(str(error))
        except Exception as error:
            _log.exception("the watch met an error that it did not expect", stream=self._stream)
            self.doubt(repr(error))

    async def _look(self) -> None:
        """Pass on all that is new. A key that changes meanwhile moves behind what was read, so it is not missed."""
        async with contextlib.aclosing(read_on(self._api, self._stream, self._seq, f"{self._prefix}>")) as messages:
            async for message in messages:
                if self.trouble:
                    return
                self._seq = message.seq + 1
                self._heard_s = asyncio.get_running_loop().time()
                key = message.subject[len(self._prefix) :]
                if within(key, self.keys):
                    headers = parse_headers(message.header or b"")
                    self._on_value(key, Entry.of(message.data, message.seq, headers))
        self._heard_s = asyncio.get_running_loop().time()
