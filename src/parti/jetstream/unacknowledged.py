"""Which messages a consumer has delivered and nobody has acknowledged: what the server knows, and tells nobody.

It says how many there are and up to where all is acknowledged. Which ones are open above that shows when it delivers
them again: the time to acknowledge is made so short that it has passed, and so little may be in flight that nothing
new comes along. Measured on nats-server 2.15.1: it looks at a changed `ack_wait` after 100 ms; what has passed is
delivered then, before anything new, sorted by sequence; `max_ack_pending`, if exceeded, holds back only new messages.

Whoever asks takes the consumer over: its settings are changed, and what was in flight is in flight here. It has to be
put back to a position afterwards (RESET) and given its settings, as every session begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parti.core.priority import Policy, group_of
from parti.jetstream.api import ConsumerInfo, JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.priority import unpin
from parti.jetstream.taking import take

_ACK_WAIT_S = 0.2
"""Has passed for whatever was in flight when a lease ended, and lasts until all of that has come again."""
_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """How far a consumer has delivered, and what of it is not acknowledged."""

    last_seq: int
    """Nothing above was delivered."""
    open_from: Mapping[str, int]
    """By subject: the lowest sequence that is not acknowledged."""

    def position(self, subject: str) -> int:
        """Every message of the subject with a lower sequence is acknowledged."""
        return self.open_from.get(subject, self.last_seq + 1)


async def find_unacknowledged(connection: Connection, stream: str, found: ConsumerInfo) -> Delivered | None:
    """Ask for what is open; None when the server has not told all of it within a second.

    That happens where somebody else still pulls or acknowledges. The pulls of a client that is pinned are refused
    with its pin, which is lifted here.
    """
    api, name = JetStreamApi(connection), found.name
    group = group_of(found.config)
    if group is not None and group.policy is Policy.PINNED:
        await unpin(api, stream, name, group.name)
    config = {**found.config, "ack_wait": int(_ACK_WAIT_S * 1e9), "max_ack_pending": 1}
    # What it says of itself after the change is what it is asked for: acknowledgements may have come in since.
    info = await api.put_consumer(stream, config, action="update")
    subjects = {
        taken.seq: taken.subject
        for taken in await take(
            connection,
            stream,
            name,
            most=info.ack_pending,
            wait_s=_ANSWER_S,
            group=group.name if group else "",
        )
        if taken.seq <= info.delivered
    }
    if group is not None and group.policy is Policy.PINNED:
        await unpin(api, stream, name, group.name)  # it was taken by asking, on an inbox that is gone
    if len(subjects) < info.ack_pending:
        return None
    open_from: dict[str, int] = {}
    for seq in sorted(subjects, reverse=True):
        open_from[subjects[seq]] = seq
    # With nothing in flight, the server's floor is how far it has looked.
    return Delivered(max(info.delivered, info.ack_floor if not subjects else 0), open_from)
