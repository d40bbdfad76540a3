"""The ledger between lanes and acknowledgements, with a stream that answers when and how a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from tests.unit.lanes_bench import Acks, Bench, Signal, behind_gates, gates, nothing

from parti.config import Settings, load_settings
from parti.errors import ApiError, ConfigError
from parti.model.ledger import LedgerBatch, decode_batch, sample_hash, sample_limit
from parti.model.message import Message
from parti.telemetry.health import Health
from parti.worker import ledger as ledger_module
from parti.worker.lanes import Lanes
from parti.worker.ledger import Ledger
from parti.worker.recording import RecordingLanes, RecordingUnorderedLanes


class Stream:
    """A ledger stream that may take its time, or refuse."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.asked: list[str] = []
        self.stored: list[LedgerBatch] = []
        self.slow: dict[int, asyncio.Event] = {}
        self.refuses = False

    async def publish(self, subject: str, payload: bytes, *, headers: Mapping[str, str], timeout_s: float) -> int:
        self.asked.append(headers["Nats-Msg-Id"])
        assert headers["Nats-Expected-Stream"] == "DC-ledger"
        assert subject == "parti.ledger.DC.w0"
        self._signal.fire()
        batch = decode_batch(payload)
        if batch.number in self.slow:
            await self.slow[batch.number].wait()
        if self.refuses:
            raise ApiError(10077, "maximum bytes exceeded")
        self.stored.append(batch)
        self._signal.fire()
        return len(self.stored)

    @property
    def seqs(self) -> list[int]:
        return [seq for batch in self.stored for seq in batch.seq]


class Writer(Acks):
    """What an AckWriter would send, many at once too."""

    def ack_all(self, replies: list[bytes]) -> None:
        for each in replies:
            self.ack(each)


class Office(Bench):
    """Lanes with a ledger."""

    def __init__(self, kind: type[RecordingLanes] = RecordingLanes, **settings: Any) -> None:
        self.health = Health()

        def make(*, acks: Acks, **options: Any) -> Lanes:
            self.stream = Stream(acks._signal)
            self.writer = Writer(acks._signal)
            api: Any = self.stream
            writer: Any = self.writer
            max_payload = settings.pop("max_payload", 1 << 20)
            chosen = Settings(**{"worker_id": "w0", "ledger": "full", **settings})
            self.ledger = Ledger(
                api, writer, options["metrics"], self.health, chosen, stream="DC", max_payload=max_payload
            )
            return kind(ledger=self.ledger, **options)

        lanes: Any = make
        super().__init__(lanes)
        self.acks = self.writer

    async def open(self, handler: Callable[[Message], Any] = nothing) -> None:
        self.own("a", "b")
        self.run_async(handler)
        self.ledger.open("t0")
        await self.until(lambda: self.stream.stored)

    async def close(self) -> None:
        self.stream.refuses = False
        for event in self.stream.slow.values():
            event.set()
        await super().close()
        await self.ledger.close(closed=False)


@pytest.fixture(autouse=True)
def only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sealed by the clock: the tests say when."""
    monkeypatch.setattr(ledger_module, "_EVERY_S", 3600.0)
    monkeypatch.setattr(ledger_module, "_RETRY_MIN_S", 0.002)


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    office = Office()
    yield office
    await office.close()


def may_start(office: Office) -> bool:
    return office.lanes.permitted


async def finished(office: Office, count: int) -> None:
    await office.until(lambda: office.lanes.finished >= count)


async def test_nothing_starts_before_the_process_is_known(office: Office) -> None:
    office.stream.slow[0] = asyncio.Event()
    office.own("a")
    office.run_async(nothing)
    office.ledger.open("t0")
    await office.until(lambda: office.stream.asked)
    office.send("a", 1)
    assert not may_start(office)
    office.stream.slow[0].set()
    await finished(office, 1)
    assert [(batch.number, len(batch)) for batch in office.stream.stored] == [(0, 0)]


async def test_acknowledgements_wait_for_their_rows(office: Office) -> None:
    await office.open()
    office.stream.slow[1] = asyncio.Event()
    office.send("a", 1, 2)
    await finished(office, 2)
    assert not await office.ledger.durable(0.0)
    await office.until(lambda: len(office.stream.asked) == 2)
    assert office.acks.acked == []
    office.stream.slow[1].set()
    assert await office.ledger.durable()
    assert office.acks.acked == [1, 2]
    assert office.stream.seqs == [1, 2]
    assert office.metrics.ledger_rows.value == 2


async def test_a_later_batch_that_is_stored_sooner_acknowledges_nothing(office: Office) -> None:
    await office.open()
    office.stream.slow[1] = asyncio.Event()
    office.send("a", 1)
    await finished(office, 1)
    office.ledger.seal()
    office.send("a", 2)
    office.send("a", 1, deliveries=2)  # it is finished, but nobody may know yet
    await finished(office, 2)
    office.ledger.seal()
    await office.until(lambda: office.stream.seqs == [2])
    assert office.acks.acked == []
    office.stream.slow[1].set()
    assert await office.ledger.durable()
    assert sorted(office.acks.acked) == [1, 1, 2]


async def test_an_acknowledgement_without_a_row_follows_the_rows_before_it(office: Office) -> None:
    await office.open()
    office.send("a", 1)
    await finished(office, 1)
    assert await office.ledger.durable()
    office.send("a", 1, deliveries=2)
    office.ledger.seal()
    assert office.acks.acked == [1, 1]
    assert len(office.stream.stored) == 2


async def test_a_ledger_that_refuses_stops_everything_and_goes_on_with_the_same_batch(office: Office) -> None:
    await office.open()
    office.stream.refuses = True
    office.send("a", 1)
    await finished(office, 1)
    office.ledger.seal()
    await office.until(lambda: office.stream.asked.count(office.stream.asked[-1]) > 3)
    assert not may_start(office)
    office.lanes.permit(float("inf"))  # a renewed lease does not change that
    office.send("a", 2)
    assert office.started("a") == [1]
    assert "maximum bytes exceeded" in office.health.reasons["ledger"]
    assert office.metrics.ledger_failures.value >= 3
    office.stream.refuses = False
    await finished(office, 2)
    assert await office.ledger.durable()
    assert office.health.healthy
    assert office.acks.acked == [1, 2]
    assert [batch.number for batch in office.stream.stored] == [0, 1, 2]


async def test_too_many_batches_on_their_way_stop_the_start_of_handlers(office: Office) -> None:
    await office.open()
    office.stream.slow = {number: asyncio.Event() for number in range(1, 100)}
    for seq in range(1, 18):
        assert may_start(office)
        office.send("a", seq)
        await finished(office, seq)
        office.ledger.seal()
    assert not may_start(office)
    for event in office.stream.slow.values():
        event.set()
    assert await office.ledger.durable()
    assert may_start(office)
    assert sorted(office.stream.seqs) == list(range(1, 18))
    assert office.acks.acked == list(range(1, 18))


async def test_a_full_batch_is_sealed_at_once() -> None:
    office = Office(max_ack_pending=63)  # a third of it is a batch
    await office.open()
    office.send("a", *range(1, 22))
    await office.until(lambda: office.stream.seqs == list(range(1, 22)))
    await office.close()


async def test_a_batch_too_large_for_a_message_becomes_two() -> None:
    office = Office(max_payload=4096 + 400)
    await office.open()
    office.send("a", *range(1, 41))
    await finished(office, 40)
    assert await office.ledger.durable()
    assert sorted(office.stream.seqs) == list(range(1, 41))
    assert len(office.stream.stored) > 2
    assert office.acks.acked == list(range(1, 41))
    await office.close()


async def test_messages_whose_acknowledgement_is_held_are_kept_alive(office: Office) -> None:
    await office.open()
    office.stream.slow[1] = asyncio.Event()
    office.send("a", 1)
    await finished(office, 1)
    office.ledger.seal()
    office.lanes.keep_alive(3600.0)
    assert office.acks.alive == []
    office.lanes.keep_alive(0.0)
    assert office.acks.alive == [1]


async def test_a_stream_made_anew_gets_no_acknowledgement_of_the_old_one(office: Office) -> None:
    doors = gates(3)
    await office.open(behind_gates(doors))
    office.stream.slow[1] = asyncio.Event()
    office.send("a", 1)
    await finished(office, 1)
    office.ledger.seal()
    office.send("a", 2)
    await finished(office, 2)
    office.send("b", 3)
    await office.until(lambda: office.started("b") == [3])
    office.ledger.start_over("t1")
    office.lanes.start_over()
    doors[3].set()
    await finished(office, 3)
    office.send("a", 1)
    await finished(office, 4)
    office.stream.slow[1].set()
    assert await office.ledger.durable()
    rows = [(batch.stream_created, seq) for batch in office.stream.stored for seq in batch.seq]
    assert sorted(rows) == [("t0", 1), ("t0", 2), ("t1", 1)]
    assert office.acks.acked == [1]
    assert len(office.lanes._outdated) == 0  # type: ignore[attr-defined]


async def test_a_sample_holds_only_its_own_acknowledgements() -> None:
    office = Office(ledger="sampled", ledger_sample=4)
    chosen = [seq for seq in range(1, 41) if sample_hash(seq) < sample_limit(4)]
    await office.open()
    office.send("a", *range(1, 41))
    await finished(office, 40)
    assert office.acks.acked == [seq for seq in range(1, 41) if seq not in chosen]
    office.send("a", chosen[0], deliveries=2)
    assert chosen[0] not in office.acks.acked
    assert await office.ledger.durable()
    assert office.stream.seqs == chosen
    assert set(office.acks.acked) == set(range(1, 41))
    await office.close()


async def test_first_starts_of_messages_that_are_given_up_are_forgotten() -> None:
    async def fails(message: Message) -> None:
        raise RuntimeError("no")

    for kind in (RecordingLanes, RecordingUnorderedLanes):
        office = Office(kind)
        await office.open(fails)
        office.send("a", 1)
        await office.until(lambda: office.starts)  # noqa: B023
        office.own("b")
        assert office.lanes._first_s == {}  # type: ignore[attr-defined]
        await office.close()


async def test_a_closed_chain_ends_with_a_batch_that_says_so(office: Office) -> None:
    await office.open()
    office.send("a", 1)
    await finished(office, 1)
    assert await office.ledger.close(closed=True)
    assert [(batch.number, len(batch), batch.closed) for batch in office.stream.stored] == [
        (0, 0, False),
        (1, 1, False),
        (2, 0, True),
    ]


def test_the_ledger_has_a_stream_of_its_own() -> None:
    with pytest.raises(ConfigError, match="ledger_stream=X holds dead letters or the bucket already"):
        load_settings({"ledger_stream": "X", "dead_letter_stream": "X"})
    with pytest.raises(ConfigError, match="must be 'off', 'sampled' or 'full'"):
        load_settings({"ledger": "most"})
