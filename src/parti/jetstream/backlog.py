"""The backlog reader: what a stream already holds on one subject, in order and without a hole.

Pages are read by batched direct gets, which any replica answers, and by the leader one message at a time where those
cannot be had or trusted. Invariants guarded here:

- A page is gap-free from the asked sequence on. Each message of a batch names the one before it and the status at the
  end names the last one, so whatever was lost on the way shows, and the page ends before it.
- Only the leader says that there is no more. A replica that lags answers "not found" for what was stored long ago.
- Only a stream's own copies are believed: mirrors answer too, and keep what their own limits let them keep.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import structlog

from parti.errors import ApiError, ConnectionFailed, NotFound, PartiError
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.direct import DirectAnswer, Stored
from parti.jetstream.wire import Wire, pub

_log = structlog.get_logger("parti.backlog")

_SILENCE_S = 2.0
"""A replica that says nothing for so long is given up."""
_AVOID_S = 30.0
"""How long the leader is read instead, after a direct get that nobody answered: a hanging replica, no permission."""
_TRIES = 6
"""The server chooses by chance who answers: with a hot mirror every other answer is of no use."""
_LEADER_BATCH = 64
"""Most messages of a page that is read one by one, at about 0.3 ms each."""


@dataclass(frozen=True, slots=True)
class Page:
    """Consecutive messages of a backlog."""

    messages: tuple[Stored, ...]
    exhausted: bool
    """The stream's leader holds nothing more on the subject behind these messages, up to the bound."""


class DirectBatch(DirectAnswer):
    """The answer to one batched direct get; `ended` is done when it is."""

    def __init__(self, stream: str, seq: int, up_to: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(stream, seq, up_to, lambda: self.ended.set_result(None))

    def sink(self, _subject: bytes, _reply: bytes, header: bytes | None, payload: bytes) -> None:
        """Take one message from the connection."""
        self.take(header, payload)


class BacklogReader:
    """Reads backlogs of one stream, any number at the same time, and keeps no messages and no subscriptions.

    With `connection`, a read notices at once that the connection broke; without, after two seconds of silence.
    """

    def __init__(
        self, api: JetStreamApi, wire: Wire, stream: StreamInfo, *, connection: Connection | None = None
    ) -> None:
        self._api = api
        self._wire = wire
        self._stream = stream
        self._connection = connection
        self._request_subject = f"$JS.API.DIRECT.GET.{stream.name}".encode()
        self._avoid_until_s = 0.0

    def follow(self, stream: StreamInfo) -> None:
        """The stream was made anew: read this one from now on; reads that are under way fail."""
        self._stream = stream

    async def read(self, subject: str, seq: int, *, up_to: int, batch: int, max_bytes: int = 1 << 20) -> Page:
        """The next messages on `subject` (wildcards allowed) from `seq` to `up_to`, at least one if there is one.

        At most `batch` messages and about `max_bytes`; often fewer, which says nothing: ask again behind the last one
        until `exhausted`. `up_to` must be a sequence that the stream has reached.

        Raises, where it would say `exhausted`, `NotFound` when the stream is gone or made anew and `ApiError` when
        it ends before `up_to` (a leader that was deposed and does not know it yet, or a stream that was restored);
        `ConnectionFailed` and `RequestTimeout` as requests do. Nothing is lost by trying again.
        """
        if seq > up_to:
            return Page((), exhausted=True)
        created = self._stream.created
        page = await self._read(subject, max(1, seq), up_to, max(1, batch), max_bytes)
        if self._stream.created != created:
            raise NotFound(10059, f"stream {self._stream.name!r} was made anew while its predecessor was read")
        return page

    async def _read(self, subject: str, seq: int, up_to: int, batch: int, max_bytes: int) -> Page:
        messages: list[Stored] = []
        if self._stream.allow_direct and asyncio.get_running_loop().time() >= self._avoid_until_s:
            for _ in range(_TRIES):
                answer = await self._get_batch(subject, seq, up_to, batch, max_bytes)
                if not answer.by_mirror:
                    break
            messages = answer.messages
            if messages and (answer.trouble or not answer.at_end):
                return Page(tuple(messages), exhausted=False)
        if not messages:
            return await self._read_from_leader(subject, seq, up_to, min(batch, _LEADER_BATCH), max_bytes)
        if messages[-1].seq == up_to:
            return Page(tuple(messages), exhausted=True)
        try:
            more = await self._next(subject, messages[-1].seq + 1, up_to)
        except PartiError:  # the next call meets it again, if it lasts
            return Page(tuple(messages), exhausted=False)
        if more is not None and len(messages) < batch:
            messages.append(more)
        return Page(tuple(messages), exhausted=more is None)

    async def _read_from_leader(self, subject: str, seq: int, up_to: int, batch: int, max_bytes: int) -> Page:
        messages: list[Stored] = []
        size = 0
        while seq <= up_to and len(messages) < batch and size < max_bytes:
            try:
                stored = await self._next(subject, seq, up_to)
            except PartiError:
                if not messages:
                    raise
                return Page(tuple(messages), exhausted=False)
            if stored is None:
                return Page(tuple(messages), exhausted=True)
            messages.append(stored)
            seq = stored.seq + 1
            size += len(stored.data) + len(stored.header or b"")
        return Page(tuple(messages), exhausted=seq > up_to)

    async def _next(self, subject: str, seq: int, up_to: int) -> Stored | None:
        """The leader's next message up to the bound; None when it holds none, and is fit to say so."""
        stored = await self._api.next_on_subject(self._stream.name, subject, seq)
        if stored is None:
            # Asked again after the check, because another server may have answered that.
            await self._check_reached(up_to)
            stored = await self._api.next_on_subject(self._stream.name, subject, seq)
        return stored if stored is not None and stored.seq <= up_to else None

    async def _check_reached(self, up_to: int) -> None:
        """Raise unless this is the stream that we know, read from a server that has all of it up to the bound.

        "None" is also what a deleted stream, its empty successor and a leader cut off from the others would say.
        """
        name = self._stream.name
        now = await self._api.stream_info(name)
        if now.created != self._stream.created:
            raise NotFound(10059, f"stream {name!r} was deleted and made anew: its old messages are gone")
        if now.last_seq < up_to:
            raise ApiError(
                0,
                f"stream {name!r} ends at {now.last_seq} and was expected to reach {up_to}: the server is behind, or "
                f"the stream was restored from an older copy; try again, or start over from its present end",
            )

    async def _get_batch(self, subject: str, seq: int, up_to: int, batch: int, max_bytes: int) -> DirectBatch:
        """Whatever a batched direct get brings; raises `ConnectionFailed` when it cannot be sent."""
        answer = DirectBatch(self._stream.name, seq, up_to)
        # Without max_bytes the server sends up to 64 MB at once and cuts off who is slow to read them.
        body = {"seq": seq, "batch": batch, "next_by_subj": subject, "max_bytes": max_bytes}
        inbox = self._wire.new_inbox()
        forget = (
            self._connection.on_state(lambda *_: answer.give_up("the connection broke")) if self._connection else None
        )
        sid = self._wire.subscribe(inbox, answer.sink)
        try:
            if not self._wire.write(pub(self._request_subject, json.dumps(body).encode(), inbox.encode())):
                raise ConnectionFailed("not connected; nothing was asked for; try again once the connection is back")
            await self._wait(answer)
        finally:
            self._wire.unsubscribe(sid)
            if forget:
                forget()
        if answer.trouble and not answer.by_mirror:
            _log.info("direct get cut short", stream=self._stream.name, subject=subject, reason=answer.trouble)
        return answer

    async def _wait(self, answer: DirectBatch) -> None:
        heard = -1
        while not answer.ended.done() and answer.heard != heard:
            heard = answer.heard
            await asyncio.wait({answer.ended}, timeout=_SILENCE_S)
        if not answer.ended.done():
            answer.give_up(f"nothing came for {_SILENCE_S:g} s")
            if not answer.heard:
                self._avoid_until_s = asyncio.get_running_loop().time() + _AVOID_S
