"""The kit of the tests of priority groups."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.conftest import Kit
from tests.integration.priority.kit import GroupKit


@pytest.fixture
async def group(kit: Kit, no_settings_of_this_machine: None) -> AsyncIterator[GroupKit]:
    """A stream on the shared server, and a name for a consumer on it."""
    made = GroupKit(kit)
    yield made
    await made.clean_up()
