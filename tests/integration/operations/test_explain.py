"""`parti explain` and the history that it reads: the story of a partition, told by the fleet itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.integration.conftest import Kit, Record, eventually
from tests.integration.operations.operators import FLEET, Operator
from tests.integration.processes import WorkerProcess, write_app

import parti
from parti.coordination.history import read_history
from parti.errors import NotFound
from parti.model.history import history_stream

PARTITIONS = [f"p{n}" for n in range(4)]


def app_of(kit: Kit, handler: Any = None, **settings: Any) -> parti.App:
    return kit.app(handler or Record().handle, PARTITIONS, **{**FLEET, **settings})


async def test_a_partition_that_moved_three_times_tells_its_story(
    kit: Kit, operator: Operator, tmp_path: Path
) -> None:
    await kit.publish(PARTITIONS, 3)
    target = write_app(tmp_path, kit, PARTITIONS, **FLEET)
    with WorkerProcess(tmp_path, target, kit.url) as first:
        await operator.all_is_well(1)
        with WorkerProcess(tmp_path, target, kit.url):
            await operator.all_is_well(2)
            claims = (await operator.records()).claims
            moved = next(p for p, claim in claims.items() if claim.owner == "worker-1")
            code, _ = await operator.type("move", moved, "--to", "worker-0", *operator.place)
            assert code == 0
            await operator.owned_by(moved, "worker-0")
            first.kill()
            await operator.owned_by(moved, "worker-1")

            async def told() -> bool:
                return len((await operator.explain(moved))["history"]) == 4

            await eventually(told)
            story = await operator.explain(moved)
            changes = [(r["from"], r["to"], r["cause"]) for r in story["history"]]
            assert changes == [
                ("", "worker-0", "new"),
                ("worker-0", "worker-1", "join"),
                ("worker-1", "worker-0", "place"),
                ("worker-0", "worker-1", "crash"),
            ]
            assert [r["by"] for r in story["history"]] == ["worker-0", "worker-0", "worker-0", "worker-1"]
            assert not story["unrecorded"]
            assert not any(r["follows_a_gap"] for r in story["history"])
            fences = [r["fence_token"] for r in story["history"]]
            assert fences == sorted(set(fences))
            assert fences[-1] == story["fence_token"]
            assert story["owner"] == "worker-1"
            assert story["orders"] == [
                f"placed on worker-0, which is not here at the moment, until 'parti move {moved} --auto'"
            ]
            # Planned moves took a moment; a first owner and a crash are none.
            assert [bool(r["took_s"]) for r in story["history"]] == [False, True, True, False]

            code, text = await operator.type("explain", moved, *operator.place)
            assert code == 0
            lines = text.splitlines()
            whys = [
                "it was new, and worker-0 was its first owner",
                "worker-1 had only just come and got its share",
                "an operator placed it on worker-0 ('parti move')",
                "worker-0 was lost: its lease ended without a word",
            ]
            rows = [next(n for n, line in enumerate(lines) if why in line) for why in whys]
            assert rows == list(range(rows[0], rows[0] + 4))
            assert lines[-1].startswith(f"worker-1 has had {moved} for ")
            assert "worker-0 was lost" in lines[-1]


async def test_the_position_and_what_waits_are_those_of_the_stream(kit: Kit, operator: Operator) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stops_at_the_third(message: parti.Message) -> None:
        if message.partition.id == "p0" and message.data == b"3":
            reached.set()
            await go_on.wait()

    seqs = {n: (await kit.publish(["p0", "p1"], data=str(n).encode()))["p0"][0] for n in range(1, 6)}
    async with app_of(kit, stops_at_the_third).running():
        await asyncio.wait_for(reached.wait(), 10)

        async def stored() -> bool:
            return bool((await operator.explain("p0"))["position"] == seqs[3])

        await eventually(stored)
        story = await operator.explain("p0")
        assert (story["waiting"], story["first_waiting"]) == (3, seqs[3])
        listed = await operator.ask("partitions", *operator.place)
        waiting = {row["partition"]: row["waiting"] for row in listed["partitions"]}
        assert waiting == {"p0": 3, "p1": 0, "p2": 0, "p3": 0}
        go_on.set()

        async def finished() -> bool:
            return bool((await operator.explain("p0"))["waiting"] == 0)

        await eventually(finished)


async def test_an_error_that_is_being_retried_is_told(kit: Kit, operator: Operator) -> None:
    async def fails(message: parti.Message) -> None:
        raise ValueError("no such order")

    await kit.publish(["p0"])
    async with app_of(kit, fails, attempts=1000, backoff_s=(0.2,)).running():

        async def told() -> bool:
            story = await operator.explain("p0")
            return "ValueError: no such order" in (story["failing"] or "")

        await eventually(told)
        code, text = await operator.type("explain", "p0", *operator.place)
        assert code == 0
        assert "its next message fails and is tried again: message " in text


async def test_dead_letters_and_orders_of_a_partition_are_told(kit: Kit, operator: Operator) -> None:
    async def refuses(message: parti.Message) -> None:
        if message.partition.id == "p0":
            raise parti.Reject("broken order")

    await kit.publish(["p0", "p1"], 2)
    async with app_of(kit, refuses).running():

        async def buried() -> bool:
            return bool((await operator.explain("p0"))["dead_letters"] == 2)

        await eventually(buried)
        story = await operator.explain("p0")
        assert story["last_dead_letter"]["error"] == "broken order"
        assert (await operator.explain("p1"))["dead_letters"] == 0
        assert (await operator.type("pause", "p1", *operator.place))[0] == 0
        paused = await operator.explain("p1")
        assert (paused["state"], paused["owner"]) == ("paused", "")
        assert paused["orders"] == ["paused: nobody is to handle it, until 'parti resume p1'"]

        async def recorded() -> bool:
            return [r["cause"] for r in (await operator.explain("p1"))["history"]] == ["new", "pause"]

        await eventually(recorded)
        assert (await operator.type("explain", "p1", *operator.place))[1].rstrip().endswith("Nobody owns p1: paused.")


# ── what the history may not do ───────────────────────────────────────────────────────────────────────────────────


async def test_moves_go_on_when_nothing_can_be_recorded(kit: Kit, operator: Operator) -> None:
    name = history_stream(f"b{kit.root}")
    # The name is taken by a stream of somebody else.
    await kit.api.call(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"other.{kit.root}"]})
    async with app_of(kit).running(), app_of(kit).running():
        await operator.all_is_well(2)
        code, text = await operator.type("move", "p0", "p1", "p2", "p3", "--to", "worker-1", *operator.place)
        assert (code, "to worker-1" in text) == (0, True)
        story = await operator.explain("p0")
        assert (story["owner"], story["history"], story["unrecorded"]) == ("worker-1", [], True)
        _, text = await operator.type("explain", "p0", *operator.place)
        assert "its claim says: placed by an operator (that change is not in the history)" in text


async def test_a_history_that_is_deleted_is_begun_anew(kit: Kit, operator: Operator) -> None:
    name = history_stream(f"b{kit.root}")
    async with app_of(kit).running(), app_of(kit).running():
        await operator.all_is_well(2)
        await eventually(lambda: _there(kit, name))
        await kit.delete_stream(name)
        first = (await operator.records()).claims["p0"].owner
        other = {"worker-0": "worker-1", "worker-1": "worker-0"}[first]
        assert (await operator.type("move", "p0", "--to", other, *operator.place))[0] == 0

        async def recorded() -> bool:
            records = await read_history(kit.api, f"b{kit.root}", "p0")
            return [(r.source, r.target, r.cause) for r in records or ()] == [(first, other, "place")]

        await eventually(recorded)


async def test_without_the_setting_nothing_is_recorded(kit: Kit, operator: Operator) -> None:
    async with app_of(kit, history=False).running(), app_of(kit, history=False).running():
        await operator.all_is_well(2)
        assert history_stream(f"b{kit.root}") not in await kit.api.stream_names()
        story = await operator.explain("p0")
        assert story["history"] is None
        assert story["notes"] == [
            f"no history is kept: there is no stream {history_stream(f'b{kit.root}')} (setting history)"
        ]


async def _there(kit: Kit, name: str) -> bool:
    try:
        return (await kit.api.stream_info(name)).messages > 0
    except NotFound:
        return False


async def test_an_unknown_partition_is_refused(kit: Kit, operator: Operator) -> None:
    async with app_of(kit).running():
        await operator.all_is_well(1)
        code, text = await operator.type("explain", "p33", *operator.place)
        assert (code, "there is no partition 'p33'; did you mean p3?" in text) == (2, True), text
