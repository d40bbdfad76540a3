"""An independent check of what a worker did: the stream, read back by plain nats-py, against what handlers noted.

Nothing of parti's own counting is used here. A worker that keeps running keeps its positions, so over any outage
each stored message must be handled exactly once, and each partition in stream order.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import ServiceUnavailableError

MSG_ID = "Nats-Msg-Id"


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as the stream holds it."""

    subject: str
    seq: int
    id: str


@dataclass(frozen=True, slots=True)
class Handled:
    """A message as a handler saw it, and when the handler began (monotonic clock)."""

    subject: str
    seq: int
    id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Findings:
    """How many messages break each rule; all zero is what must come out."""

    unpublished: int
    """Ids that should have been published and are not in the stream: the publisher's fault, not the worker's."""
    lost: int
    repeated: int
    out_of_order: int
    altered: int
    """Handled with a subject or id that the stream does not hold at that sequence."""

    @property
    def clean(self) -> bool:
        """Whether every rule held."""
        return not any(asdict(self).values())


def audit(stored: Iterable[Stored], handled: Iterable[Handled], ids: Iterable[str]) -> Findings:
    """Compare what the stream holds with what was handled, in the order in which handlers began."""
    truth = {message.seq: (message.subject, message.id) for message in stored}
    times: Counter[int] = Counter()
    last: dict[str, int] = {}
    out_of_order = altered = 0
    for entry in handled:
        times[entry.seq] += 1
        out_of_order += entry.seq <= last.get(entry.subject, 0)
        last[entry.subject] = entry.seq
        altered += truth.get(entry.seq) != (entry.subject, entry.id)
    return Findings(
        unpublished=len(set(ids) - {id_ for _, id_ in truth.values()}),
        lost=len(truth.keys() - times.keys()),
        repeated=sum(count - 1 for count in times.values()),
        out_of_order=out_of_order,
        altered=altered,
    )


def first_at_or_after(handled: Sequence[Handled], at_s: float) -> Handled | None:
    """The first message handled at or after a time; `handled` is in the order of time."""
    index = bisect_left(handled, at_s, key=lambda entry: entry.at_s)
    return handled[index] if index < len(handled) else None


async def read_back(servers: str | list[str], stream: str, timeout_s: float = 60.0) -> list[Stored]:
    """Read the whole stream with nats-py, through a consumer of its own that leaves no trace."""
    client = await nats.connect(servers)
    try:
        js = client.jetstream()
        state = (await js.stream_info(stream)).state
        config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, mem_storage=True)
        reader = await js.pull_subscribe("", stream=stream, config=config)
        found: list[Stored] = []
        deadline_s = time.monotonic() + timeout_s
        while len(found) < state.messages and time.monotonic() < deadline_s:
            try:
                batch = await reader.fetch(min(1000, state.messages - len(found)), timeout=5)
            except (ServiceUnavailableError, TimeoutError):  # A consumer of a cluster may have no leader yet.
                await asyncio.sleep(0.05)
                continue
            for message in batch:
                headers: dict[str, Any] = message.headers or {}
                found.append(Stored(message.subject, message.metadata.sequence.stream, headers.get(MSG_ID, "")))
        return found
    finally:
        await client.close()
