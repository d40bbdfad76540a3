"""Learning loads, publishing them, putting them together, and what is worth a move."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.lanes_bench import Bench

from parti.cli.workers import worker_table
from parti.config import Settings
from parti.coordination.records import Records
from parti.coordination.worker_rows import worker_rows
from parti.core.loads import IDLE_LOAD, Effort, Learning, LoadBook, Patience, Sample, is_worth, noticed
from parti.errors import RequestTimeout
from parti.jetstream.kv import Entry
from parti.model.fleet import LoadRecord, MemberRecord, decode
from parti.model.message import Message
from parti.strategies import MeasuredLoad, Slot, learns_loads, strategy_named
from parti.worker.lanes import Lanes
from parti.worker.loads import LoadMeter
from parti.worker.unordered import UnorderedLanes

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def record(after_s: float = 0.0, **loads: float) -> LoadRecord:
    return LoadRecord(incarnation=1, loads=loads, at=NOON + timedelta(seconds=after_s))


# ── what handlers took ────────────────────────────────────────────────────────────────────────────────────────────


def test_effort_is_counted_from_one_look_to_the_next() -> None:
    effort = Effort()
    effort.seconds, effort.calls = 0.5, 10
    assert effort.take() == (0.5, 10)
    assert effort.take() == (0.0, 0)


def test_a_long_call_counts_while_it_runs_and_once_in_all() -> None:
    effort = Effort()
    assert effort.take(running_s=3.0) == (3.0, 0)
    assert effort.take(running_s=8.0) == (5.0, 0)
    effort.seconds, effort.calls = 9.0, 1
    assert effort.take() == (1.0, 1)


def test_a_call_that_has_ended_but_is_not_reported_yet_is_not_counted_twice() -> None:
    effort = Effort()
    assert effort.take(running_s=2.0) == (2.0, 0)
    assert effort.take() == (0.0, 0)
    effort.seconds += 2.5
    effort.calls += 1
    assert effort.take() == (0.5, 1)


# ── learning ──────────────────────────────────────────────────────────────────────────────────────────────────────


def learned(*samples: Sample, half_life_s: float = 30.0) -> float:
    learning = Learning(half_life_s)
    for sample in samples:
        learning.observe({"p": sample}, 1.0)
    return learning.loads().get("p", -1.0)


def test_the_first_figure_is_what_was_seen_and_not_held_against_zero() -> None:
    assert learned(*[Sample(0.2, 10)] * 10) == pytest.approx(0.2)


def test_a_partition_has_no_figure_before_a_third_of_the_half_life() -> None:
    assert learned(*[Sample(0.2, 10)] * 9) == -1.0


def test_what_is_a_half_life_old_counts_half() -> None:
    assert learned(*[Sample()] * 300, *[Sample(1.0, 10)] * 30) == pytest.approx(0.5, abs=0.01)


def test_what_waits_counts_as_if_it_was_to_be_caught_up_with_in_ten_seconds() -> None:
    assert learned(*[Sample(0.5, 10, waiting=20)] * 30) == pytest.approx(0.5 + 20 * 0.05 / 10)


def test_a_partition_that_is_let_go_is_forgotten() -> None:
    learning = Learning(3.0)
    learning.observe({"p": Sample(1.0, 1), "q": Sample()}, 2.0)
    learning.observe({"q": Sample()}, 2.0)
    assert learning.loads() == {"q": 0.0}


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_figures_stay_until_one_of_them_is_noticeably_wrong_and_then_all_are_new() -> None:
    published = {"p": 0.5, "q": 0.5}
    assert noticed(published, {"p": 0.53, "q": 0.48}) is published
    assert noticed(published, {"p": 0.6, "q": 0.48765}) == {"p": 0.6, "q": 0.488}


def test_a_partition_that_hardly_matters_is_not_news_but_a_new_one_is() -> None:
    published = {"p": 1.0, "q": 0.001}
    assert noticed(published, {"p": 1.0, "q": 0.02}) is published
    assert noticed(published, {"p": 1.0, "q": 0.001, "r": 0.0}) == {"p": 1.0, "q": 0.001, "r": 0.0}
    assert noticed(published, {"p": 1.0}) == {"p": 1.0}


def test_many_small_errors_in_one_direction_are_news() -> None:
    published = {f"p{n}": 0.1 for n in range(10)}
    assert noticed(published, dict.fromkeys(published, 0.11)) == dict.fromkeys(published, 0.11)


# ── putting together ──────────────────────────────────────────────────────────────────────────────────────────────


def weights(book: LoadBook, **owners: str) -> dict[str, Any]:
    found = book.weights(owners)
    assert found is not None
    return {partition: pytest.approx(load - IDLE_LOAD) for partition, load in found.items()}


def test_the_owners_figure_counts_whoever_said_something_later() -> None:
    book = LoadBook()
    book.take("a", record(p=0.3))
    book.take("b", record(60, p=0.9, q=0.1))
    assert weights(book, p="a", q="b") == {"p": 0.3, "q": 0.1}


def test_the_figure_of_a_worker_that_is_gone_counts_until_the_new_owner_has_one() -> None:
    book = LoadBook()
    book.take("a", record(p=0.3, q=0.1))
    assert weights(book, p="b", q="b") == {"p": 0.3, "q": 0.1}
    book.take("a", None)
    assert weights(book, p="b", q="b") == {"p": 0.3, "q": 0.1}
    book.take("b", record(60, p=0.5))
    assert weights(book, p="b", q="b") == {"p": 0.5, "q": 0.1}


def test_partitions_that_nobody_has_measured_count_as_the_mean() -> None:
    book = LoadBook()
    book.take("a", record(p=0.3, q=0.1))
    assert weights(book, p="a", q="a", r="b") == {"p": 0.3, "q": 0.1, "r": 0.2}


def test_what_the_application_says_of_partitions_counts_until_they_are_measured() -> None:
    book, given = LoadBook(), {"r": 3.0}
    assert book.weights({"p": "a", "r": "a"}, given) is given
    book.take("a", record(p=0.2))
    found = book.weights({"p": "a", "r": "b"}, given)
    assert found == pytest.approx({"p": 0.2 + IDLE_LOAD, "r": 0.6 + IDLE_LOAD})


def test_with_nothing_measured_and_nothing_given_partitions_count_alike() -> None:
    assert LoadBook().weights({"p": "a"}) is None


# ── what is worth a move ──────────────────────────────────────────────────────────────────────────────────────────


EVEN = {"a": 1.0, "b": 1.0}


def test_moves_that_change_little_are_not_worth_it() -> None:
    held = [("a", 0.9), ("a", 0.12), ("b", 0.9)]
    assert not is_worth([("a", "b", 0.06)], held, EVEN, 0.1)
    assert is_worth([("a", "b", 0.06)], held, EVEN, 0.05)


def test_a_swap_that_brings_nobody_nearer_to_its_share_is_not_worth_it() -> None:
    held = [("a", 0.5), ("a", 0.5), ("b", 0.5), ("b", 0.5)]
    assert not is_worth([("a", "b", 0.5), ("b", "a", 0.5)], held, EVEN, 0.0)


def test_leaving_a_giant_is_worth_it_however_little_that_is_beside_it() -> None:
    held = [("a", 10.0), ("a", 0.05), ("b", 0.5), ("c", 0.5)]
    assert is_worth([("a", "b", 0.05)], held, {**EVEN, "c": 1.0}, 0.1)


def test_nothing_is_worth_nothing() -> None:
    assert not is_worth([], [], {}, 0.1)
    assert not is_worth([("gone", "a", 0.0)], [("a", 1.0)], {"a": 1.0}, 0.1)


def test_patience_is_over_when_something_has_lasted_without_a_break() -> None:
    patience = Patience(30.0)
    assert not patience.is_over(100.0)
    assert not patience.is_over(129.0)
    patience.reset()
    assert not patience.is_over(130.0)
    assert patience.ends_s == 160.0
    assert patience.is_over(160.0)


def test_what_has_moved_rests_for_ten_windows() -> None:
    patience = Patience(30.0)
    patience.rest(["p"], 100.0)
    assert patience.rests("p", 399.0)
    assert not patience.rests("p", 400.0)
    assert not patience.rests("q", 100.0)


# ── the strategy ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_strategy_called_load_is_the_one_that_learns() -> None:
    assert [name for name in ("sticky", "weighted", "load") if learns_loads(strategy_named(name))] == ["load"]


def test_one_heavy_partition_moves_rather_than_many_light_ones() -> None:
    loads = {"p0": 35.0, "p2": 25.0, **dict.fromkeys(["p4", "p6"], 4.0), "p1": 12.0, **dict.fromkeys("xyz", 4.0)}
    before = {p: "a" if p in {"p0", "p2", "p4", "p6"} else "b" for p in loads}
    after = MeasuredLoad().assign(list(loads), [Slot("a"), Slot("b")], before, loads)
    moved = {p for p in loads if after[p] != before[p]}
    assert "p2" in moved
    assert len(moved) <= 2


def test_a_move_that_would_only_turn_the_tables_is_not_made() -> None:
    loads = {"p": 1.1, "q": 1.1, "r": 0.9}
    before = {"p": "a", "q": "a", "r": "b"}
    assert MeasuredLoad().assign(list(loads), [Slot("a"), Slot("b")], before, loads) == before
    assert strategy_named("weighted").assign(list(loads), [Slot("a"), Slot("b")], before, loads) != before


def test_the_window_has_a_default_and_a_least_value() -> None:
    assert Settings().load_window_s == 30.0
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.5"):
        Settings(load_window_s=0.1)


# ── the meter ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Store:
    """A bucket that remembers what was written, and can be out of reach."""

    def __init__(self) -> None:
        self.written: list[LoadRecord] = []
        self.reachable = True

    async def get(self, key: str) -> Entry | None:
        raise AssertionError(key)

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        if not self.reachable:
            raise RequestTimeout("no answer")
        assert key == "load.worker-1"
        self.written.append(decode(value, LoadRecord))
        return len(self.written)


def metered(bench: Bench) -> tuple[LoadMeter, Store]:
    bench.lanes.roster.measures = True
    store = Store()
    # A short window: two looks are enough for a figure.
    return LoadMeter(bench.lanes, store, "worker-1", incarnation=7, window_s=0.5), store


KINDS = pytest.mark.parametrize("kind", [Lanes, UnorderedLanes])
BUSY_S = 0.1
"""How long the busy partition's handler takes: long against what a busy machine adds to the others'."""


@KINDS
@pytest.mark.parametrize("threads", [False, True])
async def test_what_handlers_take_is_learned_for_each_partition(kind: type[Lanes], threads: bool) -> None:
    bench = Bench(kind)
    meter, store = metered(bench)

    async def handler(message: Message) -> None:
        await asyncio.sleep(BUSY_S if message.partition.id == "busy" else 0.0)

    def plain(message: Message) -> None:
        time.sleep(BUSY_S if message.partition.id == "busy" else 0.0)

    bench.own("busy", "quick", "idle")
    if threads:
        bench.run_threads(plain)
    else:
        bench.run_async(handler)
    began_s = time.perf_counter()
    bench.send("busy", 1, 3, 5)
    bench.send("quick", 2, 4, 6)
    await bench.acked(*range(1, 7))
    assert time.perf_counter() - began_s >= (BUSY_S if kind is UnorderedLanes else 3 * BUSY_S)
    meter.look(began_s + 1.0)
    await meter.publish()
    (written,) = store.written
    assert written.incarnation == 7
    assert written.loads.keys() == {"busy", "quick", "idle"}
    assert written.loads["busy"] >= 2.75 * BUSY_S
    assert BUSY_S > written.loads["quick"] > written.loads["idle"] == 0.0
    await bench.close()


async def test_a_failed_call_is_work_too() -> None:
    bench = Bench()
    meter, store = metered(bench)

    async def handler(message: Message) -> None:
        await asyncio.sleep(0.01)
        if message.attempt < 3:
            raise ValueError("not yet")

    bench.own("p")
    bench.run_async(handler)
    began_s = time.perf_counter()
    bench.send("p", 1)
    await bench.acked(1)
    meter.look(began_s + 1.0)
    await meter.publish()
    assert store.written[0].loads["p"] >= 0.028
    await bench.close()


async def test_a_record_is_written_again_only_if_it_says_something_new_or_could_not_be_written() -> None:
    bench = Bench()
    meter, store = metered(bench)
    bench.own("p")
    meter.look(time.perf_counter() + 1.0)
    store.reachable = False
    await meter.publish()
    store.reachable = True
    await meter.publish()
    await meter.publish()
    assert [written.loads for written in store.written] == [{"p": 0.0}]
    another = Store()
    meter.continues(another, 8)
    await meter.publish()
    assert [(written.incarnation, written.loads) for written in another.written] == [(8, {"p": 0.0})]
    await bench.close()


async def test_lanes_that_do_not_measure_count_nothing() -> None:
    bench = Bench()

    async def handler(message: Message) -> None:
        return

    bench.own("p")
    bench.run_async(handler)
    bench.send("p", 1)
    await bench.acked(1)
    assert bench.lane("p").effort is None
    await bench.close()


# ── what operators see ────────────────────────────────────────────────────────────────────────────────────────────


def member(**changes: Any) -> MemberRecord:
    return MemberRecord(token="secret", incarnation=1, started_at=NOON, ttl_seconds=5.0, **changes)


def test_the_table_of_workers_shows_loads_where_they_are_known() -> None:
    records = Records(members={"worker-0": member(), "worker-1": member()})
    table, _ = worker_table(worker_rows(records, NOON), ["worker", "load"], 80)
    assert [column.header for column in table.columns] == ["worker"]
    # One that is gone has no share of what is done now.
    records.loads = {"worker-0": record(p=0.3, q=0.3), "worker-1": record(r=0.2), "worker-2": record(s=9.0)}
    table, _ = worker_table(worker_rows(records, NOON), ["worker", "load"], 80)
    assert [str(cell) for cell in table.columns[1].cells] == ["0.60 (75%)", "0.20 (25%)"]
