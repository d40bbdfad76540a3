"""The audit of a real fleet: nothing on a clean run, live and afterwards; planted faults exactly."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import Kit, eventually, kit, merge
from tests.integration.fleet import PARTITIONS, claims_of
from tests.integration.hostile import raw_publisher
from tests.spark.replays import app_of, workers

import parti
from parti.cli.main import main
from parti.config import Settings
from parti.core.progress import decode_progress, encode_progress
from parti.errors import SubjectMismatch
from parti.jetstream.kv import Bucket
from parti.jetstream.target import Target
from parti.model.fleet import Claim, encode
from parti.model.ledger import LedgerBatch, encode_batch, ledger_stream, ledger_subject
from parti.model.partition import Template
from parti.spark.audit import AuditResult
from parti.spark.audit_control import ControlRecords
from parti.spark.audit_run import Wishes, run
from parti.spark.audit_sources import Question, prepare
from parti.spark.audit_state import read_mark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["kit"]
pytestmark = pytest.mark.timeout(500)


def question_of(kit: Kit, **more: object) -> Question:
    asked = {
        "target": Target.of(Settings(nats=(kit.url,))),
        "stream": kit.stream,
        "ledger_stream": ledger_stream(kit.stream),
        "bucket": f"b{kit.root}",
        **more,
    }
    return Question(**asked)  # type: ignore[arg-type]


async def audited(spark: SparkSession, kit: Kit, state: Path | None = None) -> AuditResult:
    def work() -> AuditResult:
        prepared = prepare(question_of(kit), read_mark(state) if state else None)
        return run(spark, prepared, Wishes(skew_s=0.005, state=state))

    return await asyncio.to_thread(work)


def found(result: AuditResult) -> dict[str, int]:
    return {check.name: check.count for check in result.checks if check.count}


async def record_batch(
    kit: Kit, process: str, partition: str, seq: int, fence: int, *, number: int = 0, closed: bool = True
) -> None:
    """Put a batch of one row into the ledger, of a handler that ran just now."""
    now_us = time.time_ns() // 1000
    batch = LedgerBatch(
        stream=kit.stream,
        stream_created=(await kit.api.stream_info(kit.stream)).created,
        worker="forged",
        process=process,
        number=number,
        closed=closed,
        partitions=(partition,),
        fences=(fence,),
        partition_index=array("I", [0]),
        seq=array("q", [seq]),
        attempt=array("I", [1]),
        outcome=array("B", [0]),
        received_us=array("q", [now_us]),
        started_us=array("q", [now_us]),
        finished_us=array("q", [now_us + 10]),
    )
    await kit.api.publish(ledger_subject(f"w{kit.root}", kit.stream, "forged"), encode_batch(batch))


async def advance_position(kit: Kit, partition: str, position: int) -> None:
    """Have the owner's record claim more than is true."""
    owner = (await claims_of(kit))[partition].owner
    bucket = Bucket(kit.api, f"b{kit.root}")
    entry = await bucket.get(f"progress.{owner}")
    assert entry is not None
    record = decode_progress(entry.value)
    forged = msgspec.structs.replace(record, behind={**record.behind, partition: position})
    await bucket.put(f"progress.{owner}", encode_progress(forged), revision=entry.revision)


async def has_rows(kit: Kit) -> bool:
    """Whether more is recorded than that two workers have begun."""
    return (await kit.api.stream_info(ledger_stream(kit.stream))).messages > 2


async def test_a_fleet_is_audited_while_it_works_and_planted_faults_are_found_exactly(
    kit: Kit, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[int] = []

    async def handle(message: parti.Message) -> None:
        done.append(message.seq)
        if message.seq % 40 == 0:
            raise parti.Reject("not this one")

    state = tmp_path / "state"
    sent = await kit.publish(PARTITIONS, each=20)
    async with workers(app_of(kit, handle, ledger="full")) as made:
        await eventually(lambda: len(done) >= sum(map(len, sent.values())))
        await eventually(lambda: has_rows(kit))
        live = await audited(spark, kit, state)
        assert found(live) == {}
        assert live.seen["rows"] > 0
        await made[0].stop()
        sent = merge(sent, await kit.publish(PARTITIONS, each=10))
        await eventually(lambda: len(done) >= sum(map(len, sent.values())))

    # A message that no owner has finished and a position that passed it; one that was handled again; a token that is
    # too small; a position beyond the stream; a batch that is missing.
    one, two, three, four = PARTITIONS[:4]
    lost = (await kit.publish([one]))[one][0]
    await advance_position(kit, one, lost + 1)
    newest = {partition: claim.fence_token for partition, claim in (await claims_of(kit)).items()}
    await record_batch(kit, "again", two, sent[two][-1], newest[two] + 1)
    fresh = (await kit.publish([three]))[three][0]
    await record_batch(kit, "stale", three, fresh, newest[three] - 1)
    await record_batch(kit, "holes", four, (await kit.publish([four]))[four][0], newest[four] + 1, closed=False)
    await record_batch(kit, "holes", four, (await kit.publish([four]))[four][0], newest[four] + 1, number=2)
    await advance_position(kit, four, 10**6)
    planted = {"NoLoss": 1, "NoRepeatOnPlannedMove": 1, "EpochGrows": 1, "PositionsWithinData": 1, "LedgerWhole": 1}
    examples = {"NoLoss": (one, lost), "NoRepeatOnPlannedMove": (two, sent[two][-1]), "EpochGrows": (three, fresh)}

    piece = await audited(spark, kit, state)
    assert found(piece) == planted
    assert {name: where(piece.check(name).examples[0]) for name in examples} == examples

    # The whole of it, by the command, in the one Spark that this process has.
    monkeypatch.setattr("parti.cli.audit.open_session", lambda name, master: nullcontext(spark))
    monkeypatch.chdir(tmp_path)
    place = ["--nats", kit.url, "--bucket", f"b{kit.root}"]
    report, output = tmp_path / "audit.html", tmp_path / "tables"
    metrics = tmp_path / "audit.prom"
    command = ["audit", "--stream", kit.stream, "--report", str(report), "--output", str(output), "--json", *place]
    command += ["--metrics", str(metrics)]
    capsys.readouterr()  # what the workers have logged
    assert await asyncio.to_thread(main, command) == 1
    answer = json.loads(capsys.readouterr().out)
    checks = {check["invariant"]: check for check in answer["checks"]}
    assert {name: check["found"] for name, check in checks.items() if check["found"]} == planted
    assert {name: where(checks[name]["examples"][0]) for name in examples} == examples
    samples = metrics.read_text()
    for name, check in checks.items():
        assert f'parti_audit_violations{{invariant="{name}",stream="{kit.stream}"}} {check["found"]:.1f}' in samples
    messages = sum(map(len, sent.values()))
    assert (answer["seen"]["messages"], answer["seen"]["rows"]) == (messages + 4, messages + 4)
    assert answer["seen"]["dead_letters"] == sum(seq % 40 == 0 for seqs in sent.values() for seq in seqs)
    assert answer["seen"]["moves"] >= 1
    assert {path.name for path in output.iterdir()} >= {"audit_violations", "audit_holdings", "audit_moves"}
    page = report.read_text()
    assert "NoLoss" in page
    assert page.count("<svg") == 4
    assert "http" not in page

    for arguments, text in _BAD_INPUT.items():
        words = [word.format(stream=kit.stream, tmp=tmp_path) for word in arguments]
        assert await asyncio.to_thread(main, ["audit", *words, *place]) == 2
        assert text in capsys.readouterr().err


async def test_an_audit_goes_by_the_records_that_parti_wrote_and_by_no_others(kit: Kit, spark: SparkSession) -> None:
    done: list[int] = []

    async def handle(message: parti.Message) -> None:
        done.append(message.seq)

    sent = await kit.publish(PARTITIONS, each=2)
    async with workers(app_of(kit, handle, ledger="full")):
        await eventually(lambda: len(done) == sum(map(len, sent.values())))
        await eventually(lambda: has_rows(kit))
    claim = (await claims_of(kit))[PARTITIONS[0]]
    beyond = encode(msgspec.structs.replace(claim, position=10**6))
    prefix = f"$KV.b{kit.root}.".encode()
    deleted = [(b"KV-Operation", b"DEL")]
    async with raw_publisher(kit.url) as publisher:
        for key in (b"claims.\xff", b"claims.p0.extra", b"claims.p9/x", b"\xff.p0", b"progress.\xc3"):
            await publisher.pub(prefix + key, beyond)
        for key in (b"claims.p8", b"claims.p9"):
            await publisher.hpub(prefix + key, deleted, beyond)
    with capture_logs() as logs:
        assert found(await audited(spark, kit)) == {}
    assert [line["claims"] for line in logs if line["event"] == "claims of no partition are left out"] == [
        ["p0.extra"]
    ]


def test_claims_that_all_fit_no_partition_say_that_the_template_is_wrong() -> None:
    claim = Claim(claimed_at=datetime.now(UTC), ttl_seconds=5.0, term=1)
    with pytest.raises(SubjectMismatch, match=r"'e1\.c1' has 2 values but template 'dc\.\{tool\}' has 1 keys"):
        ControlRecords(claims={"e1.c1": claim}).fitting(Template("dc.{tool}"))


def where(violation: Mapping[str, Any]) -> tuple[str, int]:
    return violation["partition"], violation["seq"]


_BAD_INPUT = {
    ("--stream", "NOWHERE"): "works on stream 'NOWHERE'",
    ("--stream", "{stream}", "--ledger-stream", "NONE"): "has no ledger: there is no stream 'NONE'",
    ("--stream", "{stream}", "--from", "soon"): "--from is 'soon'",
    ("--stream", "{stream}", "--incremental"): "belong together",
    ("--stream", "{stream}", "--report", "{tmp}/none/a.html"): "there is no directory",
    ("--stream", "{stream}", "--complete"): "needs --template",
}
