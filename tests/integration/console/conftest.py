"""What the tests of the console share: where the browser is."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def chromium(debian_tool: Callable[[str], str], no_settings_of_this_machine: None) -> str:
    return debian_tool("chromium")
