"""An operator who types commands about a fleet, and the fleets that orders are given to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.integration.commands import Said, type_command
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS, claims_of, owners

import parti
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders, decode

KEYS = {"at", "bucket", "changed", "missing", "ok", "orders", "partitions", "summary", "waited_s"}


def answer_of(said: Said) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(said.out)
    assert set(answer) == KEYS
    return answer


def place(kit: Kit) -> tuple[str, ...]:
    return "--nats", kit.url, "--bucket", f"b{kit.root}"


class Operator:
    """Types commands about the fleet of a kit."""

    def __init__(self, kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
        self._kit = kit
        self._capsys = capsys

    async def type(self, *arguments: str) -> Said:
        """Run a command in this process."""
        return await type_command(self._capsys, *arguments, *place(self._kit))

    async def orders(self, *arguments: str) -> str:
        """Give an order that the fleet can follow, and return the line that says so."""
        said = await self.type(*arguments)
        assert (said.code, said.err) == (0, ""), said
        assert len(said.out.splitlines()) == 1, said
        return said.out.rstrip()

    async def is_refused(self, *arguments: str) -> str:
        """Give an order that makes no sense: one line, exit code 2, and nothing is changed."""
        before = await Bucket(self._kit.api, f"b{self._kit.root}").get("orders")
        said = await self.type(*arguments)
        assert (said.code, said.out) == (2, ""), said
        assert len(said.err.splitlines()) == 1, said
        assert await Bucket(self._kit.api, f"b{self._kit.root}").get("orders") == before
        return said.err.removeprefix("parti: ").rstrip()

    async def status(self) -> dict[str, Any]:
        said = await self.type("status", "--json")
        status: dict[str, Any] = json.loads(said.out)
        return status


async def orders_in(kit: Kit) -> Orders:
    entry = await Bucket(kit.api, f"b{kit.root}").get("orders")
    return decode(entry.value, Orders) if entry else Orders()


def partitions_of(claims: Mapping[str, Any], worker: str) -> list[str]:
    return [p for p, claim in claims.items() if claim.owner == worker]


async def owned_by(kit: Kit, worker: str) -> list[str]:
    return partitions_of(await claims_of(kit), worker)


class Slow:
    """Handles one partition only when told to, and the others at once."""

    def __init__(self, slow: str) -> None:
        self.partition = slow
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()

    async def handle(self, message: parti.Message) -> None:
        if message.partition.id == self.partition:
            self.began.set()
            await self.may_end.wait()


@asynccontextmanager
async def slow_fleet(kit: Kit, slow: Slow) -> AsyncIterator[tuple[str, str]]:
    """Two workers, of which the first is in the middle of a message of the slow partition."""
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(kit.app(slow.handle, PARTITIONS, **FLEET).running())
        stack.callback(slow.may_end.set)

        async def shared() -> bool:
            claims = await claims_of(kit)
            return len(set(owners(claims).values())) == 2 and {c.state for c in claims.values()} == {"owned"}

        await eventually(shared)
        here = (await claims_of(kit))[slow.partition].owner
        await kit.publish([slow.partition])
        await slow.began.wait()
        yield here, "worker-1" if here == "worker-0" else "worker-0"
