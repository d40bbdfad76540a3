"""The ledger in Spark, and single faults with what is told of them."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.bench_audit import PLANTED, run_audit
from tests.spark.audit_histories import BASE_US, Call, History
from tests.spark.test_audit_properties import ledger_of, positions_of, stored_of, troubles_of

from parti.errors import ConfigError
from parti.model.ledger import LedgerBatch, encode_batch
from parti.spark.audit import audit
from parti.spark.audit_state import Chain, Mark, read_mark
from parti.spark.ledger import ledger_batches, ledger_processes, ledger_rows, missing_batches
from parti.spark.report_page import Picture, Traffic, write_report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(400)


def batch(number: int, *, process: str = "a", closed: bool = False, rows: int = 3) -> LedgerBatch:
    numbers = range(number * 10, number * 10 + rows)
    return LedgerBatch(
        stream="S",
        stream_created="then",
        worker="w",
        process=process,
        number=number,
        closed=closed,
        partitions=("p1", "p2", "p1"),
        fences=(1, 2, 3),
        partition_index=array("I", (n % 3 for n in numbers)),
        seq=array("q", (n + 1 for n in numbers)),
        attempt=array("I", (1 + n % 2 for n in numbers)),
        outcome=array("B", (n % 2 for n in numbers)),
        received_us=array("q", (BASE_US + n for n in numbers)),
        started_us=array("q", (BASE_US + n + 1 for n in numbers)),
        finished_us=array("q", (BASE_US + n + 5 for n in numbers)),
    )


def test_ledger_messages_become_rows_and_chains(spark: SparkSession) -> None:
    written = [batch(0, rows=0), batch(1), batch(4), batch(1), batch(5, closed=True), batch(0, process="b")]
    # Not closed: the last four may have been on their way together, those before not.
    written += [batch(number, process="e") for number in (0, 2, 7, 9)]
    other = [replace(batch(7, process="c"), stream="T"), replace(batch(8, process="d"), stream_created="now")]
    payloads = [*(encode_batch(b) for b in [*written, *other]), b"not a ledger"]
    messages = spark.createDataFrame(list(enumerate(payloads, 1)), "seq bigint, payload binary").coalesce(1).cache()
    fields = ("seq", "partition", "fence", "attempt", "outcome")
    found = [
        (row.process, *(row[name] for name in fields), *(row[f"{t}_us"] for t in ("received", "started", "finished")))
        for row in ledger_rows(messages, stream="S", stream_created="then")
        .selectExpr("*", *(f"unix_micros({name}) AS {name}_us" for name in ("received", "started", "finished")))
        .collect()
    ]
    assert found == [
        (b.process, r.seq, r.partition, r.fence, r.attempt, r.outcome, r.received_us, r.started_us, r.finished_us)
        for b in written
        for r in b.rows()
    ]
    batches = ledger_batches(messages).cache()
    (damaged,) = batches.where("damage IS NOT NULL").collect()
    assert (damaged.ledger_seq, "not a ledger" in damaged.damage) == (len(payloads), True)
    chains = {row.process: row for row in ledger_processes(batches).collect()}
    assert (chains["a"].batches, chains["a"].last_number, chains["a"].missing, chains["a"].closed) == (4, 5, 2, True)
    assert (chains["b"].closed, chains["b"].rows, chains["b"].worker) == (False, 3, "w")
    holes = sorted((row.process, row.first, row["last"]) for row in missing_batches(batches).collect())
    assert holes == [("a", 2, 3), ("e", 1, 1), ("e", 3, 5)]


def good(partition: str, seqs: list[int], process: str = "a", fence: int = 1) -> list[Call]:
    return [Call(partition, seq, f"{partition}-{process}", fence, seq * 100, seq * 100 + 50) for seq in seqs]


def test_each_fault_is_told_once_with_what_follows_from_it(spark: SparkSession) -> None:
    seqs = [1, 2, 3, 4]
    names = ("clean", "lost", "swapped", "crash", "move", "twice", "ahead")
    history = History(stored=dict.fromkeys(names, seqs), positions=dict.fromkeys(names, 5))
    calls = good("clean", seqs) + good("lost", [1, 3, 4])
    swapped = good("swapped", seqs)
    calls += [swapped[0], replace(swapped[1], seq=3), replace(swapped[2], seq=2), swapped[3]]
    # What a process had finished just before it died comes again; what it had finished long before may not.
    calls += good("crash", [1, 2, 3]) + [
        replace(c, started_us=c.started_us + 1000, finished_us=c.finished_us + 1000)
        for c in good("crash", seqs, "b", 2)
    ]
    history.deaths["crash-a"] = 350
    calls += good("move", [1, 2]) + good("move", [3, 4], "b", 2)
    history.deaths["move-a"] = 900  # it did not move because of what came later
    calls += good("twice", seqs) + good("twice", [4])
    calls += good("ahead", [1, 2])
    history.positions["ahead"] = 3
    history.positions["clean"] = 900
    histories = [history]
    result = audit(
        stored_of(spark, histories),
        ledger_of(spark, calls),
        positions_of(spark, histories),
        troubles_of(spark, histories),
        unstored_s=150e-6,
        end_seq=5,
    )
    found = {check.name: check for check in result.checks}
    assert {name: check.count for name, check in found.items() if check.count} == {
        "NoLoss": 1,
        "Order": 1,
        "BoundedRepeatOnCrash": 1,
        "PositionsWithinData": 1,
    }
    (lost,) = found["NoLoss"].examples
    assert (lost["partition"], lost["seq"], lost["detail"]) == (
        "lost",
        2,
        "stored and never finished; the position is 5",
    )
    (order,) = found["Order"].examples
    assert (order["partition"], order["seq"], order["other_seq"]) == ("swapped", 3, 2)
    # The two starts after the lost one are told as one, and the late start of what was overtaken follows as well.
    assert found["Order"].consequences == 2
    (repeat,) = found["BoundedRepeatOnCrash"].examples
    assert (repeat["partition"], repeat["seq"], repeat["process"]) == ("crash", 1, "crash-b")
    seen = result.seen
    assert (seen["messages"], seen["partitions"], seen["excused"], seen["unfinished"]) == (28, 7, 2, 3)
    moves = {row.partition: row for row in result.tables["moves"].collect()}
    assert (moves["move"].pause_s, moves["move"].reason, moves["crash"].reason) == (0.00005, "planned", "crash")
    ahead = [row.seq for row in result.tables["unfinished"].where("NOT lost").collect()]
    assert ahead == [3, 4]
    report = write_report(Picture("Audit", {}, result.checks, seen, Traffic(), [], []))
    assert "NoLoss, Order, BoundedRepeatOnCrash, PositionsWithinData violated" in report


@pytest.mark.slow  # what `make bench-audit` does, in small
def test_faults_among_many_rows_are_found_exactly(spark: SparkSession) -> None:
    found, _ = run_audit(spark, 20_000, 200, 5, planted=True)
    assert found == PLANTED


def test_a_mark_is_read_back_and_bad_ones_are_refused(tmp_path: Path) -> None:
    mark = {
        "stream": "S",
        "created": "c",
        "ledger_stream": "L",
        "ledger_created": "d",
        "next_seq": 5,
        "next_ledger_seq": 6,
    }
    chain = {"worker": "w", "last_number": 3, "closed": False, "last_us": None, "ledger_seq": 1}
    assert read_mark(tmp_path) is None
    path = tmp_path / "current.json"
    path.write_text(json.dumps({"form": 1, "run": 2, "mark": {**mark, "chains": {"p": chain}}}))
    expected = Mark(
        stream="S",
        created="c",
        ledger_stream="L",
        ledger_created="d",
        next_seq=5,
        next_ledger_seq=6,
        chains={"p": Chain("w", 3, False, None, 1)},
    )
    assert read_mark(tmp_path) == expected
    expected.check("S", "c", "L", "d")
    with pytest.raises(ConfigError, match="is of stream 'S'"):
        expected.check("T", "c", "L", "d")
    with pytest.raises(ConfigError, match="made anew"):
        expected.check("S", "later", "L", "d")
    for text in ("{", "{}", '{"form": 9}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no state of an audit"):
            read_mark(tmp_path)
