"""Silver: typed, keyed, clean; what is not fit is quarantined with the reason; the same rows come out every time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parti.errors import ConfigError
from parti.spark.commits import span
from parti.spark.pipelines import silver
from parti.spark.pipelines.progress import Step
from parti.spark.pipelines.settings import PipelineSettings
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(180)

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
SCHEMA = "stream string, seq bigint, subject string, timestamp timestamp, payload binary, batch_id bigint"
DECLARED = (
    "lot string not null, wafer int not null, finished_at timestamp not null, note string, values map<string,double>"
)
Message = tuple[int, str, bytes]


def event(minutes: float = 0, **fields: Any) -> bytes:
    """A payload whose event happened so many minutes after noon."""
    at = (NOON + timedelta(minutes=minutes)).isoformat()
    return json.dumps({"lot": "L1", "wafer": 1, "finished_at": at, **fields}).encode()


def settings(lake: Path, **changes: Any) -> PipelineSettings:
    given: dict[str, Any] = {
        "stream": "DC",
        "lake": str(lake),
        "template": "dc.{tool}.done",
        "schema": DECLARED,
        "event_time": "finished_at",
        "lateness_s": 600,
    }
    return PipelineSettings.model_validate({**given, **changes})


def add(spark: SparkSession, lake: Path, batch: int, messages: Iterable[Message], arrived: datetime = NOON) -> None:
    rows = [("DC", seq, subject, arrived, payload, batch) for seq, subject, payload in messages]
    seqs = [seq for _, seq, *_ in rows]
    meta = {"seq_min": min(seqs), "seq_max": max(seqs)}
    Table(spark, str(lake), "bronze").commit(batch, spark.createDataFrame(rows, SCHEMA).coalesce(1), meta)


def good(spark: SparkSession, lake: Path) -> DataFrame:
    return Table(spark, str(lake), "silver").read()


def seqs(rows: DataFrame) -> list[int]:
    return sorted(row["seq"] for row in rows.select("seq").collect())


def refused(spark: SparkSession, lake: Path) -> Mapping[int, tuple[str, str | None]]:
    table = Table(spark, str(lake), "quarantine")
    rows = table.read().select("seq", "reason", "detail").collect() if table.commits() else []
    return {row["seq"]: (row["reason"], row["detail"]) for row in rows}


def test_rows_are_typed_and_keyed_and_what_is_wrong_is_told_apart(spark: SparkSession, tmp_path: Path) -> None:
    subject = "dc.etch.done"
    payloads = {
        1: event(0, note="ok", values={"t": 1.5}),
        2: b"",
        3: b'{"lot": "L1"',
        4: b'[{"lot": "L1", "wafer": 1}]',
        5: event(0) + b" and more",
        6: b'{"lot": "\xff", "wafer": 1}',
        7: event(0, wafer="three"),
        8: event(0, finished_at="soon"),
        9: event(0, values={"t": "hot"}),
        10: event(0, wafer=None),
        11: b'{"note": "nothing else"}',
        12: event(120),
        14: b" " + event(0, wafer=2, extra=[1]) + b"\n",
        15: event(0, wafer=3_000_000_000),
        16: b"{'lot': 'L1'}",
    }
    messages = [(seq, subject, payload) for seq, payload in payloads.items()]
    add(spark, tmp_path, 0, [*messages, (13, "dc.etch.c1.done", event(0))])
    steps: list[Step] = []
    assert silver.run(spark, settings(tmp_path), steps.append) == 16
    assert refused(spark, tmp_path) == {
        2: ("malformed", None),
        3: ("malformed", None),
        4: ("malformed", None),
        5: ("malformed", None),
        6: ("malformed", None),
        7: ("type", "wafer"),
        8: ("type", "finished_at"),
        9: ("type", "values"),
        10: ("missing", "wafer"),
        11: ("missing", "lot, wafer, finished_at"),
        12: ("future", None),
        13: ("subject", None),
        15: ("type", "wafer"),
        16: ("malformed", None),
    }
    rows = {row["seq"]: row.asDict() for row in good(spark, tmp_path).collect()}
    assert rows.keys() == {1, 14}
    assert rows[1] == {
        "stream": "DC",
        "seq": 1,
        "subject": subject,
        "timestamp": NOON.replace(tzinfo=None),
        "event_time": NOON.replace(tzinfo=None),
        "batch_id": 0,
        "tool": "etch",
        "lot": "L1",
        "wafer": 1,
        "finished_at": NOON.replace(tzinfo=None),
        "note": "ok",
        "values": {"t": 1.5},
    }
    counts = {"read": 16, "malformed": 6, "type": 4, "missing": 2, "subject": 1, "future": 1, "late": 0}
    assert [(step.rows, step.lag, step.counts) for step in steps] == [(16, 0, counts)]
    stored = Table(spark, str(tmp_path), "quarantine").read().where("seq = 3").first()
    assert stored is not None
    assert bytes(stored["payload"]) == payloads[3]


@pytest.mark.parametrize(
    ("together", "commits"),
    [
        pytest.param(1000, [span(0, 2)], id="all"),
        # The arithmetic for any grouping is a property in the unit tests.
        pytest.param(5, [span(0, 1), span(2, 2)], id="some", marks=pytest.mark.slow),
    ],
)
def test_late_rows_are_judged_by_the_batches_before_and_not_by_how_many_are_done_at_once(
    together: int, commits: list[str], spark: SparkSession, tmp_path: Path
) -> None:
    batches = [
        [(1, "dc.a.done", event(0)), (2, "dc.a.done", event(-60))],  # nothing before: nothing is late
        [(3, "dc.a.done", event(30)), (4, "dc.a.done", event(-11)), (5, "dc.a.done", event(-10))],
        [(6, "dc.a.done", event(19.9)), (7, "dc.a.done", event(20))],
    ]
    for number, messages in enumerate(batches):
        add(spark, tmp_path, number, messages)
    silver.run(spark, settings(tmp_path, silver_rows=together))
    assert refused(spark, tmp_path) == {4: ("late", None), 6: ("late", None)}
    assert seqs(good(spark, tmp_path)) == [1, 2, 3, 5, 7]
    assert [c.span for c in Table(None, str(tmp_path), "silver").commits()] == commits


def test_the_same_event_is_taken_once_within_the_watermark(spark: SparkSession, tmp_path: Path) -> None:
    subject = "dc.a.done"
    chosen = settings(tmp_path, dedup=["lot", "wafer"])
    add(spark, tmp_path, 0, [(1, subject, event(0)), (2, subject, event(0)), (3, subject, event(0, wafer=2))])
    silver.run(spark, chosen)
    add(
        spark,
        tmp_path,
        1,
        [(4, subject, event(1)), (5, subject, event(5, wafer=3)), (6, subject, event(30, lot="X"))],
    )
    # A lake that was filled from a backup may have the same message again.
    again = [(3, subject, event(0, wafer=2)), (6, subject, event(30, lot="X"))]
    add(spark, tmp_path, 2, [(7, subject, event(25)), (8, subject, event(25, wafer=3)), *again])
    silver.run(spark, chosen)
    # 4 is the same as 1; 7 and 8 come when their first ones have fallen behind the watermark, 20 minutes past noon.
    assert seqs(good(spark, tmp_path)) == [1, 3, 5, 6, 7, 8]
    assert refused(spark, tmp_path) == {}


def test_a_run_that_was_killed_between_its_two_commits_leaves_no_trace(spark: SparkSession, tmp_path: Path) -> None:
    add(spark, tmp_path, 0, [(1, "dc.a.done", event(0, step=7)), (2, "dc.a.done", b"x")])
    silver.run(spark, settings(tmp_path))
    add(spark, tmp_path, 1, [(3, "dc.a.done", b"y"), (4, "dc.a.done", event(0, step=8))])
    # As if it had been killed after the quarantine: silver does not have the range, and more has come since then.
    quarantine = Table(spark, str(tmp_path), "quarantine")
    quarantine.commit(1, quarantine.read().selectExpr("* EXCEPT (seq, batch_id)", "3L AS seq", "1L AS batch_id"))
    add(spark, tmp_path, 2, [(5, "dc.a.done", b"z")])
    # And a column has been declared.
    wider = settings(tmp_path, schema=f"{DECLARED}, step int")
    assert silver.run(spark, wider) == 3
    assert refused(spark, tmp_path) == dict.fromkeys((2, 3, 5), ("malformed", None))
    assert quarantine.read().count() == 3
    assert [(c.first, c.last) for c in Table(spark, str(tmp_path), "silver").commits()] == [(0, 0), (1, 2)]
    rows = good(spark, tmp_path).orderBy("seq").select("seq", "lot", "step").collect()
    assert [tuple(row) for row in rows] == [(1, "L1", None), (4, "L1", 8)]
    assert silver.run(spark, wider) == 0


def test_without_a_schema_it_is_said_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"silver needs the columns of the payload; add a table \[pipeline.schema\]"
    ):
        silver.run(None, PipelineSettings(stream="DC", lake=str(tmp_path)))  # type: ignore[arg-type]
