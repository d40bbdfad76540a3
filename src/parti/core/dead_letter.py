"""A dead letter: the headers that tell its story, and what it carries; the same from workers and from replays."""

from __future__ import annotations

import re

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
