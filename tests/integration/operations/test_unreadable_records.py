"""Records that others have overwritten, in a fleet that handles messages: nothing stops, and it is told once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from tests.integration.conftest import Kit, eventually
from tests.integration.console.looking import console_of, events_of
from tests.integration.fleet import PARTITIONS, Fleet, Traffic, claims_of, newest_fence, owners, running
from tests.integration.operations.operators import Operator

from parti.cli import control, doctor
from parti.coordination import roles
from parti.core.progress import decode_progress
from parti.errors import ConfigError, DecodeError, WrongRevision
from parti.jetstream.kv import Bucket
from parti.model.fleet import Claim, Orders, decode, encode, key_of
from parti.worker import progress

DEEP = 100_000
HOSTILE: Mapping[str, bytes] = {
    "nothing": b"",
    "no UTF-8": b'{"kind":"\xff\xfe"}',
    "nested lists": b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "deeply nested lists": b"[" * DEEP + b"]" * DEEP,
    "a publish ack": b'{"stream":"S","seq":4}',
    "a huge number": b'{"kind":"claim","term":' + b"9" * 5000 + b"}",
    "no number": b'{"kind":"health","at":NaN}',
    "wrong types": b'{"kind":["orders"],"placed":7}',
}
NAIVE: Mapping[str, bytes] = {
    "health": b'{"kind":"health","incarnation":1,"at":"2026-11-18T02:30:00"}',
    "ids": b'{"kind":"member","token":"t","incarnation":1,"startedAt":"2026-11-18T02:30:00","ttlSeconds":5}',
    "leader": b'{"kind":"leader","holder":"w","token":"t","term":1,"since":"2026-11-18T02:30:00","ttlSeconds":5}',
    "claims": b'{"kind":"claim","owner":"w","claimedAt":"2026-11-18T02:30:00","ttlSeconds":5,"term":1}',
}
"""Records that are right but for a time without a zone."""
VIEWS = (
    ("status",),
    ("status", "--json"),
    ("top", "--once"),
    ("workers",),
    ("partitions",),
    ("explain", "p0"),
    ("plan",),
    ("dlq", "ls"),
    ("doctor",),
)
WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def commands_that_leave_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in the process of the fleet, whose log is looked at."""
    for module in (control, doctor):
        monkeypatch.setattr(module, "configure_logging", lambda *arguments: None)


def values_for(key: str) -> list[bytes]:
    kind = key.partition(".")[0]
    return [*HOSTILE.values(), *([NAIVE[kind]] if kind in NAIVE else [])]


async def overwrite(bucket: Bucket, key: str, value: bytes) -> None:
    """Write a key, however often others write it."""
    while True:
        found = await bucket.get(key)
        with contextlib.suppress(WrongRevision):
            await bucket.put(key, value, revision=found.revision if found else 0)
            return


async def handles_all(kit: Kit, fleet: Fleet) -> None:
    """Every partition handles what is published now, soon."""
    sent = await kit.publish(PARTITIONS)
    await eventually(lambda: fleet.journal.has(sent), WITHIN_S)


def told(lines: list[MutableMapping[str, Any]], key: str) -> list[MutableMapping[str, Any]]:
    return [line for line in lines if "is unreadable" in line["event"] and line.get("key") == key]


def mistakes(lines: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """What nobody has foreseen."""
    words = ("mistake in parti", "callback of the watch failed", "did not expect", "the work of a role failed")
    return [line for line in lines if any(word in line["event"] for word in words)]


@contextlib.asynccontextmanager
async def observed(kit: Kit) -> AsyncIterator[tuple[Fleet, Bucket, list[MutableMapping[str, Any]]]]:
    """A fleet of two that handles messages; at the end nothing is lost, and nobody has made a mistake."""
    with structlog.testing.capture_logs() as lines:
        async with running(kit, 2, strategy="load") as fleet, Traffic(kit, 100) as traffic:
            yield fleet, Bucket(kit.api, f"b{kit.root}"), lines
            await traffic.stop()
            await eventually(lambda: fleet.journal.has(traffic.sent), WITHIN_S)
    fleet.journal.nothing_is_lost(traffic.sent)
    fleet.journal.one_at_a_time()
    fleet.journal.fences_never_go_back()
    assert mistakes(lines) == []


@pytest.mark.parametrize(
    "key",
    [
        "ids.worker-0",
        "health.worker-0",
        "claims.p0",
        "leader.rebalancer",
        "leader.cleanup",
        "leader.monitor",
        "assignment.worker-0",
        "orders",
        "fleet",
        "progress.worker-0",
        "load.worker-0",
        "standby.worker-0.0a1b",
        "mirror",
        "migration",
        "migration.p0",
        "state.p0",
    ],
)
async def test_an_overwritten_record_stops_nothing(kit: Kit, operator: Operator, key: str) -> None:
    async with observed(kit) as (fleet, bucket, lines), console_of(kit) as console:
        for value in values_for(key):
            await overwrite(bucket, key, value)
            code, text = await operator.type("status", *operator.place)
            assert code in {0, 1}, text
            await handles_all(kit, fleet)
        await overwrite(bucket, key, HOSTILE["no UTF-8"])
        for view in VIEWS:
            code, text = await operator.type(*view, *(operator.place if view[0] != "dlq" else operator.place[:2]))
            if code == 2:
                assert key == "fleet", text  # what needs to know the stream says so in a line
        async with events_of(console) as events:
            await events.until(lambda picture: bool(picture["fleet"]))
        await handles_all(kit, fleet)
        assert len(told(lines, key)) <= len(fleet.workers), "each process tells it once, whatever was written"


@pytest.mark.parametrize("key", ["claims.p0", "assignment.worker-0", "leader.rebalancer", "fleet", "health.worker-0"])
async def test_what_the_fleet_writes_is_made_good_by_itself(kit: Kit, operator: Operator, key: str) -> None:
    async with observed(kit) as (fleet, bucket, lines):
        before = await claims_of(kit)
        for value in (HOSTILE["a publish ack"], HOSTILE["nothing"]):
            await overwrite(bucket, key, value)

            async def well() -> bool:
                found = await bucket.get(key)
                return bool(found and found.value) and (await operator.type("status", *operator.place))[0] == 0

            await eventually(well, WITHIN_S)
        after = await claims_of(kit)
        assert owners(after) == owners(before)
        assert told(lines, key)
        refused = sum(w.metrics.records_refused.total for w in fleet.workers)
        assert refused >= 1


async def test_a_claim_that_a_new_rebalancer_cannot_read_keeps_its_owner(kit: Kit) -> None:
    """It has no other record of who handles the partition than what the owner was told."""
    async with observed(kit) as (fleet, bucket, _):
        # Shared in another way than a rebalancer would share what nobody has.
        first = owners(await claims_of(kit))
        one, other = (next(p for p, owner in first.items() if owner == f"worker-{n}") for n in range(2))
        placed = {one: "worker-1", other: "worker-0"}
        await overwrite(bucket, "orders", encode(Orders(placed=placed)))

        async def swapped() -> bool:
            claims = await claims_of(kit)
            return owners(claims) == {**first, **placed} and all(c.state == "owned" for c in claims.values())

        await eventually(swapped)
        await overwrite(bucket, "orders", encode(Orders(hold_moves=True)))
        await fleet.settles()
        before = await claims_of(kit)
        for partition in PARTITIONS:
            await overwrite(bucket, key_of("claims", partition), HOSTILE["no UTF-8"])
        await overwrite(bucket, "leader.rebalancer", HOSTILE["no UTF-8"])

        async def all_are_claims() -> bool:
            with contextlib.suppress(Exception):
                return len(await claims_of(kit)) == len(PARTITIONS)
            return False

        await eventually(all_are_claims, WITHIN_S)
        after = await claims_of(kit)
        assert owners(after) == owners(before)
        assert newest_fence(after) >= newest_fence(before)
        await handles_all(kit, fleet)


async def test_what_a_worker_left_behind_and_nobody_can_read_is_removed(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ("ids.worker-7", "health.worker-7", "load.worker-7", "standby.worker-7.0a1b")
    async with observed(kit) as (fleet, bucket, _):
        for key in gone:
            await overwrite(bucket, key, HOSTILE["no UTF-8"])
        assert (await operator.type("status", *operator.place))[0] == 1
        monkeypatch.setattr(roles, "_CLEAN_S", 0.5)
        await overwrite(bucket, "leader.cleanup", HOSTILE["no UTF-8"])  # or it would go on a minute later

        async def removed() -> bool:
            found = [await bucket.get(key) for key in gone]
            return not any(entry and entry.value for entry in found)

        await eventually(removed, WITHIN_S)
        assert (await operator.type("status", *operator.place))[0] == 0
        await handles_all(kit, fleet)


@pytest.mark.parametrize("key", ["claims.p0.extra", "claims.p9/x", "claims.p=30", "assignment.worker=2D0", "ids.a/b"])
async def test_a_key_that_parti_does_not_write_stops_nothing(kit: Kit, operator: Operator, key: str) -> None:
    claim = Claim(owner="worker-9", incarnation=1, claimed_at=datetime.now(UTC), ttl_seconds=5.0, position=1, term=1)
    async with observed(kit) as (fleet, bucket, lines):
        for value in (encode(claim), HOSTILE["no UTF-8"], HOSTILE["nothing"]):
            await overwrite(bucket, key, value)
        # A new rebalancer reads it, and has something to do.
        await overwrite(bucket, "leader.rebalancer", HOSTILE["no UTF-8"])
        await eventually(lambda: any(w.manager and w.manager.leads for w in fleet.workers))
        await overwrite(bucket, "orders", encode(Orders(paused=("p0",))))
        await eventually(lambda: sum(len(w.partitions) for w in fleet.workers) == len(PARTITIONS) - 1, WITHIN_S)
        await overwrite(bucket, "orders", encode(Orders()))
        await handles_all(kit, fleet)
        assert len([line for line in lines if "all of them again" in line["event"]]) < 5
        for view in (("status",), ("doctor",)):
            code, text = await operator.type(*view, *operator.place)
            assert code in {0, 1}, text


async def test_an_empty_answer_in_the_place_of_a_lease_repeats_nothing(kit: Kit) -> None:
    """The worker counts until its lease is over, and by then it has stopped."""
    async with observed(kit) as (fleet, bucket, lines):
        await handles_all(kit, fleet)
        await overwrite(bucket, "ids.worker-1", HOSTILE["nothing"])
        await handles_all(kit, fleet)
        assert told(lines, "ids.worker-1")
    assert fleet.journal.repeats == []


async def test_positions_that_do_not_change_are_written_again(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REWRITTEN_S", 0.5)
    async with running(kit, 1) as fleet:
        await handles_all(kit, fleet)
        bucket = Bucket(kit.api, f"b{kit.root}")
        await overwrite(bucket, "progress.worker-0", HOSTILE["no UTF-8"])

        async def readable() -> bool:
            with contextlib.suppress(DecodeError):
                return decode_progress(await found(bucket, "progress.worker-0")).highest > len(PARTITIONS)
            return False

        await eventually(readable, WITHIN_S)


@pytest.mark.parametrize("value", ["a publish ack", "nothing"])
async def test_unreadable_orders_do_not_take_the_last_ones_back(kit: Kit, operator: Operator, value: str) -> None:
    async with observed(kit) as (fleet, bucket, lines):
        paused = Orders(paused=("p0",))
        await overwrite(bucket, "orders", encode(paused))
        await eventually(lambda: sum(len(w.partitions) for w in fleet.workers) == len(PARTITIONS) - 1)
        await overwrite(bucket, "orders", HOSTILE[value])
        await eventually(lambda: bool(told(lines, "orders")))
        # A new rebalancer has never seen them: what rests goes on resting.
        await overwrite(bucket, "leader.rebalancer", HOSTILE["nothing"])
        await eventually(lambda: any(w.manager and w.manager.leads for w in fleet.workers))
        sent = await kit.publish([p for p in PARTITIONS if p != "p0"], 5)
        await eventually(lambda: fleet.journal.has(sent), WITHIN_S)
        assert decode((await found(bucket, "claims.p0")), Claim).state == "free"
        code, text = await operator.type("status", *operator.place)
        assert (code, "parti doctor --repair orders" in text) == (1, True)
        code, text = await operator.type("pause", "p1", *operator.place)
        assert (code, "--repair orders" in text) == (2, True)
        code, text = await operator.type("doctor", *operator.place)
        assert (code, "record orders" in text) == (1, True)
        code, text = await operator.type("doctor", "--repair", "orders", *operator.place)
        assert code == 0, text
        await eventually(lambda: sum(len(w.partitions) for w in fleet.workers) == len(PARTITIONS))
        assert (await operator.type("doctor", "--repair", "orders", *operator.place))[0] == 2


async def found(bucket: Bucket, key: str) -> bytes:
    entry = await bucket.get(key)
    assert entry
    return entry.value


@pytest.mark.parametrize("key", ["claims.p0", "nonsense", "ids.nobody"])
async def test_only_what_cannot_be_read_is_removed(kit: Kit, operator: Operator, key: str) -> None:
    async with running(kit, 1):
        code, text = await operator.type("doctor", "--repair", key, *operator.place)
        assert code == 2, text


async def test_a_worker_whose_fixed_id_is_unreadable_gets_it_back(kit: Kit) -> None:
    with structlog.testing.capture_logs() as lines:
        async with running(kit, 1, worker_id="one") as fleet:
            bucket = Bucket(kit.api, f"b{kit.root}")
            for value in (HOSTILE["no UTF-8"], HOSTILE["nothing"]):
                await overwrite(bucket, "ids.one", value)
                await handles_all(kit, fleet)
    assert mistakes(lines) == []


async def test_dead_letters_with_impossible_numbers_are_listed(kit: Kit, operator: Operator) -> None:
    async with running(kit, 1) as fleet, console_of(kit) as console:
        headers = {
            "Parti-Stream": kit.stream,
            "Parti-Subject": kit.subject("p0"),
            "Parti-Partition": "p0",
            "Parti-Sequence": "9" * 5000,
            "Parti-Attempts": "9" * 5000,
            "Parti-Error": "ValueError: no",
        }
        await kit.api.publish(f"d{kit.root}.{kit.stream}.{kit.subject('p0')}", b"x", headers=headers)
        for arguments in (("ls",), ("ls", "--json"), ("show", "1")):
            code, text = await operator.type("dlq", *arguments, "--nats", kit.url)
            assert code == 0, text
        async with events_of(console) as events:
            await events.until(lambda picture: bool(picture["letters"]))
        assert (await console.ask("/")).status == 200
        await handles_all(kit, fleet)


async def test_a_fleet_record_that_nobody_repairs_is_refused_in_a_line(kit: Kit) -> None:
    async with running(kit, 1):
        pass
    bucket = Bucket(kit.api, f"b{kit.root}")
    await overwrite(bucket, "fleet", HOSTILE["a publish ack"])
    with pytest.raises(ConfigError, match=r"the key 'fleet' .* cannot be read .*parti doctor --repair fleet"):
        async with asyncio.timeout(60), running(kit, 1):
            pass
