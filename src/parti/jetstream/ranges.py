"""Reads a range of sequences from a stream, in order, complete, and without leaving anything behind.

Two ways, chosen by the stream's retention:

- limits: an ephemeral pull consumer without acknowledgements, in memory, on one replica; it is deleted at the end and
  forgotten by the server a minute after a reader that died.
- work-queue and interest: batched direct gets, because a consumer would count as interest or be refused.

Guarantees: messages come in order, each once; whatever the range no longer holds is told (`missing`). "There is no
more" is believed from the stream's leader only: a replica that lags says so too early. A connection that breaks is
opened again, and the reading goes on behind the last message.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from parti.errors import ApiError, ConnectionFailed, NotFound, PartiError
from parti.jetstream.blocking import BlockingClient, passes
from parti.jetstream.direct import DirectAnswer
from parti.jetstream.target import Target
from parti.model.headers import parse_headers, parse_reply, status_of
from parti.model.subjects import covers, first_overlap

_PULL = 4096
"""Messages asked for at once; three such requests are on their way at any time."""
_PULLS = 3
_MAX_BYTES = 8 << 20
"""Most bytes of one request: a server cuts off a reader that 64 MB wait for."""
_HEARTBEAT_S = 2.0
_EXPIRES_S = 30.0
_FORGOTTEN_S = 60.0
"""How long the server keeps the consumer of a reader that died."""
_CHUNK_ROWS = 8192
_CHUNK_BYTES = 16 << 20
_FILTER_BELOW = 0.04
"""Share of wanted messages below which the server's search beats reading everything: 6-9 k/s against 250 k/s."""
_LEADERS_ROWS = 256
_PATIENCE_S = 60.0
_PAUSE_S = 0.2

_SIZE_LINE = re.compile(rb"\r\nNats-Msg-Size: \d+\r\n\r\n\Z")

_T = TypeVar("_T")
Range = tuple[int, int]
"""First sequence, and the one behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to read: `[start, end)` of a stream, and which subjects of it (none given: all)."""

    stream: str
    created: str
    start: int
    end: int
    subjects: tuple[str, ...] = ()
    payload: bool = True
    """False: the server leaves the payloads out."""


@dataclass(slots=True)
class Chunk:
    """Consecutive messages as parallel lists.

    Sequence and time stand in `replies`, the acknowledgement subjects of the consumer, or, for direct gets, in
    `seqs` and `stamps_us`.
    """

    subjects: list[bytes] = field(default_factory=list)
    headers: list[bytes | None] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    stamps_us: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.subjects)

    def keep(self, wanted: Callable[[bytes], bool]) -> Chunk:
        """Only the messages of these subjects."""
        known: dict[bytes, bool] = {}
        chosen = []
        for index, subject in enumerate(self.subjects):
            good = known.get(subject)
            if good is None:
                good = known[subject] = wanted(subject)
            if good:
                chosen.append(index)
        if len(chosen) == len(self.subjects):
            return self
        return Chunk(
            _pick(self.subjects, chosen),
            _pick(self.headers, chosen),
            _pick(self.payloads, chosen),
            _pick(self.replies, chosen),
            _pick(self.seqs, chosen),
            _pick(self.stamps_us, chosen),
        )


def _pick(values: list[_T], chosen: list[int]) -> list[_T]:
    return [values[index] for index in chosen] if values else []


class RangeReader:
    """Reads one range; iterate over `chunks()` once."""

    def __init__(self, target: Target, wanted: Wanted, *, name: str = "parti-spark-reader") -> None:
        self.next = wanted.start
        """Everything below has been given out, or is missing."""
        self.rows = 0
        self.missing: list[Range] = []
        """Sequences of the range that the stream no longer holds; unknown (empty) where the server filtered."""
        self.server_filters = False
        self._target = target
        self._wanted = wanted
        self._name = name
        self._progress_s = time.monotonic()

    def chunks(self) -> Generator[Chunk, None, None]:
        """The messages of the range; raises `NotFound` when the stream was made anew, StreamNotFound when it is gone.

        A server that cannot be reached is tried again for a minute; then ConnectionFailed or RequestTimeout.
        """
        self._progress_s = time.monotonic()
        while self.next < self._wanted.end:
            try:
                yield from self._read()
            except PartiError as error:
                if not passes(error) or time.monotonic() - self._progress_s > _PATIENCE_S:
                    raise
                time.sleep(_PAUSE_S)

    def _read(self) -> Iterator[Chunk]:
        with BlockingClient.open(self._target, name=self._name) as control:
            info = control.stream_info(self._wanted.stream)
            check_same(info, self._wanted.stream, self._wanted.created)
            source: _Pulling | _Getting
            if info["config"].get("retention", "limits") == "limits":
                source = _Pulling(self._target, control, self._wanted, self.next, info, self._name)
            else:
                source = _Getting(control, self._wanted, self.next, info)
            self.server_filters = source.server_filters
            try:
                yield from self._take(source)
            finally:
                source.close()

    def _take(self, source: _Pulling | _Getting) -> Iterator[Chunk]:
        wanted = self._wanted
        check_subjects = bool(wanted.subjects) and not source.server_filters
        for chunk, following in source.read():
            if not source.server_filters:
                self._note_missing(chunk, following)
            self.next = following
            self._progress_s = time.monotonic()
            found = chunk.keep(self._is_wanted) if check_subjects else chunk
            if len(found):
                self.rows += len(found)
                yield found
        if not source.server_filters and self.next < wanted.end:
            self.missing.append((self.next, wanted.end))
        self.next = wanted.end

    def _is_wanted(self, subject: bytes) -> bool:
        name = subject.decode("utf-8", "replace")
        return any(covers(pattern, name) for pattern in self._wanted.subjects)

    def _note_missing(self, chunk: Chunk, following: int) -> None:
        if following - self.next == len(chunk):
            return
        expected = self.next
        for seq in chunk.seqs or map(sequence_of, chunk.replies):
            if seq > expected:
                self.missing.append((expected, seq))
            expected = seq + 1
        if following > expected:
            self.missing.append((expected, following))


def check_same(info: dict[str, Any], stream: str, created: str) -> None:
    """Raise NotFound unless this is the stream that was planned for."""
    if info["created"] != created:
        raise NotFound(10059, f"stream {stream!r} was deleted and made anew: its old messages are gone")


def sequence_of(reply: bytes) -> int:
    """The stream sequence in an acknowledgement subject."""
    tokens = reply.split(b".")
    return int(tokens[5 if len(tokens) == 9 else 7])


def leaders_next(client: BlockingClient, stream: str, seq: int, subjects: tuple[str, ...]) -> int | None:
    """The first sequence from `seq` on that the stream's leader holds on one of these subjects (none given: any)."""
    found = []
    for subject in subjects or (">",):
        try:
            answer = client.api(f"STREAM.MSG.GET.{stream}", {"seq": max(1, seq), "next_by_subj": subject})
        except NotFound:
            continue
        found.append(int(answer["message"]["seq"]))
    return min(found, default=None)


def _nothing_left(client: BlockingClient, wanted: Wanted, seq: int, subjects: tuple[str, ...]) -> bool:
    """Whether the leader, and one that has the whole range, holds nothing more of it on these subjects."""
    following = leaders_next(client, wanted.stream, seq, subjects)
    if following is not None:
        return following >= wanted.end
    info = client.stream_info(wanted.stream)
    check_same(info, wanted.stream, wanted.created)
    last = int(info["state"]["last_seq"])
    if last < wanted.end - 1:
        raise ApiError(
            0,
            f"stream {wanted.stream!r} ends at {last} and was expected to reach {wanted.end - 1}: the server is "
            f"behind, or the stream was restored from an older copy; try again, or start over from its present end",
        )
    # Asked again after the check, because another server may have answered before it.
    following = leaders_next(client, wanted.stream, seq, subjects)
    return following is None or following >= wanted.end


def _askable(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """The subjects without those that another one covers; none when two still overlap: the server refuses that."""
    fewest = tuple(one for one in subjects if not any(other != one and covers(other, one) for other in subjects))
    return () if first_overlap(fewest) else fewest


class _Pulling:
    """Reads through an ephemeral consumer."""

    def __init__(
        self, target: Target, control: BlockingClient, wanted: Wanted, start: int, info: dict[str, Any], name: str
    ) -> None:
        self._target = target
        self._control = control
        self._name = name
        self._wanted = wanted
        self._next = start
        self._consumer = ""
        self.server_filters = False
        last = int(info["state"]["last_seq"])
        if subjects := _askable(wanted.subjects):
            self._pending = self._create(subjects)
            self.server_filters = self._pending <= _FILTER_BELOW * max(1, last - start + 1)
            if not self.server_filters:
                self._delete()
        if not self.server_filters:
            self._pending = self._create(())
        self._max_bytes = max(_MAX_BYTES, 2 * control.max_payload)
        try:
            self._client = BlockingClient.open(target, name=name)
        except PartiError:
            self._delete()
            raise
        self._inbox = self._client.new_inbox()
        self._client.subscribe(f"{self._inbox}.*")
        self._pulls = 0
        self._outstanding = 0

    def _create(self, subjects: tuple[str, ...]) -> int:
        name = f"parti-spark-{os.urandom(8).hex()}"
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(1, self._next),
            "ack_policy": "none",
            "max_deliver": -1,
            "max_waiting": 2 * _PULLS,
            "replay_policy": "instant",
            "inactive_threshold": int(_FORGOTTEN_S * 1e9),
            "num_replicas": 1,
            "mem_storage": True,
        }
        if len(subjects) == 1:
            config["filter_subject"] = subjects[0]
        elif subjects:
            config["filter_subjects"] = list(subjects)
        if not self._wanted.payload:
            config["headers_only"] = True
        stream = self._wanted.stream
        answer = self._control.api(
            f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config, "action": "create"}
        )
        self._consumer = name
        return int(answer.get("num_pending", 0))

    def _delete(self) -> None:
        call = f"CONSUMER.DELETE.{self._wanted.stream}.{self._consumer}"
        with contextlib.suppress(PartiError):
            try:
                self._control.api(call)
            except ConnectionFailed:
                # Nobody answers pings on it while the reading goes on, so a server gives it up after minutes.
                with BlockingClient.open(replace(self._target, connect_timeout_s=1.0), name=self._name) as another:
                    another.api(call)

    def close(self) -> None:
        """Delete the consumer; where that fails the server forgets it by itself."""
        self._client.close()
        self._delete()

    def read(self) -> Iterator[tuple[Chunk, int]]:
        """Chunks, and for each the sequence behind its last message."""
        wanted, client = self._wanted, self._client
        searched = wanted.subjects if self.server_filters else ()
        chunk, size = Chunk(), 0
        silent_s = 0.0
        if not self._pending and _nothing_left(self._control, wanted, self._next, searched):
            return
        self._ask()
        while True:
            data = client.receive(_HEARTBEAT_S / 2)
            before = len(chunk)
            if data:
                client.put_back(data[self._parse(data, chunk) :])
                size += len(data)
            if len(chunk) > before:
                silent_s = 0.0
                self._outstanding -= len(chunk) - before
                self._next = sequence_of(chunk.replies[-1]) + 1
                pending = parse_reply(chunk.replies[-1]).pending
                if self._next >= wanted.end:
                    self._cut(chunk)
                    yield chunk, wanted.end
                    return
                if len(chunk) >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
                    yield chunk, self._next
                    chunk, size = Chunk(), 0
                self._ask()
                if pending:
                    continue
            elif data:
                client.raise_denials()
                continue
            else:
                silent_s += _HEARTBEAT_S / 2
            # The consumer has no more, or says nothing: the leader knows.
            if len(chunk):
                yield chunk, self._next
                chunk, size = Chunk(), 0
            if _nothing_left(self._control, wanted, self._next, searched):
                return
            if silent_s > 3 * _HEARTBEAT_S:
                raise ConnectionFailed(f"nothing came from {client.server} for {silent_s:g} s")

    def _cut(self, chunk: Chunk) -> None:
        end = self._wanted.end
        while chunk.replies and sequence_of(chunk.replies[-1]) >= end:
            for values in (chunk.subjects, chunk.headers, chunk.payloads, chunk.replies):
                values.pop()

    def _ask(self) -> None:
        while self._outstanding <= (_PULLS - 1) * _PULL:
            batch = min(_PULL, self._wanted.end - self._next - self._outstanding)
            if batch <= 0:
                return
            self._pulls += 1
            body = {
                "batch": batch,
                "max_bytes": self._max_bytes,
                "expires": int(_EXPIRES_S * 1e9),
                "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
            }
            self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._wanted.stream}.{self._consumer}",
                json.dumps(body).encode(),
                reply=f"{self._inbox}.{self._pulls}",
            )
            self._outstanding += batch

    def _parse(self, data: bytes, chunk: Chunk) -> int:
        """Take whole messages out of `data`; returns how many bytes were used."""
        find, length = data.find, len(data)
        add_subject, add_payload = chunk.subjects.append, chunk.payloads.append
        add_reply, add_header = chunk.replies.append, chunk.headers.append
        pos = 0
        while True:
            line_end = find(b"\r\n", pos)
            if line_end < 0:
                return pos
            words = data[pos:line_end].split(b" ")
            start = line_end + 2
            kind = words[0]
            if kind == b"MSG":
                end = start + int(words[-1])
                if end + 2 > length:
                    return pos
                pos = end + 2
                # Anything else is no delivery: somebody else wrote to our inbox.
                if len(words) == 5 and words[3].startswith(b"$JS.ACK."):
                    add_subject(words[1])
                    add_reply(words[3])
                    add_header(None)
                    add_payload(data[start:end])
            elif kind == b"HMSG":
                body, end = start + int(words[-2]), start + int(words[-1])
                if end + 2 > length:
                    return pos
                pos = end + 2
                if len(words) == 6 and words[3].startswith(b"$JS.ACK."):
                    add_subject(words[1])
                    add_reply(words[3])
                    add_header(data[start:body] if self._wanted.payload else _without_size(data[start:body]))
                    add_payload(data[body:end])
                else:
                    self._take_status(data[start:body])
            else:
                self._client.take_line(data[pos:line_end])
                pos = start

    def _take_status(self, header: bytes) -> None:
        code, text = status_of(header)
        if code == 100:
            return
        if code == 503 or (code == 409 and any(word in text for word in ("Deleted", "Leadership", "Shutdown"))):
            raise ConnectionFailed(f"the reading consumer is gone ({text}); a new one is made")
        # The rest of a request that ended early will not come.
        self._outstanding -= int(parse_headers(header).get("Nats-Pending-Messages", "0"))
        self._ask()


def _without_size(header: bytes) -> bytes | None:
    """The header without the line that the server adds where it leaves the payload out."""
    block = _SIZE_LINE.sub(b"\r\n\r\n", header)
    return None if block == b"NATS/1.0\r\n\r\n" else block


class _Getting:
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
        batch = min(_PULL, wanted.end - self._next)
        body = {"seq": self._next, "batch": batch, "next_by_subj": self._subject, "max_bytes": _MAX_BYTES}
        inbox = client.new_inbox()
        sid = client.subscribe(inbox)
        client.publish(f"$JS.API.DIRECT.GET.{wanted.stream}", json.dumps(body).encode(), reply=inbox)
        while not answer.done:
            delivery = client.next_delivery(_HEARTBEAT_S)
            if delivery is None:
                answer.give_up(f"nothing came for {_HEARTBEAT_S:g} s")
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
        if not len(chunk) and not _nothing_left(self._client, wanted, self._next, (subject,)):
            raise ConnectionFailed(f"the leader of stream {wanted.stream!r} changed its answer; it is asked again")
        return chunk


def _add_from_leader(chunk: Chunk, message: dict[str, Any], payload: bool) -> None:
    stamp = datetime.fromisoformat(message["time"])
    chunk.subjects.append(str(message["subject"]).encode())
    chunk.headers.append(base64.b64decode(message["hdrs"]) if message.get("hdrs") else None)
    chunk.payloads.append(base64.b64decode(message.get("data", "")) if payload else b"")
    chunk.seqs.append(int(message["seq"]))
    chunk.stamps_us.append(round(stamp.timestamp() * 1e6))
