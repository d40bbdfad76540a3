"""Gold tables: the same as plain Python counts, run by run the same as in one go."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from parti.core.slo import (
    REDELIVERY,
    UPDATES,
    Evaluation,
    advise_ack_wait,
    advise_max_ack_pending,
    advise_partitions,
    advise_workers,
    bucket_of,
    evaluate,
    evaluate_latency,
    quantile_bucket,
    upper_bound_s,
)
from parti.errors import ConfigError
from parti.model.ledger import sample_hash, sample_limit
from parti.spark import gold
from parti.spark import gold_windows as windows
from parti.spark.gold_settings import GoldSettings
from parti.spark.ledger import LEDGER_COLUMNS
from parti.spark.pipelines.settings import PipelineSettings
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(180)

TEMPLATE = "dc.{tool}.{chamber}.completion"
START = datetime(2026, 3, 1, 23, 40, tzinfo=UTC)
"""The rows reach over midnight, so into a second period."""
WINDOW = timedelta(minutes=1)
BRONZE = "stream string, seq bigint, subject string, timestamp timestamp, payload binary, batch_id bigint"
GOLD = {"recent_s": 600}
TABLES = ("gold_stream", "gold_partition", "gold_key", "gold_worker")


class Stored(NamedTuple):
    stream: str
    seq: int
    subject: str
    timestamp: datetime
    payload: bytes
    batch_id: int

    @property
    def partition(self) -> str:
        return ".".join(self.subject.split(".")[1:3])


class Handled(NamedTuple):
    stream: str
    seq: int
    partition: str
    worker: str
    process: str
    fence: int
    attempt: int
    outcome: str
    received: datetime
    started: datetime
    finished: datetime


@dataclass
class Traffic:
    messages: list[Stored]
    ledger: list[Handled]


def make_traffic(count: int = 600, seed: int = 5) -> Traffic:
    """Messages over half an hour; some are retried, dead-lettered, handled twice, or not finished at all."""
    chance = random.Random(seed)
    messages, ledger = [], []
    at = START
    for seq in range(1, count + 1):
        at += timedelta(milliseconds=chance.randrange(1, 6000))
        tool, chamber = min(int(chance.expovariate(1.0)), 3), chance.randrange(2)
        message = Stored("DC", seq, f"dc.t{tool}.c{chamber}.completion", at, b"", 0)
        messages.append(message)
        if chance.random() < 0.02:
            continue
        ledger.append(handle(message, chance, f"w{tool % 3}"))
        if chance.random() < 0.04:
            ledger.append(handle(message, chance, "w0", after=timedelta(seconds=chance.randrange(1, 300))))
    messages.append(Stored("DC", count + 1, "dc.status", at, b"", 0))  # fits no partition
    ledger += ledger[100:120]  # from a batch that the ledger stream has stored twice
    return Traffic(messages, ledger)


def handle(message: Stored, chance: random.Random, worker: str, *, after: timedelta = timedelta()) -> Handled:
    received = message.timestamp + after + timedelta(milliseconds=chance.randrange(1, 400))
    started = received + timedelta(microseconds=chance.randrange(0, 2_000_000))
    attempt = 2 if chance.random() < 0.05 else 1
    finished = started + timedelta(microseconds=chance.randrange(1000, 90_000) * (20 if attempt == 2 else 1))
    outcome = "dead_lettered" if chance.random() < 0.03 else "handled"
    return Handled(
        "DC", message.seq, message.partition, worker, f"p-{worker}", 1, attempt, outcome, received, started, finished
    )


# ── the same in plain Python ──────────────────────────────────────────────────────────────────────────────────────


def nearest_rank(values: Iterable[timedelta], percent: int) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(percent * len(ordered) / 100) - 1] / timedelta(seconds=1)


def window_of(moment: datetime) -> datetime:
    return datetime.fromtimestamp(moment.timestamp() // 60 * 60, UTC)


Places = Sequence[tuple[str, ...]]


def places(table: str, partition: str, worker: str = "") -> Places:
    """What a row of the ledger counts for in a table."""
    tool, chamber = partition.split(".")
    every: dict[str, Places] = {
        "gold_stream": [()],
        "gold_partition": [(partition,)],
        "gold_key": [("tool", tool), ("chamber", chamber)],
        "gold_worker": [(worker,)],
    }
    return every[table]


def expected(table: str, traffic: Traffic) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of a table by window and what it is about, straight from the definitions."""
    stored = {message.seq: message for message in traffic.messages if message.subject != "dc.status"}
    first: dict[int, Handled] = {}
    for row in sorted(set(traffic.ledger), key=lambda row: (row.finished, row.process, row.attempt)):
        first.setdefault(row.seq, row)
    groups: dict[tuple[Any, ...], list[Handled]] = defaultdict(list)
    for row in set(traffic.ledger):
        for place in places(table, row.partition, row.worker):
            groups[window_of(row.finished), *place].append(row)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for at, rows in groups.items():
        again = [row for row in rows if first[row.seq] is not row]
        redelivered = [row for row in rows if row.attempt > 1 or first[row.seq] is not row]
        found[at] = {
            "finished": len(rows),
            "rate": len(rows) / 60,
            "dead_lettered": sum(row.outcome == "dead_lettered" for row in rows),
            "repeated": len(again),
            "redelivered": len(redelivered),
            "redelivery_ratio": len(redelivered) / len(rows),
            "busy_s": sum((row.finished - row.started for row in rows), timedelta()) / timedelta(seconds=1),
            "partitions": len({row.partition for row in rows}),
        }
        for percent in (50, 95, 99):
            found[at] |= {
                f"handler_p{percent}_s": nearest_rank((r.finished - r.started for r in rows), percent),
                f"wait_p{percent}_s": nearest_rank((r.started - r.received for r in rows), percent),
                f"end_to_end_p{percent}_s": nearest_rank(
                    (r.finished - stored[r.seq].timestamp for r in rows), percent
                ),
            }
    if table != "gold_worker":
        add_lag(table, found, stored.values(), first)
    return found


def add_lag(
    table: str, found: dict[tuple[Any, ...], dict[str, Any]], stored: Iterable[Stored], first: dict[int, Handled]
) -> None:
    ends = [window_of(m.timestamp) for m in stored] + [window_of(row.finished) for row in first.values()]
    window, last = min(ends), max(*ends, *(at for at, *_ in found))
    everything = {place for m in stored for place in places(table, m.partition)}
    by_place: dict[tuple[str, ...], list[Stored]] = defaultdict(list)
    for message in stored:
        for place in places(table, message.partition):
            by_place[place].append(message)
    while window <= last:
        end = window + WINDOW
        for place in everything:
            came = [m for m in by_place[place] if m.timestamp < end]
            lag = sum(1 for m in came if m.seq not in first or first[m.seq].finished >= end)
            published = sum(m.timestamp >= window for m in came)
            settled = sum(1 for m in by_place[place] if m.seq in first and window <= first[m.seq].finished < end)
            if lag or published or settled or (window, *place) in found:
                row = found.setdefault((window, *place), {"finished": 0, "rate": 0.0, "handler_p95_s": None})
                row |= {"published": published, "settled": settled, "lag": lag}
        window = end


# ── the lake ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Lake:
    def __init__(self, spark: SparkSession, root: Path, **options: Any) -> None:
        self.spark = spark
        self.root = str(root)
        self.settings = PipelineSettings(stream="DC", lake=self.root, template=TEMPLATE, ledger=True, **options)

    def add_messages(self, messages: Sequence[Stored]) -> None:
        self._add("bronze", self.spark.createDataFrame(list(messages), BRONZE))

    def add_ledger(self, rows: Sequence[Handled]) -> None:
        self._add("ledger", self.spark.createDataFrame(list(rows), LEDGER_COLUMNS))

    def _add(self, name: str, rows: DataFrame) -> None:
        table = Table(self.spark, self.root, name)
        table.commit(table.last + 1, rows.coalesce(1))

    def run(self, **options: Any) -> gold.Summary:
        return gold.run(self.spark, self.settings, **options)

    def rows(self, name: str) -> list[dict[str, Any]]:
        found = Table(self.spark, self.root, name).read().collect()
        return [{key: as_utc(value) for key, value in row.asDict().items()} for row in found]

    def contents(self) -> dict[str, set[str]]:
        return {name: {str(sorted(row.items())) for row in self.rows(name)} for name in gold.TABLES}


def as_utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def lake_with(spark: SparkSession, root: Path, traffic: Traffic) -> Lake:
    lake = Lake(spark, root, gold=GOLD)
    lake.add_messages(traffic.messages)
    lake.add_ledger(traffic.ledger)
    return lake


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return make_traffic()


@pytest.fixture(scope="module")
def whole(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, traffic: Traffic) -> Lake:
    lake = lake_with(spark, tmp_path_factory.mktemp("whole"), traffic)
    lake.run()
    return lake


@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_what_python_counts(whole: Lake, traffic: Traffic, table: str) -> None:
    wanted = expected(table, traffic)
    names = {
        "gold_stream": [],
        "gold_partition": ["partition"],
        "gold_key": ["key", "value"],
        "gold_worker": ["worker"],
    }
    found = {(row["window_start"], *(row[name] for name in names[table])): row for row in whole.rows(table)}
    assert found.keys() == wanted.keys()
    for place, row in wanted.items():
        assert found[place]["window_end"] - found[place]["window_start"] == WINDOW
        for column, value in row.items():
            told = found[place][column]
            assert told == (pytest.approx(value) if isinstance(value, float) else value), (place, column)


def test_objectives_are_judged_by_period_with_their_budgets(whole: Lake, traffic: Traffic) -> None:
    found = {(row["period_start"], row["slo"]): row for row in whole.rows("gold_slo")}
    days = {START.replace(hour=0, minute=0), START.replace(hour=0, minute=0) + timedelta(days=1)}
    assert found.keys() == {(day, slo) for day in days for slo in ("latency", "redelivery", "consumer_updates")}
    for day in days:
        rows = {row for row in traffic.ledger if row.finished.date() == day.date()}
        end = min(day + timedelta(days=1), max(window_of(row.finished) for row in rows) + WINDOW)
        recent = {row for row in rows if row.finished >= end - timedelta(minutes=10)}
        slow, limit_s = evaluate_latency(latencies(rows), latencies(recent))
        check(found[day, "latency"], slow, limit_s)
        again = [sum(windowed["redelivered"] for windowed in in_windows(traffic, part)) for part in (rows, recent)]
        check(
            found[day, "redelivery"], evaluate(REDELIVERY, len(rows), again[0], recent=(len(recent), again[1])), None
        )
        check(found[day, "consumer_updates"], evaluate(UPDATES, 0, 0), None)
        assert found[day, "latency"]["period_end"] - day == timedelta(days=1)


def latencies(rows: Iterable[Handled]) -> Counter[int]:
    return Counter(bucket_of((row.finished - row.started) / timedelta(seconds=1)) for row in rows)


def in_windows(traffic: Traffic, rows: Iterable[Handled]) -> list[dict[str, Any]]:
    wanted = {window_of(row.finished) for row in rows}
    return [row for (at,), row in expected("gold_stream", traffic).items() if at in wanted and row["finished"]]


def check(row: dict[str, Any], judged: Evaluation, limit_s: float | None) -> None:
    assert (row["objective"], row["target"]) == (judged.objective.sentence, judged.objective.target)
    assert (row["total"], row["bad"], row["verdict"]) == (judged.total, judged.bad, judged.verdict)
    assert row["limit_s"] == (None if limit_s is None else pytest.approx(limit_s))
    for column, value in (
        ("value", judged.value),
        ("budget_allowed", judged.allowed),
        ("budget_remaining", judged.remaining),
        ("burn_rate", judged.burn_rate),
        ("recent_burn_rate", judged.recent_burn_rate),
    ):
        assert row[column] == (None if value is None else pytest.approx(value)), column


def test_advice_comes_from_the_newest_period(whole: Lake, traffic: Traffic) -> None:
    day = START.replace(hour=0, minute=0) + timedelta(days=1)
    rows = {row for row in traffic.ledger if row.finished >= day}
    bucket = quantile_bucket(latencies(rows), 0.95)
    assert bucket is not None
    busy: Counter[str] = Counter()
    by_partition: Counter[str] = Counter()
    for row in rows:
        busy[row.worker] += (row.finished - row.started) // timedelta(microseconds=1)
        by_partition[row.partition] += (row.finished - row.started) // timedelta(microseconds=1)
    peaks = {at[1]: 0.0 for at in expected("gold_worker", traffic)}
    for (at, worker), told in expected("gold_worker", traffic).items():
        peaks[worker] = max(peaks[worker], told["rate"] if at >= day else 0.0)
    busiest = max(peaks, key=lambda worker: (peaks[worker], worker))
    wanted = [
        advise_ack_wait(upper_bound_s(bucket)),
        advise_max_ack_pending(busiest, peaks[busiest], upper_bound_s(bucket)),
        *advise_partitions({name: spent / 1e6 for name, spent in by_partition.items()}),
        *advise_workers({worker: spent / 1e6 for worker, spent in busy.items()}),
    ]
    found = whole.rows("gold_advice")
    assert {row["period_start"] for row in found} == {day}
    assert {(row["topic"], row["about"], row["setting"], row["value"], row["reason"]) for row in found} == {
        (each.topic, each.about, each.setting, each.value, each.reason) for each in wanted
    }
    assert {each.topic for each in wanted} == {"ack_wait", "max_ack_pending", "hot_partition", "worker_balance"}


def add_first_piece(lake: Lake, traffic: Traffic) -> None:
    """Half of the messages, and two thirds of the ledger without every tenth row."""
    rest = [row for number, row in enumerate(traffic.ledger) if number % 10]
    lake.add_messages(traffic.messages[: len(traffic.messages) // 2])
    lake.add_ledger(rest[: len(rest) * 2 // 3])


def add_second_piece(lake: Lake, traffic: Traffic) -> int:
    """Everything else: messages after their ledger rows, and rows that come late; returns how many ledger rows."""
    rest = [row for number, row in enumerate(traffic.ledger) if number % 10]
    late = [row for number, row in enumerate(traffic.ledger) if number % 10 == 0]
    lake.add_ledger(rest[len(rest) * 2 // 3 :])
    lake.add_messages(traffic.messages[len(traffic.messages) // 2 :])
    lake.add_ledger(late)
    return len(rest) - len(rest) * 2 // 3 + len(late)


@pytest.mark.slow
def test_runs_over_pieces_leave_what_one_run_over_everything_leaves(
    spark: SparkSession, tmp_path: Path, whole: Lake, traffic: Traffic
) -> None:
    lake = Lake(spark, tmp_path, gold=GOLD)
    add_first_piece(lake, traffic)
    assert lake.run().windows > 5
    added = add_second_piece(lake, traffic)
    done = lake.run()
    assert (done.ledger_rows, done.messages) == (added, len(traffic.messages) - len(traffic.messages) // 2)
    wanted = whole.contents()
    assert lake.contents() == wanted
    assert done.rows == {name: len(rows) for name, rows in wanted.items()}
    assert done.verdicts == {
        row["slo"]: row["verdict"] for row in lake.rows("gold_slo") if row["period_start"] > START
    }
    again = lake.run()
    assert (again.windows, str(again).startswith("nothing new")) == (0, True)


@pytest.mark.slow
def test_a_killed_run_and_compaction_in_between_change_nothing(
    spark: SparkSession, tmp_path: Path, whole: Lake, traffic: Traffic
) -> None:
    lake = Lake(spark, tmp_path, gold=GOLD)
    add_first_piece(lake, traffic)
    lake.run()
    add_second_piece(lake, traffic)

    def kill(step: str) -> None:
        if step == "judging objectives":
            raise InterruptedError  # as a kill would

    with pytest.raises(InterruptedError):
        lake.run(on_step=kill)
    # The ledger is put together across what has been read of it, which makes old rows look new.
    made = [commit for name in ("ledger", "gold_partition") for commit in Table(spark, lake.root, name).compact()]
    assert made
    lake.run()
    assert lake.contents() == whole.contents()


def test_only_the_windows_that_new_rows_touch_are_computed(spark: SparkSession, traffic: Traffic) -> None:
    ledger = spark.createDataFrame(traffic.ledger[:60], LEDGER_COLUMNS)
    messages = spark.createDataFrame(traffic.messages[:60], BRONZE)
    new, stored = traffic.ledger[50], traffic.messages[55]
    again = [row for row in traffic.ledger[:60] if row.seq == stored.seq]
    touched = windows.touched_windows(
        ledger,
        spark.createDataFrame([new], LEDGER_COLUMNS),
        windows.messages_of(messages.where(f"seq = {stored.seq}"), TEMPLATE, 60_000_000),
        60_000_000,
    )
    wanted = {window_of(moment) for moment in (new.finished, stored.timestamp, *(row.finished for row in again))}
    assert {row["w"] * 60 for row in touched.collect()} == {moment.timestamp() for moment in wanted}


def test_a_sampled_ledger_is_compared_with_the_same_sample_of_the_messages(
    spark: SparkSession, traffic: Traffic
) -> None:
    messages = spark.createDataFrame(traffic.messages, BRONZE)
    found = windows.messages_of(messages, TEMPLATE, 60_000_000, sample=10).collect()
    wanted = {m.seq: m for m in traffic.messages if sample_hash(m.seq) < sample_limit(10)}
    assert {row["seq"] for row in found} == wanted.keys()
    assert 30 < len(wanted) < 90
    for row in found:
        message = wanted[row["seq"]]
        assert row["partition"] == (None if message.subject == "dc.status" else message.partition)


def test_numbers_become_few_ranges() -> None:
    assert windows.ranges_of([]) == []
    assert windows.ranges_of([5, 3, 4, 9, 9, 11]) == [(3, 5), (9, 9), (11, 11)]
    assert windows.ranges_of([1, 3, 10, 12, 30], most=2) == [(1, 12), (30, 30)]
    assert windows.ranges_of([1, 3, 10, 12, 30], most=1) == [(1, 30)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gold": {"period": 5}}, "unknown setting 'period' .*known are period_s, recent_s, handler_p95_s, sample"),
        ({"gold": {"period_s": "day"}}, r"period_s is 'day' \(\[pipeline.gold\]\): expected seconds, more than 0"),
        ({"gold": {"sample": 0}}, "sample is 0 .*expected a whole number from 1 on"),
        ({"gold": {"period_s": 90}}, "period_s = 90 .*is no multiple of window_s = 60"),
        ({"template": None}, "gold needs to know the partitions .*set template"),
        ({"template": "dc.{worker}.x"}, "template has a key 'worker', which the gold tables use themselves"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    settings = PipelineSettings(**{"stream": "DC", "template": TEMPLATE, **options})
    with pytest.raises(ConfigError, match=said) as refused:
        GoldSettings.of(settings)
    assert "\n" not in str(refused.value)


def test_other_settings_than_the_tables_were_made_with_are_refused(spark: SparkSession, whole: Lake) -> None:
    other = PipelineSettings(stream="DC", lake=whole.root, template=TEMPLATE, window_s=30.0, gold=GOLD)
    with pytest.raises(ConfigError, match="were made with window_us = 60000000; set that again, or rebuild them"):
        gold.run(spark, other)


def test_an_empty_lake_gives_no_windows(spark: SparkSession, tmp_path: Path) -> None:
    assert Lake(spark, tmp_path).run().windows == 0
