"""What is finished and still in a work-queue, because its acknowledgement came to nothing, is not handled again."""

from __future__ import annotations

import asyncio

import nats
import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.migration.conftest import MakeScene

from parti.app.migration.rollback import Rollback
from parti.model.migration import OldConsumer

QUICK = ("--windows", "1", "--window", "0.1")


async def test_the_server_ignores_acknowledgements_above_the_place_that_a_consumer_was_set_back_to(kit: Kit) -> None:
    """Why the rule is needed: the message stays, and no consumer has it in flight."""
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    config = {"name": "c", "durable_name": "c", "ack_policy": "explicit", "filter_subject": kit.subject("p0")}
    await kit.api.put_consumer(kit.stream, config, action="create")
    await kit.publish(["p0"], 2)
    client = await nats.connect(kit.url)
    try:
        subscription = await client.jetstream().pull_subscribe_bind("c", kit.stream)
        first, second = await subscription.fetch(2)
        await first.ack_sync()
        await kit.api.reset_consumer(kit.stream, "c", 2)
        await second.ack()
        await client.flush()  # the server has had it
        info = await kit.api.consumer_info(kit.stream, "c")
    finally:
        await client.close()
    found = await kit.api.next_on_subject(kit.stream, kit.subject("p0"), 1)
    assert found
    assert (found.seq, info.ack_pending, info.pending) == (2, 0, 1)


async def test_a_message_that_was_being_handled_when_the_fleet_let_go_is_handled_once(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's consumer drops the subject and is set back while the handler runs: what it acknowledges stays."""
    scene = await make_scene(1, "workqueue")
    (name,) = scene.names
    started, may_end, still_there = asyncio.Event(), asyncio.Event(), []
    remove = Rollback._remove_finished

    async def looking(rollback: Rollback, old: OldConsumer, position: int) -> None:
        found = await scene.kit.api.next_on_subject(scene.kit.stream, old.subject, 1)
        still_there.append((found.seq if found else 0, position))
        await remove(rollback, old, position)

    async def until_told() -> None:
        started.set()
        await may_end.wait()

    async def dropped() -> bool:
        infos = await scene.kit.api.consumers(scene.kit.stream)
        return not any(scene.kit.subject(name) in info.subjects for info in infos)

    monkeypatch.setattr(Rollback, "_remove_finished", looking)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        async with scene.fleet(1):
            await scene.does("run", "--phase", "validate", *QUICK)
            await scene.does("run", "--phase", "switch", "--yes")
            scene.takes = until_told
            await scene.publish(each=3)
            await started.wait()
            back = asyncio.create_task(scene.does("run", "--rollback"))
            await eventually(dropped)
            may_end.set()
            await back
            await scene.settles()
    first = scene.sent[name][0]
    assert still_there == [(first, first + 1)]  # finished, by the position, and nobody has removed it
    scene.is_exact()
