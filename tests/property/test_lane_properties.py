"""Order, NoLoss and the position of a lane under random deliveries.

A model of the server sends the messages of one partition in stream order, with everything that happens on the way:
redeliveries, sessions that break and replay from the floor, and single messages that arrive late (but before a
higher one is finished; the pull engine ends a session on any other hole).
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.trials import examples_of

from parti.core.lane import Lane, Phase, Verdict
from parti.model.message import Message, Ownership
from parti.model.partition import Template

OWNERSHIP = Ownership(Template("dc.{tool}").partition("a"), "DC", "w0")
EXAMPLES = settings(deadline=None, max_examples=examples_of(150), stateful_step_count=50)


class LaneMachine(RuleBasedStateMachine):
    """One lane, its server and its runner."""

    @initialize(gaps=st.lists(st.integers(1, 3), min_size=1, max_size=12))
    def stream(self, gaps: list[int]) -> None:
        self.seqs = [sum(gaps[: i + 1]) for i in range(len(gaps))]
        self.lane = Lane(OWNERSHIP)
        self.cursor = 0
        self.late: list[int] = []
        self.finished: list[int] = []
        self.started: list[int] = []
        self.overtaken: set[int] = set()
        self.position = 0

    def deliver(self, seq: int) -> Verdict:
        waits = {m.seq for m in self.lane.waiting}
        verdict = self.lane.offer(Message("dc.a", b"", seq, OWNERSHIP, b"r"))
        if verdict is Verdict.FINISHED:
            assert seq in self.finished
        elif verdict is Verdict.DUPLICATE:
            assert seq in waits
        else:
            assert seq not in waits
            if verdict is Verdict.OVERTAKEN:
                assert any(seq < other for other in self.started)
                self.overtaken.add(seq)
            if self.lane.phase is Phase.IDLE:
                self.lane.phase = Phase.READY
        return verdict

    @precondition(lambda self: self.cursor < len(self.seqs))
    @rule(count=st.integers(1, 4))
    def deliver_next(self, count: int) -> None:
        for seq in self.seqs[self.cursor : self.cursor + count]:
            self.deliver(seq)
        self.cursor = min(len(self.seqs), self.cursor + count)

    @precondition(lambda self: self.cursor < len(self.seqs) - 1)
    @rule()
    def deliver_the_one_after_first(self) -> None:
        self.late.append(self.seqs[self.cursor])
        self.deliver(self.seqs[self.cursor + 1])
        self.cursor += 2

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.late))
        self.late.remove(seq)
        self.deliver(seq)

    @precondition(lambda self: self.cursor)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for s in self.seqs[: self.cursor] if s not in self.late] or [0]))
        if seq and not self.repeats(seq):
            self.deliver(seq)

    @precondition(lambda self: not self.late)
    @rule()
    def session_breaks_and_replays_from_the_floor(self) -> None:
        floor = self.lane.floor
        following = self.seqs[self.cursor] if self.cursor < len(self.seqs) else self.seqs[-1] + 1
        start = following if floor is None else min(floor, following)
        for seq in self.seqs[: self.cursor]:
            if seq >= start and not self.repeats(seq):
                self.deliver(seq)

    def repeats(self, seq: int) -> bool:
        """After an overtaking the position stays low for a while; what it then repeats is no news."""
        return seq in self.finished and seq >= self.lane.position

    @precondition(lambda self: self.lane.phase is Phase.READY)
    @rule()
    def start(self) -> None:
        head = self.lane.waiting[0]
        lower = [seq for seq in self.started if seq > head.seq]
        assert not lower or head.seq in self.overtaken, f"{head.seq} starts after {lower} and nobody said so"
        assert head.seq not in self.finished
        if head.seq not in self.started:
            self.started.append(head.seq)
        self.lane.phase = Phase.RUNNING

    @precondition(lambda self: self.lane.phase is Phase.RUNNING)
    @rule()
    def succeed(self) -> None:
        # A hole below the head would end the session before the head is finished.
        for seq in [s for s in self.late if s < self.lane.waiting[0].seq]:
            self.late.remove(seq)
            self.deliver(seq)
        self.finished.append(self.lane.finish().seq)
        self.lane.phase = Phase.READY if self.lane.waiting else Phase.IDLE

    @precondition(lambda self: self.lane.phase is Phase.RUNNING)
    @rule()
    def fail(self) -> None:
        self.lane.waiting[0].attempt += 1
        self.lane.phase = Phase.BACKOFF

    @precondition(lambda self: self.lane.phase is Phase.BACKOFF)
    @rule()
    def backoff_ends(self) -> None:
        self.lane.phase = Phase.READY

    @invariant()
    def position_is_true_and_never_goes_back(self) -> None:
        if not hasattr(self, "lane"):
            return
        assert self.lane.position >= self.position
        self.position = self.lane.position
        delivered = [s for s in self.seqs[: self.cursor] if s not in self.late]
        unfinished = [s for s in delivered if s not in self.finished]
        assert all(self.lane.position <= seq for seq in unfinished)
        assert self.lane.floor == min(unfinished, default=None)

    def teardown(self) -> None:
        """Everything is delivered at last and the lane drains: all finished, each once."""
        if not hasattr(self, "lane"):
            return
        for seq in list(self.late):
            self.late.remove(seq)
            self.deliver(seq)
        self.deliver_rest()
        while self.lane.waiting:
            if self.lane.phase is Phase.BACKOFF:
                self.lane.phase = Phase.READY
            if self.lane.phase is Phase.READY:
                self.start()
            self.succeed()
        assert sorted(self.finished) == self.seqs
        assert self.lane.phase is Phase.IDLE

    def deliver_rest(self) -> None:
        for seq in self.seqs[self.cursor :]:
            self.deliver(seq)
        self.cursor = len(self.seqs)


TestLane = LaneMachine.TestCase
TestLane.settings = EXAMPLES
