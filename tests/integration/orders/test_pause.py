"""`parti pause` and `parti resume`: no planned moves, or nobody who handles certain partitions."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, PARTITIONS, Fleet, Journal, Traffic, claims_of, owners, running
from tests.integration.orders.operators import Operator, orders_in, owned_by
from tests.integration.processes import WorkerProcess, write_app

from parti.coordination.orders import change_orders
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders


async def test_nobody_handles_a_paused_partition_and_it_goes_on_where_it_was(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        async with Traffic(kit) as traffic:
            await traffic.goes_on()
            line = await operator.orders("pause", "p3", "p0")
            assert re.fullmatch(
                r"Paused 2 partitions in \d\.\d s: nobody handles them, and their positions are kept\.", line
            )
            claims = await claims_of(kit)
            assert {(claims[p].owner, claims[p].state) for p in ("p0", "p3")} == {("", "free")}
            before = {p: len(calls) for p, calls in fleet.journal.by_partition.items()}
            await traffic.goes_on(80)
            await eventually(lambda: len(fleet.journal.by_partition["p1"]) > before["p1"] + 5)
            assert {p: len(fleet.journal.by_partition[p]) for p in ("p0", "p3")} == {
                p: before[p] for p in ("p0", "p3")
            }
            status = await operator.status()
            assert (status["partitions"]["paused"], status["orders"]["paused"]) == (2, ["p0", "p3"])
            assert status["notes"] == ["2 partitions are paused (p0, p3)"]
            assert "; 2 paused" in (await operator.type("status")).out
            assert await operator.is_refused("move", "p3", "p1", "--to", "worker-0") == (
                "p3 is paused: nobody handles what is paused; resume first, with 'parti resume p3'"
            )
            assert (await operator.orders("pause", "p3")).startswith("Nobody handles 1 partition, as before")

            assert re.fullmatch(r"1 partition resumed in \d\.\d s\.", await operator.orders("resume", "p3"))
            await eventually(lambda: len(fleet.journal.by_partition["p3"]) > before["p3"])
            assert await operator.orders("resume", "p3") == "Nothing has changed: p3 was not paused."
            assert await operator.orders("resume") == (
                "Nothing has changed: moves were not paused; p0 stays paused: name it, or use --all."
            )
            await operator.orders("resume", "--all")
            assert await orders_in(kit) == Orders()
        await eventually(lambda: fleet.journal.has(traffic.sent))
        fleet.journal.is_clean(traffic.sent)


async def test_while_moves_are_paused_a_new_worker_gets_nothing(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        before = owners(await claims_of(kit))
        assert (await operator.orders("pause")).startswith("Moves are paused: ")
        assert (await operator.orders("pause")).startswith("Moves are paused already")
        await fleet.join()

        async def seen() -> bool:
            status = await operator.status()
            return bool(status["rebalancer"]["reason"] == "8 partitions on 3 workers, moves are paused")

        await eventually(seen)
        assert owners(await claims_of(kit)) == before
        assert (await operator.status())["notes"] == ["moves are paused, until 'parti resume'"]
        text = (await operator.type("status")).out
        assert re.search(r"^orders +no planned moves *$", text, re.MULTILINE)
        assert await operator.is_refused("move", "p0", "--to", "worker-2") == (
            "moves are paused, so nothing would move; use 'parti resume' first, or --no-wait to leave the order for "
            "later"
        )
        await operator.orders("move", "p0", "--to", "worker-2", "--no-wait")
        # Whoever drains is drained all the same.
        assert "worker-1 is drained: 4 partitions moved to" in await operator.orders("drain", "worker-1")
        await operator.orders("drain", "worker-1", "--undo")
        assert await owned_by(kit, "worker-1") == []
        assert await operator.orders("resume") == "Moves go on."
        await fleet.settles()
        assert (await claims_of(kit))["p0"].owner == "worker-2"


async def test_partitions_of_an_interest_stream_cannot_be_paused(kit: Kit, operator: Operator) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="interest")
    async with running(kit, 1):
        assert await operator.is_refused("pause", "p0") == (
            f"partitions of the stream '{kit.stream}' cannot be paused: it has the retention 'interest', so the "
            f"server would drop what is published to a partition while nobody owns it; stop the publishers instead"
        )
        assert (await operator.orders("pause")).startswith("Moves are paused")


async def test_partitions_of_a_work_queue_can_be_paused(kit: Kit, operator: Operator) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    async with running(kit, 2) as fleet:
        first = await kit.publish(PARTITIONS, 3)
        await eventually(lambda: fleet.journal.has(first))
        await operator.orders("pause", "p5")
        sent = await kit.publish(PARTITIONS, 3)
        await eventually(lambda: fleet.journal.has({p: s for p, s in sent.items() if p != "p5"}))
        assert not {call.seq for call in fleet.journal.by_partition["p5"]} & set(sent["p5"])
        await operator.orders("resume", "p5")
        await eventually(lambda: fleet.journal.has(sent))
        fleet.journal.is_clean({p: [*first[p], *sent[p]] for p in PARTITIONS})


async def test_a_paused_partition_of_a_work_queue_whose_owner_died_can_be_resumed(
    kit: Kit, operator: Operator, tmp_path: Path
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="workqueue")
    target = write_app(tmp_path, kit, ["p0"], **FLEET)
    with WorkerProcess(tmp_path, target, kit.url, "--worker-id", "dies") as dies:
        first = await kit.publish(["p0"])
        await eventually(lambda: dies.by_partition == first)
        dies.kill()
        # Before its lease ends, so that the partition is taken from one that is not there, and given to nobody.
        await change_orders(Bucket(kit.api, f"b{kit.root}"), lambda orders: replace(orders, paused=("p0",)))
    with WorkerProcess(tmp_path, target, kit.url, "--worker-id", "lives") as lives:

        async def rests() -> bool:
            return (await claims_of(kit))["p0"].owner == ""

        await eventually(rests)
        sent = await kit.publish(["p0"])
        await operator.orders("resume", "p0")
        await eventually(lambda: lives.by_partition["p0"] == [*first["p0"], *sent["p0"]])


async def test_a_fleet_that_is_not_running_can_be_told_for_later(kit: Kit, operator: Operator) -> None:
    async with running(kit, 1):
        pass
    assert await operator.orders("pause", "p0") == "Paused 1 partition; no worker is running anyway."
    async with Fleet(kit, Journal()) as fleet:
        await fleet.join()
        sent = await kit.publish(PARTITIONS)
        await eventually(lambda: fleet.journal.has({p: s for p, s in sent.items() if p != "p0"}))
        assert "p0" not in fleet.journal.by_partition
        await operator.orders("resume", "--all")
        await eventually(lambda: fleet.journal.has(sent))
