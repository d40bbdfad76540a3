"""Replays on Spark: beside live workers every message once and in order, and history again into a table."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.conftest import Kit, eventually, kit, merge
from tests.integration.fleet import FLEET, PARTITIONS, Journal, claims_of, owners
from tests.spark.replays import NAME, app_of, noting, replayed, workers

import parti
from parti.errors import ConfigError, ReplayFailed
from parti.jetstream.target import Target
from parti.spark.replay import SparkRounds
from parti.spark.replay_table import TableRequest, reprocess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["kit"]
CHOSEN, OTHERS = PARTITIONS[:5], PARTITIONS[5:]

pytestmark = pytest.mark.timeout(180)


async def test_a_backlog_goes_through_spark_while_workers_go_on_with_the_rest(
    kit: Kit, spark: SparkSession, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "journal")
    sent = merge(await kit.publish(CHOSEN, each=600), await kit.publish(OTHERS, each=40))
    app = app_of(kit, noting(tmp_path / "journal", rejects=97))
    async with workers(app):
        before = owners(await claims_of(kit))
        outcome = await replayed(app, CHOSEN, SparkRounds(spark), messages_per_round=2_000)
        late = await kit.publish(PARTITIONS, each=5)
        await eventually(lambda: journal.has(merge(sent, late)))
        assert owners(await claims_of(kit)) == before
    journal.is_clean(merge(sent, late))
    by_spark = [call for call in journal.starts if call.worker == NAME]
    assert outcome.complete
    assert outcome.given_back
    assert outcome.rounds >= 2
    assert outcome.handled + outcome.dead_lettered == len(by_spark) > 2_000
    assert {call.partition for call in by_spark} == set(CHOSEN)
    rejected = {call.seq for call in journal.starts if call.seq % 97 == 0}
    assert len(await kit.dead_letters()) == len(rejected)
    assert outcome.dead_lettered == sum(call.seq % 97 == 0 for call in by_spark)


@pytest.mark.slow
async def test_a_task_that_dies_ends_the_replay_and_the_workers_go_on_behind_it(
    kit: Kit, spark: SparkSession, tmp_path: Path
) -> None:
    journal, here = Journal(tmp_path / "journal"), os.getpid()
    sent = await kit.publish(CHOSEN, each=40)
    note, fatal = noting(tmp_path / "journal"), sent["p1"][20]

    async def handle(message: parti.Message) -> None:
        if message.seq == fatal and os.getpid() != here:
            os._exit(1)
        await note(message)

    app = app_of(kit, handle)
    with pytest.raises(ReplayFailed, match="round 1 failed"):
        await replayed(app, CHOSEN, SparkRounds(spark))
    async with workers(app, 1):
        await eventually(lambda: journal.has(sent))
    journal.nothing_is_lost(sent)
    journal.order_holds()
    journal.fences_never_go_back()


async def test_history_is_read_again_into_a_table_and_nobody_notices(
    kit: Kit, spark: SparkSession, tmp_path: Path
) -> None:
    sent = await kit.publish(["p0", "p1", "p2"], each=50)
    first = sent["p0"][0]
    until = max(seq for seqs in sent.values() for seq in seqs)

    def handle(message: parti.Message) -> Mapping[str, Any] | None:
        if message.partition.keys["p"] == "p2":
            return None
        if message.seq == first and b"bad" in message.data:
            raise ValueError("bad payload")
        return {"p": message.partition.id, "seq": message.seq}

    def request(output: str, **changes: Any) -> TableRequest:
        given = {
            "target": Target(servers=(kit.url,)),
            "stream": kit.stream,
            "handler": handle,
            "output": f"{tmp_path}/lake/{output}",
            "schema": "p string, seq bigint",
            "template": kit.template,
            "ending": until,
        }
        return TableRequest(**{**given, **changes})

    def run() -> None:
        request("again").check()
        reprocess(spark, request("again"))
        rows = request("again").table(spark).read().collect()
        expected = [(p, s) for p in ("p0", "p1") for s in sent[p] if s < until]
        assert sorted((row["p"], row["seq"]) for row in rows) == sorted(expected)
        with pytest.raises(ConfigError, match="exists already"):
            request("again").check()
        with pytest.raises(ReplayFailed, match=r"the table was not written: .*ZeroDivisionError"):
            reprocess(spark, request("failed", handler=lambda message: 1 // 0))
        assert not request("failed").table(spark).commits()

    await asyncio.to_thread(run)
    assert await kit.api.consumer_names(kit.stream) == []


MODULE = """
import asyncio, json, os, time
from pathlib import Path
import parti

app = parti.App(**json.loads(os.environ["APP"]))

@app.handler
async def handle(message):
    def note(what):
        line = f"{what} {time.time()} {message.partition.id} {message.seq} {message.fence} {message.worker_id} 0\\n"
        with Path(os.environ["JOURNAL"]).open("ab", buffering=0) as file:
            file.write(line.encode())
    note("start")
    await asyncio.sleep(0.002)
    note("end")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_command_is_killed_and_goes_on(kit: Kit, java: object, tmp_path: Path) -> None:
    """The whole command, with a JVM of its own, killed by SIGKILL in the middle, then run again to its end."""
    journal = Journal(tmp_path / "journal")
    sent = await kit.publish(CHOSEN, each=800)
    given = {"stream": kit.stream, "subject": kit.template, "partitions": PARTITIONS, **kit.settings, **FLEET}
    del given["worker_id"]
    given |= {"lease_ttl_s": 5.0, "leader_ttl_s": 5.0}
    (tmp_path / "shop.py").write_text(MODULE)
    environment = {**os.environ, "APP": json.dumps(given), "JOURNAL": str(tmp_path / "journal")}
    command = [sys.executable, "-m", "parti", "replay", "run", "shop:app", "--partitions", ",".join(CHOSEN)]
    command += ["--round", "1500", "--json"]

    async def start() -> asyncio.subprocess.Process:
        out = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment, stdout=out)

    def lines() -> int:
        path = tmp_path / "journal"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    killed = await start()
    try:
        await eventually(lambda: lines() > 1_500, 400)
    finally:
        killed.kill()
        await killed.wait()
    again = await start()
    try:
        told, _ = await again.communicate()
    finally:
        if again.returncode is None:
            again.kill()
    assert again.returncode == 0
    outcome = json.loads(told)
    assert outcome["complete"]
    assert outcome["handled"] < 4_000
    journal.nothing_is_lost(sent)
    journal.order_holds()
    journal.fences_never_go_back()
    assert len(journal.repeats) < 1_000
