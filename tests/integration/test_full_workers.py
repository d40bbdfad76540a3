"""Workers that cannot carry all that they are to own: they take what they can, and everybody says what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, Sent, eventually, merge
from tests.integration.fleet import FLEET
from tests.integration.processes import WorkerProcess, command, environment, write_app
from tests.pace import unhindered_s

import parti
from parti.embedded.monitor import free_ports

PARTITIONS = [f"p{n}" for n in range(16)]
FIRST, REST = PARTITIONS[:10], PARTITIONS[10:]
WITHIN_S = 10.0
RETENTIONS = ("limits", "workqueue", "interest")


class Fleet:
    """`parti worker` processes of one fleet, and what an operator and a probe see of it."""

    def __init__(self, kit: Kit, directory: Path, stack: contextlib.ExitStack, **settings: Any) -> None:
        self.kit = kit
        self.directory = directory
        self.stack = stack
        (self.port,) = free_ports(1)
        self.target = write_app(directory, kit, PARTITIONS, **{**FLEET, "lease_ttl_s": 3.0, **settings})

    def start(self, *options: str, **variables: str) -> WorkerProcess:
        log = {"PARTI_LOG_LEVEL": "info", "PARTI_LOG_FORMAT": "json"}
        worker = WorkerProcess(self.directory, self.target, self.kit.url, *options, **{**log, **variables})
        return self.stack.enter_context(worker)

    def status(self, *options: str) -> tuple[int, str]:
        """Exit code and output of `parti status`."""
        place = ("--nats", self.kit.url, "--bucket", self.kit.settings["bucket"])
        done = subprocess.run(
            command("status", *options, *place), env=environment(), capture_output=True, text=True, check=False
        )
        return done.returncode, " ".join(done.stdout.split())

    def health(self) -> tuple[int, dict[str, Any]]:
        """What `/healthz` answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as answer:
            return answer.code, json.load(answer)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


async def handled(worker: WorkerProcess, sent: Sent, within_s: float = 30.0) -> None:
    """Wait until every message was handled, in order and once."""
    wanted = {partition: seqs for partition, seqs in sent.items() if seqs}

    def done() -> bool:
        seen = worker.by_partition
        return all(len(seen.get(p, ())) >= len(seqs) for p, seqs in wanted.items())

    await eventually(done, within_s)
    assert {p: worker.by_partition[p] for p in wanted} == wanted


async def all_is_well(fleet: Fleet) -> None:
    async def well() -> bool:
        # Nothing is wrong, either, before the first partitions are given away: what is published then to an interest
        # stream is for nobody.
        code, said = await asyncio.to_thread(fleet.status)
        return code == 0 and f"{len(PARTITIONS)} partitions on" in said

    await eventually(well, 30)


def lines(worker: WorkerProcess) -> list[dict[str, Any]]:
    """The log of a worker that has ended."""
    assert worker.process.stderr
    return [json.loads(line) for line in worker.process.stderr.read().splitlines() if line.startswith("{")]


@pytest.fixture(params=RETENTIONS)
async def kept(request: pytest.FixtureRequest, kit: Kit) -> Kit:
    """A kit whose stream has each retention in turn."""
    if request.param != "limits":
        await kit.delete_stream()
        await kit.create_stream(retention=request.param)
    return kit


@pytest.mark.parametrize("ending", ["terminated", "killed"])
async def test_a_worker_restarted_with_too_little_room_takes_what_it_can(
    kept: Kit, tmp_path: Path, stack: contextlib.ExitStack, ending: str
) -> None:
    fleet = Fleet(kept, tmp_path, stack, identity="pod-a")
    first = fleet.start()
    await all_is_well(fleet)
    sent = await kept.publish(PARTITIONS, 3)
    await handled(first, sent)
    if ending == "terminated":
        assert first.terminate() == 0
    else:
        first.kill()
    full = fleet.start("--metrics-port", str(fleet.port), PARTI_MAX_SUBJECTS="10")
    more = await kept.publish(PARTITIONS, 3)
    began_s = unhindered_s()
    sent = merge(sent, more)
    await eventually(lambda: all(len(set(full.by_partition[p])) == 6 for p in FIRST), 30)
    assert unhindered_s() - began_s < WITHIN_S

    async def told() -> bool:
        code, text = await asyncio.to_thread(fleet.status)
        return code == 1 and "6 partitions without owner (p10, p11, p12, p13, p14, p15)" in text

    await eventually(told, WITHIN_S)
    _, text = await asyncio.to_thread(fleet.status)
    assert "6 partitions without a live owner (p10, p11, p12, p13, p14, p15)" in text
    assert "every worker is full; start another one, or raise max_subjects or capacity" in text
    code, health = await asyncio.to_thread(fleet.health)
    assert (code, health["state"]) == (503, "degraded")
    assert "6 partitions without owner" in health["reasons"]["fleet"]
    fleet.start("--identity", "pod-b")
    await eventually(lambda: all(len(set(full.by_partition[p])) == 6 for p in REST), 30)
    await all_is_well(fleet)
    if ending == "terminated":
        await handled(full, sent)
    assert (await asyncio.to_thread(fleet.health))[0] == 200
    assert full.terminate() == 0
    said = [line["event"] for line in lines(full)]
    assert not [event for event in said if "could not be applied" in event]
    assert said.count("worker degraded") == 1


async def test_a_worker_restarted_with_enough_room_again_takes_all(
    kept: Kit, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    fleet = Fleet(kept, tmp_path, stack, identity="pod-a")
    full = fleet.start(PARTI_MAX_SUBJECTS="16")
    await all_is_well(fleet)
    sent = await kept.publish(PARTITIONS, 3)
    await handled(full, sent)
    assert full.terminate() == 0
    small = fleet.start(PARTI_MAX_SUBJECTS="10")
    sent = merge(sent, await kept.publish(PARTITIONS, 3))
    await handled(small, {p: sent[p] for p in FIRST})
    assert small.terminate() == 0
    large = fleet.start(PARTI_MAX_SUBJECTS="16")
    await handled(large, sent, WITHIN_S)
    await all_is_well(fleet)


async def test_an_assignment_that_the_server_refuses_is_told_and_goes_on_when_it_can(
    kit: Kit, tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    await kit.delete_stream()
    await kit.create_stream(max_consumers=1)
    other = {"name": "other", "durable_name": "other", "ack_policy": "explicit"}
    await kit.api.put_consumer(kit.stream, other, action="create")
    fleet = Fleet(kit, tmp_path, stack)
    worker = fleet.start("--metrics-port", str(fleet.port))
    sent = await kit.publish(PARTITIONS, 2)

    async def told() -> bool:
        code, text = await asyncio.to_thread(fleet.status)
        return code == 1 and "the assignment could not be applied, and the last one stays" in text

    await eventually(told, 20)
    assert "maximum consumers limit reached" in (await asyncio.to_thread(fleet.status))[1]
    code, health = await asyncio.to_thread(fleet.health)
    assert code == 503
    assert "maximum consumers limit reached" in health["reasons"]["fleet"]
    await kit.api.delete_consumer(kit.stream, "other")
    await handled(worker, sent, WITHIN_S)
    await all_is_well(fleet)
    assert worker.terminate() == 0
    events = [line["event"] for line in lines(worker)]
    assert events.count("the assignment could not be applied; the last one stays") == 1


async def test_partitions_outside_the_stream_do_not_keep_a_worker_from_the_others(kit: Kit, record: Record) -> None:
    await kit.delete_stream()
    await kit.create_stream(subjects=[kit.subject("p0")])
    source = parti.Callback(lambda: wanted, refresh_s=0.2)
    wanted = ["p0"]
    async with kit.app(record.handle, source, **FLEET).running() as worker:
        await kit.publish(["p0"])
        await record.reaches(1)
        wanted = ["p0", "p1"]
        await eventually(lambda: not worker.health.healthy, 20)
        assert "1 partition assigned but not taken (p1): they lie outside the stream" in str(worker.health.reasons)
        await kit.publish(["p0"])
        await record.reaches(2)
        await kit.api.call(
            f"STREAM.UPDATE.{kit.stream}",
            {"name": kit.stream, "subjects": [kit.subject("*")], "storage": "memory", "allow_direct": True},
        )
        await kit.publish(["p1"])
        await record.reaches(3)
        await eventually(lambda: worker.health.healthy)
