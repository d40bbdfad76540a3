"""A simulated process that crashes leaves coroutines behind that nobody ever awaits: that is what a crash is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of this directory pass over them."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"))


@pytest.fixture(autouse=True)
def bury_the_dead() -> Iterator[None]:
    """Collect them here, so that no later test hears of them."""
    yield
    gc.collect()
