"""Simulated links under parti's real connection: order, delay, cuts, restarts of the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from parti.errors import ConnectionFailed, NoResponders, RequestTimeout
from parti.jetstream.connection import Connection, ConnectionState
from parti.sim.client import SimWire, networks
from parti.sim.loop import VirtualLoop
from parti.sim.member import make_settings
from parti.sim.network import OUTSIDE, Conditions, Network
from parti.sim.patches import clocks_of
from parti.sim.process import Process
from parti.sim.scenario import make_scenario
from parti.sim.server import ModelServer
from parti.sim.substitution import simulation

Work = Callable[["Bench"], Coroutine[Any, Any, None]]


class Bench:
    """One process on a network, and the time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.server = ModelServer(lambda: self.loop.now_s)
        self.network = Network(self.loop, self.server, random.Random(1))
        self.process = Process(self.loop, "client")
        self.conditions = Conditions(0.01, 0.0)
        self.network.join(self.process, self.conditions)
        networks[self.process] = self.network

    async def connect(self) -> Connection:
        return await Connection.open(make_settings(make_scenario(1)), name="test")

    def run(self, work: Work) -> None:
        """Run inside the process; what it raises is raised here."""
        task = self.process.spawn(work(self))

        async def wait() -> None:
            await asyncio.wait([task])

        with simulation(), clocks_of(self.loop):
            self.loop.run_until_complete(self.loop.create_task(wait(), context=OUTSIDE))
        task.result()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    del networks[bench.process]
    bench.process.crash()
    bench.loop.dispose()


def test_a_request_takes_a_round_trip(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        connection = await bench.connect()
        began_s = bench.loop.now_s
        reply = await connection.request("$JS.API.INFO")
        assert "error" not in json.loads(reply.data)
        assert bench.loop.now_s - began_s == pytest.approx(0.02)
        with pytest.raises(NoResponders):
            await connection.request("nobody.listens")

    bench.run(work)


def test_messages_arrive_in_the_order_they_were_sent(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        bench.conditions.jitter_s = 0.05
        connection = await bench.connect()
        came: list[bytes] = []
        wire: Any = SimWire(connection.client)  # type: ignore[arg-type]
        wire.subscribe("news", lambda subject, reply, header, payload: came.append(payload))
        for number in range(50):
            wire.write(b"PUB news 2\r\n%02d\r\n" % number)
        await asyncio.sleep(1.0)
        assert came == [b"%02d" % number for number in range(50)]

    bench.run(work)


def test_what_was_sent_into_a_cut_arrives_late_if_the_connection_survives(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        connection = await bench.connect()
        bench.network.cut(bench.process)
        asked = asyncio.ensure_future(connection.request("$JS.API.INFO"))
        await asyncio.sleep(0.5)
        assert not asked.done()
        assert connection.state is ConnectionState.CONNECTED
        bench.network.heal(bench.process)
        await asked
        assert bench.loop.now_s > 0.5

    bench.run(work)


def test_a_long_cut_breaks_the_connection_and_it_comes_back(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        connection = await bench.connect()
        states: list[ConnectionState] = []
        connection.on_state(lambda state, reason: states.append(state))
        bench.network.cut(bench.process)
        with pytest.raises(RequestTimeout):
            await connection.request("$JS.API.INFO", timeout_s=30)
        assert bench.loop.now_s < 2  # three pings, not the length of the request
        with pytest.raises(ConnectionFailed):
            await connection.publish("x", b"")
        bench.network.heal(bench.process)
        await connection.wait_connected(5.0)
        await connection.request("$JS.API.INFO")
        assert states == [ConnectionState.SUSPENDED, ConnectionState.CONNECTED]

    bench.run(work)


def test_a_restart_of_the_server_is_noticed_and_survived(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        connection = await bench.connect()
        states: list[ConnectionState] = []
        connection.on_state(lambda state, reason: states.append(state))
        bench.network.crash_server(lose_unsynced_acks_s=0.0)
        await asyncio.sleep(3.0)
        assert states == [ConnectionState.SUSPENDED, ConnectionState.LOST]
        bench.network.start_server()
        await connection.request("$JS.API.INFO")
        assert states[-1] is ConnectionState.CONNECTED

    bench.run(work)


def test_without_a_leader_nobody_answers(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        connection = await bench.connect()
        bench.network.leaderless = True
        with pytest.raises(RequestTimeout):
            await connection.request("$JS.API.INFO", timeout_s=1.0)
        assert connection.state is ConnectionState.CONNECTED

    bench.run(work)


def test_a_process_that_dies_sends_nothing_more(bench: Bench) -> None:
    async def work(bench: Bench) -> None:
        connection = await bench.connect()
        client: Any = connection.client
        channel = client.channel
        assert channel in bench.network.channels
        bench.process.crash()
        with pytest.raises(ConnectionError):
            client.write([("x", b"", "", None)])

    task = bench.process.spawn(work(bench))
    with simulation(), clocks_of(bench.loop):
        bench.loop.run_until_complete(bench.loop.create_task(asyncio.sleep(5.0), context=OUTSIDE))
    assert task.done()
    task.result()
    assert bench.network.channels == []  # the server has noticed
