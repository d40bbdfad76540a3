"""How many messages to ask for."""

from __future__ import annotations

import pytest

from parti.core.batch import Load, after_a_while, after_fill, pull_size


def load(finished: int = 0, waiting: int = 0, elapsed_s: float = 0.1) -> Load:
    return Load(finished=finished, elapsed_s=elapsed_s, waiting=waiting)


def test_full_pulls_and_quick_handlers_double_the_batch_up_to_the_ceiling() -> None:
    batch, sizes = 50, []
    for _ in range(4):
        batch = after_fill(batch, held=10, ceiling=200)
        sizes.append(batch)
    assert sizes == [100, 200, 200, 200]


def test_handlers_that_do_not_keep_up_with_the_batch_do_not_get_a_larger_one() -> None:
    assert after_fill(50, held=51, ceiling=200) == 50


def test_more_than_a_second_of_work_halves_the_batch_down_to_one() -> None:
    batch, sizes = 50, []
    for _ in range(7):
        batch = after_a_while(batch, load(finished=1, waiting=400), ceiling=200)
        sizes.append(batch)
    assert sizes == [25, 12, 6, 3, 1, 1, 1]


def test_handlers_that_finish_nothing_shrink_it() -> None:
    assert after_a_while(50, load(finished=0, waiting=1), ceiling=200) == 25


def test_an_idle_stream_leaves_it_alone() -> None:
    assert after_a_while(50, load(), ceiling=200) == 50
    assert after_a_while(50, load(elapsed_s=0.0, waiting=100), ceiling=200) == 50


def test_less_than_a_second_of_work_leaves_it_alone() -> None:
    assert after_a_while(50, load(finished=100, waiting=500), ceiling=200) == 50


@pytest.mark.parametrize(
    ("inflight", "credit", "expected"),
    [
        (0, 0, 50),
        (380, 0, 20),
        (399, 0, 1),
        (400, 0, 0),
        (0, 400, 0),
        (500, 0, 0),
        (0, 50, 50),
        (300, 60, 40),
        (340, 40, 0),
    ],
)
def test_a_pull_asks_for_the_room_there_is_and_not_for_crumbs(inflight: int, credit: int, expected: int) -> None:
    assert pull_size(50, limit=400, inflight=inflight, credit=credit) == expected
