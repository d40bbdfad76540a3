"""NATS header blocks and acknowledgement subjects: what stands in them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

_PIN = b"Nats-Pin-Id: "
"""Begins the line that the server puts behind the headers of each message of a pinned group."""
_ENDS = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ReplyInfo:
    """What the server writes into the acknowledgement subject of a delivery."""

    deliveries: int
    stream_seq: int
    consumer_seq: int
    timestamp_ns: int
    pending: int


def parse_reply(reply: bytes) -> ReplyInfo:
    """Parse `$JS.ACK.…`, in the form with nine tokens or the one with domain and account hash.

    Raises ValueError for anything else.
    """
    tokens = reply.split(b".")
    if len(tokens) < 9 or tokens[0] != b"$JS" or tokens[1] != b"ACK":
        raise ValueError(f"not an acknowledgement subject: {reply!r}")
    base = 4 if len(tokens) == 9 else 6
    deliveries, stream_seq, consumer_seq, timestamp_ns, pending = (int(t) for t in tokens[base : base + 5])
    return ReplyInfo(deliveries, stream_seq, consumer_seq, timestamp_ns, pending)


def parse_headers(block: bytes) -> dict[str, str]:
    """Parse a NATS header block; of a repeated name the first value counts.

    Malformed lines are left out, bytes that are not UTF-8 become U+FFFD.
    """
    return {name: values[0] for name, values in parse_all_headers(block).items()}


def parse_all_headers(block: bytes) -> dict[str, list[str]]:
    """Parse a NATS header block with every value of a repeated name, in order."""
    headers: dict[str, list[str]] = {}
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        name = name.strip()
        if colon and name:
            headers.setdefault(name.decode("utf-8", "replace"), []).append(value.strip().decode("utf-8", "replace"))
    return headers


def split_pin(block: bytes) -> tuple[bytes, str]:
    """The publisher's own header block, and the pin that the server has put behind it; empty when there is none.

    Only the last line counts: a publisher may have written such a header too, and it stands before the server's.

    >>> split_pin(b"NATS/1.0\\r\\nNats-Pin-Id: forged\\r\\nNats-Pin-Id: xyz\\r\\n\\r\\n")
    (b'NATS/1.0\\r\\nNats-Pin-Id: forged\\r\\n\\r\\n', 'xyz')
    """
    if block.endswith(_ENDS):
        begin = block.rfind(b"\r\n", 0, -len(_ENDS)) + 2
        if block.startswith(_PIN, begin):
            pin_id = block[begin + len(_PIN) : -len(_ENDS)]
            return block[:begin] + b"\r\n", pin_id.decode("ascii", "replace")
    return block, ""


def status_of(block: bytes) -> tuple[int, str]:
    """Read code and description of a header block's first line; (0, "") when it carries no status."""
    line, _, _ = block.partition(b"\r\n")
    parts = line.split(b" ", 2)
    if len(parts) < 2 or len(parts[1]) != 3 or not parts[1].isdigit():
        return 0, ""
    return int(parts[1]), parts[2].decode("utf-8", "replace") if len(parts) > 2 else ""
