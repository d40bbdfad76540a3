"""The audit's definitions are the core's: hundreds of random histories, each judged by both."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.spark.audit_histories import BASE_US, UNSTORED_US, Call, History, make_history, moment

from parti.core.invariants import Invariant
from parti.spark.audit import TROUBLES, Carried, Keep, audit
from parti.spark.ledger import LEDGER_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(400)

Told = tuple[str, str, int, int | None]


def stored_of(spark: SparkSession, histories: list[History], seqs: range = range(1000)) -> DataFrame:
    rows = [(p, s, moment(0)) for h in histories for p, stored in h.stored.items() for s in stored if s in seqs]
    return spark.createDataFrame(rows, "partition string, seq bigint, timestamp timestamp")


def ledger_of(spark: SparkSession, calls: list[Call]) -> DataFrame:
    rows = [
        (
            *("S", call.seq, call.partition, f"w-{call.process}", call.process, call.fence, 1, "handled"),
            *(moment(call.started_us), moment(call.started_us), moment(call.finished_us)),
        )
        for call in calls
    ]
    return spark.createDataFrame(rows, LEDGER_COLUMNS)


def troubles_of(spark: SparkSession, histories: list[History]) -> DataFrame:
    rows = []
    for history in histories:
        for process in {*history.deaths, *(process for process, _, _ in history.lapses)}:
            died = history.deaths.get(process)
            lapses = [(since + BASE_US, until + BASE_US) for p, since, until in history.lapses if p == process]
            rows.append((process, None if died is None else died + BASE_US, lapses or None))
    return spark.createDataFrame(rows, TROUBLES)


def positions_of(spark: SparkSession, histories: list[History]) -> DataFrame:
    rows = [(p, position) for h in histories for p, position in h.positions.items()]
    return spark.createDataFrame(rows, "partition string, position bigint")


def told_by_core(histories: list[History]) -> set[Told]:
    return {
        (v.invariant.value, v.partition, v.seq, None if v.invariant is Invariant.NO_LOSS else int(v.at_s))
        for history in histories
        for v in history.judge()
    }


def told_by(violations: DataFrame) -> set[Told]:
    return {
        (row.invariant, row.partition, row.seq, None if row.process is None else row.at_us - BASE_US)
        for row in violations.collect()
    }


def difference(core: set[Told], spark: set[Told]) -> str:
    return f"only the core: {sorted(core - spark, key=str)[:5]}; only the audit: {sorted(spark - core, key=str)[:5]}"


def test_core_and_audit_agree_on_random_histories(spark: SparkSession) -> None:
    histories = [make_history(seed) for seed in range(400)]
    calls = [call for history in histories for call in history.calls]
    result = audit(
        stored_of(spark, histories),
        ledger_of(spark, calls),
        positions_of(spark, histories),
        troubles_of(spark, histories),
        unstored_s=UNSTORED_US / 1e6,
        every=True,
    )
    core, found = told_by_core(histories), told_by(result.tables["violations"])
    # Every invariant is broken by many of these histories, and a good part of them breaks none.
    broken = Counter(invariant for invariant, *_ in core)
    assert all(broken[invariant.value] > 10 for invariant in Invariant), broken
    assert sum(not history.judge() for history in histories) > 60
    assert found == core, difference(core, found)


@pytest.mark.slow
def test_pieces_give_what_the_whole_gives(spark: SparkSession) -> None:
    histories = [make_history(seed) for seed in range(1000, 1300)]
    for history in histories:
        history.lapses = []
    calls = [call for history in histories for call in history.calls]
    found: list[Told] = []
    carried: Carried | None = None
    seq, since_us = 0, -1
    for to_seq, until_us in ((14, 25), (26, 50), (1000, 100_000)):
        result = audit(
            stored_of(spark, histories, range(seq, to_seq)),
            ledger_of(spark, [call for call in calls if since_us <= call.finished_us < until_us]),
            positions_at(spark, histories, until_us),
            troubles_of(spark, histories),
            unstored_s=UNSTORED_US / 1e6,
            every=True,
            carried=carried,
            keep=keep_at(spark, histories, to_seq, until_us),
        )
        piece = told_by(result.tables["violations"])
        # What was reported once is not reported again.
        assert not piece & set(found)
        found += piece
        carried, seq, since_us = result.next, to_seq, until_us
    core = told_by_core(histories)
    assert set(found) == core, difference(core, set(found))


def positions_at(spark: SparkSession, histories: list[History], at_us: int) -> DataFrame:
    """Positions stop at what is finished later; they pass what never will be, which is then lost."""
    rows = []
    for history in histories:
        for partition, position in history.positions.items():
            done = [call for call in history.calls if call.partition == partition]
            early = {call.seq for call in done if call.finished_us < at_us}
            later = [seq for seq in history.stored[partition] if seq in {c.seq for c in done} - early]
            rows.append((partition, min([position, *later])))
    return spark.createDataFrame(rows, "partition string, position bigint")


def keep_at(spark: SparkSession, histories: list[History], to_seq: int, at_us: int) -> Keep:
    """What may still be compared: the last 40 us, which is longer than any call, and the end of every process."""
    last: dict[str, int] = {}
    for history in histories:
        for call in history.calls:
            if call.finished_us < at_us:
                last[call.process] = max(last.get(call.process, 0), call.finished_us)
        last |= {process: min(last.get(process, at_us), died) for process, died in history.deaths.items()}
    rows = [(process, us - UNSTORED_US + BASE_US) for process, us in last.items()]
    return Keep(at_us - 40 + BASE_US, to_seq, spark.createDataFrame(rows, "process string, from_us bigint"))
