"""`parti migrate` killed with SIGKILL in the middle of each phase and run again: it completes, and loses nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.integration.migration.conftest import MakeScene
from tests.integration.migration.scene import NEW, OLD, Scene
from tests.integration.orders.operators import place

import parti
from parti.coordination import migration_desk

Point = tuple[str, str, str, int]
TTL_S = 3.0
"""Of the lease of a run, which the next one waits for."""
AGAIN = "goes on with the same command"
STOPPED = """
import os, signal, sys
from parti.cli.main import main
from parti.coordination import migration_desk
from parti.{module} import {owner}

migration_desk._TTL_S = {ttl}
_original, _left = {owner}.{method}, [{calls}]

async def _dies(*arguments, **options):
    _left[0] -= 1
    if _left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return await _original(*arguments, **options)

{owner}.{method} = _dies
sys.exit(main(sys.argv[1:]))
"""
"""The command line with a process that kills itself in the middle of its work, before one call takes effect."""

API, DESK = ("jetstream.api", "JetStreamApi"), ("coordination.migration_desk", "MigrationDesk")
SHADOW = ("shadow", [(*DESK, "_write", 1), (*DESK, "_write", 3), (*API, "put_consumer", 2)])
VALIDATE = ("validate", [(*API, "reset_consumer", 2), (*DESK, "end", 1)])
SWITCH = (
    "switch",
    [
        (*API, "pause_consumer", 3),  # some old consumers are paused
        (*API, "pause_consumer", 14),  # one batch is with the fleet
        (*DESK, "save", 1),  # the other is paused for good, and no position is stored
        (*DESK, "change_orders", 1),  # positions are stored, and no worker knows
        (*DESK, "end", 1),
    ],
)
CLEANUP = ("cleanup", [(*API, "delete_consumer", 4), (*DESK, "save", 2)])
ROLLBACK = (
    "rollback",
    [
        (*DESK, "change_orders", 1),
        (*API, "reset_consumer", 2),
        (*API, "pause_consumer", 2),
        (*DESK, "save", 2),  # the fleet has let go, and old consumers deliver already
        (*DESK, "end", 1),
    ],
)


PHASES: Sequence[tuple[str, Sequence[Point]]] = (SHADOW, VALIDATE, SWITCH, CLEANUP, ROLLBACK)


async def _killed(scene: Scene, arguments: Sequence[str], point: Point) -> str:
    """Run the command in a process of its own that dies at a point; what it said if it never came there."""
    module, owner, method, calls = point
    script = STOPPED.format(module=module, owner=owner, method=method, calls=calls, ttl=TTL_S)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        "migrate",
        *arguments,
        *place(scene.kit),
        cwd=scene.directory,
        env={"PYTHONPATH": str(Path(parti.__file__).parents[1]), "PATH": ""},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    return "" if process.returncode == -signal.SIGKILL else f"{process.returncode}: {said.decode()}"


async def test_a_migration_that_is_killed_in_the_switch_and_in_the_rollback_completes_and_loses_nothing(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it hurts most: positions are stored and no worker knows, old consumers deliver and none is noted."""
    points = {"switch": SWITCH[1][3:4], "rollback": ROLLBACK[1][3:4]}
    await _killed_everywhere(make_scene, "limits", monkeypatch, points)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_migration_that_is_killed_at_every_point_of_every_phase(
    make_scene: MakeScene, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _killed_everywhere(make_scene, retention, monkeypatch, dict(PHASES))


@pytest.mark.parametrize("point", [(*DESK, "save", 2), (*DESK, "change_orders", 1), (*DESK, "end", 1)])
async def test_an_abandonment_that_is_killed_between_its_writes_goes_on_and_repeats_nothing(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch, point: Point
) -> None:
    monkeypatch.setattr(migration_desk, "_TTL_S", TTL_S)
    scene = await make_scene(3)
    async with scene.old_worker():
        await scene.publish(2)
        await scene.settles()
        await scene.does(*scene.shadow)
    async with scene.fleet():
        await scene.publish(2)
        assert not await _killed(scene, ("run", "--abandon", "--yes"), point)
        await scene.does("run", "--abandon", "--yes")
        await scene.settles()
    record = await scene.record()
    assert (record.phase, record.doing, (await scene.orders()).withheld) == ("abandoned", "", ())
    scene.is_exact()


async def test_a_switch_that_was_killed_can_be_abandoned_once_its_old_consumers_are_stopped_for_good(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a question: what they have finished is known, and nobody is given more."""
    monkeypatch.setattr(migration_desk, "_TTL_S", TTL_S)
    scene = await make_scene(3)
    async with scene.old_worker():
        await scene.publish(2)
        await scene.settles()
        await scene.does(*scene.shadow)
        async with scene.fleet():
            await scene.does("run", "--phase", "validate", "--windows", "1", "--window", "0.3")
            assert not await _killed(scene, ("run", "--phase", "switch", "--at-once", "8"), (*DESK, "save", 2))
            await scene.publish(2)
            assert (await scene.does("run", "--abandon"))["phase"] == "abandoned"
            await scene.settles()
    scene.is_exact()


async def _killed_everywhere(
    make_scene: MakeScene, retention: str, monkeypatch: pytest.MonkeyPatch, points: Mapping[str, Sequence[Point]]
) -> None:
    monkeypatch.setattr(migration_desk, "_TTL_S", TTL_S)
    scene = await make_scene(10, retention)

    async def through(name: str, *arguments: str) -> None:
        for point in points.get(name, ()):
            said = await _killed(scene, arguments, point)
            # Some points are not on the way of every retention, and a busy server may be too slow for the lease.
            assert not said or retention != "limits" or AGAIN in said, f"{name}, {point}: {said}"
        answer = await scene.does(*arguments)
        assert (answer["ok"], answer["left"]) == (True, []), (name, answer)

    async with scene.old_worker(), scene.under_load():
        await scene.grows(OLD)
        await through("shadow", *scene.shadow)
        async with scene.fleet():
            await through("validate", "run", "--phase", "validate", "--windows", "1", "--window", "0.3")
            await through("switch", "run", "--phase", "switch", "--yes", "--at-once", "5")
            await scene.grows(NEW)
            await through("cleanup", "run", "--phase", "cleanup", "--yes")
            await through("rollback", "run", "--rollback", "--at-once", "5")
            await scene.grows(OLD)
        await scene.settles()
    record = await scene.record()
    assert (record.phase, record.doing) == ("planned", "")
    scene.is_exact()
    paused = [i.name for i in await scene.kit.api.consumers(scene.kit.stream) if i.paused]
    assert not paused
