"""What an operator orders of a fleet: `parti move`, `drain`, `pause` and `resume`."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.conftest import Kit, eventually, open_kit
from tests.integration.fleet import FLEET, PARTITIONS, Fleet, Journal, Traffic, claims_of, owners, running
from tests.integration.processes import command, environment

import parti
from parti.cli.main import main
from parti.coordination.orders import change_orders
from parti.embedded import Server
from parti.errors import ConfigError
from parti.jetstream.kv import Bucket
from parti.model.fleet import Orders, decode, encode
from parti.telemetry.logs import configure_logging

KEYS = {"at", "bucket", "changed", "missing", "ok", "orders", "partitions", "summary", "waited_s"}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PARTI_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    configure_logging("error")


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        assert set(answer) == KEYS
        return answer


def place(kit: Kit) -> tuple[str, ...]:
    return "--nats", kit.url, "--bucket", f"b{kit.root}"


class Operator:
    """Types commands about the fleet of a kit."""

    def __init__(self, kit: Kit, capsys: pytest.CaptureFixture[str]) -> None:
        self._kit = kit
        self._capsys = capsys

    async def type(self, *arguments: str) -> Said:
        """Run a command in this process."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, [*arguments, *place(self._kit)])
        printed = self._capsys.readouterr()
        return Said(code, printed.out, printed.err)

    async def orders(self, *arguments: str) -> str:
        """Give an order that the fleet can follow, and return the line that says so."""
        said = await self.type(*arguments)
        assert (said.code, said.err) == (0, ""), said
        assert len(said.out.splitlines()) == 1, said
        return said.out.rstrip()

    async def is_refused(self, *arguments: str) -> str:
        """Give an order that makes no sense: one line, exit code 2, and nothing is changed."""
        before = await Bucket(self._kit.api, f"b{self._kit.root}").get("orders")
        said = await self.type(*arguments)
        assert (said.code, said.out) == (2, ""), said
        assert len(said.err.splitlines()) == 1, said
        assert await Bucket(self._kit.api, f"b{self._kit.root}").get("orders") == before
        return said.err.removeprefix("parti: ").rstrip()

    async def status(self) -> dict[str, Any]:
        said = await self.type("status", "--json")
        status: dict[str, Any] = json.loads(said.out)
        return status


@pytest.fixture
def operator(kit: Kit, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(kit, capsys)


async def orders_in(kit: Kit) -> Orders:
    entry = await Bucket(kit.api, f"b{kit.root}").get("orders")
    return decode(entry.value, Orders) if entry else Orders()


def partitions_of(claims: Mapping[str, Any], worker: str) -> list[str]:
    return [p for p, claim in claims.items() if claim.owner == worker]


async def owned_by(kit: Kit, worker: str) -> list[str]:
    return partitions_of(await claims_of(kit), worker)


class Slow:
    """Handles one partition only when told to, and the others at once."""

    def __init__(self, slow: str) -> None:
        self._slow = slow
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()

    async def handle(self, message: parti.Message) -> None:
        if message.partition.id == self._slow:
            self.began.set()
            await self.may_end.wait()


@asynccontextmanager
async def slow_fleet(kit: Kit, slow: Slow, workers: int = 2) -> AsyncIterator[None]:
    """Workers of which one is in the middle of a message of the slow partition."""
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(kit.app(slow.handle, PARTITIONS, **FLEET).running())
        stack.callback(slow.may_end.set)

        async def shared() -> bool:
            claims = await claims_of(kit)
            return len({c.owner for c in claims.values()}) == workers and {c.state for c in claims.values()} == {
                "owned"
            }

        await eventually(shared)
        yield


# ── move ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_partitions_move_under_traffic_and_stay(kit: Kit, operator: Operator, retention: str) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    async with running(kit, 2) as fleet:
        async with Traffic(kit) as traffic:
            for there in ("worker-1", "worker-0"):
                moving = [p for p in PARTITIONS if p not in await owned_by(kit, there)][:3]
                await traffic.goes_on()
                line = await operator.orders("move", *moving, "--to", there)
                assert re.fullmatch(rf"Moved 3 partitions to {there} in \d+\.\d s\.", line)
                claims = await claims_of(kit)
                assert {(claims[p].owner, claims[p].state) for p in moving} == {(there, "owned")}
                assert {claims[p].reason for p in moving} == {"placed by an operator"}
                await fleet.settles()
                assert set(moving) <= set(await owned_by(kit, there)), "they were not left there"
        await eventually(lambda: fleet.journal.has(traffic.sent))
        fleet.journal.is_clean(traffic.sent)


async def test_partitions_that_are_there_are_only_placed(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        here, other = (await owned_by(kit, "worker-0"))[:1], (await owned_by(kit, "worker-1"))[:1]
        before = await claims_of(kit)
        line = await operator.orders("move", *here, "--to", "worker-0")
        assert line == "1 partition is on worker-0 already, and will stay there."
        assert await claims_of(kit) == before
        assert (await orders_in(kit)).placed == dict.fromkeys(here, "worker-0")
        line = await operator.orders("move", *here, *other, "--to", "worker-0")
        assert re.fullmatch(r"Moved 1 partition to worker-0 in \d\.\d s; 1 was there already\.", line)


async def test_placed_partitions_are_given_back_to_the_strategy(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        first = (await owned_by(kit, "worker-0"))[0]
        await operator.orders("move", first, "--to", "worker-1", "--no-wait")
        line = await operator.orders("move", first, "--auto")
        assert line == "The strategy decides about 1 partition again; what need not move stays."
        assert await orders_in(kit) == Orders()
        assert await operator.orders("move", first, "--auto") == (
            "1 partition was not placed by hand; nothing has changed."
        )


async def test_moves_for_scripts(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2):
        moving = (await owned_by(kit, "worker-0"))[:2]
        said = await operator.type("move", *moving, "--to", "worker-1", "--json")
        assert (said.code, said.err) == (0, "")
        answer = said.json
        assert (answer["ok"], answer["changed"], answer["missing"]) == (True, True, [])
        assert answer["partitions"] == moving
        assert 0 < answer["waited_s"] < 10
        placed = dict.fromkeys(moving, "worker-1")
        assert answer["orders"] == {"placed": placed, "drained": [], "paused": [], "hold_moves": False}
        again = (await operator.type("move", *moving, "--to", "worker-1", "--json", "--no-wait")).json
        assert (again["changed"], again["partitions"], again["waited_s"]) == (False, [], None)


async def test_a_worker_can_be_named_by_its_identity(kit: Kit, operator: Operator) -> None:
    async with Fleet(kit, Journal()) as fleet:
        await fleet.join()
        await fleet.join(identity="pod-b")
        await fleet.settles()
        moving = (await owned_by(kit, "worker-0"))[0]
        assert "to worker-1" in await operator.orders("move", moving, "--to", "pod-b")
        assert (await orders_in(kit)).placed == {moving: "worker-1"}


async def test_a_thousand_partitions_move_by_one_order(kit: Kit, operator: Operator) -> None:
    partitions = [f"q{n}" for n in range(1000)]
    settings = {**FLEET, "lease_ttl_s": 10.0, "leader_ttl_s": 10.0, "max_subjects": 1000}

    async def handle(message: parti.Message) -> None:
        pass

    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(kit.app(handle, partitions, **settings).running())

        async def shared() -> bool:
            status = await operator.status()
            return bool(status["ok"]) and [row["owned"] for row in status["workers"]] == [500, 500]

        await eventually(shared, 30)
        said = await operator.type("move", *partitions, "--to", "worker-1", "--json")
        assert said.code == 0, said
        assert len(said.json["partitions"]) == 500
        status = await operator.status()
        assert {row["worker"]: row["owned"] for row in status["workers"]} == {"worker-0": 0, "worker-1": 1000}
        entry = await Bucket(kit.api, f"b{kit.root}").get("orders")
        assert entry
        assert len(decode(entry.value, Orders).placed) == 1000
        print("moved 500 of 1,000 in", said.json["waited_s"], "s")


# ── not in time ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_handler_that_runs_for_long_is_named(kit: Kit, operator: Operator) -> None:
    slow = Slow("p0")
    async with slow_fleet(kit, slow):
        here = (await claims_of(kit))["p0"].owner
        there = "worker-1" if here == "worker-0" else "worker-0"
        await kit.publish(["p0"])
        await slow.began.wait()
        quick = next(p for p in await owned_by(kit, here) if p != "p0")
        said = await operator.type("move", "p0", quick, "--to", there, "--timeout", "2")
        assert (said.code, said.err) == (1, "")
        summary, reason = said.out.splitlines()
        assert summary == (
            f"After 2.0 s 1 of 2 partitions had moved to {there}; the order stands, and 'parti move PARTITION... "
            f"--auto' takes it back."
        )
        assert reason == f"  p0: its handler still runs on {here}"
        for arguments in (("pause", "p0"), ("drain", here)):
            answer = (await operator.type(*arguments, "--timeout", "1", "--json")).json
            assert {"partition": "p0", "why": f"its handler still runs on {here}"} in answer["missing"]
        assert not answer["ok"]
        await operator.orders("drain", here, "--undo")
        await operator.orders("resume", "p0", "--no-wait")
        slow.may_end.set()
        line = await operator.orders("move", "p0", "--to", there)
        assert line.startswith(("Moved 1 partition", "1 partition is on"))


async def test_whoever_waits_hears_of_another_operators_order(kit: Kit, operator: Operator) -> None:
    slow = Slow("p0")
    async with slow_fleet(kit, slow):
        here = (await claims_of(kit))["p0"].owner
        there = "worker-1" if here == "worker-0" else "worker-0"
        await kit.publish(["p0"])
        await slow.began.wait()
        waiting = asyncio.create_task(operator.type("move", "p0", "--to", there, "--json"))

        async def ordered() -> bool:
            return (await orders_in(kit)).placed == {"p0": there}

        await eventually(ordered, 20)
        await change_orders(Bucket(kit.api, f"b{kit.root}"), lambda orders: Orders())
        said = await waiting
        assert said.code == 1
        assert said.json["missing"] == [{"partition": "p0", "why": "another operator has taken this back"}]
        assert "the order stands" not in said.json["summary"]


# ── drain ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_drained_worker_owns_nothing_until_that_is_undone(kit: Kit, operator: Operator) -> None:
    async with running(kit, 3) as fleet:
        async with Traffic(kit) as traffic:
            await traffic.goes_on()
            number = len(await owned_by(kit, "worker-1"))
            line = await operator.orders("drain", "worker-1")
            pattern = (
                rf"worker-1 is drained: {number} partitions moved to worker-0 \(\d\), worker-2 \(\d\) in \d\.\d s\."
            )
            assert re.fullmatch(pattern, line), line
            assert Counter(owners(await claims_of(kit)).values()).keys() == {"worker-0", "worker-2"}
            await traffic.goes_on()
            status = await operator.status()
            assert status["orders"]["drained"] == ["worker-1"]
            assert status["notes"] == ["worker-1 is drained"]
            assert {row["worker"]: row["state"] for row in status["workers"]}["worker-1"] == "drained"
            detail = (await operator.type("workers", "worker-1")).out
            assert "to own nothing, until 'parti drain worker-1 --undo'" in detail
            assert await operator.orders("drain", "worker-1") == "worker-1 is drained; there was nothing to move."

            line = await operator.orders("drain", "worker-1", "--undo")
            assert line.startswith("worker-1 gets its share again")
            await fleet.settles()
            assert await owned_by(kit, "worker-1")
            assert await operator.orders("drain", "worker-1", "--undo") == (
                "worker-1 was not drained; nothing has changed."
            )
        await eventually(lambda: fleet.journal.has(traffic.sent))
        fleet.journal.is_clean(traffic.sent)


async def test_the_last_worker_is_drained_only_by_force(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        await operator.orders("drain", "worker-0")
        reason = "nobody would be left to take what"
        assert await operator.is_refused("drain", "worker-1") == (
            f"{reason} worker-1 owns; start another worker, undo another drain, or insist with --force"
        )
        assert reason in await operator.is_refused("drain", "worker-1", "worker-0")
        said = await operator.type("drain", "worker-1", "--force", "--timeout", "0.5", "--json")
        assert said.code == 1
        assert len(said.json["missing"]) == len(PARTITIONS)
        await fleet.join()

        async def gone() -> bool:
            return Counter(owners(await claims_of(kit)).values()) == {"worker-2": len(PARTITIONS)}

        await eventually(gone)


async def test_an_order_about_a_worker_that_has_gone_since_can_be_undone(kit: Kit, operator: Operator) -> None:
    async with running(kit, 2) as fleet:
        await operator.orders("drain", "worker-1")
        await fleet.leave(next(w for w in fleet.workers if w.worker_id == "worker-1"))
        await operator.orders("drain", "worker-1", "--undo")
        assert await orders_in(kit) == Orders()


# ── pause and resume ──────────────────────────────────────────────────────────────────────────────────────────────


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


# ── what makes no sense ───────────────────────────────────────────────────────────────────────────────────────────


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


async def test_a_place_without_a_fleet_is_refused(kit: Kit, operator: Operator) -> None:
    before = await kit.api.stream_names()
    for arguments in COMMANDS:
        assert f"bucket 'b{kit.root}' does not exist" in (await operator.type(*arguments)).err
    assert await kit.api.stream_names() == before
    await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    for arguments in COMMANDS:
        assert (await operator.is_refused(*arguments)).startswith(f"there is no fleet in bucket b{kit.root} on ")


async def test_orders_of_another_version_are_not_overwritten(kit: Kit, operator: Operator) -> None:
    async with running(kit, 1):
        await Bucket(kit.api, f"b{kit.root}").put("orders", b'{"placed": 7}', revision=0)
        for arguments in COMMANDS:
            assert "use the version of parti that wrote it" in await operator.is_refused(*arguments), arguments
        status = await operator.status()
        assert "1 record cannot be read: is another version of parti at work?" in status["problems"]


# ── several operators ─────────────────────────────────────────────────────────────────────────────────────────────


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


# ── with few rights ───────────────────────────────────────────────────────────────────────────────────────────────

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


# ── on a terminal ─────────────────────────────────────────────────────────────────────────────────────────────────


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            command(*arguments), stdin=slave, stdout=slave, stderr=slave, env=environment(TERM="xterm")
        )
        os.close(slave)
        self.text = ""
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            self.text += os.read(self._master, 65_536).decode(errors="replace")
        except OSError:
            asyncio.get_running_loop().remove_reader(self._master)

    async def ends(self) -> int:
        try:
            return await asyncio.to_thread(self.process.wait, 30)
        finally:
            self.process.kill()
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)


async def test_a_terminal_shows_a_bar_and_ctrl_c_leaves_the_order(kit: Kit) -> None:
    slow = Slow("p0")
    async with slow_fleet(kit, slow):
        here = (await claims_of(kit))["p0"].owner
        there = "worker-1" if here == "worker-0" else "worker-0"
        quick = next(p for p in await owned_by(kit, here) if p != "p0")
        await kit.publish(["p0"])
        await slow.began.wait()
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
