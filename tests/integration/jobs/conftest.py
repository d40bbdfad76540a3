"""The kit of the tests of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.conftest import Kit
from tests.integration.jobs.kit import Gates, JobKit

from parti.errors import PartiError


@pytest.fixture
async def jobs(kit: Kit, no_settings_of_this_machine: None) -> AsyncIterator[JobKit]:
    """Names for jobs on the shared server; what was made is removed."""
    made = JobKit(kit)
    yield made
    try:
        await made.clean_up()
    except PartiError:
        pass


@pytest.fixture
async def gates() -> Gates:
    return Gates()
