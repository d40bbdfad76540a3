"""When acknowledgements are written: the first of a turn at once, the rest of it together."""

from __future__ import annotations

import asyncio

import pytest

from parti.jetstream.acks import AckWriter
from parti.jetstream.wire import Wire
from parti.telemetry.metrics import Metrics


class Paper(Wire):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> bool:
        self.writes.append(data)
        return True

    @property
    def acked(self) -> list[list[int]]:
        """Replies by write."""
        return [[int(line.split()[1]) for line in w.split(b"\r\n") if line.startswith(b"PUB")] for w in self.writes]


class Desk:
    def __init__(self) -> None:
        self.paper, self.metrics, self.turns = Paper(), Metrics("w"), 0
        self.acks = AckWriter(self.paper, self.metrics, self._turn)

    def _turn(self) -> None:
        self.turns += 1


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_the_only_one_of_a_turn_is_gone_when_the_call_returns(desk: Desk) -> None:
    for number in range(3):
        desk.acks.ack(b"%d" % number)
        assert desk.paper.acked[-1] == [number]
        assert desk.turns == number
        await asyncio.sleep(0)
        assert desk.turns == number + 1
    assert desk.paper.writes[0] == b"PUB 0 4\r\n+ACK\r\n"
    assert len(desk.paper.writes) == desk.metrics.acks.value == 3


async def test_a_busy_turn_costs_two_writes(desk: Desk) -> None:
    for number in range(100):
        desk.acks.ack(b"%d" % number)
    desk.acks.ack_all([b"100", b"101"])
    assert desk.paper.acked == [[0]]
    await asyncio.sleep(0)
    assert desk.paper.acked == [[0], list(range(1, 102))]
    assert (desk.turns, desk.metrics.acks.value) == (1, 102)


async def test_many_at_once_go_at_once(desk: Desk) -> None:
    desk.acks.ack_all([])
    assert desk.paper.writes == []
    desk.acks.ack_all([b"1", b"2"])
    assert desk.paper.acked == [[1, 2]]
    await asyncio.sleep(0)
    assert (desk.paper.acked, desk.turns) == ([[1, 2]], 1)


async def test_what_is_flushed_by_hand_is_not_sent_again(desk: Desk) -> None:
    desk.acks.ack(b"1")
    desk.acks.ack(b"2")
    desk.acks.in_progress(b"3")
    desk.acks.flush()
    sent = list(desk.paper.writes)
    assert sorted(reply for write in desk.paper.acked for reply in write) == [1, 2, 3]
    desk.acks.ack(b"4")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert desk.paper.writes[len(sent) :] == [b"PUB 4 4\r\n+ACK\r\n"]
    assert desk.metrics.acks.value == 3


async def test_a_silent_one_writes_nothing_and_still_ends_its_turns(desk: Desk) -> None:
    desk.acks.silent = True
    desk.acks.ack(b"1")
    desk.acks.ack(b"2")
    desk.acks.terminate(b"3")
    await asyncio.sleep(0)
    assert (desk.paper.writes, desk.turns, desk.metrics.acks.value) == ([], 1, 0)
