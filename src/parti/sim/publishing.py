"""What publishing to a stream of the model checks: revisions, duplicates and atomic batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from parti.sim.expiry import ttl_of
from parti.sim.filters import filter_of
from parti.sim.messages import SECOND_NS, Message, RefusalError, headers_of

if TYPE_CHECKING:
    from parti.sim.streams import Stream

_MAX_BATCH = 1000
_MAX_BATCHES = 50
_BATCH_TIMEOUT_NS = 10 * SECOND_NS
_ID = "Nats-Msg-Id"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
_EXPECTED_LAST = "Nats-Expected-Last-Sequence"
_BATCH, _NUMBER, _COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
_KNOWN = frozenset({_ID, _EXPECTED, _EXPECTED_OF, _EXPECTED_LAST, _BATCH, _NUMBER, _COMMIT, "Nats-TTL"})


class _Batch:
    """The messages of an atomic batch that has not been committed."""

    __slots__ = ("messages", "touched_ns")

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes, bytes]] = []
        self.touched_ns = 0


class Publishing:
    """Takes messages for one stream and answers their publishers."""

    __slots__ = ("_ack_start", "_batches", "_ids", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ids: dict[str, tuple[int, int]] = {}
        self._batches: dict[str, _Batch] = {}
        self._ack_start = f'{{"stream":"{stream.name}","seq":'.encode()

    def take(self, subject: str, payload: bytes, reply: str, header: bytes | None) -> None:
        """Store a message if its headers allow it, and answer."""
        stream = self._stream
        if not header:
            message = stream.store(subject, None, payload)
            self._answer(reply, b"%b%d}" % (self._ack_start, stream.last))
            if message is not None:
                stream.announce(message)
            return
        headers = headers_of(header)
        try:
            if _BATCH in headers:
                self._add_to_batch(headers, subject, payload, reply, header)
            else:
                self._take_checked(headers, subject, payload, reply, header)
        except RefusalError as refusal:
            error = '{{"code":{code},"err_code":{err_code},"description":"{description}"}}'.format(**refusal.answer)
            self._answer(reply, f'{{"error":{error},"stream":"{stream.name}","seq":0}}'.encode())

    def restart(self) -> None:
        """Forget unfinished batches."""
        self._batches.clear()

    def _take_checked(
        self, headers: Mapping[str, str], subject: str, payload: bytes, reply: str, header: bytes
    ) -> None:
        self._check(headers, subject)
        expected, stream = headers.get(_EXPECTED_LAST), self._stream
        if expected and int(expected) != stream.last:
            raise RefusalError(400, 10071, f"wrong last sequence: {stream.last}")
        if duplicate_of := self._duplicate(headers.get(_ID, "")):
            self._answer(reply, b'%b%d,"duplicate": true}' % (self._ack_start, duplicate_of))
            return
        message = self._store(subject, header, payload, headers)
        self._answer(reply, b"%b%d}" % (self._ack_start, stream.last))
        if message is not None:
            stream.announce(message)

    def _answer(self, reply: str, payload: bytes) -> None:
        if reply:
            self._stream.server.send(reply, reply, "", None, payload)

    def _store(self, subject: str, header: bytes, payload: bytes, headers: Mapping[str, str]) -> Message | None:
        stream = self._stream
        message = stream.store(subject, header, payload)
        ttl_s = ttl_of(headers)
        if ttl_s and message is not None:
            stream.expiry.add(message.seq, ttl_s)
        if _ID in headers:
            self._ids[headers[_ID]] = (stream.last, stream.server.wall_ns)
        return message

    # ── checks ────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, headers: Mapping[str, str], subject: str) -> None:
        """Raise what the server refuses in any message with such headers."""
        unknown = [name for name in headers if name.startswith("Nats-") and name not in _KNOWN]
        if unknown:
            raise NotImplementedError(f"the model does not know the headers {unknown}")
        if ttl_of(headers) and not self._stream.config["allow_msg_ttl"]:
            raise RefusalError(400, 10166, "per-message TTL is disabled")
        expected, other = headers.get(_EXPECTED), headers.get(_EXPECTED_OF)
        if not expected:
            if other:
                raise RefusalError(400, 10193, "missing sequence for expected last sequence per subject")
            return
        found = self._stream.last_match(filter_of((other or subject,)))
        last = found.seq if found else 0
        if last != int(expected):
            raise RefusalError(400, 10071, f"wrong last sequence: {last}")

    def _duplicate(self, message_id: str) -> int:
        """The sequence under which a message with this id was stored not long ago, or 0."""
        known = self._ids.get(message_id) if message_id else None
        window_ns: int = self._stream.config["duplicate_window"]
        return known[0] if known and self._stream.server.wall_ns - known[1] < window_ns else 0

    # ── batches ───────────────────────────────────────────────────────────────────────────────────────────────

    def _add_to_batch(
        self, headers: Mapping[str, str], subject: str, payload: bytes, reply: str, header: bytes
    ) -> None:
        if not self._stream.config.get("allow_atomic"):
            raise RefusalError(400, 10174, "atomic publish is disabled")
        if _NUMBER not in headers or headers.get(_COMMIT, "1") != "1":
            raise NotImplementedError("the model knows batches with a sequence, committed by their last message")
        name, number = headers[_BATCH], int(headers[_NUMBER])
        batch = self._batch(name, number)
        if number != len(batch.messages) + 1 or number > _MAX_BATCH:
            del self._batches[name]
            if number == len(batch.messages) + 1:
                raise RefusalError(400, 10199, f"atomic publish batch is too large: {_MAX_BATCH}")
            raise RefusalError(400, 10176, "atomic publish batch is incomplete")
        batch.messages.append((subject, header, payload))
        if _COMMIT not in headers:
            self._answer(reply, b"")
            return
        del self._batches[name]
        self._commit(batch, name, reply)

    def _batch(self, name: str, number: int) -> _Batch:
        """The batch that a message belongs to; a new one for its first message."""
        now_ns = self._stream.server.now_ns
        self._batches = {n: b for n, b in self._batches.items() if now_ns - b.touched_ns < _BATCH_TIMEOUT_NS}
        batch = self._batches.get(name)
        if batch is None:
            if number != 1:
                raise RefusalError(400, 10176, "atomic publish batch is incomplete")
            if len(self._batches) >= _MAX_BATCHES:
                raise RefusalError(429, 10210, "atomic publish too many inflight")
            batch = self._batches[name] = _Batch()
        batch.touched_ns = now_ns
        return batch

    def _commit(self, batch: _Batch, name: str, reply: str) -> None:
        """Store all messages of a batch, or raise and store none."""
        parsed = [headers_of(header) for _, header, _ in batch.messages]
        self._check_batch([subject for subject, _, _ in batch.messages], parsed)
        stored = [
            self._store(subject, header, payload, headers)
            for (subject, header, payload), headers in zip(batch.messages, parsed, strict=True)
        ]
        rest = b',"batch":"%b","count":%d}' % (name.encode(), len(stored))
        self._answer(reply, b"%b%d%b" % (self._ack_start, self._stream.last, rest))
        for message in stored:
            if message is not None:
                self._stream.announce(message)

    def _check_batch(self, subjects: list[str], parsed: list[dict[str, str]]) -> None:
        """Check each message as if the others were not there, and that no two of them concern the same revision."""
        ids: set[str] = set()
        written: set[str] = set()
        for subject, headers in zip(subjects, parsed, strict=True):
            if _EXPECTED_LAST in headers:
                raise NotImplementedError(f"the model has no {_EXPECTED_LAST} in a batch")
            message_id = headers.get(_ID, "")
            if message_id and (message_id in ids or self._duplicate(message_id)):
                raise RefusalError(400, 10201, "atomic publish batch contains duplicate message id")
            ids.add(message_id)
            if _EXPECTED in headers and (headers.get(_EXPECTED_OF) or subject) in written:
                raise RefusalError(400, 10164, "wrong last sequence")
            self._check(headers, subject)
            written.add(subject)
