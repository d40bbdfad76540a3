"""An operator for each test, who has no settings of this machine."""

from __future__ import annotations

import pytest
from tests.integration.conftest import Kit
from tests.integration.orders.operators import Operator


@pytest.fixture(autouse=True)
def _own_settings(no_settings_of_this_machine: None) -> None:
    """Every test here types commands."""


@pytest.fixture
def operator(kit: Kit, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(kit, capsys)
