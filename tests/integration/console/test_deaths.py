"""A console whose HTTP server is gone says so and ends, instead of waiting for browsers that never come."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.console.looking import Nothing

from parti.config import Settings
from parti.console.access import Access
from parti.console.hub import Hub
from parti.console.server import prepare, serving
from parti.console.web import build_web
from parti.errors import ConsoleEnded


async def test_a_console_that_cannot_listen_ends_with_an_error() -> None:
    hub = Hub()
    listener, access = prepare(Settings(console_port=0))
    assert isinstance(access, Access)
    listener.close()
    with pytest.raises(ConsoleEnded, match="start it again"):
        async with asyncio.timeout(10), serving(build_web(hub, Nothing(), access), hub, listener):
            await asyncio.Event().wait()
