"""The unordered mode: every message on its own, retried by the server's redelivery."""

from __future__ import annotations

import time
from typing import Any

from parti.core.lane import Lane, Phase, Verdict
from parti.core.retry import TryAgain
from parti.core.scatter import Scatter
from parti.model.message import Message
from parti.worker.lanes import Lanes


class UnorderedLanes(Lanes):
    """A lane for each message: nothing waits for anything else.

    A failed message is given back with a delay and counted by the server; the attempt is its delivery count.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._scatter = Scatter()
        self._in_hand: dict[int, Lane] = {}

    @property
    def floor(self) -> int:
        """Every message of an owned partition below this sequence is finished."""
        return self._scatter.floor(self.next_seq)

    def _take(self, lane: Lane, message: Message) -> None:
        verdict = Verdict.FINISHED if message.seq < lane.position else self._scatter.offer(message.seq)
        message.attempt = message.deliveries
        if message.attempt > 1:
            self._metrics.redeliveries.value += 1
        if verdict is Verdict.ACCEPTED:
            self.held += 1
            own = Lane(lane.ownership)
            own.waiting.append(message)
            own.phase = Phase.READY
            self._in_hand[message.seq] = own
            self.ready.append(own)
        elif verdict is Verdict.FINISHED:
            self._acks.ack(message.reply)
            self._metrics.skipped.value += 1

    def _try_again(self, lane: Lane, message: Message, decision: TryAgain, error: BaseException) -> None:
        self._log_retry(message, decision, error)
        self._acks.give_back(message.reply, decision.delay_s)
        self._scatter.give_back(message.seq)
        self._in_hand.pop(message.seq, None)
        self.held -= 1

    def _settle(self, lane: Lane, *, more: bool = False) -> None:
        message = lane.finish()
        lane.phase = Phase.IDLE
        self._scatter.finish(message.seq)
        self._in_hand.pop(message.seq, None)
        self.held -= 1
        self.finished += 1
        self._acks.ack(message.reply)

    def _retire(self, lane: Lane) -> None:
        """Drop what waits of a partition that is no longer ours; what runs finishes."""
        super()._retire(lane)
        for seq, own in list(self._in_hand.items()):
            if own.ownership is lane.ownership:
                with self.lock:
                    waits = own.phase is Phase.READY
                    if waits:
                        own.phase = Phase.CLOSED
                if waits:
                    del self._in_hand[seq]
                    self._scatter.forget(seq)
                    self.held -= 1

    def keep_alive(self, older_than_s: float) -> None:
        """Tell the server of everything that has waited or run this long that it is still in hand."""
        limit = time.time() - older_than_s
        for lane in self._in_hand.values():
            for message in lane.waiting:
                if message.received_s <= limit:
                    self._acks.in_progress(message.reply)

    def running_lanes(self) -> list[Lane]:
        """Messages that are with a runner."""
        return [lane for lane in self._in_hand.values() if lane.phase is Phase.RUNNING and lane.waiting]
