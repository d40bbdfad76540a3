"""A migration that the team does not go on with: no partition stays withheld, and nothing is repeated unasked."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.integration.conftest import becomes_pending, eventually
from tests.integration.migration.conftest import MakeScene
from tests.integration.migration.scene import NEW, OLD, Scene
from tests.integration.orders.operators import place
from tests.integration.terminal import Terminal

ABANDON = ("run", "--abandon")
QUICK = ("--windows", "1", "--window", "0.3")


async def _lose_old_consumers(scene: Scene) -> None:
    for name in scene.names:
        await scene.kit.api.delete_consumer(scene.kit.stream, f"old-{name}")


async def test_while_old_consumers_can_be_read_from_it_is_refused_and_a_dry_run_says_why(
    make_scene: MakeScene,
) -> None:
    scene = await make_scene(3)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.publish(2)
        await scene.settles()
        before = await scene.everything()
        dry = await scene.type(*ABANDON, "--dry-run")
        assert (dry.code, await scene.everything()) == (0, before)
        said = "3 old consumers can still be read from (old-p0, old-p1, old-p2)"
        assert said in " ".join(dry.out.split())
        refused = await scene.is_refused(*ABANDON)
        assert said in refused
        assert "say --yes if that is meant" in refused


async def test_ctrl_c_at_the_question_ends_it_and_changes_nothing(make_scene: MakeScene) -> None:
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.publish(1)
        await scene.settles()
        before = await scene.everything()
        terminal = Terminal("migrate", *ABANDON, *place(scene.kit))
        await eventually(lambda: "[y/N]: " in terminal.text)
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ends() == 130
        assert "Traceback" not in terminal.text
        assert await scene.everything() == before


async def test_the_question_is_no_part_of_an_answer_that_goes_into_a_file(
    make_scene: MakeScene, tmp_path: Path
) -> None:
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.publish(1)
        await scene.settles()
    with (tmp_path / "answer").open("w+b") as answer:
        terminal = Terminal("migrate", *ABANDON, "--json", *place(scene.kit), stdout=answer)
        await eventually(lambda: "[y/N]: " in terminal.text, 10)
        terminal.type("y\n")
        assert await terminal.ends() == 0
        answer.seek(0)
        assert json.load(answer)["phase"] == "abandoned"


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_confirmed_the_fleet_goes_on_where_idle_old_consumers_stopped(
    make_scene: MakeScene, retention: str
) -> None:
    scene = await make_scene(3, retention)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.publish(3)
        await scene.settles()
    await scene.publish(3)
    async with scene.fleet():
        answer = await scene.does(*ABANDON, "--yes")
        assert (answer["phase"], answer["ok"]) == ("abandoned", True)
        await scene.settles()
    scene.is_exact()
    assert (await scene.orders()).withheld == ()
    assert await scene.consumers() == {"old": 3, f"w{scene.kit.root}": 2}, "only shadows are deleted"
    note = (await scene.record()).notes[-1]
    assert (note.action, note.phase) == ("abandon", "abandoned")
    assert "@" in note.by
    assert "although 3 old consumers can still be read from" in note.text
    assert (await scene.does("status"))["withheld"] == 0


async def test_after_a_rollback_and_the_loss_of_old_consumers_it_begins_where_the_records_say(
    make_scene: MakeScene,
) -> None:
    """What old consumers finished after the fleet let go is told nowhere: it is repeated, and nothing before it."""
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.publish(2)
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await scene.does("run", "--phase", "validate", *QUICK)
            await scene.does("run", "--phase", "switch")
            await scene.publish(2)
            await scene.settles()
            await scene.does("run", "--rollback")
            await scene.publish(1)
            await scene.settles()
    await _lose_old_consumers(scene)
    assert "2 old consumers are gone (old-p0, old-p1)" in await scene.is_refused(*ABANDON)
    async with scene.fleet():
        await scene.does(*ABANDON, "--yes")
        await scene.grows(NEW, 2)
        await scene.publish(1)
        await scene.settles()
        for name, seqs in scene.sent.items():
            assert [seq for seq, _ in scene.handled[name]] == [*seqs[:5], *seqs[4:]]
        # And there still is a way back.
        await scene.does("run", "--rollback")
        await scene.publish(1)
        old = [f"old-{name}" for name in scene.names]
        await becomes_pending(scene.kit.api, scene.kit.stream, dict.fromkeys(old, 1))
        assert not any([(await scene.kit.api.consumer_info(scene.kit.stream, name)).paused for name in old])


async def test_what_was_never_switched_begins_where_the_shadow_phase_found_its_old_consumer(
    make_scene: MakeScene,
) -> None:
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.publish(4)
        await scene.settles()

        async def acknowledged() -> bool:
            infos = await scene.kit.api.consumers(scene.kit.stream)
            return all(i.ack_pending == 0 and i.pending == 0 for i in infos)

        await eventually(acknowledged)
        await scene.does(*scene.shadow)
    await _lose_old_consumers(scene)
    await scene.publish(1)
    async with scene.fleet():
        await scene.does(*ABANDON, "--yes")
        await scene.settles()
    scene.is_exact()


async def test_a_work_queue_loses_its_old_consumers_first_and_then_nothing_is_doubtful(make_scene: MakeScene) -> None:
    scene = await make_scene(2, "workqueue")
    async with scene.old_worker():
        await scene.publish(3)
        await scene.settles()
        await scene.does(*scene.shadow)
    await scene.publish(2)
    assert "delete them first" in await scene.is_refused(*ABANDON, "--yes")
    await _lose_old_consumers(scene)
    async with scene.fleet():
        await scene.does(*ABANDON)
        await scene.settles()
    scene.is_exact()
    assert (scene.by(OLD), scene.by(NEW)) == (6, 4)


async def test_a_stream_that_is_gone_or_made_anew_ends_the_migration_without_a_question(
    make_scene: MakeScene,
) -> None:
    scene = await make_scene(2)
    async with scene.old_worker():
        await scene.publish(3)
        await scene.settles()
        await scene.does(*scene.shadow)
    await scene.kit.delete_stream()
    assert "--abandon" in (await scene.type("run", "--rollback")).err
    assert (await scene.does(*ABANDON))["phase"] == "abandoned"
    assert (await scene.orders()).withheld == ()
    await scene.kit.create_stream()
    scene.sent.clear()
    scene.handled.clear()
    await scene.publish(2)
    async with scene.fleet():
        await scene.settles()
        again = await scene.does(*ABANDON)
        assert "no partition is withheld" in again["summary"]
    scene.is_exact()
    async with scene.old_worker():
        await scene.does(*scene.shadow)
    assert (await scene.orders()).withheld == tuple(scene.names)


async def test_a_second_shadow_remembers_consumers_that_are_gone_by_then(make_scene: MakeScene) -> None:
    """As one that nobody ever read, the partition would begin again with its oldest message, unasked."""
    scene = await make_scene(3)
    async with scene.old_worker():
        await scene.publish(4)
        await scene.settles()
        await scene.does(*scene.shadow)
    await scene.kit.api.delete_consumer(scene.kit.stream, "old-p1")
    await scene.does(*scene.shadow)
    async with scene.old_worker(["p0", "p2"]), scene.fleet():
        await scene.type("run", "--phase", "validate", *QUICK)
        assert "its consumer old-p1 is gone" in str(await scene.does("run", "--phase", "switch", code=1))
        await scene.publish(1)

        def with_the_fleet() -> set[str]:
            return {partition for partition, calls in scene.handled.items() for _, by in calls if by == NEW}

        await eventually(lambda: with_the_fleet() >= {"p0", "p2"})
        assert with_the_fleet() == {"p0", "p2"}
        assert "1 old consumer is gone (old-p1)" in await scene.is_refused(*ABANDON)
