"""The story of the demo when it breaks off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from parti.cli.demo import story
from parti.cli.demo.stage import Stage
from parti.errors import PartiError


async def test_a_story_that_breaks_off_at_once_publishes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher would fail on a closed connection, and nobody would hear of it but the terminal."""
    published = asyncio.Event()

    async def publish() -> None:
        published.set()
        await asyncio.Event().wait()

    async def until(*_: object) -> None:
        pass

    async def rest(*_: object) -> None:
        await published.wait()
        raise PartiError("a worker ended by itself")

    kept: list[asyncio.Task[None]] = []
    stage = SimpleNamespace(
        fleet=SimpleNamespace(start=lambda: None, running=[]),
        publisher=SimpleNamespace(rate=0.0, run=publish),
        open_chapter=lambda number: None,
        begin=lambda: None,
        tell=lambda text: None,
        keep=kept.append,
        until=until,
    )
    monkeypatch.setattr(story, "_rest", rest)
    with pytest.raises(PartiError, match="ended by itself"):
        await story.act(cast("Stage", stage), story.Plan())
    assert [task.cancelled() for task in kept] == [True]
