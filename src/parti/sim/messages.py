"""What the model stores and says: messages, header blocks, times, and the server's no."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

SECOND_NS = 1_000_000_000


class Message:
    """A stored message."""

    __slots__ = ("header", "payload", "seq", "subject", "wall_ns")

    def __init__(self, seq: int, subject: str, header: bytes | None, payload: bytes, wall_ns: int) -> None:
        self.seq = seq
        self.subject = subject
        self.header = header
        self.payload = payload
        self.wall_ns = wall_ns


class RefusalError(Exception):
    """The server's no, with its codes."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.answer = {"code": code, "err_code": err_code, "description": description}


def headers_of(block: bytes) -> dict[str, str]:
    """The headers of a block; of a repeated name the first."""
    headers: dict[str, str] = {}
    for line in block.decode("latin-1").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name, value.strip())
    return headers


@lru_cache(maxsize=4096)
def timestamp(wall_ns: int) -> str:
    """A time as the server writes it: nanoseconds, without zeros at the end."""
    whole, fraction = divmod(wall_ns, SECOND_NS)
    seconds = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{seconds}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def duration(seconds: int) -> str:
    """Whole seconds as Go writes a duration."""
    hours, rest = divmod(seconds, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
