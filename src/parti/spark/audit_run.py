"""One audit from beginning to end: read, check, write tables and report, remember for the next."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from parti.spark.audit import AuditResult, audit
from parti.spark.audit_report import measure_traffic, take_picture
from parti.spark.audit_sources import Material, Prepared, read
from parti.spark.audit_state import load_carried, save_state
from parti.spark.report_page import Picture, write_report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What becomes of an audit."""

    skew_s: float = 0.0
    state: Path | None = None
    """Where it goes on from, and what it leaves to the next."""
    output: str | None = None
    """Directory for the result tables."""
    report: Path | None = None
    finish: Callable[[Picture], Picture] = field(default=lambda picture: picture)
    """What else the report is to show."""


def run(
    spark: SparkSession, prepared: Prepared, wishes: Wishes, say: Callable[[str], None] = lambda text: None
) -> AuditResult:
    """Do it; `say` is told what is being done. The state is written last: an audit that failed is simply repeated."""
    question = prepared.question
    say(f"reading the ledger {question.ledger_stream}")
    material = read(spark, prepared)
    try:
        say(f"checking stream {question.stream} up to message {material.end_seq - 1:,}")
        carried = load_carried(spark, wishes.state) if wishes.state and prepared.before else None
        result = audit(
            material.stored,
            material.ledger,
            material.positions,
            material.troubles,
            batches=material.batches,
            unstored_s=question.unstored_s,
            skew_s=wishes.skew_s,
            since_seq=material.since_seq,
            end_seq=material.end_seq,
            carried=carried,
            keep=material.keep if wishes.state else None,
        )
        if wishes.output:
            say(f"writing tables to {wishes.output}")
            _write_tables(spark, wishes.output, result, added=carried is not None)
        if wishes.report:
            say(f"writing {wishes.report}")
            wishes.report.write_text(write_report(wishes.finish(_picture(prepared, material, result))))
        if wishes.state:
            say(f"writing the state to {wishes.state}")
            save_state(wishes.state, material.mark, result.next)
    finally:
        material.messages.unpersist()
    return result


def _write_tables(spark: SparkSession, directory: str, result: AuditResult, *, added: bool) -> None:
    mode = "append" if added else "overwrite"
    for name, table in result.tables.items():
        table.coalesce(1).write.mode(mode).parquet(f"{directory.rstrip('/')}/audit_{name}")
    summary = {
        "held": result.held,
        "seen": dict(result.seen),
        "checks": {check.name: check.count for check in result.checks},
    }
    row = spark.createDataFrame([(json.dumps(summary),)], "value string")
    row.coalesce(1).write.mode(mode).text(f"{directory.rstrip('/')}/audit_summary")


def _picture(prepared: Prepared, material: Material, result: AuditResult) -> Picture:
    question = prepared.question
    traffic = measure_traffic(material.ledger, material.first_us, material.last_us)
    facts = {
        "stream": question.stream,
        "ledger": question.ledger_stream,
        "messages": f"{prepared.place.start:,} to {material.end_seq - 1:,}",
    }
    return take_picture(f"Audit of {question.stream}", facts, result, traffic)
