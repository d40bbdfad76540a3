"""What a worker promises its handler, on a real server: all of it, in order, once; and what it tells of itself."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import nats
import pytest
from tests.integration.conftest import Kit, Record, eventually, merge
from tests.integration.handling import MANY

import parti
from parti.embedded import Server

# ── everything, in order ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_every_message_is_handled_once_and_in_order_per_partition(kit: Kit, record: Record, kind: str) -> None:
    app = kit.app(record.handle if kind == "async" else record.note, MANY)
    backlog = await kit.publish(MANY, 25)
    async with app.running():
        sent = merge(backlog, await kit.publish(MANY, 25))
        await record.reaches(2000)
        await eventually(kit.all_acked)
    record.is_exactly(sent)


async def test_waiting_handlers_of_many_partitions_run_at_the_same_time(kit: Kit, record: Record) -> None:
    running = highest = 0

    async def handle(message: parti.Message) -> None:
        nonlocal running, highest
        record.note(message)
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0.005)
        running -= 1

    sent = await kit.publish(MANY, 5)
    async with kit.app(handle, MANY).running():
        await record.reaches(200)
    record.is_exactly(sent)
    assert highest > 10


async def test_the_message_carries_everything_a_handler_needs(kit: Kit) -> None:
    seen: list[parti.Message] = []

    async def handle(message: parti.Message) -> None:
        seen.append(message)

    app = kit.app(handle, ["etch1.c3"], subject=f"{kit.root}.{{tool}}.{{chamber}}.done")
    before = datetime.now(UTC) - timedelta(seconds=1)
    seq = await kit.api.publish(f"{kit.root}.etch1.c3.done", b"\x00payload", headers={"Trace": "abc"})
    async with app.running():
        await eventually(lambda: bool(seen))
    (message,) = seen
    assert message.subject == f"{kit.root}.etch1.c3.done"
    assert message.data == b"\x00payload"
    assert message.headers == {"Trace": "abc"}
    assert (message.stream, message.seq, message.worker_id) == (kit.stream, seq, "one")
    assert (message.attempt, message.fence, message.deliveries) == (1, 0, 1)
    assert message.partition.id == "etch1.c3"
    assert dict(message.partition.keys) == {"tool": "etch1", "chamber": "c3"}
    assert before < message.published_at <= message.received_at < datetime.now(UTC)
    context = message.context
    assert (context.partition_id, context.seq, context.published_at) == ("etch1.c3", seq, message.published_at)
    assert "payload" not in repr(message)
    assert "payload" not in repr(context)


async def test_without_a_list_every_subject_of_the_template_is_a_partition(kit: Kit, record: Record) -> None:
    sent = await kit.publish(["a", "b", "c"], 20)
    await kit.api.publish(f"{kit.root}.too.deep", b"")
    async with kit.app(record.handle).running() as worker:
        later = await kit.publish(["b", "new"], 20)
        await record.reaches(100)
        await eventually(lambda: worker.metrics.lane_count.export("one").samples[0].value == 4)
    record.is_exactly(merge(sent, later))


async def test_a_wildcard_partition_keeps_one_order_over_its_subjects(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["etch1.*", "etch2.c1"], subject=f"{kit.root}.{{tool}}.{{chamber}}")
    sent = await kit.publish(["etch1.c1", "etch1.c2", "etch1.c3", "etch2.c1"], 30)
    async with app.running():
        await record.reaches(120)
    record.is_exactly(
        {"etch1.*": sent["etch1.c1"] + sent["etch1.c2"] + sent["etch1.c3"], "etch2.c1": sent["etch2.c1"]}
    )


async def test_a_message_larger_than_a_pull_may_return_is_delivered(kit: Kit, record: Record) -> None:
    small = await kit.publish(["a"], 3)
    large = await kit.publish(["a"], 2, data=b"L" * 50_000)
    async with kit.app(record.handle, ["a"], pull_max_bytes=1024).running():
        last = await kit.publish(["a"], 3)
        await record.reaches(8)
    record.is_exactly(merge(small, large, last))


async def test_start_new_leaves_old_messages_alone(kit: Kit, record: Record) -> None:
    await kit.publish(["a", "b"], 10)
    app = kit.app(record.handle, ["a", "b"], start="new")
    async with app.running():
        sent = await kit.publish(["a", "b"], 10)
        await record.reaches(20)
    async with app.running():
        sent = merge(sent, await kit.publish(["a", "b"], 10))
        await record.reaches(40)
    record.is_exactly(sent)


# ── telemetry ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fetch(port: int | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_metrics_and_health_are_served_while_the_worker_runs(kit: Kit, record: Record) -> None:
    app = kit.app(record.handle, ["a", "b"], metrics_port=0)
    async with app.running() as worker:
        await kit.publish(["a", "b"], 10)
        await eventually(lambda: worker.finished == 20)
        status, text = await asyncio.to_thread(fetch, worker.metrics_port, "/metrics")
        assert status == 200
        for line in (
            'parti_consumer_messages_total{worker="one"} 20.0',
            'parti_handler_latency_seconds_count{worker="one"} 20.0',
            'parti_consumer_subject_count{worker="one"} 2.0',
            'parti_consumer_inflight{worker="one"} 0.0',
            'parti_lane_count{worker="one"} 2.0',
            'parti_pull_healthy{worker="one"} 1.0',
            'parti_connection_state{state="connected",worker="one"} 1.0',
        ):
            assert line in text
        status, text = await asyncio.to_thread(fetch, worker.metrics_port, "/healthz")
        assert (status, json.loads(text)) == (200, {"state": "healthy", "reasons": {}})
        worker.health.raise_signal("test", "said so")
        status, text = await asyncio.to_thread(fetch, worker.metrics_port, "/healthz")
        assert (status, json.loads(text)["reasons"]) == (503, {"test": "said so"})


async def test_a_worker_that_may_not_pull_says_so_by_name(nats_server_factory: Callable[..., Server]) -> None:
    server = nats_server_factory(
        config="""authorization { users: [
            { user: ann, password: pw, permissions: { publish: { deny: ["$JS.API.CONSUMER.MSG.NEXT.>"] } } }
        ] }"""
    )
    client = await nats.connect(server.url, user="ann", password="pw")
    await client.jetstream().add_stream(name="S", subjects=["s.*"])
    await client.close()
    app = parti.App(stream="S", subject="s.{k}", partitions=["a"], nats=server.url, user="ann", password="pw")

    @app.handler
    async def handle(message: parti.Message) -> None:
        """Never called."""

    async with app.running() as worker:
        await eventually(lambda: "$JS.API.CONSUMER.MSG.NEXT" in worker.health.reasons.get("permissions", ""))
