"""Several operators at the same time, operators with few rights, and operators at a terminal."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.integration.conftest import Kit, eventually, open_kit
from tests.integration.fleet import claims_of, owners, running
from tests.integration.orders.operators import Operator, Slow, orders_in, owned_by, place, slow_fleet
from tests.integration.terminal import Terminal

from parti.cli.main import main
from parti.coordination.orders import change_orders
from parti.embedded import Server
from parti.errors import ConfigError
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders, encode

# ── several operators ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_operators_at_the_same_time_lose_no_order(kit: Kit) -> None:
    async with running(kit, 2):
        codes = await asyncio.gather(
            asyncio.to_thread(main, ["move", "p0", "p1", "--to", "worker-1", *place(kit)]),
            asyncio.to_thread(main, ["move", "p6", "p7", "--to", "worker-0", *place(kit)]),
            asyncio.to_thread(main, ["pause", "p4", *place(kit)]),
        )
        assert list(codes) == [0, 0, 0]
        placed = {"p0": "worker-1", "p1": "worker-1", "p6": "worker-0", "p7": "worker-0"}
        assert await orders_in(kit) == Orders(placed=placed, paused=("p4",))
        claims = owners(await claims_of(kit))
        assert {p: claims[p] for p in placed} == placed
        assert claims["p4"] == ""


async def test_a_crowd_of_operators_loses_no_order(kit: Kit) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)

    def placing(name: str, worker: str) -> Any:
        return lambda orders: msgspec.structs.replace(orders, placed={**orders.placed, name: worker})

    changes = await asyncio.gather(*(change_orders(bucket, placing(f"q{n}", f"worker-{n}")) for n in range(30)))
    assert (await orders_in(kit)).placed == {f"q{n}": f"worker-{n}" for n in range(30)}
    assert len({change.revision for change in changes}) == 30
    again = await change_orders(bucket, placing("q7", "worker-7"))
    assert (again.before, again.revision) == (again.after, max(change.revision for change in changes))


async def test_a_change_that_is_refused_on_a_second_look_writes_nothing(kit: Kit) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    theirs = Orders(paused=("q0",))
    looks = []

    def change(orders: Orders) -> Orders:
        looks.append(orders)
        if orders.paused:
            raise ConfigError("it is paused")
        return Orders(placed={"q0": "worker-0"})

    class Overtaken(Bucket):
        """Another operator is faster."""

        async def put(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
            await super().put(key, encode(theirs), revision=revision)
            return await super().put(key, value, revision=revision, ttl_s=ttl_s)

    with pytest.raises(ConfigError, match="it is paused"):
        await change_orders(Overtaken(kit.api, bucket.name), change)
    assert looks == [Orders(), theirs]
    assert await orders_in(kit) == theirs


# ── with few rights ─────────────────────────────────────────────────────────────────────────────────────────────────


PERMISSIONS = (
    *("$JS.API.STREAM.INFO.KV_{bucket}", "$JS.API.CONSUMER.CREATE.KV_{bucket}.>", "$JS.FC.KV_{bucket}.>"),
    *("$JS.API.CONSUMER.DELETE.KV_{bucket}.>", "$JS.API.STREAM.MSG.GET.KV_{bucket}"),
    *("$KV.{bucket}.orders", "$JS.API.STREAM.INFO.{stream}"),
)


async def test_the_permissions_listed_are_enough_to_give_orders(
    nats_server_factory: Callable[..., Server], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, root = "RIGHTS", "rights"
    publish = ", ".join(f'"{subject.format(bucket=f"b{root}", stream=stream)}"' for subject in PERMISSIONS)
    few = f'{{user: few, password: pw, permissions: {{publish: [{publish}], subscribe: ["_INBOX.>"]}}}}'
    server = nats_server_factory(
        config=f"authorization {{ users: [{{user: all, password: pw}}, {few}] }}\nno_auth_user: all"
    )
    kit = replace(await open_kit(server, stream), root=root)
    try:
        await kit.create_stream()
        monkeypatch.setenv("PARTI_USER", "few")
        monkeypatch.setenv("PARTI_PASSWORD", "pw")
        operator = Operator(kit, capsys)
        async with running(kit, 2, user="all", password="pw"):
            await operator.orders("move", "p0", "--to", "worker-1")
            await operator.orders("pause", "p1")
            await operator.orders("resume", "--all")
            await operator.orders("drain", "worker-1")
            assert (await operator.status())["orders"]["drained"] == ["worker-1"]
    finally:
        await kit.connection.close()


# ── on a terminal ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_terminal_shows_a_bar_and_ctrl_c_leaves_the_order(kit: Kit) -> None:
    async with slow_fleet(kit, Slow("p0")) as (here, there):
        quick = next(p for p in await owned_by(kit, here) if p != "p0")
        terminal = Terminal("move", "p0", quick, "--to", there, *place(kit))
        await eventually(lambda: f"moving to {there}" in terminal.text and "1/2" in terminal.text, 20)
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ends() == 130
        assert "the order stands, though nobody waits for it any more" in terminal.text
        assert "Traceback" not in terminal.text
        assert (await orders_in(kit)).placed == {"p0": there, quick: there}


async def test_the_bar_gives_way_to_one_line(kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    async with running(kit, 2):
        moving = (await owned_by(kit, "worker-0"))[0]
        said = await operator.type("move", moving, "--to", "worker-1")
        assert said.code == 0
        assert "moving to worker-1" in said.out
        assert re.search(r"Moved 1 partition to worker-1 in \d\.\d s\.\x1b\[0m\n$", said.out)


async def test_elsewhere_lines_tell_how_far_it_is(
    kit: Kit, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parti.cli.orders._SAY_S", 0.0)
    async with running(kit, 2):
        moving = await owned_by(kit, "worker-0")
        said = await operator.type("move", *moving, "--to", "worker-1")
        *lines, last = said.out.splitlines()
        assert lines[0] == "moving to worker-1: 0 of 4"
        assert len(set(lines)) == len(lines), "the same was said twice"
        assert last.startswith("Moved 4 partitions to worker-1 in ")
