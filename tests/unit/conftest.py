"""A bench of lanes for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.lanes_bench import Bench

from parti.worker.unordered import UnorderedLanes


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    it = Bench()
    yield it
    await it.close()


@pytest.fixture
async def unordered() -> AsyncIterator[Bench]:
    it = Bench(UnorderedLanes)
    yield it
    await it.close()
