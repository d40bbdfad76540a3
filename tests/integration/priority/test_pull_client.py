"""The pull client that stands alone: messages and answers, refusals, interruptions, and its part in a group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.integration.conftest import eventually, open_kit
from tests.integration.priority.kit import GROUP, SHORT_S, GroupKit
from tests.integration.proxy import Proxy

from parti.core.priority import Policy, PriorityGroup
from parti.embedded import Server
from parti.errors import ConfigError, ConnectionFailed, NotFound, ServerTooOld
from parti.jetstream.connection import Connection
from parti.jetstream.priority import ensure_consumer
from parti.jetstream.pull_client import PullClient, Pulled

OVERFLOW = PriorityGroup(GROUP, Policy.OVERFLOW)
SECOND_NS = 1_000_000_000


async def take(client: PullClient, count: int) -> list[Pulled]:
    async with asyncio.timeout(15):
        return [await anext(client) for _ in range(count)]


# ── messages and answers ──────────────────────────────────────────────────────────────────────────────────────────


async def test_messages_come_in_order_and_acknowledged_ones_are_finished(group: GroupKit) -> None:
    await group.make(None)
    sent = await group.publish(300, b"data", {"X": "y"})
    async with group.client(group="") as client:
        for seq in sorted(sent):
            (message,) = await take(client, 1)
            assert (message.seq, message.data, message.headers) == (seq, b"data", {"X": "y"})
            assert (message.delivery.deliveries, message.pin_id) == (1, "")
            assert message.published_at.year > 2000
            message.ack()
            message.ack()
        await eventually(group.all_acked)
        assert (client.held, client.finished) == (0, 300)
        assert client.metrics.messages.value == 300


async def test_a_message_can_be_given_back_ended_and_kept(group: GroupKit) -> None:
    await group.make(None, ack_wait=SECOND_NS // 2)
    first, second, third = sorted(await group.publish(3))
    async with group.client(group="") as client:
        back, ended, kept = await take(client, 3)
        back.nak()
        ended.term()
        (again,) = await take(client, 1)
        assert (again.seq, again.delivery.deliveries) == (first, 2)
        again.nak(delay_s=0.2)
        (again,) = await take(client, 1)
        assert (again.seq, again.delivery.deliveries) == (first, 3)
        await again.ack_confirmed()
        for _ in range(8):  # for longer than ack_wait
            kept.in_progress()
            await asyncio.sleep(0.1)
        kept.ack()
        await eventually(group.all_acked)
        assert (ended.seq, kept.seq) == (second, third)
        assert kept.delivery.deliveries == 1
        assert client.held == 0


async def test_no_more_than_the_limit_is_unanswered_at_a_time(group: GroupKit) -> None:
    await group.make(None)
    await group.publish(50)
    async with group.client(group="", limit=7) as client:
        messages = await take(client, 7)
        assert (await group.info()).ack_pending == 7
        for message in messages:
            message.ack()
        for _ in range(43):
            (message,) = await take(client, 1)
            assert client.held <= 7
            message.ack()
        await eventually(group.all_acked)


async def test_what_comes_again_while_it_is_worked_on_is_finished_by_the_first_answer(group: GroupKit) -> None:
    await group.make(None, ack_wait=SECOND_NS // 2)
    await group.publish(1)
    async with group.client(group="") as client:
        (message,) = await take(client, 1)
        await eventually(lambda: client.metrics.messages.value == 2)
        message.ack()
        await eventually(group.all_acked)
        assert client.held == 0
        await group.publish(1)
        (other,) = await take(client, 1)
        assert other.seq != message.seq
        other.ack()


async def test_what_was_not_handed_out_is_given_back_at_the_end(group: GroupKit) -> None:
    await group.make(None)
    sent = await group.publish(20)
    async with group.client(group="") as client:
        (first,) = await take(client, 1)
        first.ack()
        await eventually(lambda: client.held == 19)
    async with group.client(group="") as client:
        for message in await take(client, 19):
            assert (message.delivery.deliveries, message.seq > min(sent)) == (2, True)
            message.ack()
        await eventually(group.all_acked)


async def test_several_tasks_and_several_clients_share_one_connection(group: GroupKit) -> None:
    await group.make(None)
    await ensure_consumer(group.kit.connection, group.stream, "other", None)
    seen: dict[str, list[int]] = {"shared": [], "other": []}

    async def work(client: PullClient) -> None:
        async for message in client:
            seen[client.consumer].append(message.seq)
            message.ack()

    clients = [PullClient(group.kit.connection, stream=group.stream, consumer=name) for name in seen]
    tasks = []
    for client in clients:
        await client.start()
        tasks += [asyncio.create_task(work(client)) for _ in range(3)]
    sent = await group.publish(200)
    await eventually(lambda: all(len(found) == 200 for found in seen.values()))
    for client in clients:
        await client.stop()
        await client.stop()
    await asyncio.gather(*tasks)
    assert all(sorted(found) == sorted(sent) for found in seen.values())
    await group.kit.api.account_info()  # the connection is the test's own, and stays


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 0}, "limit=0 leaves no room"),
        ({"min_pending": -1}, "min_pending=-1 is negative"),
        ({"priority": 10}, "priority=10 is outside"),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_opened(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PullClient("nats://localhost:1", stream="S", consumer="c", **options)


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        (OVERFLOW, {"group": ""}, "pulls without a group"),
        (OVERFLOW, {"group": "h"}, "expected its priority group 'g'"),
        (OVERFLOW, {"priority": 1}, "the consumer's policy is overflow"),
        (None, {}, "the consumer has no priority group"),
        (PriorityGroup(GROUP, Policy.PINNED), {"min_pending": 1}, "the consumer's policy is pinned_client"),
    ],
)
async def test_pulls_that_would_not_be_served_are_refused_at_the_start(
    group: GroupKit, made: PriorityGroup | None, options: dict[str, Any], said: str
) -> None:
    await group.make(made)
    client = group.client(**options)
    with pytest.raises(ConfigError, match=said):
        await client.start()
    assert (await group.info()).waiting == 0


async def test_consumers_that_cannot_be_pulled_are_refused(group: GroupKit) -> None:
    with pytest.raises(NotFound):
        await group.client().start()
    await group.put(ack_policy="none")
    with pytest.raises(ConfigError, match="no pull consumer with explicit"):
        await group.client(group="").start()


async def test_a_server_too_old_for_groups_is_named(group: GroupKit, monkeypatch: pytest.MonkeyPatch) -> None:
    await group.make(None)  # what an old server makes of a consumer with a group
    monkeypatch.setattr(Connection, "server_version", (2, 10, 29))
    with pytest.raises(ServerTooOld, match=r"nats-server 2\.10\.29, but priority policy overflow needs 2\.11\.0"):
        await group.client().start()
    with pytest.raises(ServerTooOld):
        await ensure_consumer(group.kit.connection, group.stream, "new", OVERFLOW)
    assert await group.kit.api.consumer_names(group.stream) == [group.consumer]
    monkeypatch.setattr(Connection, "server_version", (2, 11, 4))
    with pytest.raises(ServerTooOld, match=r"prioritized needs 2\.12\.0"):
        await ensure_consumer(group.kit.connection, group.stream, "new", PriorityGroup(GROUP, Policy.PRIORITIZED))


# ── interruptions ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_deleted_consumer_ends_the_iteration_with_the_reason(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    async with group.client() as client:
        await group.kit.api.delete_consumer(group.stream, group.consumer)
        with pytest.raises(NotFound):
            await take(client, 1)


async def test_a_consumer_that_was_made_anew_without_its_group_ends_the_iteration(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    async with group.client() as client:
        await group.put("update")  # which the server should not do
        client._engine.new_session("to look at it")  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="has no priority group"):
            await take(client, 1)


async def test_a_closed_connection_ends_the_iteration(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    client = group.client()
    await client.start()
    await client._connection.close()
    with pytest.raises(ConnectionFailed, match="was closed"):
        await take(client, 1)
    await client.stop()


async def test_a_cut_connection_costs_nothing_and_keeps_the_pin(group: GroupKit) -> None:
    await group.make(PriorityGroup(GROUP, Policy.PINNED), ack_wait=SECOND_NS)
    changes: list[str] = []
    proxy = Proxy(int(group.kit.url.rpartition(":")[2]))
    await proxy.start()
    try:
        client = PullClient(
            proxy.url,
            stream=group.stream,
            consumer=group.consumer,
            group=GROUP,
            on_pinned=changes.append,
            on_unpinned=changes.append,
        )
        async with client:
            await group.publish(3)
            for message in await take(client, 3):
                await message.ack_confirmed()
            pin = client.pin_id
            proxy.cut()
            sent = await group.publish(3)
            seen = set[int]()
            while seen != set(sent):
                (message,) = await take(client, 1)
                seen.add(message.seq)
                message.ack()
            assert (client.pin_id, changes) == (pin, [pin])
            await eventually(group.all_acked)
    finally:
        await proxy.stop()


async def test_a_killed_server_takes_the_pin_with_it_and_it_is_given_anew(
    nats_server_factory: Callable[..., Server],
) -> None:
    server = nats_server_factory()
    kit = await open_kit(server, "KILLED")
    group = GroupKit(kit)
    changes: list[str] = []
    try:
        await kit.create_stream(storage="file")
        await group.make(PriorityGroup(GROUP, Policy.PINNED))
        async with group.client(
            on_pinned=changes.append, on_unpinned=lambda reason: changes.append("lost")
        ) as client:
            await group.publish(1)
            (message,) = await take(client, 1)
            await message.ack_confirmed()
            before = client.pin_id
            await server.kill()
            await server.restart()
            await kit.connection.wait_connected(10)
            sent = await group.publish(2)
            seen = set[int]()
            while not seen >= set(sent):
                (message,) = await take(client, 1)
                seen.add(message.seq)
                message.ack()
            await eventually(lambda: client.pin_id not in {"", before})
            assert changes == [before, "lost", client.pin_id]
    finally:
        await kit.connection.close()


# ── overflow and priorities ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_remote_client_helps_only_above_its_threshold(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    remote_got: list[int] = []

    async def help_out(client: PullClient) -> None:
        async for message in client:
            remote_got.append(message.delivery.pending)
            message.ack()

    async with group.client(min_pending=10) as remote:
        helping = asyncio.create_task(help_out(remote))
        await group.publish(9)
        async with group.client() as local:
            for message in await take(local, 9):
                message.ack()
            await eventually(group.all_acked)
        assert remote_got == []
        await group.publish(30)
        await eventually(lambda: len(remote_got) == 21)
        # `pending` is what was left after each: at least nine, so there were ten or more when it was given out.
        assert min(remote_got) == 9
    await helping
    assert (await group.info()).pending == 9


async def test_the_second_region_waits_for_the_first(group: GroupKit) -> None:
    await group.make(PriorityGroup(GROUP, Policy.PRIORITIZED))
    async with group.client(priority=0, limit=4) as primary, group.client(priority=1) as secondary:
        await group.standing(4)
        await group.publish(4)
        messages = await take(primary, 4)
        assert secondary.held == 0
        await group.publish(2)  # the first has its hands full
        for message in await take(secondary, 2):
            message.ack()
        for message in messages:
            message.ack()
        await eventually(group.all_acked)
        raw = await (await group.raw()).pull(group=GROUP, priority=9, seconds=SHORT_S)
        await raw.brings_nothing()  # and so stands the pull of the first again
        await group.publish(1)
        (message,) = await take(primary, 1)
        message.ack()
