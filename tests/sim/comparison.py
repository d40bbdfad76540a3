"""When an answer of the model and one of the server are the same: all but times, and what the model leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parti.sim.server import Delivery

Op = tuple[Any, ...]
"""A kind and its arguments: plain values, so that a list of operations can be printed, cut and run again."""

_TIMES = frozenset({"created", "ts", "first_ts", "last_ts", "time", "metadata"})


_NOT_THERE = frozenset({10043, 10057})
"""Ways to say that a message cannot be deleted; on file storage it depends on the block where it would lie."""


def plain(delivery: Delivery) -> tuple[Any, ...]:
    """A delivery without what differs by nature: times."""
    lines = [] if delivery.header is None else delivery.header.decode().split("\r\n")
    lines = [line for line in lines if not line.startswith("Nats-Time-Stamp:")]
    # Nobody hears an acknowledgement: its subject comes back, with a count that may have been a moment old.
    header = tuple(line.rsplit(".", 2)[0] if "$JS.ACK." in line else line for line in lines)
    payload: Any = delivery.payload
    if payload.startswith(b"{"):
        payload = json.loads(payload)
    return delivery.subject.decode(), _timeless(delivery.reply.decode()), header, payload


def _timeless(text: str) -> str:
    """An acknowledgement subject without its time."""
    if "$JS.ACK." not in text:
        return text
    tokens = text.split(".")
    tokens[7] = "T"
    return ".".join(tokens)


def same(expected: Any, found: Any) -> bool:
    """Whether the server says what the model says; it may say more, but neither an error nor subjects."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.get("err_code") in _NOT_THERE and found.get("err_code") in _NOT_THERE:
            return True
        for key in ("error", "subjects", "num_deleted", "num_subjects", "filter_subject", "filter_subjects", "data"):
            if (key in expected) != (key in found):
                return False
        return all(k in found and (k in _TIMES or same(v, found[k])) for k, v in expected.items())
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(map(same, expected, found))
    return bool(expected == found)


def by_sid(deliveries: Sequence[Delivery]) -> dict[bytes, list[tuple[Any, ...]]]:
    """Deliveries of each subscription; what goes to different ones has no common order."""
    grouped: dict[bytes, list[tuple[Any, ...]]] = {}
    for delivery in deliveries:
        grouped.setdefault(delivery.sid, []).append(plain(delivery))
    return grouped


def uncounted(grouped: dict[bytes, list[tuple[Any, ...]]]) -> dict[bytes, list[tuple[Any, ...]]]:
    """The same without the number of messages that are still to come."""
    return {
        sid: [(subject, reply.rpartition(".")[0], *rest) for subject, reply, *rest in deliveries]
        for sid, deliveries in grouped.items()
    }


def floorless(grouped: dict[bytes, list[tuple[Any, ...]]]) -> dict[bytes, list[tuple[Any, ...]]]:
    """The same without ack floors."""

    def strip(payload: Any) -> Any:
        return {k: v for k, v in payload.items() if k != "ack_floor"} if isinstance(payload, dict) else payload

    return {sid: [(*rest, strip(payload)) for *rest, payload in some] for sid, some in grouped.items()}


@dataclass
class DifferenceError(Exception):
    """Where the two disagree."""

    step: int
    op: Op
    expected: Any
    found: Any

    def __str__(self) -> str:
        return f"step {self.step}: {self.op}\n  model:  {self.expected}\n  server: {self.found}"
