"""Every alert fires when what it is about happens, on a real server: scraped metrics, evaluated by promtool."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tests.alarms import PROVOKED, Alarm, alarm, provokes, scrape, scrape_file
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.fleet import FLEET, PARTITIONS, Fleet, Journal, Traffic
from tests.integration.jobs.kit import Gates, JobKit
from tests.integration.test_consumer_updates import add_rival
from tests.integration.test_fleet_outages import own_kit

import parti
from parti.app.worker import Worker
from parti.cli.audit import write_metrics
from parti.cli.main import main
from parti.core.fleet_view import FleetState
from parti.embedded import Server
from parti.errors import ApiError
from parti.jetstream.kv import Bucket
from parti.model.fleet import key_of
from parti.model.history import history_pattern
from parti.model.ledger import ledger_stream
from parti.spark.commits import Commit, encode
from parti.telemetry.alerts import Thresholds
from parti.telemetry.rules import all_alerts

__all__ = ["alarm", "own_kit"]

SERVED = {"metrics_port": 0}


def test_every_alert_is_provoked_by_a_test() -> None:
    assert PROVOKED.keys() == {alert.name for alert in all_alerts()}


def in_flight(worker: Worker) -> float:
    probe = worker.metrics.inflight.probe
    return probe() if probe else 0


# ── a worker alone ────────────────────────────────────────────────────────────────────────────────────────────────


@provokes("PartiRedeliveries", "PartiDeadLetters", "PartiRedeliveryBudget", "PartiLatencyBudget")
async def test_handlers_that_fail_and_are_slow(kit: Kit, alarm: Alarm) -> None:
    async def handle(message: parti.Message) -> None:
        if message.attempt == 1 or message.data == b"bad":
            raise RuntimeError("not this time")
        await asyncio.sleep(0.02)

    async with kit.app(handle, ["a", "b"], ordered=False, attempts=2, **SERVED).running() as worker:
        before = await scrape(worker)
        await kit.publish(["a", "b"], 5)
        await kit.publish(["a"], 1, data=b"bad")
        await eventually(lambda: worker.finished == 11)
        after = await scrape(worker)
    slow = Thresholds(latency_p95_s=0.005)
    await alarm.rings(before, after, ["PartiRedeliveries", "PartiDeadLetters"])
    await alarm.rings(before, after, ["PartiRedeliveryBudget", "PartiLatencyBudget"], slow)


@provokes("PartiDeadLetters")
async def test_what_a_new_worker_counts_before_its_first_scrape(kit: Kit, alarm: Alarm) -> None:
    async def handle(message: parti.Message) -> None:
        raise parti.Reject("no such order")

    async with kit.app(handle, ["a"], **SERVED).running() as worker:
        await kit.publish(["a"], 1)
        await eventually(lambda: worker.metrics.dead_letters.value == 1)
        first = await scrape(worker)
    await alarm.rings_at_its_first_scrape(first, ["PartiDeadLetters"])


@provokes("PartiSubjectsNearCap", "PartiBacklog", "PartiLag", "PartiConsumerUpdatesFail", "PartiUpdateBudget")
async def test_a_worker_that_has_too_much(kit: Kit, alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parti.worker.lag.LOOK_S", 0.05)
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    await add_rival(kit, "taken")
    gate, many = asyncio.Event(), [f"p{n}" for n in range(10)]

    async def handle(message: parti.Message) -> None:
        await gate.wait()

    app = kit.app(handle, ["p0"], max_subjects=10, max_ack_pending=20, pull_batch=4, update_attempts=1, **SERVED)
    async with app.running() as worker:
        before = await scrape(worker)
        await worker.update_worker_consumer("one", many)
        with pytest.raises(ApiError):
            await worker.update_worker_consumer("one", [*many[1:], "taken"])
        await kit.publish(many, 20)
        await eventually(lambda: worker.metrics.lag.value > 100 and in_flight(worker) >= 15)
        after = await scrape(worker)
        gate.set()
    updates = ["PartiConsumerUpdatesFail", "PartiUpdateBudget"]
    await alarm.rings(before, after, ["PartiSubjectsNearCap", "PartiBacklog", "PartiLag"], Thresholds(lag_msgs=100))
    await alarm.rings(before, after, updates)


@provokes("PartiStalled")
async def test_a_handler_that_blocks_the_event_loop(kit: Kit, alarm: Alarm) -> None:
    async def handle(message: parti.Message) -> None:
        while not worker.metrics.stalled.value:
            time.sleep(0.01)  # noqa: ASYNC251 - this is the fault

    async with kit.app(handle, ["a"], stall_after_s=0.5, **SERVED).running() as worker:
        before = await scrape(worker)
        await kit.publish(["a"])
        await eventually(lambda: worker.finished == 1)
        after = await scrape(worker)
    await alarm.rings(before, after, ["PartiStalled"])


@provokes("PartiLedgerStopped")
async def test_a_ledger_that_is_full(kit: Kit, record: Record, alarm: Alarm) -> None:
    name = ledger_stream(kit.stream)
    config = {"name": name, "subjects": [f"w{kit.root}.ledger.{kit.stream}.*"], "discard": "new"}
    await kit.api.call(f"STREAM.CREATE.{name}", config)
    app = kit.app(record.handle, ["a"], ledger="full", drain_timeout_s=0.2, **SERVED)
    async with app.running() as worker:
        await kit.publish(["a"])
        await eventually(lambda: worker.metrics.ledger_rows.value == 1)
        before = await scrape(worker)
        full = (await kit.api.stream_info(name)).messages
        await kit.api.call(f"STREAM.UPDATE.{name}", {**config, "max_msgs": full})
        await kit.publish(["a"], 10)
        await eventually(lambda: worker.metrics.ledger_failures.value > 0)
        after = await scrape(worker)
    await kit.delete_stream(name)
    await alarm.rings(before, after, ["PartiLedgerStopped"])


@provokes("PartiMirrorFull")
async def test_a_mirror_that_is_full(kit: Kit, alarm: Alarm) -> None:
    await kit.delete_stream()
    await kit.create_stream(storage="file")
    gate, many = asyncio.Event(), [f"p{n}" for n in range(10)]

    async def handle(message: parti.Message) -> None:
        await gate.wait()

    app = kit.app(handle, many, hot_mirror="on", hot_mirror_max_bytes=1 << 20, **SERVED)
    async with app.running() as worker:
        await eventually(lambda: bool(worker.metrics.mirror_inside.value))
        before = await scrape(worker)
        await kit.publish(many, 16, data=bytes(8_000))
        await eventually(lambda: worker.metrics.mirror_bytes.value > 0.96 * (1 << 20))
        after = await scrape(worker)
        gate.set()
    await alarm.rings(before, after, ["PartiMirrorFull"])


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@provokes("PartiJobsWait")
async def test_jobs_that_wait_for_slots(kit: Kit, alarm: Alarm, no_settings_of_this_machine: None) -> None:
    jobs, gates = JobKit(kit), Gates()
    async with jobs.app(gates.handle, max_capacity=5, **SERVED).running() as worker:
        before = await scrape(worker)
        await jobs.publish({"cost": 5}, {"cost": 5})
        await eventually(lambda: len(gates.holding) == 1 and worker.scheduler.waiting == 1)
        after = await scrape(worker)
        gates.opened.set()
        await eventually(lambda: len(gates.done) == 2)
    await jobs.clean_up()
    await alarm.rings(before, after, ["PartiJobsWait"])


# ── fleets ────────────────────────────────────────────────────────────────────────────────────────────────────────


@provokes(
    "PartiMovesSlow",
    "PartiPartitionsFlap",
    "PartiClaimsFail",
    "PartiHistoryLost",
    "PartiPartitionsUnowned",
    "PartiDegraded",
)
async def test_a_fleet_in_trouble(kit: Kit, alarm: Alarm) -> None:
    bucket = Bucket(kit.api, f"b{kit.root}")
    # Somebody else's stream takes what the history is published to.
    taken = f"X{kit.stream}"
    await kit.api.call(f"STREAM.CREATE.{taken}", {"name": taken, "subjects": [history_pattern(bucket.name)]})
    async with Fleet(kit, Journal()) as fleet, Traffic(kit):
        first = await fleet.join(takes_s=0.3, **SERVED)
        await fleet.settles()
        await eventually(lambda: first.metrics.history_lost.value == len(PARTITIONS))
        before = await scrape(first)
        for partition in PARTITIONS:
            entry = await bucket.get(key_of("claims", partition))
            assert entry
            await bucket.put(key_of("claims", partition), entry.value, revision=entry.revision)
        second = await fleet.join(takes_s=0.3, capacity=4, **SERVED)
        await fleet.settles(20)
        after = await scrape(first)
        owned = await scrape(first, second)
        await fleet.leave(first)
        await eventually(lambda: second.metrics.fleet_unowned.value == 4 and second.state is FleetState.DEGRADED, 20)
        unowned = await scrape(second)
    assert first.metrics.fleet_partitions.value == 0, "who is no longer the monitor goes on telling"
    await kit.delete_stream(taken)
    strict = Thresholds(move_s=0.025, claim_failures=0)
    await alarm.rings(before, after, ["PartiMovesSlow", "PartiPartitionsFlap", "PartiClaimsFail"], strict)
    await alarm.rings(before, after, ["PartiHistoryLost"])
    await alarm.rings(owned, unowned, ["PartiPartitionsUnowned", "PartiDegraded"])


@provokes(
    "PartiDisconnected", "PartiNotPulling", "PartiPositionsNotStored", "PartiNoLeader", "PartiLeaseLost", "PartiDown"
)
async def test_a_server_that_is_away(own_kit: tuple[Kit, Server], record: Record, alarm: Alarm) -> None:
    (kit, server), gate = own_kit, asyncio.Event()

    async def handle(message: parti.Message) -> None:
        record.note(message)
        await gate.wait()

    quick = {"reconnect_wait_s": 0.05, "pull_heartbeat_s": 0.2, "drain_timeout_s": 0.5, **SERVED}
    alone = kit.app(handle, ["a"], bucket=f"s{kit.root}", **quick).worker()
    await alone.start()
    async with Fleet(kit, Journal()) as fleet:
        member = await fleet.join(**{**FLEET, **quick, "lease_ttl_s": 1.0, "leader_ttl_s": 1.0})
        await fleet.settles()
        await kit.publish(["a"])
        await record.reaches(1)
        before = await scrape(alone, member)
        await server.kill()
        gate.set()
        await eventually(lambda: alone.metrics.progress_failures.value > 0, 20)
        await eventually(lambda: member.state is FleetState.DEGRADED and not member.metrics.leading.value, 20)
        # Only the worker alone goes on asking; one whose lease has ended does not even try.
        away = await scrape(alone, member)
        await server.restart()
        await eventually(lambda: member.state is FleetState.STABLE, 20)
        # To the worker this is what a lease is that has ended before it could be renewed.
        lease = f"$KV.b{kit.root}.{key_of('ids', member.worker_id)}"
        await kit.api.publish(lease, b"", headers={"KV-Operation": "DEL"})
        await eventually(lambda: member.metrics.lease_losses.total > 0, 20)
        back = await scrape(alone, member)
    await alone.stop(drain=False)
    outage = ["PartiDisconnected", "PartiNotPulling", "PartiPositionsNotStored", "PartiNoLeader"]
    await alarm.rings(before, away, outage)
    await alarm.rings(before, back, ["PartiLeaseLost"])
    await alarm.rings(before, {}, ["PartiDown"])


@provokes("PartiStandbyMissing")
async def test_nobody_stands_by(kit: Kit, record: Record, alarm: Alarm) -> None:
    shared = {**FLEET, "lease_ttl_s": 1.0, "leader_ttl_s": 1.0, "worker_id": "both", "standby": True, **SERVED}
    async with kit.app(record.handle, ["a"], **shared).running() as one:
        async with kit.app(record.handle, ["a"], **shared).running() as two:
            states = {FleetState.STABLE, FleetState.STANDBY}
            await eventually(lambda: {one.state, two.state} == states, 20)
            before = await scrape(one, two)
        after = await scrape(one)
    await alarm.rings(before, after, ["PartiStandbyMissing"])


# ── commands that end ─────────────────────────────────────────────────────────────────────────────────────────────


@provokes("PartiAuditViolated")
async def test_an_audit_that_found_something(tmp_path: Path, alarm: Alarm) -> None:
    """The whole way, from a stream with planted faults, is in tests/spark/test_audit_live.py."""
    from parti.spark.audit import AuditResult  # noqa: PLC0415 - pyspark takes a second
    from parti.spark.promises import Check  # noqa: PLC0415

    path = tmp_path / "audit.prom"
    scrapes = []
    for lost in (0, 1):
        checks = tuple(Check(name, n) for name, n in (("NoLoss", lost), ("Order", 0)))
        write_metrics("ORDERS", AuditResult(checks, {"messages": 7}, {}, cast("Any", None)), path)
        scrapes.append(scrape_file(path))
    before, after = scrapes
    await alarm.rings(before, after, ["PartiAuditViolated"])


@provokes("PartiAuditOld")
async def test_an_audit_that_does_not_run_any_more(tmp_path: Path, alarm: Alarm) -> None:
    from parti.spark.audit import AuditResult  # noqa: PLC0415 - as above

    path = tmp_path / "audit.prom"
    write_metrics("ORDERS", AuditResult((), {"messages": 7}, {}, cast("Any", None)), path)
    last = scrape_file(path)
    await alarm.rings(last, last, ["PartiAuditOld"], Thresholds(audit_age_s=20 * 60))


@provokes("PartiPipelineLags")
async def test_a_table_that_is_behind(
    kit: Kit, tmp_path: Path, alarm: Alarm, no_settings_of_this_machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    await kit.publish(["a"], 30)
    directory = tmp_path / "lake" / "bronze" / Commit(0, 0).directory
    directory.mkdir(parents=True)
    metrics, scrapes = tmp_path / "pipeline.prom", []
    command = ["pipeline", "status", "--lake", str(tmp_path / "lake"), "--stream", kit.stream, "--nats", kit.url]
    for taken in (30, 5):
        meta = {"stream": kit.stream, "offsets": {"start": {"next": 1}, "end": {"next": taken + 1}}}
        commit = Commit(0, 0, rows=taken, files=1, bytes=1, written_at="2026-11-17T00:00:00Z", meta=meta)
        (directory / "_meta.json").write_text(encode(commit))
        assert await asyncio.to_thread(main, [*command, "--metrics", str(metrics)]) == 0, capsys.readouterr()
        scrapes.append(scrape_file(metrics))
    before, after = scrapes
    await alarm.rings(before, after, ["PartiPipelineLags"], Thresholds(pipeline_lag=20))
    for wrong, text in (("nowhere/x.prom", "create the directory"), ("x.txt", "must end in .prom")):
        assert await asyncio.to_thread(main, [*command, "--metrics", str(tmp_path / wrong)]) == 2
        assert text in capsys.readouterr().err
