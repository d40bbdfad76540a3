"""A dead letter: the headers that tell its story, and what it carries; the same from workers and from replays.

Every message can be written as one. What a letter cannot carry as it was is left out or abbreviated, and `Parti-Cut`
says so: headers beyond the server's limit, a payload that leaves them no room, a subject that is no UTF-8 text. The
original is then in the origin stream or, where that deletes what is handled, in messages of the dead-letter stream
that are stored first (`Parti-Original`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from parti.model.headers import split_pin
from parti.model.message import Message
from parti.model.records import number_in
from parti.model.safe_text import abbreviate, digest, escape_line, is_plain, many_lines, may_be_bytes, one_line

ORIGIN_HEADERS = frozenset(
    {
        "Parti-Stream",
        "Parti-Sequence",
        "Parti-Subject",
        "Parti-Subject-Base64",
        "Parti-Partition",
        "Parti-Error",
        "Parti-Traceback",
        "Parti-Attempts",
        "Parti-Worker",
        "Parti-Published",
        "Parti-Payload",
        "Parti-Cut",
        "Parti-Original",
    }
)
"""What `write_letter` adds to the headers of the message; a publisher's headers of these names are left out."""
ORIGINALS = "parti-original"
"""Token of the subjects that originals are stored under."""
_RESERVED = frozenset(name.lower() for name in ORIGIN_HEADERS)
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_MOST_HEADERS = 60_000
"""Bytes of headers in a letter; the server stores no more than 65,535."""
_MOST_SUBJECT = 1_000
"""Bytes of the subject that a letter is published under: a server takes no longer line than 4,096 by default."""
_MOST_NAME = 8_192
"""Bytes of the original subject in a header."""
_MOST_PARTITION = 1_000
_MOST_TRACEBACK = 4_000
_SHORT = 200
_ROOM = 512
"""Bytes for what is added once the original has been stored, and for the line that begins and ends a header block."""
_NEWLINE = "␤"
"""Stands for a newline in the header with the traceback."""
_LONGEST_NUMBER = 20


@dataclass(frozen=True, slots=True)
class WrittenLetter:
    """A dead letter that can be published."""

    subject: str
    headers: Mapping[str, str]
    payload: bytes
    originals: Sequence[bytes] = ()
    """To be stored first, one after the other and without headers: the original, which nobody else keeps."""
    originals_subject: str = ""
    original_headers: int = 0
    """Bytes of the original that are its header block."""

    def referring_to(self, stored: Sequence[int]) -> WrittenLetter:
        """The letter, once its original has been stored in these messages of the same stream."""
        where = " ".join(map(str, stored))
        return replace(self, headers={**self.headers, "Parti-Original": f"{self.original_headers} in {where}"})


def dead_letter_subject(root: str, message: Message) -> str:
    """Where a message goes as a dead letter; `root` is what all dead letters are published under.

    A subject that cannot be published under, is too long for the server's control line, or has the token that
    originals lie under, ends in a hash of itself.
    """
    start, subject = f"{root}.{message.stream}", message.subject
    tokens = subject.split(".")
    usable = [_is_token(token) for token in tokens]
    if all(usable) and len(f"{start}.{subject}".encode()) <= _MOST_SUBJECT:
        return f"{start}.{subject}"
    end = digest(subject)
    for token, good in zip(tokens, usable, strict=True):
        if not good or len(f"{start}.{token}.{end}".encode()) > _MOST_SUBJECT:
            break
        start = f"{start}.{token}"
    return f"{start}.{end}"


def _is_token(token: str) -> bool:
    # A publisher's subject with the token of the originals would make the letter look like one of these.
    return (
        bool(token)
        and token not in {"*", ">", ORIGINALS}
        and token.isprintable()
        and " " not in token
        and "\\" not in token
    )


def write_letter(
    message: Message, reason: str, *, root: str, max_payload: int, kept: bool, traceback: str = ""
) -> WrittenLetter:
    """Write the dead letter of a message; one that is accepted by a server which takes `max_payload` bytes.

    It is de-duplicated by origin stream and sequence. `kept`: the origin keeps its messages, so that what the letter
    lacks can be read there.
    """
    most = max(_ROOM, min(_MOST_HEADERS, max_payload - _ROOM))
    story, cuts = _story(message, reason, traceback, most)
    own, all_own = _own_headers_of(message.header, most - _size(story))
    if not all_own:
        cuts.append("headers")
    payload = message.data
    if _size(story) + _size(own) + len(payload) + _ROOM > max_payload:
        cuts.append("payload")
        place = "still in the origin stream" if kept else "see Parti-Original"
        story["Parti-Payload"] = f"left out: {len(payload)} bytes, {place}"
        payload = b""
    if cuts:
        story["Parti-Cut"] = ", ".join(cuts)
    letter = WrittenLetter(dead_letter_subject(root, message), own | story, payload)
    if kept or not {"headers", "payload"} & set(cuts):
        return letter
    block = split_pin(message.header)[0] if message.header else b""
    original = block + message.data
    parts = [original[start : start + max_payload] for start in range(0, len(original), max_payload)]
    return replace(
        letter,
        originals=parts,
        originals_subject=f"{root}.{message.stream}.{ORIGINALS}.{message.seq}",
        original_headers=len(block),
    )


def _story(message: Message, reason: str, traceback: str, most: int) -> tuple[dict[str, str], list[str]]:
    """The headers that tell what has happened, and what is not told as it was."""
    story = {
        "Nats-Msg-Id": f"{message.stream}:{message.seq}:{message.published_at.timestamp():.6f}",
        "Parti-Stream": message.stream,
        "Parti-Sequence": str(message.seq),
        "Parti-Partition": abbreviate(message.partition.id, _MOST_PARTITION),
        "Parti-Error": one_line(reason),
        "Parti-Attempts": str(message.attempt),
        "Parti-Worker": message.worker_id,
        "Parti-Published": message.published_at.isoformat(),
    }
    told, exact = _subject_headers(message.subject, _MOST_NAME)
    trace = many_lines(traceback, _MOST_TRACEBACK).replace("\n", _NEWLINE)
    if trace and _size(story | told) + len(trace.encode()) + _SHORT <= most:
        story["Parti-Traceback"] = trace
    elif _size(story | told) + _SHORT > most:  # a server that takes very small messages only
        told, exact = _subject_headers(message.subject, _SHORT)
        story["Parti-Error"] = one_line(reason, _SHORT // 4)
        story["Parti-Partition"] = abbreviate(message.partition.id, _SHORT // 4)
    return story | told, [] if exact else ["subject"]


def _subject_headers(subject: str, most: int) -> tuple[dict[str, str], bool]:
    """Headers that tell the subject, and whether they tell it exactly."""
    if may_be_bytes(subject) or len(subject.encode()) > most:
        return {"Parti-Subject": abbreviate(subject, most)}, False
    if is_plain(subject) and subject == subject.strip():
        return {"Parti-Subject": subject}, True
    exact = base64.b64encode(subject.encode()).decode()
    return {"Parti-Subject": escape_line(subject), "Parti-Subject-Base64": exact}, True


def _own_headers_of(block: bytes | None, room: int) -> tuple[dict[str, str], bool]:
    """The publisher's headers as far as they can be sent again and there is room, and whether these are all.

    Headers that steer the server (ids, expectations, TTL) belonged to the first publish and are not counted. Of a
    repeated name the first value is sent again.
    """
    own: dict[str, str] = {}
    complete, seen = True, set()
    for name, value in _raw_headers(block):
        if name.lower().startswith(b"nats-") or name.lower().decode("latin-1") in _RESERVED:
            continue
        if name in seen:
            complete = False
            continue
        seen.add(name)
        key, text = name.decode("latin-1"), _sendable(value)
        size = len(name) + len(value) + 4
        if text is None or not _HEADER_NAME.fullmatch(key) or size > room:
            complete = False
        else:
            own[key] = text
            room -= size
    return own, complete


def _raw_headers(block: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    for line in split_pin(block)[0].split(b"\r\n")[1:] if block else ():
        name, colon, value = line.partition(b":")
        if colon and name.strip():
            yield name.strip(), value.strip()


def _sendable(value: bytes) -> str | None:
    """A header value as text that the client sends unchanged; None when there is none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if text == text.strip() and "\r" not in text and "\n" not in text else None


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode("utf-8", "replace")) + 4 for name, value in headers.items())


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as it lies in its stream, without its payload."""

    seq: int
    """Its own sequence, in the dead-letter stream."""
    stored_at: datetime
    headers: Mapping[str, str]

    @property
    def stream(self) -> str:
        """The stream that the message was in."""
        return self.headers.get("Parti-Stream", "")

    @property
    def origin_seq(self) -> int:
        """Where the message was in that stream; 0: not known."""
        return number_in(self.headers.get("Parti-Sequence", ""))

    @property
    def subject(self) -> str:
        """The subject that the message lay under; only nearly, when `cut` names it."""
        try:
            return base64.b64decode(self.headers.get("Parti-Subject-Base64", "-"), validate=True).decode()
        except (ValueError, binascii.Error):
            return self.headers.get("Parti-Subject", "")

    @property
    def partition(self) -> str:
        """The partition of the message."""
        return self.headers.get("Parti-Partition", "")

    @property
    def error(self) -> str:
        """Why no attempt could handle it."""
        return self.headers.get("Parti-Error", "")

    @property
    def traceback(self) -> str:
        """Where the error was raised; empty when nothing is known of it."""
        return self.headers.get("Parti-Traceback", "").replace(_NEWLINE, "\n")

    @property
    def attempts(self) -> int:
        """How often it was tried."""
        return number_in(self.headers.get("Parti-Attempts", ""))

    @property
    def worker(self) -> str:
        """Who tried."""
        return self.headers.get("Parti-Worker", "")

    @property
    def payload_left_out(self) -> bool:
        """The payload is not in the letter, but only where the original is."""
        return "Parti-Payload" in self.headers

    @property
    def cut(self) -> frozenset[str]:
        """What of the message is not in the letter as it was: `subject`, `headers`, `payload`."""
        named = {part.strip() for part in self.headers.get("Parti-Cut", "").split(",") if part.strip()}
        return frozenset(named | ({"payload"} if self.payload_left_out else set()))

    @property
    def original(self) -> tuple[int, tuple[int, ...]] | None:
        """Bytes of the header block, and the messages of the dead-letter stream that hold the original.

        None: it is in the origin stream, if anywhere.
        """
        size, _, where = self.headers.get("Parti-Original", "").partition(" in ")
        stored = tuple(number_in(each) for each in where.split())
        return (number_in(size), stored) if stored and all(stored) else None

    @property
    def own_headers(self) -> dict[str, str]:
        """The headers that the message itself had."""
        return own_headers_of(self.headers)


def own_headers_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers without those that tell a story or steer the server."""
    # The client strips more white space off a name than a header block loses when it is read.
    names = {name: name.strip().lower() for name in headers}
    return {k: headers[k] for k, name in names.items() if name not in _RESERVED and not name.startswith("nats-")}


def sendable_headers_of(block: bytes | None) -> tuple[dict[str, str], bool]:
    """The headers of an original that can be sent again, and whether these are all that a publisher gave it."""
    return _own_headers_of(block, _MOST_HEADERS + len(block or b""))


def is_original(subject: str) -> bool:
    """Whether a message of the dead-letter stream is no letter, but the original of one."""
    tokens = subject.rsplit(".", 2)
    return len(tokens) == 3 and tokens[1] == ORIGINALS and tokens[2].isdecimal()


def reason_of(error: str) -> str:
    """What errors of one kind have in common: the type of the error, or what was said before the first detail.

    >>> reason_of("ValueError: 'x17' is no number"), reason_of("no such order: 4711"), reason_of("broken")
    ('ValueError', 'no such order', 'broken')
    """
    return error.partition(":")[0].strip() or "unknown"
