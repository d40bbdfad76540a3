"""A lane: order, duplicates, late deliveries, position, parking."""

from __future__ import annotations

import pytest

from parti.core.lane import Lane, Phase, Verdict, lanes_to_park
from parti.model.message import Message, Ownership
from parti.model.partition import Template

OWNERSHIP = Ownership(Template("dc.{tool}").partition("a"), "DC", "w0")


def message(seq: int) -> Message:
    return Message("dc.a", b"", seq, OWNERSHIP, b"reply-%d" % seq)


def lane_with(*seqs: int, position: int = 0, phase: Phase = Phase.READY) -> Lane:
    lane = Lane(OWNERSHIP, position)
    for seq in seqs:
        assert lane.offer(message(seq)) is Verdict.ACCEPTED
    lane.phase = phase
    return lane


def seqs(lane: Lane) -> list[int]:
    return [each.seq for each in lane.waiting]


def test_messages_wait_in_stream_order_and_the_position_follows_what_is_finished() -> None:
    lane = lane_with(3, 7, 9)
    assert (lane.position, lane.floor) == (0, 3)
    for seq in (3, 7, 9):
        assert lane.finish().seq == seq
        assert lane.position == seq + 1
    assert lane.floor is None


def test_a_delivery_below_the_position_is_finished_and_one_at_it_is_not() -> None:
    lane = lane_with(position=10)
    assert lane.offer(message(9)) is Verdict.FINISHED
    assert lane.offer(message(10)) is Verdict.ACCEPTED
    assert seqs(lane) == [10]


def test_what_already_waits_or_runs_is_a_duplicate() -> None:
    lane = lane_with(1, 2, 3, phase=Phase.RUNNING)
    for seq in (1, 2, 3):
        assert lane.offer(message(seq)) is Verdict.DUPLICATE
    assert seqs(lane) == [1, 2, 3]


def test_a_late_delivery_goes_where_it_belongs() -> None:
    lane = lane_with(2, 6, phase=Phase.RUNNING)
    assert lane.offer(message(4)) is Verdict.ACCEPTED
    assert seqs(lane) == [2, 4, 6]


def test_before_the_head_was_started_a_late_delivery_comes_first() -> None:
    lane = lane_with(5, 6)
    assert lane.offer(message(4)) is Verdict.ACCEPTED
    assert seqs(lane) == [4, 5, 6]
    assert lane.floor == 4


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.BACKOFF])
def test_a_head_that_was_started_overtakes_and_the_position_waits_for_the_late_one(phase: Phase) -> None:
    lane = lane_with(5, 6, position=2, phase=phase)
    assert lane.offer(message(4)) is Verdict.OVERTAKEN
    assert seqs(lane) == [5, 4, 6]
    assert lane.floor == 4
    assert lane.finish().seq == 5
    assert lane.position == 4
    assert lane.finish().seq == 4
    assert lane.position == 5


def test_a_head_that_waits_for_its_second_attempt_stays_the_head() -> None:
    lane = lane_with(5, phase=Phase.READY)
    lane.waiting[0].attempt = 2
    assert lane.offer(message(4)) is Verdict.OVERTAKEN
    assert seqs(lane) == [5, 4]


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ([5, 20, 7], [10, 5, 7, 20]),
        ([5, 7], [10, 5, 7]),
        ([7, 5], [10, 5, 7]),
        ([5, 3, 12, 8], [10, 3, 5, 8, 12]),
    ],
)
def test_several_late_deliveries_are_sorted_behind_the_running_head(late: list[int], expected: list[int]) -> None:
    lane = lane_with(10, phase=Phase.RUNNING)
    verdicts = {seq: lane.offer(message(seq)) for seq in late}
    assert seqs(lane) == expected
    assert verdicts == {seq: Verdict.OVERTAKEN if seq < 10 else Verdict.ACCEPTED for seq in late}
    assert lane.floor == min(expected)
    lane.finish()
    assert lane.position == min(late)


def test_a_runner_that_took_several_finishes_its_own_and_not_a_late_one() -> None:
    lane = lane_with(1, 3, 4, phase=Phase.RUNNING)
    taken = list(lane.waiting)
    lane.finish(taken[0])
    lane.offer(message(2))
    assert lane.finish(taken[1]).seq == 3
    assert lane.finish(taken[2]).seq == 4
    assert seqs(lane) == [2]
    assert lane.position == 2
    lane.finish()
    assert lane.position == 3


def test_the_position_never_goes_back() -> None:
    lane = lane_with(5, position=5, phase=Phase.RUNNING)
    lane.finish()
    assert lane.position == 6
    lane.position = 100
    lane.waiting.append(message(50))
    lane.finish()
    assert lane.position == 100


# ── parking ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_parked_lane_keeps_its_head_and_takes_nothing_more() -> None:
    lane = lane_with(1, 2, 3, phase=Phase.RUNNING)
    assert [m.seq for m in lane.park()] == [2, 3]
    assert seqs(lane) == [1]
    assert lane.offer(message(1)) is Verdict.DUPLICATE
    assert lane.offer(message(4)) is Verdict.PARKED
    assert lane.offer(message(2)) is Verdict.PARKED
    assert seqs(lane) == [1]
    lane.finish()
    assert lane.offer(message(1)) is Verdict.FINISHED
    assert lane.position == 2
    assert not lane.caught_up(100)


def test_a_parked_lane_is_fed_in_order_until_all_it_let_go_is_back() -> None:
    lane = lane_with(1, 2, 5, phase=Phase.RUNNING)
    lane.park()
    lane.finish()
    lane.offer(message(9))
    lane.feed([message(2), message(5)], exhausted=False)
    assert lane.offer(message(12)) is Verdict.PARKED
    lane.feed([message(5), message(9), message(12)], exhausted=False)
    assert not lane.parked
    assert seqs(lane) == [2, 5, 9, 12]
    assert lane.offer(message(13)) is Verdict.ACCEPTED
    assert lane.offer(message(12)) is Verdict.DUPLICATE


def test_a_parked_lane_whose_messages_are_gone_from_the_stream_goes_live_again() -> None:
    lane = lane_with(1, 2, phase=Phase.RUNNING)
    lane.park()
    lane.finish()
    lane.feed([], exhausted=True)
    assert not lane.parked
    assert lane.caught_up(3)


def test_a_late_message_is_not_let_go_for_ever_when_its_lane_is_parked() -> None:
    lane = lane_with(10, 11, 12, phase=Phase.RUNNING)
    assert lane.offer(message(5)) is Verdict.OVERTAKEN
    lane.park()
    lane.finish()
    # The stream still holds them all; 10 is finished.
    lane.feed([message(seq) for seq in (5, 11, 12) if seq not in seqs(lane)], exhausted=True)
    assert seqs(lane) == [5, 11, 12]
    assert lane.position == 5


def test_what_a_runner_holds_is_not_let_go() -> None:
    lane = lane_with(1, 2, 3, 4, phase=Phase.RUNNING)
    lane.taken_to = 2
    assert [m.seq for m in lane.park()] == [3, 4]
    assert seqs(lane) == [1, 2]
    assert (lane.feed_from, lane.parked_to) == (3, 4)


def test_a_lane_behind_has_caught_up_when_nothing_is_left_that_only_its_position_remembers() -> None:
    lane = lane_with(position=5)
    lane.start_behind(20)
    assert not lane.caught_up(19)
    assert lane.caught_up(20)
    lane.start_behind(20, feed_to=9)
    assert lane.offer(message(21)) is Verdict.PARKED
    assert not lane.caught_up(30)
    lane.feed([message(5), message(9), message(21)], exhausted=False)
    lane.phase = Phase.RUNNING
    assert not lane.parked
    fed = Message("dc.a", b"", 30, OWNERSHIP)
    lane.waiting.appendleft(fed)
    assert not lane.caught_up(30)
    lane.waiting.popleft()
    assert lane.caught_up(30)


def full_lane(count: int) -> Lane:
    lane = Lane(OWNERSHIP)
    for seq in range(1, count + 1):
        lane.offer(message(seq))
    return lane


@pytest.mark.parametrize(
    ("waiting", "held", "parked"),
    [
        ([100], 200, [100]),
        ([100], 199, []),  # half of the room is free
        ([99], 400, []),  # less than a quarter is stuck
        ([25] * 16, 400, [25] * 13),  # many with few each: until the rest takes less than a quarter
        ([10, 200, 30], 300, [200]),
        ([1] * 400, 400, []),  # a head alone cannot be parked
    ],
)
def test_the_fullest_stuck_lanes_are_parked_until_there_is_room(
    waiting: list[int], held: int, parked: list[int]
) -> None:
    chosen = lanes_to_park([full_lane(count) for count in waiting], held=held, limit=400)
    assert [len(lane.waiting) for lane in chosen] == parked
