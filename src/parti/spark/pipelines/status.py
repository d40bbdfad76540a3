"""How a lake stands: what each table holds, how far it is and how much is waiting. Needs no Spark for local lakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parti.spark.lake import files_of
from parti.spark.pipelines.compaction import table_names
from parti.spark.pipelines.silver import consumed
from parti.spark.pipelines.watermark import moment
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDER = ("bronze", "silver", "quarantine", "ledger", "ledger_batches")


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table at one moment."""

    name: str
    commits: int
    rows: int
    files: int
    bytes: int
    last_batch: int
    written_at: str
    lag: int | None
    """Messages of the stream, or rows of bronze, that it has not taken in; None if unknown or without meaning."""
    watermark: str | None
    counts: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """The same for a machine."""
        return {field: getattr(self, field) for field in self.__slots__}


def look(lake: str, ends: Mapping[str, int], spark: SparkSession | None = None) -> list[TableStatus]:
    """The tables of a lake; `ends` are the last sequences of the streams, by name, as far as they are known."""
    names = table_names(files_of(spark, lake), lake)
    names.sort(key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    tables = {name: Table(spark, lake, name) for name in names}
    return [_status(table, tables, ends) for table in tables.values() if table.commits()]


def _status(table: Table, tables: Mapping[str, Table], ends: Mapping[str, int]) -> TableStatus:
    commits = table.commits()
    counts: dict[str, int] = {}
    for commit in commits:
        for name, number in commit.meta.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + int(number)
    return TableStatus(
        name=table.name,
        commits=len(commits),
        rows=sum(c.rows for c in commits),
        files=sum(c.files for c in commits),
        bytes=sum(c.bytes for c in commits),
        last_batch=commits[-1].last,
        written_at=max(c.written_at for c in commits),
        lag=_lag(table, tables, ends),
        watermark=moment(commits[-1].meta.get("watermark_us")),
        counts=counts,
    )


def _lag(table: Table, tables: Mapping[str, Table], ends: Mapping[str, int]) -> int | None:
    newest = table.commits()[-1]
    end = (newest.meta.get("offsets") or {}).get("end")
    if isinstance(end, Mapping) and newest.meta.get("stream") in ends:
        return max(0, ends[newest.meta["stream"]] + 1 - int(end["next"]))
    if "source" in newest.meta and "bronze" in tables:
        done = consumed(table, "bronze")
        return sum(commit.rows for commit in tables["bronze"].commits() if commit.last > done)
    return None
