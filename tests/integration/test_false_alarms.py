"""What is busy, idle or without an answer for a while is not a stall: such a worker is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from tests.integration.conftest import Kit, Record, eventually, open_kit
from tests.integration.handling import MANY

import parti
from parti.app.worker import Worker
from parti.embedded import Server


def stalls(worker: Worker) -> float:
    """Times that the worker was found to stand still."""
    return sum(sample.value for sample in worker.metrics.stalls.export("one").samples)


async def test_heartbeats_that_are_further_apart_than_a_stall_may_take(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["a"], pull_heartbeat_s=1.5, stall_after_s=0.5)
    async with app.running() as worker:
        heartbeats = worker.metrics.pull_status.child("heartbeat")
        await eventually(lambda: heartbeats.value >= 6 or stalls(worker) > 0)  # of two pulls that stand
        assert not stalls(worker)
        sent = await kit.publish(["a"])
        await record.reaches(1)
    record.is_exactly(sent)


async def test_handlers_that_compute_let_the_event_loop_turn(kit: Kit, record: Record) -> None:
    """With a backlog, one handler comes right after the other: together they must not hold up the lease."""
    sent = await kit.publish(MANY, 5)
    late_s = 0.0

    async def compute(message: parti.Message) -> None:
        record.note(message)
        time.sleep(0.02)  # noqa: ASYNC251 - what a handler does that parses something large

    async with kit.app(compute, MANY, stall_after_s=1.0).running() as worker:
        while len(record.calls) < 200 and not stalls(worker):
            before_s = time.monotonic()
            await asyncio.sleep(0)
            late_s = max(late_s, time.monotonic() - before_s)
        assert not stalls(worker)
    record.is_exactly(sent)
    assert late_s < 1.0


async def test_a_server_that_does_not_answer_for_a_while(
    nats_server_factory: Callable[..., Server], record: Record
) -> None:
    server = nats_server_factory()
    kit = await open_kit(server, "WORK")
    await kit.create_stream()
    app = kit.app(record.handle, ["a"], pull_heartbeat_s=0.5, stall_after_s=1.0, ping_interval_s=60.0)
    try:
        async with app.running() as worker:
            missed = worker.metrics.pull_missed_heartbeats
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await eventually(
                    lambda: (missed.value >= 1 and "pull" in worker.health.reasons) or stalls(worker) > 0
                )
                assert not stalls(worker)
            finally:
                os.kill(server.pid, signal.SIGCONT)
            sent = await kit.publish(["a"], 3)
            await record.reaches(3)
            await eventually(lambda: worker.health.healthy)
            assert not stalls(worker)
        record.is_exactly(sent)
    finally:
        await kit.connection.close()
