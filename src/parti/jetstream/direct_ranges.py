"""Reads a range by batched direct gets, which no consumer and no worker notices."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from parti.errors import ConnectionFailed, NotFound
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.chunks import Chunk, Wanted
from parti.jetstream.direct import DirectAnswer
from parti.jetstream.leaders import check_same, nothing_left

_BATCH = 4096
_MAX_BYTES = 8 << 20
"""Most bytes of one answer: a server cuts off a reader that 64 MB wait for."""
_SILENT_S = 2.0
_LEADERS_ROWS = 256


class DirectRange:
    """Reads by batched direct gets, and from the leader where those cannot be had or trusted."""

    server_filters = False

    def __init__(self, control: BlockingClient, wanted: Wanted, start: int, info: dict[str, Any]) -> None:
        self._client = control
        self._wanted = wanted
        self._next = start
        self._direct = bool(info["config"].get("allow_direct"))
        self.server_filters = bool(wanted.subjects)
        # A list of subjects cannot be asked for; several are found by reading everything.
        self._subject = wanted.subjects[0] if len(wanted.subjects) == 1 else ">"
        if len(wanted.subjects) > 1:
            self.server_filters = False

    def close(self) -> None:
        """Nothing is left behind."""

    def read(self) -> Iterator[tuple[Chunk, int]]:
        """Chunks, and for each the sequence behind its last message."""
        wanted = self._wanted
        while self._next < wanted.end:
            chunk = self._direct_chunk() if self._direct else Chunk()
            if not len(chunk):
                chunk = self._leaders_chunk(1 if self._direct else _LEADERS_ROWS)
            # Sequences begin anew with a stream, so nothing in the messages tells which stream they are of.
            check_same(self._client.stream_info(wanted.stream), wanted.stream, wanted.created)
            if not len(chunk):
                return
            self._next = chunk.seqs[-1] + 1
            yield chunk, self._next

    def _direct_chunk(self) -> Chunk:
        messages = self._get().messages
        return Chunk(
            [m.subject.encode() for m in messages],
            [m.header for m in messages],
            [m.data if self._wanted.payload else b"" for m in messages],
            seqs=[m.seq for m in messages],
            stamps_us=[round(m.stored_at.timestamp() * 1e6) for m in messages],
        )

    def _get(self) -> DirectAnswer:
        wanted, client = self._wanted, self._client
        answer = DirectAnswer(wanted.stream, self._next, wanted.end - 1)
        batch = min(_BATCH, wanted.end - self._next)
        body = {"seq": self._next, "batch": batch, "next_by_subj": self._subject, "max_bytes": _MAX_BYTES}
        inbox = client.new_inbox()
        sid = client.subscribe(inbox)
        client.publish(f"$JS.API.DIRECT.GET.{wanted.stream}", json.dumps(body).encode(), reply=inbox)
        while not answer.done:
            delivery = client.next_delivery(_SILENT_S)
            if delivery is None:
                client.raise_denials()
                answer.give_up(f"nothing came for {_SILENT_S:g} s")
            elif delivery.sid == sid:
                try:
                    answer.take(delivery.header, delivery.data)
                except UnicodeDecodeError:
                    answer.give_up("a subject is not UTF-8")
        client.unsubscribe(sid)
        return answer

    def _leaders_chunk(self, most: int) -> Chunk:
        """The next messages from the leader, one by one; empty when the range has no more."""
        wanted, chunk, following = self._wanted, Chunk(), self._next
        subject = self._subject if self.server_filters else ">"
        size = 0
        while len(chunk) < most and following < wanted.end and size < _MAX_BYTES:
            body = {"seq": following, "next_by_subj": subject}
            try:
                found = self._client.api(f"STREAM.MSG.GET.{wanted.stream}", body)["message"]
            except NotFound:
                break
            if int(found["seq"]) >= wanted.end:
                break
            _add_from_leader(chunk, found, wanted.payload)
            following = chunk.seqs[-1] + 1
            size += len(chunk.payloads[-1])
        if not len(chunk) and not nothing_left(self._client, wanted, self._next, (subject,)):
            raise ConnectionFailed(f"the leader of stream {wanted.stream!r} changed its answer; it is asked again")
        return chunk


def _add_from_leader(chunk: Chunk, message: dict[str, Any], payload: bool) -> None:
    stamp = datetime.fromisoformat(message["time"])
    chunk.subjects.append(str(message["subject"]).encode())
    chunk.headers.append(base64.b64decode(message["hdrs"]) if message.get("hdrs") else None)
    chunk.payloads.append(base64.b64decode(message.get("data", "")) if payload else b"")
    chunk.seqs.append(int(message["seq"]))
    chunk.stamps_us.append(round(stamp.timestamp() * 1e6))
