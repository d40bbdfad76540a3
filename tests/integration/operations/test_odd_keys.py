"""Keys that parti never writes, beside a running fleet: nothing stops, no command fails, and they are left alone."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from fuzz.raw import Raw, RawClient
from structlog.testing import capture_logs
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import PARTITIONS, running
from tests.integration.operations.operators import Operator

from parti.cli import control, doctor
from parti.coordination import roles
from parti.jetstream.kv import Bucket
from parti.model.fleet import Claim, encode

KINDS = (
    *(b"ids", b"health", b"claims", b"leader", b"assignment", b"load", b"standby", b"stalls", b"progress", b"state"),
    b"migration",
)
NAMES = (b"\xff", b"a.\xc3.b", b"p9/x", b"worker=2D0", b"\x1b[2J")
CLAIM = encode(Claim(owner="w", incarnation=1, claimed_at=datetime.now(UTC), ttl_seconds=5.0, position=1, term=1))
VIEWS = (
    *(("status",), ("status", "--json"), ("top", "--once"), ("workers",), ("partitions",), ("explain", "p0")),
    *(("plan",), ("dlq", "ls"), ("doctor",)),
)


@pytest.fixture(autouse=True)
def commands_that_leave_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (control, doctor):
        monkeypatch.setattr(module, "configure_logging", lambda *arguments: None)


async def plant(kit: Kit, value: bytes) -> list[int]:
    """Write every kind of record under keys that nobody would; returns where they lie."""
    records = [Raw(b"$KV.b%b.%b.%b" % (kit.root.encode(), kind, name), value) for kind in KINDS for name in NAMES]
    with RawClient(kit.url) as client:
        return await asyncio.to_thread(client.publish, records)


@pytest.mark.parametrize("value", [CLAIM, b"nonsense", b""], ids=["a claim", "nonsense", "nothing"])
async def test_a_fleet_its_cleanup_and_its_commands_go_on_beside_odd_keys(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.setattr(roles, "_CLEAN_S", 0.2)
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    planted = await plant(kit, value)
    with capture_logs() as lines:
        async with running(kit, 2) as fleet:
            await bucket.put("ids.nobody", b"nonsense", revision=0)

            async def cleaned_up() -> bool:
                entry = await bucket.get("ids.nobody")
                return not (entry and entry.value)

            await eventually(cleaned_up, 10)
            for view in VIEWS:
                code, text = await operator.type(*view, *operator.place)
                assert (code in {0, 1}, "\x1b[2J" in text) == (True, False), (view, text)
            sent = await kit.publish(PARTITIONS)
            await eventually(lambda: fleet.journal.has(sent), 10)
    assert [line for line in lines if line.get("exc_info")] == []
    for seq in planted:
        await kit.api.call(f"STREAM.MSG.GET.{bucket.stream}", {"seq": seq})


@pytest.mark.parametrize("value", [CLAIM, b"nonsense", b""], ids=["a claim", "nonsense", "nothing"])
async def test_keys_with_more_words_than_parti_writes_stop_nothing_and_can_be_repaired(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    monkeypatch.setattr(roles, "_CLEAN_S", 0.2)
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    keys = [f"{kind.decode()}.w.x" for kind in KINDS]
    async with running(kit, 2) as fleet:
        for key in keys:
            await bucket.put(key, value, revision=0)
        for view in VIEWS:
            code, text = await operator.type(*view, *operator.place)
            assert code in {0, 1}, (view, text)
        for key in keys:
            code, text = await operator.type("doctor", "--repair", key, *operator.place)
            assert code in {0, 2}, text
        sent = await kit.publish(PARTITIONS)
        await eventually(lambda: fleet.journal.has(sent), 10)
        code, text = await operator.type("doctor", *operator.place)
        assert (code, "cannot be read" in text) == (0, False), text
