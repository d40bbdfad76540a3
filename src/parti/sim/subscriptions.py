"""Who listens where on the model's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parti.sim.consumers import Consumer
    from parti.sim.server import ModelClient

_Place = tuple[dict[str, list[tuple["ModelClient", bytes]]], str]


class Subscriptions:
    """The subscriptions of all clients; wildcards only as the last token of a subject."""

    def __init__(self) -> None:
        self._exact: dict[str, list[tuple[ModelClient, bytes]]] = {}
        self._star: dict[str, list[tuple[ModelClient, bytes]]] = {}
        self._tail: dict[str, list[tuple[ModelClient, bytes]]] = {}
        self._push: dict[str, list[Consumer]] = {}

    def listeners(self, subject: str) -> Sequence[tuple[ModelClient, bytes]]:
        """Clients and their subscriptions that get what is sent to a subject."""
        found = self._exact.get(subject)
        head = subject.rpartition(".")[0]
        if head in self._star:
            found = [*found, *self._star[head]] if found else self._star[head]
        if self._tail:
            while head:
                if head in self._tail:
                    found = [*found, *self._tail[head]] if found else self._tail[head]
                head = head.rpartition(".")[0]
        return found or ()

    def heard(self, subject: str) -> bool:
        """Whether anybody would get a message on this subject."""
        return subject in self._exact or bool(self.listeners(subject))

    def add(self, client: ModelClient, subject: str, sid: bytes) -> None:
        """Begin a subscription."""
        index, key = self._place(subject)
        index.setdefault(key, []).append((client, sid))
        client.subscriptions[sid] = subject
        self._tell_consumers()

    def drop(self, client: ModelClient, sids: Sequence[bytes]) -> None:
        """End some subscriptions of a client."""
        for sid in sids:
            index, key = self._place(client.subscriptions.pop(sid))
            index[key].remove((client, sid))
            if not index[key]:
                del index[key]
        self._tell_consumers()

    def _place(self, subject: str) -> _Place:
        head, _, last = subject.rpartition(".")
        if "*" in head or ">" in head or (not head and last in {"*", ">"}):
            raise NotImplementedError(f"the model has no subscriptions with wildcards as in {subject!r}")
        if last == "*":
            return self._star, head
        return (self._tail, head) if last == ">" else (self._exact, subject)

    # ── push consumers ────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, consumer: Consumer, subject: str) -> None:
        """Tell a push consumer when somebody begins or ceases to listen where it delivers."""
        self._push.setdefault(subject, []).append(consumer)

    def unwatch(self, consumer: Consumer, subject: str) -> None:
        """Tell it no more."""
        consumers = self._push.get(subject)
        if consumers and consumer in consumers:
            consumers.remove(consumer)
            if not consumers:
                del self._push[subject]

    def _tell_consumers(self) -> None:
        for subject, consumers in self._push.items():
            heard = self.heard(subject)
            for consumer in consumers:
                if consumer.push.active != heard:
                    consumer.hear(heard)
