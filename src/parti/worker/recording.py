"""Lanes that keep a ledger: what they finish is recorded where it is finished."""

from __future__ import annotations

import time
from typing import Any

from parti.core.lane import Lane, Phase
from parti.core.lease import NEVER_S
from parti.model.ledger import DEAD_LETTERED, HANDLED, sample_hash, sample_limit
from parti.model.message import Message
from parti.worker.lanes import Lanes
from parti.worker.ledger import Ledger
from parti.worker.unordered import UnorderedLanes

_clock = time.perf_counter


class RecordingLanes(Lanes):
    """Records each message, or a sample of them, before its position can be stored and its acknowledgement sent.

    While the ledger takes nothing, no handler is started.
    """

    def __init__(self, *, ledger: Ledger, **options: Any) -> None:
        super().__init__(acks=ledger.acks, **options)
        self._ledger = ledger
        self._rows = ledger.rows
        self._most_rows = ledger.limit
        self._outcome = HANDLED
        self._finish = super().settle
        self._samples = ledger.sample > 1
        self._sample_limit = sample_limit(ledger.sample)
        self._hold = ledger.acks.held.append
        # Those that are not in a sample are acknowledged at once: the ack floor cannot pass one that is held.
        self._ack_others = ledger.acks.direct.ack
        self._ack = self._ack_others if self._samples else self._hold
        self._allowed_until_s = self.permitted_until_s
        self._stuck = False
        # First start of messages that are to be tried again, by sequence.
        self._first_s: dict[int, float] = {}
        # Their handlers still run, but the stream that they came from is gone.
        self._outdated: set[Lane] = set()
        ledger.on_stuck = self._be_stuck

    def settle(
        self,
        lane: Lane,
        more: bool = False,
        message: Message | None = None,
        started_s: float = 0.0,
        finished_s: float = 0.0,
    ) -> None:
        """A message is finished: record it, acknowledge it and let the lane go on."""
        done = message or lane.waiting[0]
        seq = done.seq
        if self._samples:
            if sample_hash(seq) >= self._sample_limit:
                self._finish(lane, more, message)
                return
            self._ack = self._hold
        if not started_s:
            started_s = lane.started_s
        if self._first_s:
            started_s = self._first_s.pop(seq, started_s)
        rows = self._rows
        if not self._outdated or lane not in self._outdated:
            ended_s = finished_s or _clock()
            rows.append((done.ownership, seq, done.attempt, done.received_s, started_s, ended_s, self._outcome))
        self._finish(lane, more, message)
        if self._samples:
            self._ack = self._ack_others
        if len(rows) >= self._most_rows:
            self._ledger.seal()

    def _settle_buried(self, lane: Lane, message: Message) -> None:
        self._outcome = DEAD_LETTERED
        # It may never have been started: processes that died in it were enough.
        now_s = _clock()
        self.settle(lane, False, message, now_s, now_s)
        self._outcome = HANDLED

    def failed(self, lane: Lane, error: BaseException, elapsed_s: float, message: Message | None = None) -> None:
        """The handler of a message raised: remember when it was started first."""
        seq = (message or lane.waiting[0]).seq
        if lane.phase is not Phase.CLOSED and sample_hash(seq) < self._sample_limit:
            self._first_s.setdefault(seq, lane.started_s)
        super().failed(lane, error, elapsed_s, message)

    def abandon(self, lane: Lane) -> None:
        """Drop what waits in a closed lane, and what is remembered of it."""
        self._outdated.discard(lane)
        for message in lane.waiting:
            self._first_s.pop(message.seq, None)
        super().abandon(lane)

    def start_over(self) -> None:
        """The stream was made anew: what still runs is of the old one and is not recorded."""
        self._outdated |= {lane for lane in (*self.running_lanes(), *self.roster.leaving.values()) if lane.waiting}
        self._first_s.clear()
        super().start_over()

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server of everything that is still in hand, or finished and not acknowledged yet."""
        super().keep_alive(older_than_s)
        self._ledger.keep_alive(older_than_s)

    # ── standing still ────────────────────────────────────────────────────────────────────────────────────────────

    def permit(self, until_s: float) -> None:
        """Allow or forbid the start of handlers; while the ledger takes nothing, none is started anyway."""
        self._allowed_until_s = until_s
        super().permit(NEVER_S if self._stuck else until_s)

    def _be_stuck(self, stuck: bool) -> None:
        self._stuck = stuck
        self.permit(self._allowed_until_s)


class RecordingUnorderedLanes(RecordingLanes, UnorderedLanes):
    """The same for the unordered mode."""

    def closed(self, lane: Lane) -> int:
        """Drop what waits of a partition that is no longer ours; returns its position."""
        position = super().closed(lane)
        # What was given back to the server is no longer ours, what still runs is.
        self._first_s = {s: at for s, at in self._first_s.items() if s in self._in_hand or s in self._owed}
        return position

    def start_over(self) -> None:
        """The stream was made anew."""
        self._outdated |= {lane for lane in self._in_hand.values() if lane.phase is Phase.CLOSED}
        super().start_over()
