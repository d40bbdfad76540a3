"""Parity: a shadow run that is as it should be passes, a broken one names exactly what is broken."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.migration.conftest import MakeScene
from tests.integration.migration.scene import NEW, OLD, Scene

from parti.core.invariants import Event, Finish, Invariant, Start, check_history
from parti.core.parity import Window
from parti.jetstream.api import ConsumerInfo, JetStreamApi
from parti.model.ledger import decode_batch


async def _filters(scene: Scene, change: Callable[[str, list[str]], list[str]]) -> None:
    """Change what the shadow consumers carry."""
    for info in await scene.kit.api.consumers(scene.kit.stream):
        if info.name.startswith("shadow-"):
            subjects = change(info.name, list(info.subjects))
            config: dict[str, Any] = {k: v for k, v in info.config.items() if k != "filter_subject"}
            config["filter_subjects"] = subjects
            await scene.kit.api.put_consumer(scene.kit.stream, config, action="update")


async def _ledger_tells_the_same(scene: Scene, ledger: str, answer: dict[str, Any]) -> None:
    """By the audit's definitions, applied to the rows that were recorded: p3 is lost, p9 is repeated, no other is."""
    first, last = answer["windows"][0]["first_seq"], answer["windows"][-1]["last_seq"]
    events: list[Event] = []
    for seq in range(1, (await scene.kit.api.stream_info(ledger)).last_seq + 1):
        stored = await scene.kit.api.call(f"STREAM.MSG.GET.{ledger}", {"seq": seq})
        batch = decode_batch(base64.b64decode(stored["message"]["data"]))
        for row in batch.rows():
            about = (row.partition, row.seq, batch.process, row.fence, batch.process)
            events += [Start(*about, row.started_us / 1e6), Finish(*about, row.finished_us / 1e6)]
    await scene.kit.delete_stream(ledger)
    # Between what was looked at and now the publisher went on.
    published = {p: [s for s in seqs if first <= s <= last] for p, seqs in scene.sent.items()}
    broken = {(each.invariant, each.partition) for each in check_history(published, events, unstored_s=1.0)}
    assert (Invariant.NO_LOSS, "p3") in broken
    assert {p for _, p in broken} == {"p3", "p9"}


async def test_messages_that_the_server_has_stored_and_not_counted_yet_are_not_missing(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = JetStreamApi.consumer_info

    async def behind(self: JetStreamApi, stream: str, consumer: str) -> ConsumerInfo:
        info = await ask(self, stream, consumer)
        return replace(info, pending=max(0, info.pending - 3))

    scene = await make_scene(4)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        async with scene.under_load():
            await scene.grows(OLD)
            monkeypatch.setattr(JetStreamApi, "consumer_info", behind)
            answer = await scene.does("run", "--phase", "validate", "--windows", "2", "--window", "0.5")
    for window in answer["windows"]:
        assert window["incomplete"] == []
        assert window["stored"] == window["new"]["delivered"] > 0


async def test_a_broken_shadow_run_names_the_partition_that_nobody_has_and_the_one_that_two_have(
    make_scene: MakeScene,
) -> None:
    scene = await make_scene(12)
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        lost, twice = scene.kit.subject("p3"), scene.kit.subject("p9")

        def broken(name: str, subjects: list[str]) -> list[str]:
            kept = [subject for subject in subjects if subject != lost]
            return kept if twice in kept else [*kept, twice]

        await _filters(scene, broken)
        async with scene.under_load():
            await scene.grows(OLD)
            ledger = f"{scene.kit.stream}-shadows"
            validate = ("run", "--phase", "validate", "--windows", "2", "--window", "0.5", "--ledger", ledger)
            answer = await scene.does(*validate, code=1)
            said = await scene.type("run", "--phase", "validate", "--windows", "1", "--window", "0.5")
        for window in answer["windows"]:
            assert window["stored"] > 0
            assert (window["unassigned"], window["duplicated"], window["incomplete"]) == (["p3"], ["p9"], [])
            rows = {row["partition"]: row for row in window["partitions"]}
            assert rows["p3"]["seen"] == 0
            assert rows["p9"]["repeated"] == rows["p9"]["stored"] == rows["p9"]["seen"]
            assert rows["p0"]["seen"] == rows["p0"]["stored"]
        await _ledger_tells_the_same(scene, ledger, answer)
        assert answer["phase"] == "shadow"  # it may not be switched like this
        assert "p3: unassigned: nobody has it" in said.out
        assert "p9: duplicated" in said.out
        refused = await scene.is_refused("run", "--phase", "switch")
        assert "not the time for 'switch'" in refused
        # Made again, it is as it should be.
        await scene.does(*scene.shadow)
        async with scene.under_load():
            answer = await scene.does("run", "--phase", "validate", "--windows", "1", "--window", "0.5")
        (window,) = answer["windows"]
        assert window["stored"] == window["new"]["delivered"] > 0
        assert answer["phase"] == "validated"


async def test_an_slo_that_is_broken_in_windows_in_a_row_takes_everything_back(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await make_scene(6)
    # One message too many waits in each window: the fleet is not allowed any.
    monkeypatch.setenv("PARTI_MIGRATE_MAX_LAG_MSGS", "0")
    monkeypatch.setenv("PARTI_MIGRATE_BREACHES", "2")
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await scene.does("run", "--phase", "validate", "--windows", "1", "--window", "0.2")
        async with scene.fleet():
            await scene.does("run", "--phase", "switch")
            await scene.publish(each=2)
            await scene.settles()
            monkeypatch.setattr(Window, "breaches", lambda self, slo: ("as if messages waited",))
            answer = await scene.does("run", "--phase", "validate", "--windows", "5", "--window", "0.2", code=1)
        assert len(answer["windows"]) == 2
        assert (answer["phase"], answer["rolled_back"]) == ("planned", True)
        await scene.publish(each=2)
        await scene.settles()
    scene.is_exact()
    assert (scene.by(NEW), scene.by(OLD)) == (12, 12)
    actions = [note.action for note in (await scene.record()).notes]
    assert actions == ["shadow", "validate", "switch", "validate", "rollback"]
