"""`parti partitions` and `parti top`: what the fleet has and what it does."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.operations.operators import FLEET, Operator
from tests.integration.terminal import Terminal

import parti
from parti.jetstream.kv import Bucket
from parti.jetstream.waiting import Waiting
from parti.model.fleet import Claim, encode, key_of

PARTITIONS = [f"p{n}" for n in range(4)]


def app_of(kit: Kit, handler: Any = None, partitions: Any = PARTITIONS, **settings: Any) -> parti.App:
    return kit.app(handler or Record().handle, partitions, **{**FLEET, **settings})


async def settled(operator: Operator, *arguments: str) -> dict[str, Any]:
    """The partitions, once nothing waits."""
    found: dict[str, Any] = {}

    async def nothing_waits() -> bool:
        found.update(await operator.ask("partitions", *arguments, *operator.place))
        return all(row["waiting"] == 0 for row in found["partitions"])

    await eventually(nothing_waits)
    return found


async def test_partitions_are_listed_with_owner_fence_position_and_what_waits(kit: Kit, operator: Operator) -> None:
    sent = await kit.publish(PARTITIONS, 5)
    async with app_of(kit).running(), app_of(kit).running():
        await operator.all_is_well(2)
        found = await settled(operator)
        claims = (await operator.records()).claims
        for row in found["partitions"]:
            claim = claims[row["partition"]]
            assert (row["owner"], row["fence_token"], row["state"]) == (claim.owner, claim.fence_token, "owned")
            assert row["position"] > sent[row["partition"]][-1]
            assert row["subject"] == kit.subject(row["partition"])
        assert found["summary"] == "4 partitions; 0 messages wait in 0 of them."
        mine = await operator.ask("partitions", "--owner", "worker-1", *operator.place)
        assert {row["owner"] for row in mine["partitions"]} == {"worker-1"}
        assert (await operator.ask("partitions", "--behind", *operator.place))["partitions"] == []
        first = await operator.ask("partitions", "--limit", "1", *operator.place)
        assert ([row["partition"] for row in first["partitions"]], first["total"]) == (["p0"], 4)
        code, text = await operator.type("partitions", "--limit", "1", *operator.place)
        assert code == 0
        assert "… and 3 more partitions (--limit)" in text
        assert text.rstrip().endswith("1 partition of 4; 0 messages wait in 0 of them.")


async def test_those_behind_come_with_most_first_and_those_without_owner_are_found(
    kit: Kit, operator: Operator
) -> None:
    async with app_of(kit).running():
        await operator.all_is_well(1)
    for n, partition in enumerate(PARTITIONS):
        await kit.publish([partition], n)
    assert len((await operator.ask("partitions", "--unowned", *operator.place))["partitions"]) == 4
    behind = await operator.ask("partitions", "--behind", "--limit", "2", *operator.place)
    assert [(row["partition"], row["waiting"]) for row in behind["partitions"]] == [("p3", 3), ("p2", 2)]
    assert behind["total"] == 3
    # Whoever owned them is gone, but still named by the claims.
    lost = await operator.ask("partitions", "--owner", "worker-0", *operator.place)
    assert {row["state"] for row in lost["partitions"]} == {"unowned"}


async def test_paused_partitions_say_so(kit: Kit, operator: Operator) -> None:
    async with app_of(kit).running():
        await operator.all_is_well(1)
        assert (await operator.type("pause", "p1", *operator.place))[0] == 0
        found = await operator.ask("partitions", "--unowned", *operator.place)
        assert [(row["partition"], row["state"]) for row in found["partitions"]] == [("p1", "paused")]


@pytest.mark.parametrize(
    "config", [{"allow_direct": False}, {"retention": "workqueue"}, {"storage": "file"}], ids=str
)
async def test_what_waits_is_counted_on_any_stream(kit: Kit, operator: Operator, config: dict[str, Any]) -> None:
    await kit.delete_stream()
    await kit.create_stream(**config)
    stops = asyncio.Event()

    async def stop_at_once(message: parti.Message) -> None:
        await stops.wait()

    await kit.publish(PARTITIONS, 4)
    async with app_of(kit, stop_at_once, ["*"] if "storage" in config else PARTITIONS).running():

        async def counted() -> bool:
            found = await operator.ask("partitions", *operator.place)
            return bool(sum(row["waiting"] for row in found["partitions"]) == 16)

        await eventually(counted)
        stops.set()
        await settled(operator)


async def test_counting_begins_at_the_sequence_asked_for(kit: Kit) -> None:
    sent = await kit.publish(["a", "b"], 10)
    for direct in (True, False):
        config = await kit.api.stream_config(kit.stream)
        await kit.api.call(f"STREAM.UPDATE.{kit.stream}", {**config, "allow_direct": direct})
        info = await kit.api.stream_info(kit.stream)
        wanted = {
            "all": (kit.subject("a"), 1),
            "half": (kit.subject("a"), sent["a"][5]),
            "last": (kit.subject("a"), sent["a"][-1]),
            "past": (kit.subject("a"), sent["a"][-1] + 1),
            "end": (kit.subject("b"), info.last_seq + 1),
            "both": (f"{kit.root}.*", sent["a"][5]),
            "none": (kit.subject("c"), 1),
        }
        done: list[int] = []
        found = await Waiting(kit.connection, kit.api, info).count(wanted, f"{kit.root}.>", counted=done.append)
        assert {name: backlog.messages for name, backlog in found.items()} == {
            **{"all": 10, "half": 5, "last": 1, "past": 0, "end": 0, "both": 10, "none": 0},
        }
        assert sum(done) == len(wanted)
        assert not [name for name in await kit.api.consumer_names(kit.stream) if name.startswith("parti-count")]


async def test_a_claim_of_a_partition_that_fits_no_template_stops_nobody(kit: Kit, operator: Operator) -> None:
    record = Record()
    await kit.publish(["a"])
    async with app_of(kit, record.handle, None).running():
        await record.reaches(1)
    claim = Claim(owner="gone", claimed_at=datetime.now(UTC), ttl_seconds=5.0, term=1)
    for name in ("a.b", ">", "a b"):
        await Bucket(kit.api, f"b{kit.root}").put(key_of("claims", name), encode(claim), revision=0)
    async with app_of(kit, record.handle, None).running():
        await kit.publish(["a", "new"])
        await record.reaches(3)
        rows = (await operator.ask("partitions", *operator.place))["partitions"]
        code, said = await operator.type("explain", "a.b", *operator.place)
    assert [row["partition"] for row in rows] == ["a", "new"]
    assert (code, "Traceback" in said) == (2, False)


@pytest.mark.parametrize("status", ["404", "503", "²"])
async def test_a_header_of_a_publisher_hides_nothing_that_waits(kit: Kit, status: str) -> None:
    headers = {"Status": status, "Nats-Stream": "other", "Nats-Num-Pending": "0", "Nats-Sequence": "7"}
    seq = await kit.api.publish(kit.subject("a"), b"", headers=headers)
    await kit.publish(["a"], 4)
    wanted = {"a": (kit.subject("a"), seq)}
    waiting = Waiting(kit.connection, kit.api, await kit.api.stream_info(kit.stream))
    found = await waiting.count(wanted, f"{kit.root}.>", look=True)
    assert (found["a"].messages, found["a"].first_seq) == (5, seq)


# ── top ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_top_shows_rates_lags_latencies_and_failures(kit: Kit, operator: Operator) -> None:
    async def sometimes(message: parti.Message) -> None:
        await asyncio.sleep(0.002)
        if message.partition.id == "p3":
            raise ValueError("no such order")

    await kit.publish(PARTITIONS, 200)
    async with app_of(kit, sometimes, attempts=1000, lease_ttl_s=1.5).running():

        async def told() -> bool:
            found = await operator.ask("top", *operator.place)
            worker = found["workers"][0]
            return bool(worker["p50_ms"]) and found["failures"] > 0 and "p3" in found["failing"]

        await eventually(told)
        found = await operator.ask("top", *operator.place)
        assert set(found) == {
            *(
                "at",
                "bucket",
                "dead_letters",
                "failing",
                "failures",
                "finished",
                "in_hand",
                "lag",
                "moved_in_a_minute",
            ),
            *("moving", "note", "partitions", "rate", "rebalancer", "unowned", "workers"),
        }
        worker = found["workers"][0]
        assert worker["p99_ms"] >= worker["p50_ms"] > 1
        assert (worker["worker"], worker["owned"], found["partitions"]) == ("worker-0", 4, 4)
        assert found["lag"] == worker["lag"] is not None
        code, text = await operator.type("top", "--once", *operator.place)
        assert code == 0
        assert "p3 fails: message " in text


async def test_top_runs_on_a_terminal_until_q(kit: Kit, operator: Operator) -> None:
    async with AsyncExitStack() as running:
        await running.enter_async_context(app_of(kit).running())
        for leave in ("q", "ctrl-c"):
            terminal = Terminal("top", "--interval", "0.2", *operator.place)
            await eventually(lambda t=terminal: "worker-0" in t.text and "q or Ctrl-C ends" in t.text, 15)  # type: ignore[misc]
            if leave == "q":
                terminal.type("q")
            else:
                terminal.process.send_signal(signal.SIGINT)
            assert await terminal.ends() == 0, terminal.text


async def test_moves_of_the_last_minute_are_counted(kit: Kit, operator: Operator) -> None:
    async with app_of(kit).running():
        await operator.all_is_well(1)
        assert (await operator.ask("top", *operator.place))["moved_in_a_minute"] == 0  # first owners are no moves
        async with app_of(kit).running():
            await operator.all_is_well(2)
            assert (await operator.ask("top", *operator.place))["moved_in_a_minute"] == 2
