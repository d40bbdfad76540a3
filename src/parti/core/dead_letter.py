"""A dead letter: the headers that tell its story, and what it carries; the same from workers and from replays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from parti.model.message import Message

_HEADER_ROOM = 1024
ORIGIN_HEADERS = frozenset(
    {
        "Parti-Stream",
        "Parti-Sequence",
        "Parti-Subject",
        "Parti-Partition",
        "Parti-Error",
        "Parti-Attempts",
        "Parti-Worker",
        "Parti-Published",
        "Parti-Payload",
    }
)
"""What `write_letter` adds to the headers of the message."""
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def dead_letter_subject(subject: str, message: Message) -> str:
    """Where a message goes as a dead letter; `subject` is what all dead letters are published under."""
    return f"{subject}.{message.stream}.{message.subject}"


def write_letter(
    message: Message, reason: str, *, max_payload: int, omit_large: bool
) -> tuple[dict[str, str], bytes]:
    """Headers and payload of a dead letter.

    It is de-duplicated by origin stream and sequence. `omit_large`: a payload that leaves no room for the headers may
    be left out, because the origin keeps it.
    """
    # Headers that steer the server (ids, expectations, TTL) belonged to the first publish.
    headers = {
        k: v for k, v in message.headers.items() if _HEADER_NAME.fullmatch(k) and not k.lower().startswith("nats-")
    }
    headers |= {
        "Nats-Msg-Id": f"{message.stream}:{message.seq}:{message.published_at.timestamp():.6f}",
        "Parti-Stream": message.stream,
        "Parti-Sequence": str(message.seq),
        "Parti-Subject": message.subject,
        "Parti-Partition": message.partition.id,
        "Parti-Error": " ".join(reason.split()),
        "Parti-Attempts": str(message.attempt),
        "Parti-Worker": message.worker_id,
        "Parti-Published": message.published_at.isoformat(),
    }
    size = sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items())
    if omit_large and size + len(message.data) + _HEADER_ROOM > max_payload:
        headers["Parti-Payload"] = f"left out: {len(message.data)} bytes, still in the origin stream"
        return headers, b""
    return headers, message.data


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
        text = self.headers.get("Parti-Sequence", "")
        return int(text) if text.isdecimal() else 0

    @property
    def subject(self) -> str:
        """The subject that the message lay under."""
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
    def attempts(self) -> int:
        """How often it was tried."""
        text = self.headers.get("Parti-Attempts", "")
        return int(text) if text.isdecimal() else 0

    @property
    def worker(self) -> str:
        """Who tried."""
        return self.headers.get("Parti-Worker", "")

    @property
    def payload_left_out(self) -> bool:
        """The payload is in the origin stream only."""
        return "Parti-Payload" in self.headers

    @property
    def own_headers(self) -> dict[str, str]:
        """The headers that the message itself had."""
        return {
            k: v for k, v in self.headers.items() if k not in ORIGIN_HEADERS and not k.lower().startswith("nats-")
        }


def reason_of(error: str) -> str:
    """What errors of one kind have in common: the type of the error, or what was said before the first detail.

    >>> reason_of("ValueError: 'x17' is no number"), reason_of("no such order: 4711"), reason_of("broken")
    ('ValueError', 'no such order', 'broken')
    """
    return error.partition(":")[0].strip() or "unknown"
