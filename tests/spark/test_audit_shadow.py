"""The audit of a shadow run: what shadow consumers of `parti migrate` were given is judged like a ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.conftest import Kit, kit, no_settings_of_this_machine
from tests.integration.migration.scene import Scene

from parti.config import Settings
from parti.jetstream.target import Target
from parti.spark.audit import audit
from parti.spark.ledger import ledger_rows
from parti.spark.options import target_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["kit", "no_settings_of_this_machine"]
# Small in test_audit.py (what the audit finds) and tests/integration/migration (what a broken shadow run shows).
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def scene(kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_settings_of_this_machine: None) -> Scene:
    return Scene(kit, tmp_path, capsys, ["p0", "p1", "p2"])


async def _break(scene: Scene, lost: str, twice: str) -> None:
    """Take one partition from the shadow consumers, and give another to both of them."""
    for info in await scene.kit.api.consumers(scene.kit.stream):
        if info.name.startswith("shadow-"):
            config: dict[str, Any] = {k: v for k, v in info.config.items() if k != "filter_subject"}
            config["filter_subjects"] = sorted({*info.subjects, twice} - {lost})
            await scene.kit.api.put_consumer(scene.kit.stream, config, action="update")


async def test_an_unassigned_partition_is_a_loss_and_a_duplicated_one_a_repeat(
    spark: SparkSession, scene: Scene
) -> None:
    kit, ledger = scene.kit, f"{scene.kit.stream}-shadows"
    async with scene.old_worker():
        await scene.does(*scene.shadow)
        await _break(scene, lost=kit.subject("p1"), twice=kit.subject("p2"))
        async with scene.under_load():
            validate = ("run", "--phase", "validate", "--windows", "1", "--window", "0.5", "--ledger", ledger)
            (window,) = (await scene.does(*validate, code=1))["windows"]

    def read(stream: str) -> DataFrame:
        options = {**target_options(Target.of(Settings(nats=(kit.url,)))), "stream": stream}
        return spark.read.format("jetstream").options(**options).load()

    def judged() -> set[tuple[str, str]]:
        stored = read(kit.stream).where(f"seq between {window['first_seq']} and {window['last_seq']}")
        stored = stored.selectExpr("element_at(split(subject, '[.]'), -1) AS partition", "seq", "timestamp")
        result = audit(stored, ledger_rows(read(ledger)))
        rows = result.tables["violations"].select("invariant", "partition").distinct().collect()
        return {(row.invariant, row.partition) for row in rows}

    try:
        found = await asyncio.to_thread(judged)
    finally:
        await kit.delete_stream(ledger)
    assert ("NoLoss", "p1") in found
    assert ("NoRepeatOnPlannedMove", "p2") in found
    assert {partition for _, partition in found} == {"p1", "p2"}
