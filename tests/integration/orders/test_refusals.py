"""Orders that make no sense: one line, exit code 2, and nothing is changed."""

from __future__ import annotations

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import Fleet, Journal, running
from tests.integration.orders.operators import Operator

from parti.jetstream.kv import Bucket

COMMANDS = [
    ("move", "p0", "--to", "worker-0"),
    ("move", "p0", "--auto"),
    ("drain", "worker-0"),
    ("drain", "worker-0", "--undo"),
    ("pause",),
    ("pause", "p0"),
    ("resume",),
    ("resume", "--all"),
]


async def test_names_that_do_not_exist_are_refused(kit: Kit, operator: Operator) -> None:
    async with Fleet(kit, Journal()) as fleet:
        await fleet.join(identity="pod-a")
        await fleet.settles()
        for arguments in (("move", "p10", "--to", "worker-0"), ("move", "p10", "--auto"), ("pause", "p10")):
            assert await operator.is_refused(*arguments) == "there is no partition 'p10'; did you mean p0, p1?"
        assert await operator.is_refused("resume", "p0", "zz", "aa") == (
            "there are no partitions aa, zz; there are 8 partitions, such as p0, p1, p2"
        )
        for name, hint in (
            ("wroker-0", "did you mean worker-0? "),
            ("nobody", ""),
            ("pod-b", "did you mean pod-a? "),
        ):
            for arguments in (("move", "p0", "--to", name), ("drain", name), ("drain", name, "--undo")):
                assert await operator.is_refused(*arguments) == (
                    f"there is no worker {name!r}; {hint}workers here: worker-0"
                )


async def test_workers_that_cannot_take_partitions_are_refused(kit: Kit, operator: Operator) -> None:
    async with Fleet(kit, Journal()) as fleet:
        await fleet.join()
        await fleet.join(capacity=2)
        third = await fleet.join(identity="pod-c")

        async def settled() -> bool:
            status = await operator.status()
            return bool(status["ok"]) and [row["owned"] for row in status["workers"]] == [3, 2, 3]

        await eventually(settled)
        full = "worker-1 is full: it takes 2 partitions at most, and 3 would be placed there; "
        assert (await operator.is_refused("move", "p0", "p1", "p2", "--to", "worker-1")).startswith(full)
        await operator.orders("move", "p0", "p1", "--to", "worker-1")
        assert (await operator.is_refused("move", "p2", "--to", "worker-1")).startswith(full)

        await operator.orders("drain", "worker-0")
        assert await operator.is_refused("move", "p0", "--to", "worker-0") == (
            "worker-0 is drained; name another worker, or first use 'parti drain worker-0 --undo'"
        )
        await operator.orders("drain", "worker-0", "--undo")
        await fleet.leave(third)
        assert await operator.is_refused("move", "p0", "--to", "worker-2") == (
            "worker-2 is away; wait until it is back, or name another worker"
        )


async def test_a_worker_that_is_gone_is_refused(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        await fleet.leave(next(w for w in fleet.workers if w.worker_id == "worker-1"))
        for arguments in (("move", "p0", "--to", "worker-1"), ("drain", "worker-1")):
            assert await operator.is_refused(*arguments) == "worker 'worker-1' is gone; workers here: worker-0"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("move", "p0"), "say where the partitions are to go: --to WORKER, or --auto"),
        (("move", "p0", "--to", "worker-0", "--auto"), "--to and --auto exclude each other"),
        (("move", "--auto"), "Missing argument"),
        (("drain",), "Missing argument"),
        (("resume", "p0", "--all"), "--all and partitions exclude each other"),
        (("move", "p0", "--to", "worker-0", "--timeout", "-1"), "should be greater than or equal to 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_options_that_make_no_sense_are_refused(
    kit: Kit, operator: Operator, arguments: tuple[str, ...], reason: str
) -> None:
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    assert reason in await operator.is_refused(*arguments)


async def test_a_place_without_a_fleet_is_refused(kit: Kit, operator: Operator) -> None:
    before = await kit.api.stream_names()
    for arguments in COMMANDS:
        assert f"bucket 'b{kit.root}' does not exist" in (await operator.type(*arguments)).err
    assert await kit.api.stream_names() == before
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    for arguments in COMMANDS:
        assert (await operator.is_refused(*arguments)).startswith(f"there is no fleet in bucket b{kit.root} on ")


async def test_orders_that_cannot_be_read_are_not_overwritten(kit: Kit, operator: Operator) -> None:
    async with running(kit, 1):
        await Bucket(kit.api, f"b{kit.root}").put("orders", b'{"placed": 7}', revision=0)
        for arguments in COMMANDS:
            said = await operator.is_refused(*arguments)
            assert "nothing was changed: run 'parti doctor --repair orders'" in said, arguments
        status = await operator.status()
        assert any(problem.startswith("unreadable record orders: ") for problem in status["problems"])
