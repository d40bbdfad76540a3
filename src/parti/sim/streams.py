"""Streams of the model: what is stored, how it is found, and when it goes away."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from parti.sim.expiry import Expiry
from parti.sim.filters import Filter, filter_of
from parti.sim.messages import SECOND_NS, Message
from parti.sim.publishing import Publishing

if TYPE_CHECKING:
    from parti.sim.consumers import Consumer
    from parti.sim.server import ModelServer

_FEW = 4
"""With so few plain subjects, looking at each is quicker than walking through the stream."""


class Stream:
    """One stream with its messages and consumers.

    `first` and `last` are as the server reports them: `first` is 0 before the first message, and one more than
    `last` when nothing is left.
    """

    def __init__(self, server: ModelServer, config: dict[str, Any]) -> None:
        self.server = server
        self.name: str = config["name"]
        self.created_ns = server.stamp_ns()
        self.messages: dict[int, Message] = {}
        """By sequence, in ascending order."""
        self.by_subject: dict[str, list[int]] = {}
        self.first = self.last = 0
        self.consumers: dict[str, Consumer] = {}
        self.publishing = Publishing(self)
        self.expiry = Expiry(self)
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        """Take a checked configuration."""
        self.config = config
        self.retention: str = config["retention"]
        self.takes: Filter = filter_of(tuple(config["subjects"]))
        self.per_subject: int = config["max_msgs_per_subject"]
        self._max_messages: int = config["max_msgs"]
        self.expiry.marker_ttl_s = config.get("subject_delete_marker_ttl", 0) // SECOND_NS

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────

    def subjects_in(self, wanted: Filter) -> Iterator[str]:
        """Subjects with a message that the filter matches."""
        if wanted.literal:
            return (s for s in wanted.patterns if s in self.by_subject)
        return (s for s in self.by_subject if wanted.matches(s))

    def next_match(self, wanted: Filter, start: int) -> Message | None:
        """The first message at or after `start` that the filter matches."""
        messages, last = self.messages, self.last
        start = max(start, self.first)
        if start > last or not messages:
            return None
        if wanted.literal and len(wanted.patterns) <= _FEW:
            return self._next_of_few(wanted.patterns, start)
        if len(messages) * 4 < last - start:
            return next((m for q, m in messages.items() if q >= start and wanted.matches(m.subject)), None)
        for seq in range(start, last + 1):
            message = messages.get(seq)
            if message is not None and wanted.matches(message.subject):
                return message
        return None

    def _next_of_few(self, subjects: tuple[str, ...], start: int) -> Message | None:
        found = 0
        for subject in subjects:
            seqs = self.by_subject.get(subject)
            if seqs and seqs[-1] >= start:
                seq = seqs[bisect_left(seqs, start)]
                if not found or seq < found:
                    found = seq
        return self.messages[found] if found else None

    def last_match(self, wanted: Filter) -> Message | None:
        """The last message that the filter matches."""
        last = max((self.by_subject[s][-1] for s in self.subjects_in(wanted)), default=0)
        return self.messages[last] if last else None

    def count_from(self, wanted: Filter, start: int) -> int:
        """How many messages at or after `start` the filter matches."""
        seqs = (self.by_subject[s] for s in self.subjects_in(wanted))
        return sum(len(s) - bisect_left(s, start) for s in seqs)

    # ── storing ───────────────────────────────────────────────────────────────────────────────────────────────

    def store(self, subject: str, header: bytes | None, payload: bytes) -> Message | None:
        """Give a message the next sequence and keep it; None when it is not kept because nobody is interested."""
        self.last = seq = self.last + 1
        if self.retention == "interest" and not any(c.hears.matches(subject) for c in self.consumers.values()):
            if not self.messages:
                self.first = seq + 1
            return None
        message = Message(seq, subject, header, payload, self.server.wall_ns)
        if not self.messages:
            self.first = seq
        self.messages[seq] = message
        seqs = self.by_subject.get(subject)
        if seqs is None:
            seqs = self.by_subject[subject] = []
        seqs.append(seq)
        if self.per_subject > 0:
            while len(seqs) > self.per_subject:
                self.remove(seqs[0])
        if self._max_messages > 0:
            while len(self.messages) > self._max_messages:
                self.remove(self.first)
        return message

    def announce(self, message: Message) -> None:
        """Tell the consumers of a message that was stored."""
        subject, seq = message.subject, message.seq
        for consumer in self.consumers.values():
            if consumer.hears.matches(subject):
                consumer.notice(seq)

    # ── removal ───────────────────────────────────────────────────────────────────────────────────────────────

    def remove(self, seq: int) -> bool:
        """Delete one message and tell the consumers that it is gone; False when there is none."""
        message = self._take_out(seq)
        if message is None:
            return False
        for consumer in self.consumers.values():
            if consumer.hears.matches(message.subject):
                consumer.lose(seq)
        return True

    def _take_out(self, seq: int) -> Message | None:
        message = self.messages.pop(seq, None)
        if message is None:
            return None
        seqs = self.by_subject[message.subject]
        if len(seqs) == 1:
            del self.by_subject[message.subject]
        else:
            del seqs[bisect_left(seqs, seq)]
        if seq == self.first:
            self.first = next(iter(self.messages)) if self.messages else self.last + 1
        return message

    def _take_out_many(self, seqs: list[int]) -> None:
        for seq in seqs:
            self._take_out(seq)
        if seqs:
            for consumer in self.consumers.values():
                consumer.recount()
                consumer.forget_redeliveries(self.first)

    def purge(self, subject: str = "", *, before: int = 0, keep: int = 0) -> int:
        """Delete messages of a subject, up to but not including `before` or all but the newest `keep`.

        Without a subject and with a `before` beyond the end, the next message gets that sequence.
        """
        wanted = filter_of((subject,) if subject else ())
        seqs: list[int] = []
        if before != 1:
            seqs = sorted(q for s in self.subjects_in(wanted) for q in self.by_subject[s])
            seqs = [q for q in seqs if q < before] if before else seqs[: max(0, len(seqs) - keep)]
        if len(seqs) == 1 and (subject or keep):
            self.remove(seqs[0])
        else:
            self._take_out_many(seqs)
        if not subject and before > self.last + 1:
            self.first, self.last = before, before - 1
        elif not subject and not before and not keep:
            self.first = self.last + 1
        self._purge_consumers(subject, wanted)
        return len(seqs)

    def _purge_consumers(self, subject: str, wanted: Filter) -> None:
        start = self.first
        if subject:
            found = self.next_match(wanted, self.first)
            start = found.seq if found else 0
        for consumer in list(self.consumers.values()):
            if not subject or consumer.filter.within(subject):
                consumer.purged(start, wider=False)
            elif consumer.filter.covers(subject):
                consumer.purged(self.first, wider=True)

    # ── interest ──────────────────────────────────────────────────────────────────────────────────────────────

    def acknowledged(self, seq: int) -> None:
        """Delete a message of a stream with interest or work-queue retention unless somebody still needs it."""
        if self.retention != "limits" and self.first <= seq <= self.last and not self._needed(seq):
            self.remove(seq)

    def _needed(self, seq: int) -> bool:
        message = self.messages.get(seq)
        return message is not None and any(c.needs(message) for c in self.consumers.values())

    def drop_unneeded(self, start: int) -> None:
        """Delete, from `start` on, what lost its last interested consumer."""
        if self.retention != "interest":
            return
        if not self.consumers:
            self._take_out_many(list(self.messages))
            self.first = self.last + 1
        elif max(start, self.first) > self.last:
            # The server computes the distance without a sign, finds it enormous and leaves the work to its check.
            self.check_interest()
        else:
            for seq in [q for q in self.messages if q >= start and not self._needed(q)]:
                self.remove(seq)

    def check_interest(self) -> None:
        """Delete what the consumers' stored states count as acknowledged, as the server's own check does.

        On a stream with interest retention, a consumer that lies beyond the end and has never been checked makes the
        server delete everything.
        """
        if self.retention == "limits":
            return
        for consumer in list(self.consumers.values()):
            consumer.delete_orphans()
        if self.retention == "interest" and self.consumers:
            bound = min(c.checked_to for c in self.consumers.values())
            self._take_out_many([q for q in self.messages if not bound or q < bound])
            if not bound:
                self.first = self.last + 1
            elif bound > self.last:
                self.first, self.last = bound, bound - 1

    # ── the end, and restarts ─────────────────────────────────────────────────────────────────────────────────

    def delete(self) -> None:
        """End, with all consumers."""
        for consumer in list(self.consumers.values()):
            consumer.delete()
        self.expiry.stop()
        self.server.drop_stream(self)

    def recover(self, lose_ns: int) -> None:
        """Begin again from what is stored."""
        self.publishing.restart()
        self.expiry.restart()
        self.consumers = {name: c for name, c in self.consumers.items() if c.durable}
        for consumer in self.consumers.values():
            consumer.recover(lose_ns)
        if self.retention == "interest":
            for consumer in self.consumers.values():
                consumer.delete_orphans()
