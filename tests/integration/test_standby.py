"""Two processes on one worker id: one works, the other stands by and takes over, in order and without repeats."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from benchmarks.audit import Handled, audit, read_back
from benchmarks.traffic import SteadyPublisher
from rich.console import Console
from tests.integration.conftest import eventually
from tests.integration.test_outages import CLEAN, PARTITIONS, app_for, create_stream

from parti.app.worker import Worker
from parti.cli.status import draw, take_picture
from parti.config import Settings, load_settings
from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records
from parti.coordination.worker_rows import worker_rows
from parti.core.fleet_view import FleetState
from parti.embedded import Server
from parti.embedded.monitor import ask
from parti.errors import ConfigError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.priority import unpin
from parti.model.fleet import MemberRecord, StandbyRecord, encode

RATE = 1_000
SHARED: dict[str, Any] = {
    "worker_id": "both",
    "standby": True,
    "lease_ttl_s": 1.0,
    "pull_heartbeat_s": 0.3,
    "cold_start_window_s": 0.2,
    "scale_window_s": 0.3,
}


class Pair:
    """Workers that share an id, and a publisher."""

    def __init__(self, url: str, stream: str, count: int, settings: dict[str, Any]) -> None:
        self.url = url
        self.stream = stream
        self.count = count
        self.journal: list[Handled] = []
        self.settings = {"bucket": stream, "prefix": stream, **SHARED, **settings}
        self.publishing: asyncio.Task[Any] | None = None
        self._first = self._limit = 0
        self._since_s = 0.0

    def publish(self, share: float = 1.0) -> None:
        """Begin; what an interest stream gets before somebody reads it is gone."""
        publisher = SteadyPublisher(
            self.url, self.count, lambda n: f"{self.stream}.{PARTITIONS[n * 7 % len(PARTITIONS)]}"
        )
        self.publish_to(share)
        self.publishing = asyncio.create_task(publisher.run(self._due))

    def publish_to(self, share: float) -> None:
        """Go on up to this share of all messages, at the same rate, from now on."""
        self._first, self._limit = self._limit, round(share * self.count)
        self._since_s = asyncio.get_running_loop().time()

    def _due(self, n: int) -> bool:
        return n < min(self._limit, self._first + RATE * (asyncio.get_running_loop().time() - self._since_s))

    @contextlib.asynccontextmanager
    async def worker(self, **settings: Any) -> AsyncIterator[Worker]:
        app = app_for(self.stream, self.journal)
        async with app.running(nats=self.url, **{**self.settings, **settings}) as worker:
            yield worker

    async def handled(self, share: float) -> None:
        await eventually(lambda: len(self.journal) >= share * self.count, 30)

    async def finish(self) -> None:
        assert self.publishing
        await asyncio.wait_for(self.publishing, 40)
        await self.handled(1)

    async def verify(self, retention: str = "limits") -> None:
        """Each message once, each partition in order."""
        if retention == "limits":
            assert audit(await read_back(self.url, self.stream), self.journal, map(str, range(self.count))) == CLEAN
            return
        assert sorted(int(entry.id) for entry in self.journal) == list(range(self.count))
        seqs: dict[str, list[int]] = {}
        for entry in self.journal:
            seqs.setdefault(entry.subject, []).append(entry.seq)
        assert all(each == sorted(each) for each in seqs.values())


@contextlib.asynccontextmanager
async def pair_on(
    url: str, stream: str, count: int, retention: str = "limits", **settings: Any
) -> AsyncIterator[Pair]:
    await create_stream(url, stream, allow_direct=True, retention=retention)
    pair = Pair(url, stream, count, settings)
    try:
        yield pair
    finally:
        if pair.publishing:
            pair.publishing.cancel()
            await asyncio.gather(pair.publishing, return_exceptions=True)


def works(worker: Worker) -> bool:
    return worker.state is FleetState.STABLE and len(worker.partitions) == len(PARTITIONS)


# A queue and a stream that keeps everything stand for the third kind.
@pytest.mark.parametrize("retention", ["limits", "workqueue", pytest.param("interest", marks=pytest.mark.slow)])
async def test_whoever_stands_by_goes_on_when_the_other_leaves(
    nats_server: Server, stream_name: str, retention: str
) -> None:
    async with pair_on(nats_server.url, stream_name, 4_000, retention) as pair, contextlib.AsyncExitStack() as second:
        async with pair.worker() as first:
            await eventually(lambda: works(first))
            pair.publish()
            other = await second.enter_async_context(pair.worker())
            await eventually(lambda: other.state is FleetState.STANDBY)
            await pair.handled(0.4)
            assert other.finished == 0
        await eventually(lambda: works(other), 5)
        await pair.finish()
        assert other.finished > 0
    await pair.verify(retention)


async def test_several_consumers_change_hands_together(nats_server: Server, stream_name: str) -> None:
    shards: dict[str, Any] = {"consumer_shards": 2, "max_subjects": 20}
    async with pair_on(nats_server.url, stream_name, 3_000, **shards) as pair, contextlib.AsyncExitStack() as second:
        async with pair.worker() as first:
            await eventually(lambda: works(first))
            pair.publish()
            other = await second.enter_async_context(pair.worker())
            await eventually(lambda: other.state is FleetState.STANDBY)
            await pair.handled(0.3)
        await eventually(lambda: works(other), 5)
        await pair.finish()
    await pair.verify()


async def test_of_three_the_smaller_rank_goes_first(nats_server: Server, stream_name: str) -> None:
    async with (
        pair_on(nats_server.url, stream_name, 4_000) as pair,
        pair.worker(standby_rank=1) as last,
        contextlib.AsyncExitStack() as others,
    ):
        await eventually(lambda: works(last))
        pair.publish()
        second = await others.enter_async_context(pair.worker(standby_rank=2))
        first = await others.enter_async_context(pair.worker(standby_rank=0))
        await eventually(lambda: second.state is first.state is FleetState.STANDBY)
        await eventually(lambda: _stand_by(nats_server.url, stream_name, ranks=[0, 2]))
        await last.stop()
        await eventually(lambda: works(first), 5)
        await pair.handled(0.8)
        assert second.finished == 0
        await first.stop()
        await eventually(lambda: works(second), 5)
        await pair.finish()
    await pair.verify()


def test_operators_see_who_stands_by() -> None:
    since = datetime.now(UTC) - timedelta(seconds=8)
    member = MemberRecord(token="t", incarnation=7, host="a", pid=1, version="1.0", started_at=since, ttl_seconds=5.0)
    waits = StandbyRecord(worker="both", rank=1, host="b", pid=2, version="1.0", since=since, ttl_seconds=5.0)
    records = Records.of(
        {
            "ids.both": Entry(encode(member), 1),
            "standby.both.0a1b": Entry(encode(waits), 2),
            "standby.other.0a1c": Entry(encode(waits)[:9], 3),
        }
    )
    assert list(records.unreadable) == ["standby.other.0a1c"]
    (row,) = worker_rows(records, datetime.now(UTC))
    assert row.standbys == (waits,)
    console = Console(width=200, file=io.StringIO())
    console.print(draw(take_picture("here", records), console, fit=False))
    assert isinstance(console.file, io.StringIO)
    assert "1 standing by" in console.file.getvalue()
    records.take("standby.both.0a1b", Entry(b"", 4))
    assert not records.standbys


async def _stand_by(url: str, stream: str, ranks: list[int]) -> bool:
    """Whether so many say in the bucket that they stand by."""
    connection = await Connection.open(settings_for(url), name="operator")
    try:
        found = Records.of(await read_keys(connection, JetStreamApi(connection), stream, KEYS)).standbys.values()
    finally:
        await connection.close()
    return sorted(each.rank for each in found) == ranks and all(each.worker == "both" for each in found)


async def test_standing_by_can_be_turned_on_and_off(nats_server: Server, stream_name: str) -> None:
    """The consumer is made anew, with the group or without it, and goes on where the other one was."""
    async with pair_on(nats_server.url, stream_name, 3_000) as pair:
        for share, standby in ((0.3, False), (0.6, True), (1.0, False)):
            async with pair.worker(standby=standby) as worker:
                await eventually(lambda w=worker: works(w))  # type: ignore[misc]
                if not pair.publishing:
                    pair.publish()
                if share == 1.0:
                    await pair.finish()
                await pair.handled(share)
                assert await _has_group(nats_server.url, stream_name) is standby
    await pair.verify()


async def _has_group(url: str, stream: str) -> bool:
    connection = await Connection.open(settings_for(url), name="operator")
    try:
        config = (await JetStreamApi(connection).consumer_info(stream, f"{stream}-both")).config
    finally:
        await connection.close()
    return config.get("priority_groups") == ["lease"]


async def test_after_a_reset_whoever_worked_goes_first(nats_server: Server, stream_name: str) -> None:
    """It has the positions in memory, which are in no bucket any more."""
    async with pair_on(nats_server.url, stream_name, 4_000) as pair, pair.worker() as first:
        await eventually(lambda: works(first))
        pair.publish()
        async with pair.worker() as second:
            await eventually(lambda: second.state is FleetState.STANDBY)
            await pair.handled(0.3)
            connection = await Connection.open(settings_for(nats_server.url), name="operator")
            try:
                api = JetStreamApi(connection)
                await api.call(f"STREAM.DELETE.KV_{stream_name}")
                await Bucket.open(api, stream_name, replicas=1)  # as any other worker of the fleet may
            finally:
                await connection.close()
            before = len(pair.journal)
            await eventually(lambda: works(first) and len(pair.journal) > before + 500, 15)
            await pair.finish()
            assert second.finished == 0
    await pair.verify()


async def test_after_an_outage_whoever_worked_goes_first(stream_name: str) -> None:
    """It knows what it has finished; the other one knows only what was stored."""
    async with Server() as server, pair_on(server.url, stream_name, 4_000) as pair, pair.worker() as first:
        await eventually(lambda: works(first))
        pair.publish()
        async with pair.worker() as second:
            await eventually(lambda: second.state is FleetState.STANDBY)
            await pair.handled(0.3)
            await server.kill()
            await eventually(lambda: first.state is FleetState.DEGRADED)
            await server.restart()
            await eventually(lambda: works(first), 15)
            await pair.finish()
            assert second.finished == 0
            await pair.verify()


async def test_an_operator_lets_the_other_one_work(nats_server: Server, stream_name: str) -> None:
    """Unpinning is a planned switch: nothing is repeated, and the one that worked stands by."""
    async with pair_on(nats_server.url, stream_name, 6_000) as pair, pair.worker() as first:
        await eventually(lambda: works(first))
        pair.publish(0.4)
        async with pair.worker() as second:
            workers = (first, second)
            connection = await Connection.open(settings_for(nats_server.url), name="operator")
            try:
                api = JetStreamApi(connection)
                for turn, (share, further) in enumerate(((0.3, 0.8), (0.6, 1.0))):
                    active, waiting = workers[turn % 2], workers[1 - turn % 2]
                    await eventually(lambda w=active: works(w), 30)  # type: ignore[misc]
                    await eventually(lambda w=waiting: w.state is FleetState.STANDBY, 30)  # type: ignore[misc]
                    await eventually(lambda: _waits(nats_server, stream_name), 30)
                    await pair.handled(share)
                    await unpin(api, stream_name, f"{stream_name}-both", "lease")
                    pair.publish_to(further)  # the server pins whoever gets the next message: there has to be one
                    await eventually(lambda w=waiting: works(w), 30)  # type: ignore[misc]
            finally:
                await connection.close()
            await pair.finish()
            assert first.finished
            assert second.finished
    await pair.verify()


def _waits(server: Server, stream: str) -> bool:
    """Whether whoever stands by has sent its pull: it asks for the consumer first, and sends nothing else.

    The consumer's number of waiting pulls does not tell: those that a client sent before it was pinned stay in it.
    """
    found = ask(server.monitor_port, "/connz?limit=4096")
    assert found
    sent = [c["in_msgs"] for c in found["connections"] if c.get("name") == f"{stream}-both-standby"]
    return any(count >= 2 for count in sent)


def settings_for(url: str) -> Settings:
    return load_settings({"nats": url})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"worker_id": None}, "standby is for a member of a fleet whose worker id others share; set worker_id"),
        ({"fleet": False}, "standby is for a member of a fleet"),
        ({"hot_mirror": "on"}, "standby=true needs a consumer with acknowledgements"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings({**SHARED, **settings})
