"""A task's line to the driver of its replay: may it go on, and how far has it got?

The desk asks in a thread of its own, several times within each permission. An answer holds for a while, counted from
when the question was sent: no clocks are compared, and it never outlasts the guest's lease. So a task that hears
nothing stops starting handlers before anybody else can own its partitions. Rows of the ledger are stored before the
positions that they belong to are told.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from parti.core.dead_letter import write_letter
from parti.core.replay import Answer, Ask, decode_answer, encode
from parti.errors import ApiError, ConnectionFailed, DecodeError, NoResponders, PartiError, RequestTimeout
from parti.jetstream.blocking import BlockingClient, api_error
from parti.jetstream.target import Target
from parti.model.ledger import DEAD_LETTERED, LedgerBatch, encode_batch, sample_hash
from parti.model.message import Message

_ASK_S = 0.3
_PATIENCE_S = 30.0
"""A driver that has not answered for so long is gone."""
_LEDGER_ROWS = 5_000
_RETRY_MIN_S, _RETRY_MAX_S = 0.2, 2.0
_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished message, as the ledger wants it; times in microseconds since 1970."""

    partition: str
    seq: int
    attempt: int
    outcome: int
    received_us: int
    started_us: int
    finished_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTo:
    """Where rows go, and which."""

    subject: str
    stream: str
    stream_created: str
    worker: str
    below: int
    """Only messages whose `sample_hash` is below this."""


@dataclass(slots=True)
class Reached:
    """How far one partition has got; written by its lane, read by the desk."""

    position: int
    handled: int = 0
    dead_lettered: int = 0


@dataclass(slots=True)
class Gate:
    """What may be started now. Replaced as a whole, so that lanes read it without a lock."""

    until_s: float = _NEVER_S
    keep: Mapping[str, int] = field(default_factory=dict)
    wait: Collection[str] = ()


class Connections:
    """One connection, opened when it is needed and again after it broke; one request at a time."""

    def __init__(self, target: Target, name: str) -> None:
        self._target = target
        self._name = name
        self._client: BlockingClient | None = None
        self._lock = threading.Lock()

    def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float = 5.0
    ) -> bytes:
        """Send a request and return its answer; raises what `BlockingClient.request` raises."""
        with self._lock:
            try:
                if self._client is None:
                    self._client = BlockingClient.open(self._target, name=self._name)
                return self._client.request(subject, payload, headers=headers, timeout_s=timeout_s).data
            except (ConnectionFailed, RequestTimeout):
                self._drop()
                raise

    def store(self, subject: str, payload: bytes, headers: Mapping[str, str], *, stop: Callable[[], bool]) -> bool:
        """Publish to a stream until it says that it has the message; False when told to stop before."""
        delay_s = _RETRY_MIN_S
        while True:
            try:
                _check_stored(self.request(subject, payload, headers))
                return True
            except PartiError as error:
                if stop():
                    return False
                if isinstance(error, ApiError):
                    delay_s = _RETRY_MAX_S
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MAX_S)

    @property
    def max_payload(self) -> int:
        """Most bytes of one message."""
        with self._lock:
            if self._client is None:
                self._client = BlockingClient.open(self._target, name=self._name)
            return self._client.max_payload

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _check_stored(answer: bytes) -> None:
    found = json.loads(answer)
    if "error" in found:
        raise api_error(found["error"])


class Desk:
    """Asks for all partitions of a task from `open` to `close`."""

    def __init__(
        self,
        target: Target,
        subject: str,
        task: str,
        round_number: int,
        *,
        ledger: LedgerTo | None,
        fences: Mapping[str, int],
    ) -> None:
        self.gate = Gate()
        self.reached: dict[str, Reached] = {}
        self.records = ledger is not None
        self._rows: deque[Finished] = deque()
        """Rows for the ledger, put there before the position moves past them."""
        self.failure: Exception | None = None
        self._subject = subject
        self._task = task
        self._round = round_number
        self._ledger = ledger
        self._fences = fences
        self._process = uuid.uuid4().hex
        self._number = 0
        self._asked_for: tuple[str, ...] = ()
        self._done: set[str] = set()
        self._line = Connections(target, f"parti-replay-{task}")
        self._letters = Connections(target, f"parti-replay-letters-{task}")
        self._heard_s = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parti-replay-desk", daemon=True)

    def open(self, partitions: Collection[str]) -> None:
        """Ask for these; returns when the first answer is there."""
        self._asked_for = tuple(partitions)
        self.gate = Gate(wait=frozenset(partitions))
        self._ask()
        self._thread.start()

    def close(self, *, failed: bool = False) -> None:
        """Say how far everything has got and that this was all; raises when nobody hears it."""
        self._ended.set()
        self._thread.join()
        try:
            if failed:
                return
            if self.failure is not None:
                raise self.failure
            while not self._ask(last=True):
                self._check_heard()
                time.sleep(_ASK_S)
        finally:
            self._line.close()
            self._letters.close()

    def may_start(self, partition: str) -> bool:
        """Whether a handler of a partition may be started at this moment."""
        gate = self.gate
        return partition in gate.keep and time.monotonic() < gate.until_s

    def refused(self, partition: str) -> bool:
        """Whether a partition is not to be gone on with at all."""
        gate = self.gate
        return self.failure is not None or not (partition in gate.keep or partition in gate.wait)

    def let_go(self, partition: str) -> None:
        """A lane has ended; its partition is not asked for again."""
        self._done.add(partition)

    def finish(self, reached: Reached, row: Finished) -> None:
        """A message is finished: its row first, then the position."""
        if self.records:
            self._rows.append(row)
        if row.outcome == DEAD_LETTERED:
            reached.dead_lettered += 1
        else:
            reached.handled += 1
        reached.position = row.seq + 1

    def bury(self, subject: str, message: Message, reason: str, traceback: str = "") -> bool:
        """Store a message as a dead letter; False when its partition was taken away before that."""
        letter = write_letter(
            message, reason, root=subject, max_payload=self._letters.max_payload, kept=True, traceback=traceback
        )
        partition = message.partition.id
        return self._letters.store(
            letter.subject, letter.payload, letter.headers, stop=lambda: self.refused(partition)
        )

    # ── in the thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._ended.wait(_ASK_S):
                self._ask()
                self._check_heard()
        except Exception as error:  # whatever it is, lanes must not wait for answers that never come
            self.failure = error
            self.gate = Gate()

    def _ask(self, *, last: bool = False) -> bool:
        """One question; False when it was not answered."""
        # In this order: a lane that has ended here has told its last position, and each position its rows. One that
        # was refused still counts as held until it has ended: its handler may be running.
        holds = () if last else tuple(p for p in self._asked_for if p not in self._done)
        at = {p: reached.position for p, reached in self.reached.items()}
        handled = sum(reached.handled for reached in self.reached.values())
        dead = sum(reached.dead_lettered for reached in self.reached.values())
        if not self._store_rows(last=last):
            return False
        ask, sent_s = Ask(self._task, self._round, holds, at, handled, dead), time.monotonic()
        try:
            answer = decode_answer(self._line.request(self._subject, encode(ask), timeout_s=2.0))
        except (NoResponders, RequestTimeout, ConnectionFailed, DecodeError) as error:
            if error.fatal:
                raise
            return False
        self._heard_s = time.monotonic()
        self._take(answer, sent_s)
        return True

    def _take(self, answer: Answer, sent_s: float) -> None:
        for partition, position in answer.keep.items():
            if partition not in self.reached:
                self.reached[partition] = Reached(position)
        self.gate = Gate(sent_s + answer.for_s, answer.keep, frozenset(answer.wait))

    def _check_heard(self) -> None:
        if time.monotonic() - self._heard_s > _PATIENCE_S:
            raise RequestTimeout(f"the driver of the replay has not answered for {_PATIENCE_S:g} s; is it gone?")

    # ── the ledger ────────────────────────────────────────────────────────────────────────────────────────────

    def _store_rows(self, *, last: bool) -> bool:
        ledger = self._ledger
        if ledger is None:
            return True
        while self._rows or (last and self._number):
            rows = [self._rows.popleft() for _ in range(min(_LEDGER_ROWS, len(self._rows)))]
            rows = [row for row in rows if sample_hash(row.seq) < ledger.below]
            closed = last and not self._rows
            if not rows and not (closed and self._number):
                continue
            batch = self._batch(ledger, rows, closed=closed)
            headers = {"Nats-Msg-Id": batch.message_id}
            if not self._line.store(ledger.subject, encode_batch(batch), headers, stop=self._gave_up):
                self._rows.extendleft(reversed(rows))
                return False
            self._number += 1
            if closed:
                self._number = 0
        return True

    def _gave_up(self) -> bool:
        return time.monotonic() - self._heard_s > _PATIENCE_S

    def _batch(self, ledger: LedgerTo, rows: list[Finished], *, closed: bool) -> LedgerBatch:
        places: dict[str, int] = {}
        for row in rows:
            places.setdefault(row.partition, len(places))
        return LedgerBatch(
            stream=ledger.stream,
            stream_created=ledger.stream_created,
            worker=ledger.worker,
            process=self._process,
            number=self._number,
            closed=closed,
            partitions=tuple(places),
            fences=tuple(self._fences[partition] for partition in places),
            partition_index=array("I", [places[row.partition] for row in rows]),
            seq=array("q", [row.seq for row in rows]),
            attempt=array("I", [row.attempt for row in rows]),
            outcome=array("B", [row.outcome for row in rows]),
            received_us=array("q", [row.received_us for row in rows]),
            started_us=array("q", [row.started_us for row in rows]),
            finished_us=array("q", [row.finished_us for row in rows]),
        )
