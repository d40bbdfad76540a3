"""Compaction of a whole lake: small commits are put together, but never across what a later table has read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parti.spark.commits import Commit
from parti.spark.lake import LakeFiles, files_of
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Compacted:
    """What became of one table."""

    table: str
    before: int
    after: int
    rows: int
    """Rows that were written again."""


def compact_lake(
    spark: SparkSession,
    lake: str,
    target_bytes: int,
    *,
    after: int = 0,
    recover: bool = True,
    stop: threading.Event | None = None,
) -> list[Compacted]:
    """Compact every table of a lake that has at least `after` commits below the target.

    Without `recover` a query of this process may go on writing: what it has in hand is not taken for left over.
    Raises InterruptedError instead of beginning with a table when `stop` is set.
    """
    tables = [Table(spark, lake, name) for name in table_names(files_of(spark, lake), lake)]
    done = []
    for table in tables:
        if stop and stop.is_set():
            raise InterruptedError(f"table {table.name} is left as it is")
        if recover:
            table.recover()
        before = table.commits()
        if sum(commit.bytes < target_bytes for commit in before) < after:
            continue
        fences = boundaries(table.name, (commit for other in tables for commit in other.commits()))
        made = table.compact(target_bytes=target_bytes, boundaries=fences)
        if made:
            done.append(Compacted(table.name, len(before), len(table.commits()), sum(c.rows for c in made)))
    return done


def boundaries(table: str, commits: Iterable[Commit]) -> set[int]:
    """The batches up to which others have read a table, by the metas of their commits."""
    return {last for commit in commits if (last := _read_up_to(commit.meta, table)) is not None}


def _read_up_to(meta: Mapping[str, Any], table: str) -> int | None:
    """What a table has read stands in its meta: as `source` (of one table) or as `read` (of several)."""
    source = meta.get("source")
    if source and source.get("table") == table:
        return int(source["last"])
    last = (meta.get("read") or {}).get(table)
    return None if last is None else int(last)


def table_names(files: LakeFiles, lake: str) -> list[str]:
    """The tables of a lake."""
    return [name for name in files.names(lake) if not name.startswith(("_", "."))]
