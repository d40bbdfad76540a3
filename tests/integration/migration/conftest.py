"""A scene for each test, on a stream of the retention that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit
from tests.integration.migration.scene import Scene

MakeScene = Callable[..., Coroutine[Any, Any, Scene]]


@pytest.fixture(autouse=True)
def _own_settings(no_settings_of_this_machine: None) -> None:
    """Every test here types commands."""


@pytest.fixture
def make_scene(kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> MakeScene:
    """A function that makes the scene: `await make_scene(20, retention="workqueue")`."""

    async def make(partitions: int, retention: str = "limits") -> Scene:
        if retention != "limits":
            await kit.delete_stream()
            await kit.create_stream(retention=retention)
        return Scene(kit, tmp_path, capsys, [f"p{n}" for n in range(partitions)])

    return make
