"""Whatever is asked, released, cancelled or fails, in any order: no slot leaks or is given twice, nobody starves."""

from __future__ import annotations

import asyncio
import random
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.trials import examples_of

from parti.core.admission import STRICT, Admission, LookAhead, Stage, Ticket
from parti.jobs.scheduler import WeightedScheduler

COSTS = st.integers(1, 40)


class AdmissionMachine(RuleBasedStateMachine):
    """Random schedules against the pure admission."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.admission = Admission(1)
        self.running: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.passed: dict[Ticket, int] = {}

    @initialize(
        capacity=st.integers(1, 20),
        window=st.integers(0, 8),
        overtakings=st.integers(0, 6),
        patience_s=st.sampled_from([0.0, 5.0, 1e9]),
    )
    def begin(self, capacity: int, window: int, overtakings: int, patience_s: float) -> None:
        self.admission = Admission(capacity, LookAhead(window, overtakings, patience_s))

    def admit(self) -> None:
        for granted in self.admission.admit(self.now_s):
            for other in self.waiting:
                # Later, not more important, and yet before: that is what is bounded.
                if other.number < granted.number and other.priority >= granted.priority:
                    self.passed[other] = self.passed.get(other, 0) + 1
            self.waiting.remove(granted)
            self.running.append(granted)

    @rule(cost=COSTS, priority=st.integers(-1, 1))
    def ask(self, cost: int, priority: int) -> None:
        self.waiting.append(self.admission.ask(cost, priority, now_s=self.now_s))
        self.admit()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self.admission.release(ticket)
        self.admit()

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.running + self.waiting))
        for places in (self.running, self.waiting):
            if ticket in places:
                places.remove(ticket)
        self.admission.cancel(ticket)
        self.admit()

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.admit()

    @invariant()
    def holds_together(self) -> None:
        self.admission.check()
        assert self.admission.used == sum(ticket.slots for ticket in self.running) <= self.admission.capacity
        assert self.admission.waiting == len(self.waiting)

    @invariant()
    def is_never_idle(self) -> None:
        assert self.running or not self.waiting, "nothing runs, and yet something waits"

    @invariant()
    def nobody_is_overtaken_too_often(self) -> None:
        bound = self.admission.look_ahead
        limit = bound.overtakings if bound.window else 0
        assert all(number <= limit for number in self.passed.values())

    def teardown(self) -> None:
        """Whatever has happened: when nothing new comes, everything is granted."""
        while self.running:
            self.admission.release(self.running.pop())
            self.admit()
        assert not self.waiting
        assert self.admission.used == 0


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=examples_of(150), stateful_step_count=60, deadline=None)


@given(st.lists(COSTS, min_size=1, max_size=60), st.integers(1, 20))
def test_strict_order_is_the_order_of_arrival(costs: list[int], capacity: int) -> None:
    admission = Admission(capacity, STRICT)
    tickets = [admission.ask(cost, now_s=0.0) for cost in costs]
    granted: list[Ticket] = []
    while any(ticket.stage is not Stage.ENDED for ticket in tickets):
        granted += admission.admit(0.0)
        admission.release(next(ticket for ticket in granted if ticket.stage is Stage.GRANTED))
    assert granted == tickets


@given(st.integers(0, 2**32), st.integers(1, 20), st.booleans())
@settings(max_examples=examples_of(40), deadline=None)
def test_jobs_that_return_fail_or_are_cancelled_give_their_slots_back(seed: int, capacity: int, strict: bool) -> None:
    chance = random.Random(seed)
    scheduler = WeightedScheduler(capacity, look_ahead=STRICT if strict else None)
    seen: list[int] = []

    async def work(cost: int, turns: int, *, fails: bool) -> None:
        async with scheduler.acquire(cost, chance.randrange(3)):
            seen.append(scheduler.current_usage)
            for _ in range(turns):
                await asyncio.sleep(0)
            if fails:
                raise RuntimeError("as planned")

    async def run() -> None:
        tasks = []
        for _ in range(40):
            work_ = work(chance.randrange(1, 30), chance.randrange(6), fails=chance.random() < 0.2)
            tasks.append(asyncio.create_task(work_))
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert (scheduler.current_usage, scheduler.waiting) == (0, 0)
    assert all(used <= capacity for used in seen)
    scheduler._admission.check()


@given(st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_threads_and_coroutines_share_the_same_slots(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = WeightedScheduler(5)
    lock, used, highest = threading.Lock(), 0, 0

    def change(slots: int) -> None:
        nonlocal used, highest
        with lock:
            used += slots
            highest = max(highest, used)

    def in_thread(costs: list[int]) -> None:
        for cost in costs:
            try:
                with scheduler.acquire_sync(cost, timeout_s=0.002 if cost == 7 else None) as got:
                    change(got.slots)
                    change(-got.slots)
            except TimeoutError:
                pass

    async def on_loop(cost: int) -> None:
        async with scheduler.acquire(cost) as got:
            change(got.slots)
            try:
                await asyncio.sleep(0)
            finally:  # it may be cancelled right here
                change(-got.slots)

    async def run() -> None:
        tasks = [asyncio.create_task(on_loop(chance.randrange(1, 8))) for _ in range(60)]
        for task in chance.sample(tasks, 10):
            asyncio.get_running_loop().call_later(chance.random() / 100, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)

    threads = [
        threading.Thread(target=in_thread, args=([chance.randrange(1, 8) for _ in range(40)],)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    asyncio.run(run())
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert highest <= 5
    assert (scheduler.current_usage, scheduler.waiting) == (0, 0)
