"""What tests of one worker share: many partitions, handlers that wait at a gate, and the headers of a dead letter."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

from tests.integration.conftest import Record

import parti
from parti.model.headers import parse_headers

MANY = [f"p{n}" for n in range(40)]


def headers_of(letter: dict[str, Any]) -> dict[str, str]:
    return parse_headers(base64.b64decode(letter["hdrs"]))


class Gate:
    """Holds handlers of the named partitions until it is opened."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.opened = asyncio.Event()
        self.entered = asyncio.Event()

    async def passes(self, message: parti.Message) -> None:
        if message.partition.id in self.held:
            self.entered.set()
            await self.opened.wait()

    def after(self, record: Record) -> Callable[[parti.Message], Awaitable[None]]:
        """A handler that notes a message, and then has to pass."""

        async def handle(message: parti.Message) -> None:
            record.note(message)
            await self.passes(message)

        return handle
