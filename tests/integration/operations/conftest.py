"""An operator for each test, who has no settings of this machine but the names of the kit."""

from __future__ import annotations

import pytest
from tests.integration.conftest import Kit
from tests.integration.operations.operators import Operator


@pytest.fixture
def operator(
    kit: Kit,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_settings_of_this_machine: None,
) -> Operator:
    monkeypatch.setenv("PARTI_DEAD_LETTER_STREAM", f"d{kit.root}")
    monkeypatch.setenv("PARTI_DEAD_LETTER_SUBJECT", f"d{kit.root}")
    return Operator(kit, capsys)
