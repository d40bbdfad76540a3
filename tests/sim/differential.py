"""Runs the same random operations on the model and on a real nats-server and compares every answer.

    python -m tests.sim.differential --seeds 1000 [--first 0] [--length 60]

prints the first seed whose answers differ and the shortest list of operations found that still shows it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.sim.backends import Model, Real

from parti.embedded import Server
from parti.sim.server import Delivery

Op = tuple[Any, ...]
"""A kind and its arguments: plain values, so that a list of operations can be printed, cut and run again."""

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


# ── comparing ─────────────────────────────────────────────────────────────────────────────────────────────────

_TIMES = frozenset({"created", "ts", "first_ts", "last_ts", "time", "metadata"})


_NOT_THERE = frozenset({10043, 10057})
"""Ways to say that a message cannot be deleted; on file storage it depends on the block where it would lie."""


def plain(delivery: Delivery) -> tuple[Any, ...]:
    """A delivery without what differs by nature: times."""
    lines = [] if delivery.header is None else delivery.header.decode().split("\r\n")
    header = tuple(_timeless(line) for line in lines if not line.startswith("Nats-Time-Stamp:"))
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


def _uncounted(grouped: dict[bytes, list[tuple[Any, ...]]]) -> dict[bytes, list[tuple[Any, ...]]]:
    """The same without the number of messages that are still to come."""
    return {
        sid: [(subject, reply.rpartition(".")[0], *rest) for subject, reply, *rest in deliveries]
        for sid, deliveries in grouped.items()
    }


def _floorless(grouped: dict[bytes, list[tuple[Any, ...]]]) -> dict[bytes, list[tuple[Any, ...]]]:
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


# ── one run ───────────────────────────────────────────────────────────────────────────────────────────────────


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
        self.real.flush()
        time.sleep(_QUIET_S)

    def compare(self, expected: Sequence[Delivery], found: Sequence[Delivery]) -> None:
        left, right = by_sid(expected), by_sid(found)
        if self._racing:
            left.pop(b"1")
            right.pop(b"1", None)
        if self.setup.discards:
            # Whether a message that made room is finished before or after its successor is delivered decides where
            # the floor comes to lie. The server does both at the same time.
            left, right = _floorless(left), _floorless(right)
        if self._op[0] == "batch" or self.setup.discards:
            # The first message may be delivered before the second is counted, or after.
            left, right = _uncounted(left), _uncounted(right)
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
        _OPERATIONS[kind](self, *arguments)
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

    def compare_and_set(self, root: str, off: int, other: str) -> None:
        last = max(0, self.last_of(other or root) + off)
        lines = f"Nats-Expected-Last-Subject-Sequence: {last}\r\n"
        if other:
            lines += f"Nats-Expected-Last-Subject-Sequence-Subject: {self.subject(other)}\r\n"
        self.request(self.subject(root), b"cas", f"NATS/1.0\r\n{lines}\r\n".encode())

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
        if self._batched:
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


_OPERATIONS: dict[str, Callable[..., None]] = {
    "publish": Run.publish,
    "cas": Run.compare_and_set,
    "batch": Run.batch,
    "consumer": Run.consumer,
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


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────

_CONSUMERS = ("A", "B", "C")
_WEIGHTS = {
    "publish": 22,
    "cas": 4,
    "batch": 3,
    "consumer": 12,
    "watch": 2,
    "pull": 14,
    "leave": 3,
    "ack": 22,
    "forge": 2,
    "reset": 3,
    "delete consumer": 1,
    "delete": 2,
    "purge": 2,
    "read": 5,
    "info": 10,
    "names": 1,
}


def choose_setup(rng: random.Random) -> Setup:
    retention = rng.choice(("limits", "limits", "workqueue", "interest"))
    per_subject = rng.choice((-1, -1, 1, 2)) if retention == "limits" else -1
    limit = rng.choice((-1, -1, -1, 6)) if per_subject == -1 and retention == "limits" else -1
    return Setup(retention, rng.choice(("memory", "memory", "file")), per_subject, limit)


def choose_ops(rng: random.Random, setup: Setup, length: int) -> list[Op]:
    kinds = [kind for kind in _WEIGHTS if kind != "watch" or setup.kv]
    weights = [_WEIGHTS[kind] for kind in kinds]
    start: list[Op] = [("consumer", name, rng.randrange(7), "create", 1000, False) for name in _CONSUMERS[:2]]
    return start + [_choose(rng, rng.choices(kinds, weights)[0], setup) for _ in range(length)]


def _choose(rng: random.Random, kind: str, setup: Setup) -> Op:
    root, name, seq = rng.choice(ROOTS), rng.choice(_CONSUMERS), rng.randrange(1, 24)
    many = rng.randrange(2, 4)
    wide = ">" if setup.storage == "memory" else root
    choices: dict[str, Callable[[], Op]] = {
        "publish": lambda: (kind, root, rng.choice((1, 1, 100)), rng.choice(("", "", "", "", "m1", "m2"))),
        "cas": lambda: (kind, root, rng.choice((0, 0, 1, -1)), rng.choice(("", "", rng.choice(ROOTS)))),
        "batch": lambda: (
            kind,
            tuple(rng.choice(ROOTS) for _ in range(many)),
            tuple(rng.choice((0, 0, 0, 1, 9)) for _ in range(many)),
            rng.choice((0, 0, 0, 1, 2)),
        ),
        "consumer": lambda: (
            kind,
            name,
            rng.randrange(len(FILTERS)) if rng.random() < 0.3 else rng.randrange(7),
            rng.choice(("create", "update", "update", "update", "")),
            rng.choice((1000, 1000, 3)),
            rng.random() < 0.5,
        ),
        "watch": lambda: (kind, rng.choice(("W", "V")), rng.randrange(6)),
        "pull": lambda: (
            kind,
            name,
            rng.choice((1, 2, 5, 10)),
            rng.choice((0, 0, 0, 200, 1000)),
            rng.random() < 0.2,
            rng.choice((0, 100, 100)),
        ),
        "leave": lambda: (kind, rng.randrange(100)),
        "ack": lambda: (
            kind,
            -rng.randrange(1, 8) if rng.random() < 0.8 else rng.randrange(100),
            rng.choice((b"", b"+ACK", b"+ACK", b"+ACK", b"+ACK", b"-NAK", b"+TERM", b"+WPI")),
        ),
        "forge": lambda: (kind, name, seq, rng.randrange(1, 12)),
        "reset": lambda: (kind, name, rng.choice((1, seq, seq) if setup.discards else (-1, 0, 1, seq, seq))),
        "delete consumer": lambda: (kind, name),
        "delete": lambda: (kind, seq),
        "purge": lambda: (kind, rng.choice(("", root, root, wide)), *rng.choice(((0, 0), (seq, 0), (0, 1)))),
        "read": lambda: (
            kind,
            rng.choice(("seq", "last", "next", "direct", "direct last", "direct batch", "direct all")),
            rng.choice((root, root, ">")),
            seq,
            rng.choice((1, 2, 5, 50)),
        ),
        "info": lambda: (kind, rng.choice(("", name, name, name))),
        "names": lambda: (kind,),
    }
    return choices[kind]()


# ── many runs ─────────────────────────────────────────────────────────────────────────────────────────────────


def plan(seed: int, length: int) -> tuple[Setup, list[Op]]:
    """What a seed stands for."""
    rng = random.Random(seed)
    setup = choose_setup(rng)
    return setup, choose_ops(rng, setup, length)


def find_difference(real: Real, setup: Setup, ops: Sequence[Op]) -> DifferenceError | None:
    """Run operations on both sides; None when all answers agree."""
    run = Run(Model(), real, setup)
    run.begin()
    try:
        for op in ops:
            run.do(op)
        for consumer in ("", *sorted(run.model.server.streams[run.name].consumers)):
            run.do(("info", consumer))
    except DifferenceError as difference:
        return difference
    finally:
        run.end()
    return None


def shrink(real: Real, setup: Setup, ops: Sequence[Op]) -> list[Op]:
    """Leave out what is not needed for the two to differ."""
    kept = list(ops)
    size = max(1, len(kept) // 2)
    while True:
        begin = 0
        while begin < len(kept):
            fewer = kept[:begin] + kept[begin + size :]
            if find_difference(real, setup, fewer) is not None:
                kept = fewer
            else:
                begin += size
        if size == 1:
            return kept
        size = max(1, size // 2)


def check_seeds(url: str, seeds: Sequence[int], length: int) -> str:
    """Run all seeds; what differs, in words, or nothing."""
    real = Real(url)
    try:
        real.subscribe("_INBOX.keeper", 2)
        config = {"name": "KEEPER", "subjects": ["keeper"], "storage": "file"}
        real.publish("$JS.API.STREAM.CREATE.KEEPER", json.dumps(config).encode(), "_INBOX.keeper", None)
        real.collect(1)
        for seed in seeds:
            setup, ops = plan(seed, length)
            difference = find_difference(real, setup, ops)
            if difference is not None:
                fewest = shrink(real, setup, ops[: difference.step + 1])
                again = find_difference(real, setup, fewest) or difference
                listed = "\n".join(f"    {op!r}," for op in fewest)
                return f"seed {seed}: {setup}\n  ops = [\n{listed}\n  ]\n{again}"
        return ""
    finally:
        real.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--length", type=int, default=60)
    options = parser.parse_args()
    began_s = time.monotonic()
    with Server() as server:
        trouble = check_seeds(server.url, range(options.first, options.first + options.seeds), options.length)
    print(trouble or f"{options.seeds} seeds, no difference, {time.monotonic() - began_s:.0f} s")
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
