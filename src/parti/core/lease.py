"""Lease arithmetic: when to renew, and until when a holder may act.

The server counts a lease from the moment it stores the write; the holder counts from before it sent it, and stops a
margin early. So the holder has always stopped before the server can let somebody else in, however long the answer
took, as long as both clocks run at about the same speed.
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER_S = float("-inf")
"""The end of a lease that is not held."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Length of a lease and the share of it after which it is renewed."""

    ttl_s: float
    renew_share: float

    @property
    def margin_s(self) -> float:
        """How much earlier than the server the holder regards its lease as ended."""
        return max(0.2, 0.1 * self.ttl_s)

    def ends_at(self, sent_s: float) -> float:
        """Until when the holder may act, after a renewal that it began to send at `sent_s` and that succeeded."""
        return sent_s + self.ttl_s - self.margin_s

    def silent_until(self, heard_s: float) -> float:
        """When somebody who saw a renewal at `heard_s` knows that its holder has stopped, if no other followed.

        The holder has counted from an earlier moment, and a margin less; the server lets go after another half of it.
        """
        return heard_s + self.ttl_s - self.margin_s / 2

    def renew_at(self, sent_s: float) -> float:
        """When the next renewal is due."""
        return sent_s + self.ttl_s * self.renew_share

    def retry_after(self, now_s: float, ends_at_s: float) -> float:
        """How long to wait after a renewal that failed: several tries must fit into what is left."""
        return min(1.0, max(0.05, (ends_at_s - now_s) / 5))


def epoch(base: int, last_seq: int) -> int:
    """The number of a new term or incarnation, larger than any before it.

    `base` is when the bucket was made (`epoch_base`), `last_seq` its last sequence, read after the revision of the
    key that the lease is about to take: whoever held it before has written at or below that sequence.
    """
    return base + last_seq + 1
