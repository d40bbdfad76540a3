"""A partition moves while its next message fails: the attempts are counted on, and the last one is the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS, claims_of
from tests.integration.handling import headers_of
from tests.integration.orders.operators import Operator

import parti
from parti.app.worker import Worker

ALL = ["limits", "interest", "workqueue"]
BAD = "p3"


@dataclass
class Failing:
    """Two workers, and a message that fails whenever it is tried."""

    workers: list[Worker] = field(default_factory=list)
    calls: list[tuple[int, int, str]] = field(default_factory=list)
    """Of its partition: sequence, attempt and worker."""
    started_s: list[float] = field(default_factory=list)
    held_attempt: int = 0
    """The attempt that fails only when told to."""
    seq: int = 0
    fails: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, message: parti.Message) -> None:
        if message.partition.id != BAD:
            return
        self.calls.append((message.seq, message.attempt, message.worker_id))
        self.started_s.append(time.monotonic())
        if message.data == b"bad":
            if message.attempt == self.held_attempt:
                await self.fails.wait()
            raise ValueError(f"attempt {message.attempt} at {message.worker_id}")

    @property
    def owner(self) -> Worker:
        (owner,) = [w for w in self.workers if BAD in [p.id for p in w.partitions]]
        return owner

    async def begin(self, kit: Kit) -> tuple[str, str]:
        """Publish the message and one after it; returns the owner and the other worker."""
        claims = await claims_of(kit)
        here = claims[BAD].owner
        self.seq = (await kit.publish([BAD], data=b"bad"))[BAD][0]
        await kit.publish([BAD])
        return here, next(claim.owner for claim in claims.values() if claim.owner != here)

    @property
    def attempts(self) -> list[tuple[int, str]]:
        return [(attempt, worker) for seq, attempt, worker in self.calls if seq == self.seq]


@asynccontextmanager
async def failing(kit: Kit, retention: str, *, attempts: int, backoff_s: float) -> AsyncIterator[Failing]:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    found = Failing()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            app = kit.app(found.handle, PARTITIONS, **FLEET, attempts=attempts, backoff_s=(backoff_s,))
            found.workers.append(await stack.enter_async_context(app.running()))
        await eventually(lambda: all(len(w.partitions) == len(PARTITIONS) // 2 for w in found.workers))
        yield found


@pytest.mark.parametrize("retention", ALL)
async def test_a_message_that_fails_while_its_partition_is_released_is_not_at_its_first_attempt_again(
    kit: Kit, operator: Operator, retention: str
) -> None:
    async with failing(kit, retention, attempts=3, backoff_s=0.05) as found:
        found.held_attempt = 2
        here, there = await found.begin(kit)
        await eventually(lambda: len(found.calls) == 2)
        owner = found.owner
        await operator.orders("move", BAD, "--to", there, "--no-wait")
        await eventually(lambda: BAD not in [p.id for p in owner.partitions])
        found.fails.set()
        await eventually(lambda: len(found.calls) == 4)
        assert found.attempts == [(1, here), (2, here), (3, there)]
        assert found.calls[-1] == (found.seq + 1, 1, there)
        (letter,) = await kit.dead_letters()
        headers = headers_of(letter)
        assert (headers["Parti-Attempts"], headers["Parti-Worker"]) == ("3", there)


@pytest.mark.parametrize("retention", ALL)
async def test_a_message_that_waits_for_its_next_attempt_keeps_its_count_and_its_pause(
    kit: Kit, operator: Operator, retention: str
) -> None:
    pause_s = 2.0
    async with failing(kit, retention, attempts=2, backoff_s=pause_s) as found:
        here, there = await found.begin(kit)
        await eventually(lambda: bool(found.owner.metrics.handler_failures.child("retry").value))
        await operator.orders("move", BAD, "--to", there)
        await eventually(lambda: len(found.calls) == 3)
        assert found.attempts == [(1, here), (2, there)]
        assert found.started_s[1] - found.started_s[0] >= pause_s
        assert found.calls[-1] == (found.seq + 1, 1, there)
        (letter,) = await kit.dead_letters()
        assert headers_of(letter)["Parti-Attempts"] == "2"


@pytest.mark.parametrize("retention", ALL)
async def test_a_last_attempt_that_fails_while_its_partition_is_released_is_the_last(
    kit: Kit, operator: Operator, retention: str
) -> None:
    async with failing(kit, retention, attempts=1, backoff_s=0.05) as found:
        found.held_attempt = 1
        here, there = await found.begin(kit)
        await eventually(lambda: len(found.calls) == 1)
        owner = found.owner
        await operator.orders("move", BAD, "--to", there, "--no-wait")
        await eventually(lambda: BAD not in [p.id for p in owner.partitions])
        found.fails.set()
        await eventually(lambda: len(found.calls) == 2)
        assert found.calls == [(found.seq, 1, here), (found.seq + 1, 1, there)]
        (letter,) = await kit.dead_letters()
        assert headers_of(letter)["Parti-Worker"] == here
