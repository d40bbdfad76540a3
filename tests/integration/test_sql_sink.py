"""The example with a SQL database: repeats have no effect, and an owner that was replaced is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nats
import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.fleet import FLEET, network_to
from tests.integration.processes import command, environment

import parti
from parti.embedded import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
CUSTOMERS = ("ada", "bob", "cy")
ORDERS = 40


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sql_sink", EXAMPLES / "sql_sink.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(path: Path) -> list[tuple[str, int]]:
    with sqlite3.connect(path) as database:
        return list(database.execute("SELECT customer, number FROM orders ORDER BY rowid"))


async def publish(kit: Kit, number: int) -> int:
    order = json.dumps({"number": number, "amount": 10}).encode()
    return await kit.api.publish(f"{kit.root}.eu.ada", order)


async def test_what_is_handled_again_has_no_effect(kit: Kit, example: ModuleType, tmp_path: Path) -> None:
    sink, path = example.Sink(str(tmp_path / "orders.db")), tmp_path / "orders.db"
    outcomes: list[str] = []

    def handle(message: parti.Message) -> None:
        outcomes.append(sink.take(message))
        if message.attempt == 1:
            raise ValueError("the order is stored, but parti is told that it failed")

    app = kit.app(handle, subject=f"{kit.root}.{{region}}.{{customer}}", **{**FLEET, "worker_id": None})
    for number in range(1, 6):
        await publish(kit, number)
    async with app.running():
        await eventually(lambda: len(outcomes) == 10)
    assert outcomes == ["taken", "repeated"] * 5
    assert stored(path) == [("ada", number) for number in range(1, 6)]


async def test_an_owner_that_was_replaced_is_refused(kit: Kit, example: ModuleType, tmp_path: Path) -> None:
    """It was cut off in the midst of a handler; when that goes on, others have the partition."""
    sink, path = example.Sink(str(tmp_path / "orders.db")), tmp_path / "orders.db"
    outcomes: list[tuple[int, str, int]] = []
    stalled, wake = threading.Event(), threading.Event()

    def handle(message: parti.Message) -> None:
        if json.loads(message.data)["number"] == 2 and not stalled.is_set():
            stalled.set()
            assert wake.wait(30)
        outcomes.append((json.loads(message.data)["number"], sink.take(message), message.fence))

    def of(number: int) -> list[tuple[str, int]]:
        """What became of an order, but for repeats: the first one may not have been on record yet."""
        return [(outcome, fence) for n, outcome, fence in outcomes if n == number and outcome != "repeated"]

    app = kit.app(handle, subject=f"{kit.root}.{{region}}.{{customer}}", **{**FLEET, "lease_ttl_s": 1.0})
    async with network_to(kit) as network:
        first = app.worker(nats=network.url)
        await first.start()
        try:
            await publish(kit, 1)
            await publish(kit, 2)
            await eventually(stalled.is_set)
            network.block()
            async with app.running():
                await publish(kit, 3)
                await eventually(lambda: bool(of(3)), 20.0)
                wake.set()
                await eventually(lambda: len(of(2)) == 2)
        finally:
            wake.set()
            network.block(False)
            await first.stop()
    ((_, old),) = of(1)
    ((_, new),) = of(3)
    assert old < new
    assert of(2) == [("taken", new), ("stale", old)]
    assert stored(path) == [("ada", 1), ("ada", 2), ("ada", 3)]


def test_a_repeat_shuts_out_older_owners_too(example: ModuleType, tmp_path: Path) -> None:
    """Else an owner that was replaced could still be the first to store what its successor has not got to yet."""
    sink = example.Sink(str(tmp_path / "orders.db"))
    partition = parti.Template("orders.{region}.{customer}").partition("eu.ada")
    ownerships = [parti.model.message.Ownership(partition, "ORDERS", "w", fence) for fence in (7, 8)]
    old, new = [
        [parti.Message(partition.subject, b'{"number": 1, "amount": 1}', seq, owner) for seq in (1, 2)]
        for owner in ownerships
    ]
    assert [sink.take(old[0]), sink.take(new[0]), sink.take(old[1]), sink.take(new[1])] == [
        "taken",
        "repeated",
        "stale",
        "taken",
    ]


@pytest.mark.slow
async def test_the_example_stores_every_order_once_over_a_crash(
    nats_server_factory: Callable[..., Server], tmp_path: Path
) -> None:
    server = nats_server_factory()
    client = await nats.connect(server.url)
    stream = client.jetstream()
    await stream.add_stream(name="ORDERS", subjects=["orders.*.*"])
    sent = []
    for number in range(1, ORDERS + 1):
        for customer in CUSTOMERS:
            order = {"number": number, "amount": 10 * number}
            await stream.publish(f"orders.eu.{customer}", json.dumps(order).encode())
            sent.append((customer, number))
    await client.close()
    path = tmp_path / "orders.db"
    settings = {"ORDERS_DB": str(path), "PARTI_LEASE_TTL_S": "1", "PARTI_PROGRESS_INTERVAL_S": "10"}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command("worker", "sql_sink:app", "--nats", server.url),
            cwd=EXAMPLES,
            env=environment(**settings, PYTHONDONTWRITEBYTECODE="1"),
            stdout=subprocess.DEVNULL,
        )

    def count() -> int:
        """Orders in the file; none while the worker has made the file and not yet the table in it."""
        if not path.exists():
            return 0
        with sqlite3.connect(path) as database:
            made = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'orders'").fetchone()
        return len(stored(path)) if made else 0

    killed = start()
    try:
        await eventually(lambda: count() > 10, 30.0)
    finally:
        killed.kill()
        killed.wait()
    left = count()
    worker = start()
    try:
        await eventually(lambda: count() >= len(sent), 30.0)
    finally:
        worker.terminate()
        await asyncio.to_thread(worker.wait, 20)
    print(f"{left} of {len(sent)} were stored when it was killed")
    assert sorted(stored(path)) == sorted(sent)
    for customer in CUSTOMERS:
        assert [n for c, n in stored(path) if c == customer] == list(range(1, ORDERS + 1))
