"""From one consumer per partition to one per worker and back, under load: nothing lost, nothing twice, in order."""

from __future__ import annotations

import json

import nats
import pytest
from tests.integration.conftest import eventually
from tests.integration.migration.conftest import MakeScene
from tests.integration.migration.scene import NEW, OLD, Scene

from parti.errors import NotFound

QUICK = ("--windows", "1", "--window", "0.3")


async def _to_the_fleet(scene: Scene) -> None:
    await scene.does("run", "--phase", "validate", *QUICK)
    answer = await scene.does("run", "--phase", "switch", "--yes", "--at-once", "8")
    assert (answer["phase"], answer["left"]) == ("switched", [])
    await scene.grows(NEW)


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_stream_moves_to_the_fleet_and_back_and_again_under_load(
    make_scene: MakeScene, retention: str
) -> None:
    scene = await make_scene(20, retention)
    async with scene.old_worker(), scene.under_load():
        await scene.grows(OLD)
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await _to_the_fleet(scene)
            assert (await scene.consumers())[f"w{scene.kit.root}"] == 2
            answer = await scene.does("run", "--phase", "cleanup", "--yes")
            assert answer["phase"] == "cleaned"
            # 20 became 2.
            assert await scene.consumers() == {f"w{scene.kit.root}": 2}

            answer = await scene.does("run", "--rollback", "--at-once", "8")
            assert (answer["phase"], answer["left"]) == ("planned", [])
            await scene.grows(OLD)
            assert (await scene.consumers())["old"] == 20

            await scene.does(*scene.shadow)
            await _to_the_fleet(scene)
            # Before a cleanup the old consumers of a limits stream have only to be set back.
            await scene.does("run", "--rollback")
            await scene.grows(OLD)
        await scene.settles()
    scene.is_exact()
    assert scene.by(OLD)
    assert scene.by(NEW)


async def test_a_plan_shows_consumers_before_and_after_and_changes_nothing(make_scene: MakeScene) -> None:
    scene = await make_scene(5)
    await scene.publish(each=3)
    async with scene.old_worker():
        await scene.settles()
        before = await scene.everything()
        arguments = ("plan", scene.module, "--consumers", "old-{partition}", "--workers", "2")
        answer = await scene.does(*arguments)
        said = await scene.type(*arguments)
        assert await scene.everything() == before
    assert answer["ok"]
    assert answer["consumers"] == {"before": 5, "after": 2}
    assert {row["partition"] for row in answer["partitions"]} == set(scene.names)
    assert "5 now, 2 when all is done" in said.out
    assert "It can begin" in said.out


async def test_every_phase_is_recorded_with_who_and_when_and_a_dry_run_changes_nothing(make_scene: MakeScene) -> None:
    scene = await make_scene(4)
    await scene.publish()
    async with scene.old_worker(), scene.fleet():
        # The workers were early: they have the partitions, and both sides would handle them.
        await eventually(lambda: scene.by(NEW) == 4)
        refused = await scene.is_refused(*scene.shadow)
        assert "both handle them" in refused
    async with scene.old_worker():
        for action in (scene.shadow, ("run", "--phase", "validate", *QUICK)):
            before = await scene.everything()
            dry = await scene.type(*action, "--dry-run")
            assert (dry.code, dry.out[:15]) == (0, "Dry run: would "), dry
            assert await scene.everything() == before
            await scene.does(*action)
        async with scene.fleet():
            for action in (
                ("run", "--phase", "switch"),
                ("run", "--phase", "cleanup", "--yes"),
                ("run", "--rollback"),
            ):
                before = (await scene.record(), await scene.orders())
                assert (await scene.type(*action, "--dry-run")).code == 0
                assert (await scene.record(), await scene.orders()) == before
                await scene.does(*action)
    notes = (await scene.record()).notes
    assert [note.action for note in notes] == ["shadow", "validate", "switch", "cleanup", "rollback"]
    assert all("@" in note.by and note.text for note in notes)
    status = await scene.does("status", "--all")
    assert status["partitions"] == {"old": 4, "both": 0, "fleet": 0}
    assert "rollback" in (await scene.type("status")).out


async def test_partitions_are_withheld_from_workers_until_the_switch(make_scene: MakeScene) -> None:
    scene = await make_scene(4)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await scene.publish(each=5)
            await scene.settles()
            assert scene.by(NEW) == 0
            assert (await scene.orders()).withheld == tuple(scene.names)
    scene.is_exact()


async def test_what_an_old_consumer_has_not_handled_yet_is_handled_by_the_fleet(make_scene: MakeScene) -> None:
    """Its worker is stopped in order, and lags: what it has acknowledged is not repeated, the rest is not lost."""
    scene = await make_scene(6)
    await scene.publish(each=10)
    async with scene.old_worker():
        await scene.settles()
    await scene.publish(each=10)
    await scene.does(*scene.shadow)
    await scene.does("run", "--phase", "validate", *QUICK)
    # With `start = "new"` too: the position of the old consumer counts, not where the fleet begins.
    async with scene.fleet(start="new"):
        await scene.does("run", "--phase", "switch")
        await scene.settles()
    scene.is_exact()
    assert (scene.by(OLD), scene.by(NEW)) == (60, 60)


async def test_a_message_in_flight_is_waited_for(make_scene: MakeScene) -> None:
    scene = await make_scene(1)
    (name,) = scene.names
    await scene.kit.api.put_consumer(
        scene.kit.stream,
        {
            "name": "old-p0",
            "durable_name": "old-p0",
            "ack_policy": "explicit",
            "ack_wait": 600 * 10**9,
            "filter_subject": scene.kit.subject(name),
        },
        action="create",
    )
    await scene.publish(each=3)
    client = await nats.connect(scene.kit.url)
    try:
        subscription = await client.jetstream().pull_subscribe_bind("old-p0", scene.kit.stream)
        (first,) = await subscription.fetch(1)
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", *QUICK)
        async with scene.fleet():
            stuck = await scene.does("run", "--phase", "switch", "--drain-timeout", "0.3", code=1)
            assert "1 messages of old-p0 were in flight" in stuck["left"][0]["why"]
            assert not (await scene.kit.api.consumer_info(scene.kit.stream, "old-p0")).paused
            assert (await scene.record()).doing == "switch"
            scene.handled[name].append((first.metadata.sequence.stream, OLD))
            await first.ack()
            await scene.does("run", "--phase", "switch")
            await scene.settles()
    finally:
        await client.close()
    scene.is_exact()
    assert (scene.by(OLD), scene.by(NEW)) == (1, 2)


@pytest.mark.parametrize(
    ("finished", "repeated"),
    [
        (0, []),
        # The second of three: the server tells that one is finished above its floor, not which.
        (1, [1]),
    ],
)
async def test_what_a_dead_worker_had_in_flight_can_be_taken_over(
    make_scene: MakeScene, finished: int, repeated: list[int]
) -> None:
    scene = await make_scene(1)
    config = {"ack_policy": "explicit", "filter_subject": scene.kit.subject("p0"), "ack_wait": 600 * 10**9}
    await scene.kit.api.put_consumer(
        scene.kit.stream, {"name": "old-p0", "durable_name": "old-p0", **config}, action="create"
    )
    await scene.publish(each=5)
    client = await nats.connect(scene.kit.url)
    subscription = await client.jetstream().pull_subscribe_bind("old-p0", scene.kit.stream)
    messages = await subscription.fetch(3)
    await messages[finished].ack_sync()
    await client.close()
    await scene.does(*scene.shadow)
    await scene.does("run", "--phase", "validate", *QUICK)
    async with scene.fleet():
        answer = await scene.does("run", "--phase", "switch", "--drain-timeout", "0.2", "--take-over")
        assert "2 messages were in flight" in answer["summary"]
        assert ("handled again" in answer["summary"]) == bool(repeated)
        sent = scene.sent["p0"]
        done_before = [sent[finished]] if not repeated else []
        await eventually(lambda: len(scene.handled["p0"]) == len(sent) - len(done_before))
    assert [seq for seq, _ in scene.handled["p0"]] == [seq for seq in sent if seq not in done_before]


async def test_consumers_that_know_no_way_to_a_position_come_back_by_start_sequence(make_scene: MakeScene) -> None:
    scene = await make_scene(1)
    config = {"deliver_policy": "new", "ack_policy": "explicit", "filter_subject": scene.kit.subject("p0")}
    await scene.kit.api.put_consumer(
        scene.kit.stream, {"name": "old-p0", "durable_name": "old-p0", "max_deliver": 7, **config}, action="create"
    )
    async with scene.old_worker([]):
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", *QUICK)
        async with scene.fleet():
            await scene.does("run", "--phase", "switch")
            await scene.publish(each=4)
            await scene.settles()
            await scene.does("run", "--rollback")
    info = await scene.kit.api.consumer_info(scene.kit.stream, "old-p0")
    assert (info.config["deliver_policy"], info.config["max_deliver"]) == ("by_start_sequence", 7)
    assert info.config["opt_start_seq"] == scene.sent["p0"][-1] + 1
    assert (info.pending, info.paused) == (0, False)


async def test_deleting_asks_first(make_scene: MakeScene) -> None:
    scene = await make_scene(3, "workqueue")
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", *QUICK)
        async with scene.fleet():
            refused = await scene.is_refused("run", "--phase", "switch")
            assert "3 partitions and delete their old consumers" in refused
            assert "--yes" in refused
            await scene.does("run", "--phase", "switch", "--yes")
            with pytest.raises(NotFound):
                await scene.kit.api.consumer_info(scene.kit.stream, "old-p0")


async def test_the_status_is_one_document(make_scene: MakeScene) -> None:
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        said = await scene.type("status", "--json")
    assert json.loads(said.out)["phase"] == "shadow"
