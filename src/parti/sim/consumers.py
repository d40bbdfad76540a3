"""Consumers of the model: the cursor, the filter, deliveries and acknowledgements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parti.sim.consumer_state import ConsumerState
from parti.sim.filters import Filter, filter_of
from parti.sim.messages import SECOND_NS, Message
from parti.sim.pulls import Pulls
from parti.sim.push import Push
from parti.sim.streams import Stream
from parti.sim.timers import Timer

if TYPE_CHECKING:
    from parti.sim.server import ModelServer

_ACK_SLACK_NS = 1_000_000
"""The server looks for overdue acknowledgements so long after they are due."""
_NAK_LOOK_NS = 10_000_000
_UPDATE_LOOK_NS = 100_000_000
_ACKS = frozenset({b"", b"+ACK", b"+OK"})
_NOTHING = filter_of(("$nothing",))


class Consumer(ConsumerState):
    """One consumer of a stream, pull or push."""

    def __init__(self, server: ModelServer, stream: Stream, config: dict[str, Any]) -> None:
        super().__init__(_starting_seq(stream, config), durable="durable_name" in config)
        self.server = server
        self.stream = stream
        self.config = config
        self.name: str = config["name"]
        self.created_ns = server.stamp_ns()
        self.is_ready = False
        self.closed = False
        self.in_memory = bool(config.get("mem_storage")) or stream.config["storage"] == "memory"
        self.deliver_to: str = config.get("deliver_subject", "")
        self.acks = config["ack_policy"] != "none"
        self._ack_start = f"$JS.ACK.{stream.name}.{self.name}."
        self._read_config()
        self.hears = self.filter
        """Which new and deleted messages it is told of."""
        self.unseen = 0
        """How many messages are ahead of the cursor, as the server counts them."""
        self._counted_to = 0
        self.checked_to = 0
        """Below this the check for acknowledged messages has nothing more to do."""
        self._start()

    def _read_config(self) -> None:
        config = self.config
        one = config.get("filter_subject")
        self.filter: Filter = filter_of((one,) if one else tuple(config.get("filter_subjects") or ()))
        same = set(self.filter.patterns) == set(self.stream.takes.patterns)
        self._filtered = bool(self.filter.patterns) and not same
        self._ack_wait_ns: int = config.get("ack_wait", 0)
        self._max_pending: int = config.get("max_ack_pending", 0)

    def _start(self) -> None:
        """Begin to work, as new or after a restart."""
        server, config = self.server, self.config
        self._overdue = Timer(server.timers, self._check_overdue)
        self._idle = Timer(server.timers, self._check_idle)
        self.pulls = Pulls(server, self, config.get("max_waiting", 0))
        self.push = Push(self, config.get("idle_heartbeat", 0), flow_control=config.get("flow_control", False))
        if self.deliver_to:
            server.subscriptions.watch(self, self.deliver_to)
            self.push.active = server.subscriptions.heard(self.deliver_to)
        self._plan_idle()
        self.recount()
        server.make_ready(self)

    def _plan_idle(self) -> None:
        self._idle_ns: int = self.config.get("inactive_threshold", 0)
        if not self._idle_ns:
            if not self.durable:
                raise NotImplementedError("the model wants an inactive_threshold of consumers that are not durable")
            self._idle.set(0)
            return
        if not self.deliver_to:
            self._idle_ns += SECOND_NS // 10 + self.server.jitter_ns(9 * SECOND_NS // 10)
        if not self.push.active:
            self._idle.set(self.server.now_ns + self._idle_ns)

    # ── configuration ─────────────────────────────────────────────────────────────────────────────────────────

    def update(self, config: dict[str, Any]) -> None:
        """Take a checked configuration. A changed filter moves no cursor."""
        before, old_filter = self.config, self.filter
        old_max, old_wait_ns = self._max_pending, self._ack_wait_ns
        self.config = config
        self._read_config()
        if self._max_pending != old_max:
            self.server.make_ready(self)
        if self._ack_wait_ns != old_wait_ns and self._overdue.due_ns:
            self._overdue.set(self.server.now_ns + _UPDATE_LOOK_NS)
        if config.get("inactive_threshold") != before.get("inactive_threshold"):
            self._plan_idle()
        if set(self.filter.patterns) != set(old_filter.patterns):
            # An update that takes the filter away leaves the consumer deaf: no new message wakes it or is counted.
            self.hears = self.filter if self.filter.patterns else _NOTHING
            self.stream.drop_unneeded(self.floor_seq)
            self.recount()

    def reset(self, seq: int) -> int:
        """Make `seq` (0: what follows the ack floor) the next message, and forget what was in flight."""
        seq = seq or self.floor_seq + 1
        recount = self.cursor != seq or bool(self.pending)
        self.put_to(seq)
        if self.stream.retention == "interest":
            self.delete_orphans()
        if recount:
            self.recount()
        self.server.make_ready(self)
        return seq

    def delete(self) -> None:
        """End; whoever waits is told."""
        self.closed = True
        self.pulls.end("409 Consumer Deleted")
        self.push.stop()
        for timer in (self._overdue, self._idle):
            timer.set(0)
        self.server.subscriptions.unwatch(self, self.deliver_to)
        del self.stream.consumers[self.name]
        self.stream.drop_unneeded(self.floor_seq)

    # ── what the stream tells ─────────────────────────────────────────────────────────────────────────────────

    def notice(self, seq: int) -> None:
        """A message was stored that the filter matches."""
        if seq > self._counted_to:
            self.unseen += 1
        if seq >= self.cursor and (self.pulls.waiting or self.push.active):
            self.server.make_ready(self)

    def lose(self, seq: int) -> None:
        """A message that the filter matches was deleted: if it is in flight, that counts as acknowledged."""
        if seq >= self.cursor:
            self.unseen -= 1
        entry = self.pending.get(seq)
        if entry is not None:
            self.server.finish_later(self, seq, entry[0])
        elif seq in self.redelivered:
            del self.redelivered[seq]
            self.stored.redelivered.pop(seq, None)

    def recount(self) -> None:
        """Count anew what is ahead of the cursor."""
        self.unseen = self.stream.count_from(self.filter, self.cursor)
        self._counted_to = self.stream.last

    def correct_count(self) -> None:
        """Count no more than there can be, as the server does whenever somebody asks."""
        stream = self.stream
        if self.cursor > stream.last:
            self.unseen = 0
        elif self.unseen > 0:
            self.unseen = min(self.unseen, len(stream.messages), stream.last - self.cursor + 1)

    def purged(self, start: int, *, wider: bool) -> None:
        """Messages were purged: what is left for this consumer begins at `start` (0: nothing is left).

        `wider`: the consumer also has other subjects than the purged ones.
        """
        if not start and not wider:
            start = self.stream.last + 1
        self.purge(start, self.stream.messages if wider else None)

    def needs(self, message: Message) -> bool:
        """Whether the stream has to keep a message for this consumer."""
        if self._filtered and not self.filter.matches(message.subject):
            return False
        seq = message.seq
        if seq > self.floor_seq and (not self.acks or seq >= self.cursor or seq in self.pending):
            return True
        return seq in self.redelivered

    def delete_orphans(self) -> None:
        """Acknowledge to the stream whatever the stored state counts as acknowledged."""
        state, stream = self.stored, self.stream
        bound = floor = state.floor_seq
        if state.pending:
            bound = max(bound, state.delivered_seq)
        if floor > stream.last:
            return
        retry, seq = 0, max(stream.first, self.checked_to)
        while bound and seq <= bound:
            found = stream.next_match(self.filter, seq)
            if found is None or found.seq > bound:
                break
            seq = found.seq
            if seq > floor:
                retry = retry or seq
            if seq <= floor or seq not in state.pending:
                stream.acknowledged(seq)
            if seq <= floor and seq not in stream.messages:
                retry = retry or seq
            seq += 1
        if not retry:
            found = stream.next_match(self.filter, floor + 1)
            retry = max(floor + 1, found.seq) if found else stream.last + 1
        self.checked_to = max(self.checked_to, retry)

    # ── delivering ────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Deliver what can be delivered."""
        if self.closed:
            return
        stalled = False
        while self.push.open if self.deliver_to else self.pulls.waiting:
            found = self._next_redelivery() if self.again else None
            if found is None:
                if 0 < self._max_pending <= len(self.pending):
                    stalled = True
                    break
                message = self.stream.next_match(self.filter, self.cursor)
                if message is None:
                    self._reach_end()
                    break
                self.cursor = message.seq + 1
                found = (message, 1)
            if not self._deliver(*found):
                break
        if not self.deliver_to:
            self.pulls.check(ended=not stalled)

    def _reach_end(self) -> None:
        last = self.stream.last
        if last >= self.cursor:
            self.cursor = last + 1
            if self.server.replicated:
                # In a cluster the cursor is part of what is replicated.
                self.stored.delivered_seq = max(self.stored.delivered_seq, last)
        if self.unseen:
            self.unseen, self._counted_to = 0, last

    def _next_redelivery(self) -> tuple[Message, int] | None:
        while self.again:
            seq = self.again.popleft()
            message = self.stream.messages.get(seq)
            if message is not None:
                self.redelivered[seq] = count = self.redelivered.get(seq, 0) + 1
                return message, count + 1
            entry = self.pending.get(seq)
            if entry is not None:
                self.acknowledge(seq, entry[0])
        return None

    def _deliver(self, message: Message, count: int) -> bool:
        """Send a message to whoever is next; False, and as if it had not been looked at, when nobody wants it."""
        seq, server = message.seq, self.server
        if count == 1:
            self.unseen -= 1
        ahead = max(0, self.unseen)
        reply = f"{self._ack_start}{count}.{seq}.{self.number}.{message.wall_ns}.{ahead}"
        size = len(message.subject) + len(reply) + len(message.header or b"") + len(message.payload)
        if self.deliver_to:
            self._note(message, count)
            server.send(self.deliver_to, message.subject, reply, message.header, message.payload)
            self.push.sent(size)
            return True
        pull = self.pulls.next_for(size)
        if pull is None:
            self._put_back(seq, count)
            return False
        self._note(message, count)
        server.send(pull.reply, message.subject, reply, message.header, message.payload)
        self.pulls.delivered(pull)
        return True

    def _put_back(self, seq: int, count: int) -> None:
        if count == 1 and seq == self.cursor - 1:
            self.cursor -= 1
            self.unseen += 1
        elif seq not in self.again:
            self.redelivered[seq] -= 1
            if not self.redelivered[seq]:
                del self.redelivered[seq]
            self.again.append(seq)

    def _note(self, message: Message, count: int) -> None:
        seq, now_ns = message.seq, self.server.now_ns
        self.deliver(seq, count, message.wall_ns - self.server.epoch_ns, now_ns, acks=self.acks)
        if self.acks:
            due_ns = now_ns + self._ack_wait_ns + _ACK_SLACK_NS
            if not self._overdue.due_ns or self._overdue.due_ns > due_ns:
                self._overdue.set(due_ns)
        elif self.stream.retention != "limits":
            self.stream.acknowledged(seq)

    # ── acknowledgements ──────────────────────────────────────────────────────────────────────────────────────

    def take_ack(self, seq: int, number: int, payload: bytes, reply: str) -> None:
        """Handle what came on the acknowledgement subject of a delivery."""
        if payload in _ACKS or payload.startswith(b"+TERM"):
            if not self.acknowledge(seq, number):
                return
        elif payload == b"+WPI":
            self.touch(seq, self.server.now_ns)
        elif payload.startswith(b"-NAK"):
            self._nak(seq, number, payload[4:].strip())
        else:
            raise NotImplementedError(f"the model does not know the acknowledgement {payload!r}")
        if reply and seq:
            self.server.send(reply, reply, "", None, b"")

    def acknowledge(self, seq: int, number: int) -> bool:
        """Finish a message; False when it lies beyond the cursor, which the server ignores.

        On streams with interest or work-queue retention it is deleted unless another consumer needs it, whether it
        was in flight here or not: an acknowledgement names a sequence, and that is all the server looks at.
        """
        if seq >= self.cursor and not self.config.get("flow_control"):
            return False
        if 0 < self._max_pending <= len(self.pending) and seq in self.pending:
            self.server.make_ready(self)
        self.finish(seq, number, self.server.now_ns)
        self.stream.acknowledged(seq)
        return True

    def _nak(self, seq: int, number: int, argument: bytes) -> None:
        if not self.floor < number <= self.number or seq not in self.pending:
            return
        if argument:
            if seq in self.again:
                self.again.remove(seq)
            now_ns = self.server.now_ns
            self.touch(seq, now_ns - self._ack_wait_ns + _nak_delay_ns(argument))
            if self._overdue.due_ns:
                self._overdue.set(now_ns + _NAK_LOOK_NS)
            return
        if seq not in self.again:
            self.again.append(seq)
        self.server.make_ready(self)

    def _check_overdue(self) -> None:
        waiting, now_ns = len(self.again), self.server.now_ns
        look_ns = self.take_overdue(self.stream.first, self._ack_wait_ns, now_ns)
        self._overdue.set(min(look_ns, now_ns + self._ack_wait_ns + _ACK_SLACK_NS))
        if len(self.again) > waiting:
            self.server.make_ready(self)

    # ── listeners, inactivity, restarts, leaders ──────────────────────────────────────────────────────────────

    def hear(self, heard: bool) -> None:
        """Somebody begins, or nobody is left, to listen where this push consumer delivers."""
        self.push.active = heard
        if heard:
            self._idle.set(0)
            self.server.make_ready(self)
        elif not self._idle.due_ns:
            self._idle.set(self.server.now_ns + self._idle_ns)

    def send_heartbeat(self, to: str, question: str = "") -> None:
        """Say that the consumer is there, and how much it has delivered."""
        stalled = f"Nats-Consumer-Stalled: {question}\r\n" if question else ""
        header = (
            f"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: {self.number - 1}\r\n"
            f"Nats-Last-Stream: {self.cursor - 1}\r\n{stalled}\r\n"
        )
        self.server.send(to, to, "", header.encode(), b"")

    def _check_idle(self) -> None:
        """Delete the consumer if nobody has used it for too long."""
        now_ns = self.server.now_ns
        if self.deliver_to:
            if not self.push.active:
                self.delete()
            return
        rest_ns = self._idle_ns - (now_ns - self.pulls.last_ns)
        if rest_ns <= 0:
            self.pulls.check(ended=True)
            rest_ns = self._idle_ns if self.pulls.waiting else 0
        if rest_ns <= 0:
            wait_ns = self._ack_wait_ns + _ACK_SLACK_NS + self._idle_ns
            rest_ns = max((at_ns + wait_ns - now_ns for _, at_ns in self.pending.values()), default=0)
        if rest_ns > 0:
            self._idle.set(now_ns + rest_ns)
        else:
            self.delete()

    def change_leader(self) -> None:
        """Go on as the leader on another server does: from the same cursor, without the pulls."""
        self.pulls.end("409 Leadership Change")
        self.load_pending()
        if self.pending:
            self._check_overdue()
        self.server.make_ready(self)

    def recover(self, lose_ns: int) -> None:
        """Go on after a restart of the server, from the stored state as it was at most `lose_ns` ago.

        What is in flight is judged at once: gone if the stream no longer has it, overdue if the message is old.
        """
        self.load(lose_ns, self.server.now_ns, self.server.epoch_ns)
        self.is_ready = False
        self.checked_to = 0
        self.hears = self.filter
        self._start()
        if self.pending:
            self._check_overdue()


def _starting_seq(stream: Stream, config: dict[str, Any]) -> int:
    policy = config["deliver_policy"]
    if policy == "by_start_sequence":
        return max(int(config["opt_start_seq"]), stream.first)
    if policy == "new":
        return stream.last + 1
    if policy == "last_per_subject" and stream.per_subject == 1:
        return max(1, stream.first)
    if policy != "all":
        raise NotImplementedError(f"the model does not start at {policy!r} here")
    return max(1, stream.first)


def _nak_delay_ns(argument: bytes) -> int:
    """How long the server is to wait before it delivers again."""
    if argument.startswith(b"{"):
        name, _, value = argument.strip(b"{} ").partition(b":")
        if name.strip() == b'"delay"' and value.strip().isdigit():
            return int(value)
    raise NotImplementedError(f"the model reads a delay in nanoseconds only, not {argument!r}")
