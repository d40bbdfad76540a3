"""A part of a worker meets an error that nobody has foreseen: the work goes on all the same, and it is told.

Each test plants the error in a collaborator, once or twice. What it would have ended is in the test's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.unit.lanes_bench import TEMPLATE, Bench, nothing

from parti.config import Settings
from parti.core.progress import Progress
from parti.errors import ConfigError
from parti.jetstream.acks import AckWriter
from parti.jetstream.backlog import Page
from parti.jetstream.direct import Stored
from parti.jetstream.kv import Entry
from parti.jetstream.vitals import Vitals
from parti.model.fleet import Grant
from parti.model.message import Message
from parti.model.partition import Partition
from parti.worker.caution import Caution
from parti.worker.lanes import Lanes
from parti.worker.ledger import Ledger
from parti.worker.parking import Parking
from parti.worker.progress import ProgressKeeper
from parti.worker.recording import RecordingLanes
from parti.worker.stateful import StatefulPartitions

UNFORESEEN = (
    RuntimeError("unable to perform operation on a closed transport"),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    asyncio.CancelledError("an inner future was cancelled"),
)


@pytest.fixture(params=UNFORESEEN, ids=lambda error: type(error).__name__)
def error(request: pytest.FixtureRequest) -> BaseException:
    found: BaseException = request.param
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Do not draw tracebacks: without a set-up log each takes a second, on the event loop."""
    with capture_logs():
        yield


@pytest.fixture
def vitals() -> Vitals:
    return Vitals("w0")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


class Planted:
    """Raises the error at the first calls, then does what it is there for."""

    def __init__(self, error: BaseException, action: Callable[..., Awaitable[Any]], times: int = 1) -> None:
        self._error = error
        self._action = action
        self._left = times
        self.met = 0

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._left:
            self._left -= 1
            self.met += 1
            raise self._error
        return await self._action(*arguments, **options)


def deaths(vitals: Vitals, task: str) -> int:
    return vitals.metrics.task_deaths.child(task).value


# ── dead letters ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_dead_letter_that_fails_is_sent_again_and_its_lane_goes_on(
    bench: Bench, vitals: Vitals, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Planted(error, bench.letters.send, times=2)
    monkeypatch.setattr(bench.letters, "send", send)
    bench.lanes.failures.health = vitals.health

    async def handler(message: Message) -> None:
        if message.seq == 1:
            raise ValueError("no")

    bench.own("a")
    bench.run_async(handler)
    bench.send("a", 1, 2)
    await bench.acked(1, 2)
    assert [seq for seq, *_ in bench.letters.sent] == [1]
    assert send.met == deaths(vitals, "dead-letter") == 2
    assert vitals.health.healthy


# ── parked lanes ──────────────────────────────────────────────────────────────────────────────────────────────────


class Backlog:
    """A stream of which a parked lane is fed."""

    def __init__(self, *seqs: int) -> None:
        self._seqs = seqs

    async def read(self, subject: str, seq: int, *, up_to: int, batch: int, max_bytes: int) -> Page:
        found = [Stored(each, subject, b"x", None, datetime.now(UTC)) for each in self._seqs if seq <= each <= up_to]
        return Page(tuple(found), exhausted=True)


async def stored() -> bool:
    return True


class Parked:
    """Parking over a bench, with a collaborator that fails."""

    def __init__(
        self, bench: Bench, vitals: Vitals, *, read: Any = None, store: Any = stored, limit: int = 8
    ) -> None:
        backlog: Any = Backlog(*range(1, 10))
        if read is not None:
            backlog.read = read(backlog.read)
        self.parking = Parking(bench.lanes, backlog, store, vitals.metrics, vitals.health, limit=8)
        self._task = asyncio.ensure_future(self.parking.run())

    async def __aenter__(self) -> Parked:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_feed_that_fails_feeds_its_lane_later(bench: Bench, vitals: Vitals, error: BaseException) -> None:
    async with Parked(bench, vitals, read=lambda read: Planted(error, read, times=2)):
        bench.own("a")
        bench.run_async(nothing)
        bench.lanes.roster.gain(next(iter(TEMPLATE.partitions(["a"]))), 1, feed_to=4)
        await bench.until(lambda: bench.started("a") == [1, 2, 3, 4])
    assert deaths(vitals, "feeding") == 2


async def test_positions_that_cannot_be_stored_leave_no_lane_parked_with_its_messages(
    bench: Bench, vitals: Vitals, error: BaseException
) -> None:
    """What a parked lane lets go is acknowledged when its position is stored; until then it takes others' room."""
    gate = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.partition.id == "a":
            await gate.wait()

    store = Planted(error, stored, times=2)
    bench.own("a", "b")
    bench.run_async(handler)
    async with Parked(bench, vitals, store=store):
        bench.send("a", 1, 2, 3, 4, 5, 6, 7)
        await bench.acked(2, 3, 4, 5, 6, 7)
        assert store.met == deaths(vitals, "parking") == 2
        gate.set()
        await bench.until(lambda: bench.started("a") == [1, 2, 3, 4, 5, 6, 7])


# ── caution after a crash ─────────────────────────────────────────────────────────────────────────────────────────


async def test_a_note_that_fails_is_written_again_and_its_lanes_begin(
    bench: Bench, vitals: Vitals, error: BaseException
) -> None:
    store = Planted(error, stored, times=2)
    caution = Caution(bench.lanes, store, vitals.health, limit=2)
    caution.take({"a": Grant(1, 1, 10), "b": Grant(1, 1, 10)})
    bench.own("a", "b")
    bench.run_async(nothing)
    bench.send("a", 1, 3)
    bench.send("b", 2)
    await bench.acked(1, 2, 3)
    assert store.met == deaths(vitals, "caution") == 2
    await caution.stop()


# ── the ledger ────────────────────────────────────────────────────────────────────────────────────────────────────


class Stream:
    """A ledger stream that takes everything."""

    async def publish(self, subject: str, payload: bytes, **_: Any) -> int:
        return 1


class Writer:
    """Acknowledges as an AckWriter does."""

    def __init__(self, acks: Any) -> None:
        self.ack = acks.ack

    def ack_all(self, replies: list[bytes]) -> None:
        for reply in replies:
            self.ack(reply)


class Torn(Writer):
    """The first time, its transport has just been closed."""

    torn = True

    def ack_all(self, replies: list[bytes]) -> None:
        if self.torn:
            self.torn = False
            raise RuntimeError("unable to perform operation on a closed transport")
        super().ack_all(replies)


async def handle_with_ledger(vitals: Vitals, stream: Any, writer: type[Writer]) -> list[int]:
    """Handle three messages, each in a batch of the ledger of its own; returns what was acknowledged."""
    made: list[Ledger] = []

    def make(*, acks: Any, **options: Any) -> RecordingLanes:
        settings, acking = Settings(worker_id="w0", ledger="full"), cast("AckWriter", writer(acks))
        made.append(Ledger(stream, acking, vitals.metrics, vitals.health, settings, stream="DC", max_payload=1 << 20))
        return RecordingLanes(ledger=made[0], **options)

    bench = Bench(cast("type[Lanes]", make))
    bench.own("a")
    bench.run_async(nothing)
    made[0].open("t0")
    for seq in (1, 2, 3):
        bench.send("a", seq)
        await bench.until(partial(lambda count: bench.lanes.finished >= count, seq))
        assert await made[0].durable(5.0)
    await bench.close()
    await made[0].close(closed=True)
    return bench.acks.acked


async def test_a_batch_of_the_ledger_whose_answer_is_cancelled_is_published_again(
    vitals: Vitals, error: BaseException
) -> None:
    stream: Any = Stream()
    stream.publish = Planted(error, stream.publish, times=2)
    assert await handle_with_ledger(vitals, stream, Writer) == [1, 2, 3]
    assert vitals.health.healthy


async def test_acknowledgements_that_cannot_be_written_hold_up_no_later_batch(vitals: Vitals) -> None:
    assert await handle_with_ledger(vitals, Stream(), Torn) == [2, 3]
    assert deaths(vitals, "ledger") == 1
    assert vitals.health.healthy


# ── states ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Keeper:
    """A keeper of states that has one at position 7."""

    async def load(self, partition: Partition, *, fence: int, stream_created: str) -> int:
        return 7

    async def settle(self) -> None:
        """Nothing is left over."""


async def test_a_partition_whose_state_cannot_be_restored_begins_later(bench: Bench, vitals: Vitals) -> None:
    keeper: Any = Keeper()
    keeper.load = Planted(KeyError("chunk"), keeper.load, times=2)
    stateful = StatefulPartitions(
        keeper,
        bench.lanes,
        vitals.metrics,
        vitals.health,
        worker_id="w0",
        stream_created=lambda: "t0",
        checkpoint_interval_s=60.0,
    )
    begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stateful.begin(Partition("a", "dc.a", {}), lambda: 1, begun.set_result)
    async with asyncio.timeout(5.0):
        assert await begun == 7
    assert vitals.metrics.state_failures.value == 2
    assert vitals.health.healthy
    await stateful.stop(save=False, timeout_s=1.0)


# ── positions ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Records:
    """A bucket that takes everything."""

    async def get(self, key: str) -> Entry | None:
        return None

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        return revision + 1


async def test_positions_that_fail_to_be_stored_are_told_of_and_stored_the_next_time(vitals: Vitals) -> None:
    store: Any = Records()
    store.put = Planted(UNFORESEEN[1], store.put)
    keeper = ProgressKeeper(store, "w0", vitals.metrics, vitals.health)

    def summarise(writer: str) -> Progress:
        return Progress(stream="DC", stream_created="t0", writer=writer)

    assert not await keeper.save(summarise)
    assert "surrogates" in vitals.health.reasons["progress"]
    assert await keeper.save(summarise)
    assert vitals.health.healthy


async def test_positions_that_can_never_be_stored_are_in_the_log_once_in_a_while(vitals: Vitals) -> None:
    store: Any = Records()
    store.put = Planted(ConfigError("message of 2000000 bytes is larger than max_payload"), store.put, times=50)
    keeper = ProgressKeeper(store, "w0", vitals.metrics, vitals.health)
    with capture_logs() as logs:
        for _ in range(50):
            assert not await keeper.save(lambda writer: Progress(stream="DC", stream_created="t0", writer=writer))
    assert [line["event"] for line in logs] == ["progress not stored"]
    assert vitals.metrics.progress_failures.value == 50
    assert "2000000" in vitals.health.reasons["progress"]
