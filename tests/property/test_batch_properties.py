"""Batch sizes stay in their bounds whatever the load."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.batch import Load, after_a_while, after_fill, pull_size

sizes = st.integers(1, 5_000)
loads = st.builds(
    Load,
    finished=st.integers(0, 100_000),
    elapsed_s=st.floats(0, 10, allow_nan=False),
    waiting=st.integers(0, 5_000),
)


@settings(deadline=None, max_examples=examples_of(300))
@given(batch=sizes, limit=sizes, inflight=st.integers(0, 6_000), credit=st.integers(0, 6_000))
def test_a_pull_never_asks_for_more_than_there_is_room(batch: int, limit: int, inflight: int, credit: int) -> None:
    size = pull_size(batch, limit=limit, inflight=inflight, credit=credit)
    assert 0 <= size <= max(0, limit - inflight - credit)
    assert size <= batch


@settings(deadline=None, max_examples=examples_of(200))
@given(batch=sizes, limit=sizes, inflight=st.integers(0, 6_000))
def test_with_room_and_no_pull_standing_something_is_always_asked_for(batch: int, limit: int, inflight: int) -> None:
    assert (pull_size(batch, limit=limit, inflight=inflight, credit=0) > 0) == (inflight < limit)


@settings(deadline=None, max_examples=examples_of(300))
@given(batch=sizes, load=loads, ceiling=sizes)
def test_the_batch_is_bounded(batch: int, load: Load, ceiling: int) -> None:
    assert 1 <= after_a_while(batch, load, ceiling=ceiling) <= batch
    assert 1 <= after_fill(batch, held=load.waiting, ceiling=ceiling) <= ceiling


@settings(deadline=None, max_examples=examples_of(200))
@given(batch=sizes, ceiling=sizes, steps=st.lists(loads, min_size=20, max_size=20))
def test_a_batch_above_its_ceiling_comes_down(batch: int, ceiling: int, steps: list[Load]) -> None:
    for load in steps:
        batch = after_a_while(batch, load, ceiling=ceiling)
    assert batch <= ceiling


@settings(deadline=None, max_examples=examples_of(200))
@given(batch=sizes, waiting=st.integers(1, 5_000), finished=st.integers(0, 100), ceiling=sizes)
def test_it_shrinks_when_more_than_a_second_of_work_waits(
    batch: int, waiting: int, finished: int, ceiling: int
) -> None:
    load = Load(finished=finished, elapsed_s=0.1, waiting=waiting + finished * 10)
    assert after_a_while(batch, load, ceiling=ceiling) == max(1, batch // 2)


@settings(deadline=None, max_examples=examples_of(200))
@given(batch=sizes, held=st.integers(0, 5_000), ceiling=sizes)
def test_it_grows_when_pulls_come_back_full_and_handlers_keep_up(batch: int, held: int, ceiling: int) -> None:
    grown = after_fill(batch, held=held, ceiling=ceiling)
    assert grown == min(ceiling, batch * 2 if held <= batch else batch)


@settings(deadline=None, max_examples=examples_of(100))
@given(batch=sizes, elapsed_s=st.floats(0, 10), room=sizes)
def test_it_stays_when_nothing_happens(batch: int, elapsed_s: float, room: int) -> None:
    load = Load(finished=0, elapsed_s=elapsed_s, waiting=0)
    assert after_a_while(batch, load, ceiling=batch + room) == batch
