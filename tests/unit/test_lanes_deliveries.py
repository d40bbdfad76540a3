"""What lanes do with a delivery: order, positions, the floor, and very many subjects."""

from __future__ import annotations

import pytest
from tests.unit.lanes_bench import Bench, behind_gates, gates, nothing

from parti.worker import roster as roster_module

# ── deliveries, positions and floor ─────────────────────────────────────────────────────────────────────────────────


async def test_messages_of_a_partition_are_handled_in_order_and_acknowledged(bench: Bench) -> None:
    bench.own("a", "b")
    bench.run_async(nothing)
    bench.send("a", 1, 3)
    bench.send("b", 2, 4)
    await bench.acked(1, 2, 3, 4)
    assert bench.started("a") == [1, 3]
    assert bench.started("b") == [2, 4]
    assert bench.positions() == {"a": 4, "b": 5}
    assert (bench.lanes.held, bench.lanes.finished, bench.lanes.floors.floor) == (0, 4, 5)


async def test_the_floor_is_the_lowest_message_that_is_not_finished(bench: Bench) -> None:
    doors = gates(2)
    bench.own("a", "b")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1)
    bench.send("b", 2)
    bench.send("a", 3, 4)
    await bench.acked(1, 3, 4)
    assert bench.lanes.floors.floor == 2
    assert bench.positions()["a"] == 5
    assert bench.positions()["b"] <= 2
    doors[2].set()
    await bench.acked(2)
    assert bench.lanes.floors.floor == 5


async def test_a_delivery_below_the_position_is_acknowledged_and_skipped(bench: Bench) -> None:
    bench.own("a", at={"a": 10})
    bench.run_async(nothing)
    bench.send("a", 8, 9, 10)
    await bench.acked(8, 9, 10)
    assert bench.started() == [10]
    assert (bench.metrics.skipped.value, bench.metrics.redeliveries.value) == (2, 2)
    assert bench.lanes.held == 0


async def test_a_duplicate_while_its_message_runs_is_neither_handled_nor_acknowledged_twice(bench: Bench) -> None:
    doors = gates(1)
    bench.own("a")
    bench.run_async(behind_gates(doors))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.send("a", 1, 2)
    assert bench.lanes.held == 2
    doors[1].set()
    await bench.acked(1, 2)
    bench.send("a", 1)
    assert bench.started() == [1, 2]
    assert bench.acks.acked == [1, 2, 1]
    assert bench.lanes.held == 0


async def test_a_message_of_a_partition_that_is_not_ours_is_left_alone(bench: Bench) -> None:
    bench.own("a")
    bench.run_async(nothing)
    bench.send("b", 1)
    bench.send("a", 2)
    await bench.acked(2)
    assert bench.acks.acked == [2]
    assert bench.started() == [2]


async def test_with_wildcard_partitions_one_order_spans_their_subjects(bench: Bench) -> None:
    bench.own("*")
    doors = gates(1)
    bench.run_async(behind_gates(doors))
    bench.send("x", 1)
    bench.send("y", 2)
    await bench.until(lambda: bench.started() == [1])
    doors[1].set()
    await bench.acked(1, 2)
    assert [(pid, seq) for pid, seq, _ in bench.starts] == [("*", 1), ("*", 2)]
    assert bench.most_at_once["*"] == 1


async def test_keep_alive_speaks_of_what_has_waited_or_run_long_enough(bench: Bench) -> None:
    bench.own("a", "b")
    bench.run_async(behind_gates(gates(1)))
    bench.send("a", 1, 2)
    await bench.until(lambda: bench.started() == [1])
    bench.lanes.keep_alive(60.0)
    assert bench.acks.alive == []
    bench.lanes.keep_alive(-1.0)
    assert sorted(bench.acks.alive) == [1, 2]


# ── many subjects ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_very_many_idle_lanes_are_forgotten_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "_EVICT_ABOVE", 3)
    bench = Bench(each_subject=True)
    doors = gates(4)
    bench.own("*")
    bench.run_async(behind_gates(doors))
    for seq, partition_id in enumerate("abc", start=1):
        bench.send(partition_id, seq)
    await bench.acked(1, 2, 3)
    bench.lanes.roster.evict()
    assert len(bench.lanes.roster.lanes) == 3
    bench.send("d", 4)
    bench.send("e", 5)
    await bench.acked(5)
    bench.lanes.roster.evict()
    assert sorted(bench.positions()) == ["d", "e"]
    doors[4].set()
    bench.send("a", 6)
    await bench.acked(4, 6)
    assert bench.started("a") == [1, 6]
    await bench.close()


async def test_a_redelivery_to_a_lane_that_was_forgotten_is_still_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "_EVICT_ABOVE", 0)
    bench = Bench(each_subject=True)
    bench.own("*")
    bench.run_async(nothing)
    bench.send("a", 1)
    bench.send("b", 2)
    await bench.acked(1, 2)
    bench.lanes.roster.evict()
    assert len(bench.lanes.roster.lanes) == 0
    bench.send("a", 1, deliveries=2)
    bench.send("b", 3)
    await bench.acked(3)
    assert bench.started("a") == [1]
    await bench.close()


async def test_each_subject_is_a_partition_of_its_own() -> None:
    bench = Bench(each_subject=True)
    bench.own("*")
    bench.run_async(nothing)
    bench.send("a", 1)
    bench.send("b", 2)
    bench.send("a.b", 3)
    await bench.acked(1, 2)
    assert bench.positions() == {"a": 2, "b": 3}
    assert bench.acks.acked == [1, 2]
    await bench.close()
