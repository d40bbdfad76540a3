"""On whose event loop a worker process runs."""

from __future__ import annotations

import asyncio
import sys

import pytest

from parti.app.process import run_on_loop


async def whose() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_it_is_uvloops_where_that_is_installed() -> None:
    assert run_on_loop(whose()) == "uvloop"


def test_it_can_be_declined() -> None:
    assert run_on_loop(whose(), "asyncio") == "asyncio"


def test_without_uvloop_it_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run_on_loop(whose()) == "asyncio"
