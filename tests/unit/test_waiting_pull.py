"""The pull of a process that stands by: told to wait and not to wait, in whatever order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from parti.config import Settings
from parti.jetstream.connection import Connection
from parti.worker.standby import WaitingPull


async def test_it_stands_again_after_it_was_told_to_end_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = asyncio.Event()

    async def open_(settings: Settings, *, name: str) -> Any:
        opening.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Connection, "open", open_)
    waiting = WaitingPull(Settings(), "S", "worker-0")
    waiting.stand(True)
    waiting.stand(False)
    await waiting.stop()
    assert not opening.is_set()
    waiting.stand(True)
    async with asyncio.timeout(5):
        await opening.wait()
    await waiting.stop()
