"""The message that a handler gets, and the context that is safe to log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import msgspec

from parti.model.headers import parse_headers, parse_reply, split_pin
from parti.model.partition import Partition

_EPOCH = datetime.fromtimestamp(0, UTC)
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MessageContext:
    """Where a message comes from and who handles it: everything but payload and headers, so safe to log."""

    subject: str
    partition_id: str
    keys: Mapping[str, str]
    stream: str
    seq: int
    worker_id: str
    attempt: int
    fence: int
    received_at: datetime
    published_at: datetime


@dataclass(frozen=True, slots=True)
class Ownership:
    """What all messages of one partition share while one worker owns it."""

    partition: Partition
    stream: str
    worker_id: str
    fence: int = 0


class Message(msgspec.Struct, eq=False, gc=False):
    """One message of a partition, as handed to a handler.

    Headers, times and keys are worked out when they are asked for: most handlers need few of them. A struct,
    because a worker makes a hundred thousand of these a second; it holds nothing that could refer back to it.
    """

    subject: str
    data: bytes
    seq: int
    ownership: Ownership
    reply: bytes = b""
    header: bytes | None = None
    """The header block as it came over the wire, or None."""
    received_s: float = 0.0
    attempt: int = 1

    @property
    def headers(self) -> Mapping[str, str]:
        """The publisher's headers; of a repeated name the first value."""
        return parse_headers(split_pin(self.header)[0]) if self.header else _NO_HEADERS

    @property
    def partition(self) -> Partition:
        """The partition: its `id` and the named `keys` of the template."""
        return self.ownership.partition

    @property
    def stream(self) -> str:
        """Name of the stream that holds the message."""
        return self.ownership.stream

    @property
    def worker_id(self) -> str:
        """The worker that handles the message."""
        return self.ownership.worker_id

    @property
    def fence(self) -> int:
        """Token that grows with every change of owner; 0 while nothing claims partitions."""
        return self.ownership.fence

    @property
    def received_at(self) -> datetime:
        """When this worker received the message (UTC)."""
        return datetime.fromtimestamp(self.received_s, UTC)

    @property
    def published_at(self) -> datetime:
        """When the server stored the message (UTC), in whole microseconds: the same, however it was read."""
        return _EPOCH + timedelta(microseconds=parse_reply(self.reply).timestamp_ns // 1000)

    @property
    def deliveries(self) -> int:
        """How often the server has delivered the message, this time included."""
        return parse_reply(self.reply).deliveries

    @property
    def context(self) -> MessageContext:
        """Everything but payload and headers."""
        return MessageContext(
            subject=self.subject,
            partition_id=self.partition.id,
            keys=self.partition.keys,
            stream=self.stream,
            seq=self.seq,
            worker_id=self.worker_id,
            attempt=self.attempt,
            fence=self.fence,
            received_at=self.received_at,
            published_at=self.published_at,
        )

    def __repr__(self) -> str:
        return f"Message(stream={self.stream!r}, seq={self.seq}, subject={self.subject!r}, {len(self.data)} bytes)"


class StoredMessage(Message, eq=False, gc=False):
    """A message read from the stream itself: nothing is to be acknowledged."""

    stored_at: datetime = _EPOCH

    @property
    def published_at(self) -> datetime:
        """When the server stored the message (UTC)."""
        return self.stored_at

    @property
    def deliveries(self) -> int:
        """Always 1: the server does not count reads."""
        return 1
