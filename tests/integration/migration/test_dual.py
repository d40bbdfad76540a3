"""Dual mode: both sides handle for a while, nobody is stopped, and a sink with (stream, sequence) tells repeats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from examples.legacy.once import Once
from tests.integration.migration.conftest import MakeScene
from tests.integration.migration.scene import NEW, OLD, Scene

QUICK = ("--windows", "1", "--window", "0.2")


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Once]:
    once = Once(str(tmp_path / "once.db"))
    yield once
    once.close()


def _effects(scene: Scene, sink: Once) -> None:
    """Bring what handlers did to the sink, in their order."""
    for calls in scene.handled.values():
        for seq, who in calls:
            sink.take(scene.kit.stream, seq, who)


async def test_both_handle_until_the_switch_and_each_effect_happens_once(make_scene: MakeScene, sink: Once) -> None:
    scene = await make_scene(8)
    async with scene.old_worker(), scene.under_load():
        await scene.grows(OLD)
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", *QUICK)
        async with scene.fleet():
            answer = await scene.does("run", "--phase", "switch", "--dual")
            assert "with the old consumers too (dual mode)" in answer["summary"]
            assert (await scene.does("status"))["partitions"] == {"old": 0, "both": 8, "fleet": 0}
            await scene.grows(NEW)
            await scene.grows(OLD)  # nobody was stopped
            # A cleanup would delete consumers that handle.
            assert "'switch' was begun and has not ended" in await scene.is_refused(
                "run", "--phase", "cleanup", "--yes"
            )
            answer = await scene.does("run", "--phase", "switch")
            assert answer["phase"] == "switched"
            await scene.grows(NEW)
            await scene.does("run", "--phase", "cleanup", "--yes")
        # What was published last may not be handled by anybody yet when the fleet leaves: it comes back for it.
    async with scene.fleet():
        await scene.settles()
    _effects(scene, sink)
    done = [seq for seq, _ in sink.effects()]
    assert sorted(done) == sorted(seq for seqs in scene.sent.values() for seq in seqs)
    # Each side kept its own order.
    for calls in scene.handled.values():
        for who in (OLD, NEW):
            mine = [seq for seq, by in calls if by == who]
            assert mine == sorted(set(mine))


async def test_dual_mode_goes_back_too(make_scene: MakeScene) -> None:
    scene = await make_scene(4)
    async with scene.old_worker(), scene.under_load():
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", *QUICK)
        async with scene.fleet():
            await scene.does("run", "--phase", "switch", "--dual")
            await scene.grows(NEW)
            answer = await scene.does("run", "--rollback")
            assert answer["phase"] == "planned"
            after = scene.by(NEW)
            await scene.grows(OLD)
            assert scene.by(NEW) == after
    async with scene.old_worker():
        await scene.settles()
    for partition, seqs in scene.sent.items():
        assert [seq for seq, by in scene.handled[partition] if by == OLD] == seqs


async def test_a_work_queue_cannot_have_both(make_scene: MakeScene) -> None:
    scene = await make_scene(2, "workqueue")
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", *QUICK)
        async with scene.fleet():
            assert "workqueue retention" in await scene.is_refused("run", "--phase", "switch", "--dual", "--yes")
