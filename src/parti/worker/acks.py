"""What lanes say to the server of a message; `AckWriter` is how it gets there."""

from __future__ import annotations

from typing import Protocol

from parti.jetstream.acks import AckWriter

__all__ = ["AckWriter", "Acks"]


class Acks(Protocol):
    """What is said to the server of a message."""

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message: it is finished."""

    def in_progress(self, reply: bytes) -> None:
        """Tell the server that a message is still being worked on."""

    def give_back(self, reply: bytes, delay_s: float) -> None:
        """Ask the server to deliver a message again after a delay."""
