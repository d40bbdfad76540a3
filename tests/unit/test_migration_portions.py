"""Portions of a migration: two steps that overlap, never more at once than was said, and an error that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from parti.app.migration.site import in_portions


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 20])
async def test_never_more_than_at_once_are_between_the_two_steps(at_once: int) -> None:
    resting, most, done = 0, 0, list[int]()

    async def first(portion: Sequence[int]) -> Sequence[int]:
        nonlocal resting, most
        resting += len(portion)
        most = max(most, resting)
        await asyncio.sleep(0)
        return portion

    async def then(portion: Sequence[int]) -> None:
        nonlocal resting
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        resting -= len(portion)
        done.extend(portion)

    took_s = await in_portions(range(11), at_once, first, then)
    assert done == list(range(11))
    assert most <= at_once
    assert resting == 0
    assert len(took_s) == -(-11 // max(1, at_once // 2))


async def test_the_next_portion_is_begun_while_the_one_before_is_ended() -> None:
    begun = asyncio.Event()

    async def first(portion: Sequence[int]) -> int:
        if portion[0] == 1:
            begun.set()
        return portion[0]

    async def then(number: int) -> None:
        if number == 0:
            await begun.wait()  # for ever, were it one after the other

    async with asyncio.timeout(10):
        await in_portions(range(3), 2, first, then)


async def test_an_error_ends_it_and_what_is_under_way_is_cancelled() -> None:
    cancelled = False

    async def first(portion: Sequence[int]) -> int:
        if portion[0] == 1:
            await asyncio.sleep(0)
            raise ValueError("no")
        return portion[0]

    async def then(number: int) -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(ValueError, match="no"):
        await in_portions(range(3), 2, first, then)
    assert cancelled
