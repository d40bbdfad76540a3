"""One run of operations on the model and on the server at the same time, under the same names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.sim.backends import Model, Real
from tests.sim.comparison import DifferenceError, Op, by_sid, floorless, same, uncounted

from parti.sim.server import Delivery

ROOTS = ("x", "y", "z")
FILTERS: tuple[tuple[str, ...], ...] = (
    ("x",),
    ("y",),
    ("z",),
    ("x", "y"),
    ("y", "z"),
    ("x", "y", "z"),
    ("none",),
    (">",),
    ("*",),
    (),
    ("x", ">"),
)
_QUIET_S = 0.002
_runs = count()


@dataclass(frozen=True, slots=True)
class Setup:
    """The stream that a run is about."""

    retention: str
    storage: str
    per_subject: int
    max_messages: int

    @property
    def kv(self) -> bool:
        return self.per_subject == 1

    @property
    def discards(self) -> bool:
        """Whether messages make room for others, in flight or not."""
        return self.per_subject > 0 or self.max_messages > 0


@dataclass
class Run:
    """The same operations on both sides, names and all."""

    model: Model
    real: Real
    setup: Setup
    name: str = field(default_factory=lambda: f"D{next(_runs)}")
    live: bool = False
    """Whether the model's clock follows the real one; otherwise each operation takes a millisecond."""
    step: int = 0
    _began_s: float = field(default_factory=time.monotonic)
    _op: Op = ("begin",)
    _racing: bool = False
    _batched: bool = False
    _purged: bool = False
    _tokens: Iterator[int] = field(default_factory=lambda: count(1))
    _sids: Iterator[int] = field(default_factory=lambda: count(10))
    _pulls: list[int] = field(default_factory=list)
    _acks: list[tuple[str, str]] = field(default_factory=list)
    """Acknowledgement subjects of each delivery: the model's and the server's."""

    def begin(self) -> None:
        self.resubscribe()
        setup = self.setup
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": [f"{self.name}.>"],
            "retention": setup.retention,
            "storage": setup.storage,
            "allow_direct": True,
            "allow_atomic": True,
            "allow_msg_ttl": True,
            "max_msgs_per_subject": setup.per_subject,
            "max_msgs": setup.max_messages,
        }
        if setup.kv:
            config |= {"discard": "new", "subject_delete_marker_ttl": 60 * 10**9, "allow_rollup_hdrs": True}
        self.call(f"STREAM.CREATE.{self.name}", config)

    def subscribe(self, subject: str, sid: int) -> None:
        for side in (self.model, self.real):
            side.subscribe(subject, sid)

    def unsubscribe(self, sid: int) -> None:
        self.keep_time()
        for side in (self.model, self.real):
            side.unsubscribe(sid)

    def resubscribe(self) -> None:
        """Listen again after a restart of the server."""
        self.subscribe(f"_INBOX.{self.name}.*", 1)

    def delivered(self, consumer: str) -> list[str]:
        """Acknowledgement subjects of what a consumer has delivered."""
        return [ours for ours, _ in self._acks if ours.split(".")[3] == consumer]

    def end(self) -> None:
        """Leave nothing behind on the server."""
        for sid in self._pulls:
            self.real.unsubscribe(sid)
        self.real.publish(f"$JS.API.STREAM.DELETE.{self.name}", b"", f"_INBOX.{self.name}.end", None)
        self.real.collect(1)
        self.real.unsubscribe(1)
        self.real.flush()
        self.real.collect(0)

    def subject(self, root: str) -> str:
        return f"{self.name}.{root}"

    # ── both at once ──

    def call(self, verb: str, body: Any = None) -> Any:
        """An API request; if the answers differ it is asked again for a while, unless it changes something."""
        payload = json.dumps(body).encode() if body is not None else b""
        asks = any(part in verb for part in ("INFO", "GET", "NAMES", "LIST"))
        return self.request(f"$JS.API.{verb}", payload, again=asks)

    def request(self, subject: str, payload: bytes, header: bytes | None = None, *, again: bool = False) -> Any:
        reply = f"_INBOX.{self.name}.{next(self._tokens)}"
        self.keep_time()
        self.model.publish(subject, payload, reply, header)
        expected = self.model.collect()
        deadline = time.monotonic() + 0.1
        while True:
            self.real.publish(subject, payload, reply, header)
            found = self.real.collect(len(expected))
            differ = not same(by_sid(expected), by_sid(found))
            if not differ or not again or time.monotonic() > deadline:
                break
            time.sleep(_QUIET_S)
        self.compare(expected, found)
        answers = [d.payload for d in expected if d.sid == b"1"]
        return json.loads(answers[0]) if answers and answers[0].startswith(b"{") else None

    def tell(self, subject: str, payload: bytes, reply: str = "", header: bytes | None = None) -> None:
        """A message without an answer of its own; deliveries may follow."""
        self.keep_time()
        self.model.publish(subject, payload, reply, header)
        expected = self.model.collect()
        self.real.publish(subject, payload, reply, header)
        self.settle()
        self.compare(expected, self.real.collect(len(expected)))

    def wait(self, seconds: float) -> None:
        """Let time pass on both sides and compare what came meanwhile."""
        self.real.wait(seconds)
        self.keep_time()
        expected = self.model.collect()
        self.compare(expected, self.real.collect(len(expected)))

    def keep_time(self) -> None:
        """Let as much time pass on the model as has passed here."""
        if self.live:
            self.model.wait(max(0.0, time.monotonic() - self._began_s - self.model.now_s))

    def settle(self) -> None:
        """Give the server's goroutines time: it answers a publisher before it tells the consumers, for example."""
        self.real.flush()
        time.sleep(_QUIET_S)

    def compare(self, expected: Sequence[Delivery], found: Sequence[Delivery]) -> None:
        left, right = by_sid(expected), by_sid(found)
        if self._racing:
            left.pop(b"1")
            right.pop(b"1", None)
        if self.setup.discards or self._purged:
            # Whether a message that made room is finished before or after its successor is delivered decides where
            # the floor comes to lie. The server does both at the same time. And of several messages that are purged
            # while in flight, it forgets one after the other in an order that chance decides.
            left, right = floorless(left), floorless(right)
        if self._op[0] == "batch" or self.setup.discards:
            # The first message may be delivered before the second is counted, or after.
            left, right = uncounted(left), uncounted(right)
        if not same(left, right):
            raise DifferenceError(self.step, self._op, left, right)
        theirs: dict[bytes, list[str]] = {}
        for delivery in found:
            if delivery.reply.startswith(b"$JS.ACK"):
                theirs.setdefault(delivery.sid, []).append(delivery.reply.decode())
        for delivery in expected:
            if delivery.reply.startswith(b"$JS.ACK"):
                self._acks.append((delivery.reply.decode(), theirs[delivery.sid].pop(0)))

    # ── operations ──

    def do(self, op: Op) -> None:
        self._op = op
        kind, *arguments = op
        OPERATIONS[kind](self, *arguments)
        self.step += 1
        self.model.now_s += 0.001

    def last_of(self, root: str) -> int:
        seqs = self.model.server.streams[self.name].by_subject.get(self.subject(root))
        return seqs[-1] if seqs else 0

    @property
    def last(self) -> int:
        return self.model.server.streams[self.name].last

    def publish(self, root: str, size: int, message_id: str) -> None:
        header = f"NATS/1.0\r\nNats-Msg-Id: {message_id}\r\n\r\n".encode() if message_id else None
        self.request(self.subject(root), b"p" * size, header)
        self.settle()

    def compare_and_set(self, root: str, off: int, other: str) -> None:
        last = max(0, self.last_of(other or root) + off)
        lines = f"Nats-Expected-Last-Subject-Sequence: {last}\r\n"
        if other:
            lines += f"Nats-Expected-Last-Subject-Sequence-Subject: {self.subject(other)}\r\n"
        self.request(self.subject(root), b"cas", f"NATS/1.0\r\n{lines}\r\n".encode())
        self.settle()

    def batch(self, roots: Sequence[str], offs: Sequence[int], cut: int) -> None:
        """An atomic batch of compare-and-set writes; `cut`: leave out that message (0: none)."""
        name = f"b{next(self._tokens)}"
        self._batched = True
        for number, (root, off) in enumerate(zip(roots, offs, strict=True), 1):
            if number == cut:
                continue
            lines = f"Nats-Batch-Id: {name}\r\nNats-Batch-Sequence: {number}\r\n"
            if off < 9:
                lines += f"Nats-Expected-Last-Subject-Sequence: {max(0, self.last_of(root) + off)}\r\n"
            if number == len(roots):
                lines += "Nats-Batch-Commit: 1\r\n"
            header = f"NATS/1.0\r\n{lines}\r\n".encode()
            if number < len(roots):
                self.tell(self.subject(root), b"b%d" % number, "", header)
            else:
                self.request(self.subject(root), b"b%d" % number, header)
                self.settle()

    def consumer(self, name: str, which: int, action: str, max_pending: int, single: bool) -> None:
        subjects = [self.subject(root) for root in FILTERS[which]]
        found = self.model.server.streams[self.name].consumers.get(name)
        if found and found.pulls.waiting:
            # A new limit wakes the consumer while the server is still at work on the update: either may come first.
            max_pending = found.config.get("max_ack_pending", max_pending)
        config: dict[str, Any] = {
            "name": name,
            "durable_name": name,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "ack_wait": 600 * 10**9,
            "max_ack_pending": max_pending,
            "max_waiting": 4,
            "inactive_threshold": 600 * 10**9,
        }
        if single and len(subjects) == 1:
            config["filter_subject"] = subjects[0]
        else:
            config["filter_subjects"] = subjects
        body = {"stream_name": self.name, "config": config, "action": action}
        self.call(f"CONSUMER.CREATE.{self.name}.{name}", body)
        self.settle()

    def hold(self, name: str, which: int, seq: int) -> None:
        """A consumer that begins at a sequence and that nobody reads."""
        config: dict[str, Any] = {
            "name": name,
            "durable_name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": seq,
            "ack_policy": "explicit",
            "filter_subjects": [self.subject(root) for root in FILTERS[which]],
            "inactive_threshold": 600 * 10**9,
            "num_replicas": 0,
        }
        body = {"stream_name": self.name, "config": config, "action": "create"}
        self.call(f"CONSUMER.CREATE.{self.name}.{name}", body)
        self.settle()

    def watch(self, name: str, which: int) -> None:
        """A push consumer as a watch makes them."""
        sid = next(self._sids)
        inbox = f"_INBOX.w{self.name}.{sid}"
        self.subscribe(inbox, sid)
        self._pulls.append(sid)
        config = {
            "name": name,
            "deliver_subject": inbox,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "max_deliver": 1,
            "filter_subjects": [self.subject(root) for root in FILTERS[which]],
            "idle_heartbeat": 100 * 10**9,
            "flow_control": True,
            "inactive_threshold": 500 * 10**9,
            "mem_storage": True,
            "num_replicas": 1,
        }
        body = {"stream_name": self.name, "config": config, "action": "create"}
        self.call(f"CONSUMER.CREATE.{self.name}.{name}", body)
        self.settle()

    def pull(self, name: str, batch: int, max_bytes: int, no_wait: bool, expires_s: int) -> None:
        if no_wait:
            # One that may also wait ends whenever the consumer finds nothing more: in the middle of a batch, or not.
            expires_s = 0
        sid = next(self._sids)
        inbox = f"_INBOX.p{self.name}.{sid}"
        self.subscribe(inbox, sid)
        self._pulls.append(sid)
        body = {"batch": batch, "max_bytes": max_bytes, "no_wait": no_wait, "expires": expires_s * 10**9}
        given = {key: value for key, value in body.items() if value}
        self.tell(f"$JS.API.CONSUMER.MSG.NEXT.{self.name}.{name}", json.dumps(given).encode(), inbox)

    def leave(self, index: int) -> None:
        """End the subscription behind a pull or a watch."""
        if self._pulls:
            sid = self._pulls.pop(index % len(self._pulls))
            self.unsubscribe(sid)
            self.settle()
            self.compare(self.model.collect(), self.real.collect(0))

    def acknowledge(self, index: int, payload: bytes) -> None:
        if self._acks:
            ours, theirs = self._acks[index % len(self._acks)]
            self._ack(ours, theirs, payload)

    def forge(self, name: str, seq: int, number: int) -> None:
        """Acknowledge a sequence that may never have been delivered."""
        subject = f"$JS.ACK.{self.name}.{name}.1.{seq}.{number}.1.0"
        self._ack(subject, subject, b"+ACK")

    def _ack(self, ours: str, theirs: str, payload: bytes) -> None:
        reply = f"_INBOX.{self.name}.{next(self._tokens)}"
        self.keep_time()
        self.model.publish(ours, payload, reply, None)
        expected = self.model.collect()
        self.real.publish(theirs, payload, reply, None)
        self.settle()
        self.compare(expected, self.real.collect(len(expected)))

    def reset(self, name: str, seq: int) -> None:
        found = self.model.server.streams[self.name].consumers.get(name)
        if self._batched or self._purged:
            # A consumer may look for more in the middle of a batch, or at its end: its cursor, and with it the floor
            # that it would go back to, then lies here or there.
            seq = max(1, seq)
        if self.setup.storage == "file":
            # A consumer that begins at 1 looks to its store like one without a state, and if the store is being
            # written at that moment, the state before the reset comes back.
            seq = max(2, seq)
        if found:
            # Likewise: a reset wakes the consumer before the server describes it.
            self._racing = bool(found.pulls.waiting)
            self.call(f"CONSUMER.RESET.{self.name}.{name}", {"seq": seq} if seq >= 0 else None)
            self._racing = False
            self.settle()

    def delete_consumer(self, name: str) -> None:
        self.call(f"CONSUMER.DELETE.{self.name}.{name}")
        self.settle()

    def delete_message(self, seq: int) -> None:
        self.call(f"STREAM.MSG.DELETE.{self.name}", {"seq": seq})
        self.settle()

    def purge(self, root: str, seq: int, keep: int) -> None:
        if not root and self.setup.storage == "file" and self.setup.retention == "interest":
            # Sequences that were given to messages nobody wanted confuse the file store about where it begins.
            seq = 0
        if not root and keep and self.setup.storage == "file":
            # The server then tells its consumers of a deleted subject by the name of the pattern `>`.
            keep = 0
        consumers = self.model.server.streams[self.name].consumers.values()
        self._purged = self._purged or any(len(c.pending) > 1 for c in consumers)
        body = {"filter": self.subject(root) if root else "", "seq": seq, "keep": keep}
        self.call(f"STREAM.PURGE.{self.name}", {key: value for key, value in body.items() if value})
        self.settle()

    def read(self, how: str, root: str, seq: int, batch: int) -> None:
        subject = self.subject(root)
        if how == "seq":
            self.call(f"STREAM.MSG.GET.{self.name}", {"seq": seq})
        elif how == "last":
            self.call(f"STREAM.MSG.GET.{self.name}", {"last_by_subj": subject})
        elif how == "next":
            self.call(f"STREAM.MSG.GET.{self.name}", {"seq": seq, "next_by_subj": subject})
        elif how == "direct":
            self.call(f"DIRECT.GET.{self.name}", {"seq": seq})
        elif how == "direct last":
            self.call(f"DIRECT.GET.{self.name}.{self.subject(root.replace(chr(62), 'x'))}")
        elif how == "direct batch":
            self.call(f"DIRECT.GET.{self.name}", {"seq": seq, "batch": batch, "next_by_subj": subject})
        else:
            self.call(f"DIRECT.GET.{self.name}", {"seq": seq, "batch": batch})

    def info(self, consumer: str) -> None:
        if consumer:
            self.call(f"CONSUMER.INFO.{self.name}.{consumer}")
        else:
            self.call(f"STREAM.INFO.{self.name}", {"subjects_filter": f"{self.name}.>"})

    def names(self) -> None:
        self.call(f"CONSUMER.NAMES.{self.name}")


OPERATIONS: dict[str, Callable[..., None]] = {
    "publish": Run.publish,
    "cas": Run.compare_and_set,
    "batch": Run.batch,
    "consumer": Run.consumer,
    "hold": Run.hold,
    "watch": Run.watch,
    "pull": Run.pull,
    "leave": Run.leave,
    "ack": Run.acknowledge,
    "forge": Run.forge,
    "reset": Run.reset,
    "delete consumer": Run.delete_consumer,
    "delete": Run.delete_message,
    "purge": Run.purge,
    "read": Run.read,
    "info": Run.info,
    "names": Run.names,
}
