"""Publishes many messages fast: a window of them waits for acknowledgements, and every one of these is checked.

A message counts as stored when the stream has acknowledged it, never before. Whatever is not acknowledged is sent
again after a broken connection, a lost acknowledgement or a leaderless stream; with a message id the stream drops
what it has already, so that nothing is stored twice within its duplicate window. Without one it may be.

Order: a stream stores the messages of one publisher in the order in which they were given. Two events can swap
messages of one window: a stream that loses its leader, and a server that refuses some because too many wait.

Standard library only, for Spark's tasks. Writing never waits without reading: acknowledgements that nobody takes
would fill the server's buffers and stop it from reading.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import ssl
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TypeAlias

from parti.errors import ApiError, ConfigError, ConnectionFailed, PartiError, PermissionDenied, RequestTimeout
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.model.headers import status_of
from parti.model.subjects import has_wildcard, tokens_of

Outgoing: TypeAlias = tuple[bytes, bytes, bytes, bytes]
"""Subject, payload, header lines (each ended by CR LF; none: empty) and message id (none: empty)."""

DEFAULT_WINDOW = 4096
_SMALLEST_WINDOW = 64
_CHUNK_MESSAGES = 512
_CHUNK_BYTES = 1 << 18
_WINDOW_BYTES = 64 << 20
"""Most bytes that wait for acknowledgements: with large messages this, and not their number, is the window."""
_READ_BYTES = 1 << 18
_MAX_SUBJECT_BYTES = 2048
"""The server reads protocol lines of up to 4,096 bytes, which hold a reply subject and numbers, too."""
_KNOWN_SUBJECTS = 100_000
_ID_LINE = b"Nats-Msg-Id: \r\n\r\n"
_ACK_WAIT_S = 10.0
_PATIENCE_S = 60.0
_VERDICT_S = 2.0
"""How long no stream must have a subject until that is believed: a starting server finds its streams bit by bit."""
_PAUSE_S = 0.1
_SHORT_PAUSE_S = 0.01
_WAIT_AGAIN = frozenset({10008, 10009, 10167})
"""JetStream errors that pass: temporarily unavailable, no leader, too many requests."""
_TOO_MANY = 10167
_ADVICE = {
    10054: "the message is larger than the stream's max_msg_size; raise it or send less",
    10060: "another stream stores this subject; check the stream and the subject",
    10077: "the stream is full and refuses new messages; raise its max_bytes, or let it discard old ones",
    10047: "the server has no room left; raise its storage limits",
    10023: "the server lacks resources; raise its limits",
}
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class WindowedPublisher:
    """Publishes in order with a window of unacknowledged messages; `flush` before anything is taken for stored.

    with WindowedPublisher(target, stream="DC") as publisher:
        publisher.publish((b"dc.%d" % n, b"payload", b"", b"run-7.%d" % n) for n in range(1000))
        publisher.flush()

    Raises, once and for the first message concerned, with its row (the place in the order of publishing, from 1) and
    subject: ConfigError for what cannot be published at all (a bad subject, too large), ApiError for what the stream
    refuses, PermissionDenied, and ConnectionFailed or RequestTimeout after a minute without any acknowledgement.
    What was acknowledged before stays stored.
    """

    def __init__(
        self,
        target: Target,
        *,
        name: str = "parti-publisher",
        stream: str | None = None,
        window: int = DEFAULT_WINDOW,
        ack_wait_s: float = _ACK_WAIT_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Describe a publisher; nothing is opened until the first message. `stream`: no other may store them."""
        self.published = 0
        """Messages given so far."""
        self.stored = 0
        """Messages that the stream has stored and acknowledged."""
        self.duplicates = 0
        """Messages that the stream had already: from an earlier attempt, or sent again after a broken connection."""
        self.reconnects = 0
        self._target = target
        self._name = name
        self._window = window
        self._ack_wait_s = ack_wait_s
        self._patience_s = patience_s
        expected = f"Nats-Expected-Stream: {stream}\r\n".encode() if stream else b""
        self._block_start = b"NATS/1.0\r\n" + expected
        self._plain = not stream
        # The same on every connection: what is sent again is the same bytes, and a late acknowledgement still counts.
        self._inbox = f"{target.inbox_prefix}.{os.urandom(12).hex()}."
        self._ack = re.compile(
            rb"MSG %b(\d+) 1 \d+\r\n"
            rb'\{"stream": ?"[^"\r]*", ?(?:"domain": ?"[^"\r]*", ?)?"seq": ?\d+(,[^{}\r]*)?\}\r\n'
            % re.escape(self._inbox.encode())
        )
        self._client: BlockingClient | None = None
        self._max_payload = 0
        self._rest = b""
        self._pong_due = False
        self._pending: dict[int, bytes] = {}
        self._pending_bytes = 0
        self._refused: dict[int, bytes] = {}
        """Refused for now; sent again when the rest of the window is settled."""
        self._pause_s = _PAUSE_S
        self._out: list[bytes] = []
        self._sent_at: deque[tuple[int, float]] = deque()
        """For each write the number behind its last message, and when it began."""
        self._known: set[bytes] = set()
        self._progress_s = time.monotonic()
        self._uncovered_s = 0.0

    def __enter__(self) -> WindowedPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what is not acknowledged by now may be stored or not."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def publish(self, messages: Iterable[Outgoing]) -> None:
        """Publish messages; waits only while the window is full."""
        if self._client is None:
            self._advance(self._window)
        pending, add, known, inbox = self._pending, self._out.append, self._known, self._inbox.encode()
        start, plain, most = self._block_start, self._plain, self._max_payload
        fixed, number, size = len(start) + len(_ID_LINE), self.published, 0
        push_at = number + self._room()
        for subject, payload, lines, msg_id in messages:
            if subject not in known:
                self._learn(subject, number)
            if msg_id:
                if b"\r" in msg_id or b"\n" in msg_id:
                    raise ConfigError(f"{_place(number, subject)}: the message id holds a line break; remove it")
                head = fixed + len(lines) + len(msg_id)
                total = head + len(payload)
                data = b"HPUB %b %b%d %d %d\r\n%b%bNats-Msg-Id: %b\r\n\r\n%b\r\n" % (
                    subject, inbox, number, head, total, start, lines, msg_id, payload
                )  # fmt: skip
            elif lines or not plain:
                head = len(start) + len(lines) + 2
                total = head + len(payload)
                data = b"HPUB %b %b%d %d %d\r\n%b%b\r\n%b\r\n" % (
                    subject, inbox, number, head, total, start, lines, payload
                )  # fmt: skip
            else:
                total = len(payload)
                data = b"PUB %b %b%d %d\r\n%b\r\n" % (subject, inbox, number, total, payload)
            if total > most:
                raise ConfigError(
                    f"{_place(number, subject)}: {total:,} bytes with headers are more than the server takes "
                    f"({most:,}); send less, or raise the server's max_payload"
                )
            pending[number] = data
            add(data)
            number += 1
            size += len(data)
            if number >= push_at or size >= _CHUNK_BYTES:
                self._count(number, size)
                size = 0
                # Room for the next write, so that a full window does not end in many small ones.
                self._advance(self._window - min(_CHUNK_MESSAGES, self._window // 4 + 1))
                push_at = number + self._room()
        self._count(number, size)

    def _room(self) -> int:
        """How many messages the next write may have."""
        return max(1, min(_CHUNK_MESSAGES, self._window - len(self._pending)))

    def _count(self, number: int, size: int) -> None:
        self.published = number
        self._pending_bytes += size

    def flush(self) -> None:
        """Wait until every message is acknowledged."""
        if self._pending or self._refused:
            self._advance(0)

    # ── sending and waiting ───────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, most: int) -> None:
        """Send what is built; wait until at most `most` messages are unacknowledged. Outlives lost connections."""
        self._progress_s = time.monotonic()
        while True:
            try:
                client = self._client or self._connect()
                # First, because a server that has closed the connection may have acknowledged before.
                self._take_acks(client)
                self._send(client)
                self._take_acks(client)
                while len(self._pending) > most or self._refused or self._pending_bytes > _WINDOW_BYTES:
                    if not self._pending:
                        self._send_again(client)
                    self._wait(client, writing=False)
                    self._take_acks(client)
                    self._send(client)
                self._check_age()
                return
            except (ConnectionFailed, RequestTimeout) as error:
                self._lose(error)

    def _connect(self) -> BlockingClient:
        client = BlockingClient.open(self._target, name=self._name)
        try:
            client.subscribe(f"{self._inbox}*")
            client._sock.setblocking(False)
        except BaseException:
            client.close()
            raise
        self._client = client
        self._max_payload = client.max_payload
        self._rest, client._buffer = client._buffer, b""
        self._pong_due = False
        # Refused and pending messages in the order in which they were given.
        self._pending.update(self._refused)
        self._refused.clear()
        waiting = sorted(self._pending.items())
        self._pending.clear()
        self._pending.update(waiting)
        self._pending_bytes = sum(map(len, self._pending.values()))
        self._out[:] = self._pending.values()
        return client

    def _lose(self, error: PartiError) -> None:
        """Give the connection up; raise when there is no hope."""
        self.close()
        self._sent_at.clear()
        self.reconnects += 1
        if error.fatal or time.monotonic() - self._progress_s > self._patience_s:
            raise self._with_place(error) from None
        time.sleep(_PAUSE_S)

    def _with_place(self, error: PartiError) -> PartiError:
        waiting = self._pending | self._refused
        if error.fatal or not waiting:
            return error
        first = min(waiting)
        return type(error)(
            f"{_place(first, _subject_of(waiting[first]))} and {len(waiting) - 1} more were not acknowledged "
            f"within {self._patience_s:g} s: {error}"
        )

    def _send(self, client: BlockingClient) -> None:
        out = self._out
        if self._pong_due:
            self._pong_due = False
            out.append(b"PONG\r\n")
        if not out:
            return
        view = memoryview(b"".join(out))
        out.clear()
        self._sent_at.append((self.published, time.monotonic()))
        while view:
            try:
                view = view[client._sock.send(view) :]
            except _WOULD_BLOCK:
                self._wait(client, writing=True)
                self._take_acks(client)
            except OSError as error:
                raise ConnectionFailed(
                    f"the connection to {client.server} broke: {error.strerror or error}"
                ) from None

    def _send_again(self, client: BlockingClient) -> None:
        """The window is settled but for what was refused: give the server a moment, then send that once more."""
        if time.monotonic() - self._progress_s > self._patience_s:
            raise RequestTimeout("the stream refused them for now, again and again; check the stream's leader")
        time.sleep(self._pause_s)
        for number in sorted(self._refused)[: self._window]:
            self._pending[number] = self._refused.pop(number)
        self._out[:] = self._pending.values()
        self._sent_at.clear()
        self._send(client)

    def _wait(self, client: BlockingClient, *, writing: bool) -> None:
        """Wait until something can be read (or written); raises when nothing came for too long."""
        if isinstance(client._sock, ssl.SSLSocket) and client._sock.pending():
            return
        poll = select.poll()
        poll.register(client._sock, select.POLLIN | (select.POLLOUT if writing else 0))
        if not poll.poll(self._ack_wait_s * 1000):
            raise RequestTimeout(f"{client.server} was silent for {self._ack_wait_s:g} s")

    def _check_age(self) -> None:
        """Notice the acknowledgement that never came while others did."""
        oldest = next(iter(self._pending), self.published)
        while self._sent_at and self._sent_at[0][0] <= oldest:
            self._sent_at.popleft()
        if self._sent_at and time.monotonic() - self._sent_at[0][1] > self._ack_wait_s:
            raise RequestTimeout(f"no acknowledgement for {self._ack_wait_s:g} s")

    # ── acknowledgements ──────────────────────────────────────────────────────────────────────────────────────────

    def _take_acks(self, client: BlockingClient) -> None:
        """Read all that has come, without waiting."""
        more = True
        while more:
            try:
                data = client._sock.recv(_READ_BYTES)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                raise ConnectionFailed(
                    f"the connection to {client.server} broke: {error.strerror or error}"
                ) from None
            if not data:
                raise ConnectionFailed(f"the server {client.server} closed the connection")
            # A TLS socket gives one record at a time, and says nothing to poll() about the rest.
            more = len(data) == _READ_BYTES or isinstance(client._sock, ssl.SSLSocket)
            self._rest = self._parse(client, self._rest + data if self._rest else data)

    def _parse(self, client: BlockingClient, data: bytes) -> bytes:
        """Take acknowledgements out of `data`; returns what is left."""
        pos, before = 0, self.stored + self.duplicates
        pop = self._pending.pop
        while True:
            for found in self._ack.finditer(data, pos):
                if found.start() != pos:
                    break
                pos = found.end()
                sent = pop(int(found[1]), None)
                if sent is not None:
                    self._pending_bytes -= len(sent)
                    if found[2] and b'"duplicate"' in found[2]:
                        self.duplicates += 1
                    else:
                        self.stored += 1
            following = self._parse_other(client, data, pos)
            if following == pos:
                break
            pos = following
        if self.stored + self.duplicates > before:
            self._progress_s = time.monotonic()
            self._uncovered_s = 0.0
        return data[pos:]

    def _parse_other(self, client: BlockingClient, data: bytes, pos: int) -> int:
        """Take one thing that is no plain acknowledgement; returns where it ends, `pos` when it is not complete."""
        end = data.find(b"\r\n", pos)
        if end < 0:
            return pos
        line = data[pos:end]
        words = line.split()
        if words and words[0] in {b"MSG", b"HMSG"}:
            start, size = end + 2, int(words[-1])
            if len(data) < start + size + 2:
                return pos
            head = int(words[-2]) if words[0] == b"HMSG" else 0
            number = int(words[1].rpartition(b".")[2])
            self._take_answer(number, data[start : start + head], data[start + head : start + size])
            return start + size + 2
        if line == b"PING":
            self._pong_due = True  # never in the middle of a message
        elif line.lower().startswith(b"-err 'permissions violation"):
            operation = "publish to" if b"publish" in line.lower() else "subscribe on"
            quoted = [*line.decode("utf-8", "replace").split('"'), ""]
            raise PermissionDenied(operation, quoted[1])
        else:
            client.take_line(line)
        return end + 2

    def _take_answer(self, number: int, header: bytes, body: bytes) -> None:
        data = self._pending.get(number)
        if data is None:
            return
        if status_of(header)[0] == 503:
            self._check_covered(number, data)
            self._pause_s = _PAUSE_S
            self._refused[number] = self._pending.pop(number)
            return
        try:
            answer = json.loads(body)
        except ValueError:
            answer = {}
        error = answer.get("error")
        if error is None and "seq" in answer:
            del self._pending[number]
            self._pending_bytes -= len(data)
            self.duplicates += bool(answer.get("duplicate"))
            self.stored += not answer.get("duplicate")
            return
        code, text = int((error or {}).get("err_code", 0)), (error or {}).get("description", "an unknown answer")
        if code in _WAIT_AGAIN:
            self._pause_s = _SHORT_PAUSE_S if code == _TOO_MANY else _PAUSE_S
            if code == _TOO_MANY and not self._refused:
                self._window = max(_SMALLEST_WINDOW, self._window // 2)
            self._refused[number] = self._pending.pop(number)
            return
        advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
        raise ApiError(code, f"{_place(number, _subject_of(data))} was not stored: {text}{advice}")

    def _check_covered(self, number: int, data: bytes) -> None:
        """Nobody took a message: raise if that is because no stream has its subject, and not one without a leader."""
        now_s = time.monotonic()
        if self._refused or now_s - self._uncovered_s < _PAUSE_S:
            return
        subject = _subject_of(data)
        names: list[str] | None = None
        with contextlib.suppress(PartiError), BlockingClient.open(self._target, name=self._name) as client:
            names = client.api("STREAM.NAMES", {"subject": subject.decode()}).get("streams") or []
        if names is None or names:
            self._uncovered_s = 0.0
        elif not self._uncovered_s:
            self._uncovered_s = now_s
        elif now_s - self._uncovered_s > _VERDICT_S:
            raise ConfigError(
                f"{_place(number, subject)} was not stored: no stream has this subject; "
                f"add it to a stream, or correct it"
            )

    # ── what may be published ─────────────────────────────────────────────────────────────────────────────────────

    def _learn(self, subject: bytes, number: int) -> None:
        """Refuse a subject that would break the protocol or that a server would drop."""
        check_subject(subject, _place(number, subject))
        if len(self._known) >= _KNOWN_SUBJECTS:
            self._known.clear()
        self._known.add(subject)


def check_subject(subject: bytes, where: str) -> None:
    """Raise ConfigError, beginning with `where`, unless messages can be published on this subject."""
    try:
        text = subject.decode()
        tokens_of(text)
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: the subject is no UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if has_wildcard(text):
        raise ConfigError(f"{where}: the subject has a wildcard; messages are published on one subject")
    if len(subject) > _MAX_SUBJECT_BYTES:
        raise ConfigError(f"{where}: the subject has {len(subject):,} bytes; expected at most {_MAX_SUBJECT_BYTES:,}")
    if not text.isprintable():
        raise ConfigError(f"{where}: the subject holds control characters; remove them")


def _place(number: int, subject: bytes) -> str:
    text = subject.decode("utf-8", "replace")
    return f"row {number + 1} (subject {text if len(text) < 120 else text[:120] + '…'!r})"


def _subject_of(data: bytes) -> bytes:
    """The subject in the bytes of a publish."""
    return data[: data.index(b"\r\n")].split(b" ")[1]
