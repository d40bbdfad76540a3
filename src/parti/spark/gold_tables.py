"""The gold tables as they lie in the lake: rows of numbered windows and periods, replaced in groups.

A commit of a table of windows holds whole groups of `GROUP` windows, one of `gold_slo` whole periods; the number of a
group is its batch. Invariant guarded here: after `replace` a window has the new rows or the old ones, never both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyspark.sql.functions as sf

from parti.spark.gold_windows import numbered, timed
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from parti.spark.gold_settings import GoldSettings

TABLES = ("gold_stream", "gold_partition", "gold_key", "gold_worker", "gold_slo", "gold_advice")
GROUP = 60
"""Windows that lie in one commit."""


class GoldTables:
    """All gold tables of a lake; numbers of windows in (column `w`), or of periods, their start and end stored."""

    def __init__(self, spark: SparkSession, options: GoldSettings) -> None:
        self._options = options
        self._tables = {name: Table(spark, options.lake, name) for name in TABLES}
        for table in self._tables.values():
            table.recover()

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the last run wrote down with its advice; empty before the first."""
        made = self._tables["gold_advice"].commits()
        return made[-1].meta if made else {}

    def rows(self) -> dict[str, int]:
        """How many rows each table has."""
        return {name: sum(commit.rows for commit in table.commits()) for name, table in self._tables.items()}

    def forget(self) -> None:
        """Empty all tables; the notes go first, so that a run after a kill begins anew."""
        for name in reversed(TABLES):
            self._tables[name].withdraw(after=-1)

    def stood(self, name: str, first: int, last: int, unit: str = "w") -> DataFrame | None:
        """Rows of a table for these windows or periods, with numbers; None if it has no commits there."""
        table, group = self._tables[name], _group(unit)
        commits = [c for c in table.commits() if c.first <= last // group and first // group <= c.last]
        if not commits:
            return None
        return numbered(table.read(commits), unit, self._unit_us(unit)).where(sf.col(unit).between(first, last))

    def replace(self, name: str, rows: DataFrame, first: int, last: int, unit: str = "w") -> None:
        """Put the rows, which are all from `first` to `last`, in the place of what the table has from `first` on.

        What stands before `first` in its group is written again. The newest group gets a commit of its own, because
        it is the one that the next run replaces.
        """
        table, group = self._tables[name], _group(unit)
        low, high = first // group, last // group
        # Compaction may have put groups together: they are replaced together.
        met = [commit for commit in table.commits() if commit.first <= high and low <= commit.last]
        low = min((commit.first for commit in met), default=low)
        if (earlier := self.stood(name, low * group, first - 1, unit)) is not None:
            rows = rows.unionByName(earlier.select(*rows.columns))
        # Kept, because the first commit takes files away that the second one would read.
        rows = rows.persist()
        for start, end in ((low, high - 1), (high, high)):
            if start <= end:
                part = rows.where(sf.col(unit).between(start * group, (end + 1) * group - 1))
                table.commit((start, end), timed(part, unit, self._unit_us(unit)))
        rows.unpersist()

    def write_advice(self, rows: DataFrame, notes: Mapping[str, Any]) -> int:
        """Replace the advice and the notes; returns how many pieces there are."""
        commit = self._tables["gold_advice"].commit(0, timed(rows, "period", self._unit_us("period")), notes)
        assert commit is not None
        return commit.rows

    def advice(self) -> DataFrame | None:
        """The advice of the last run; None before the first."""
        table = self._tables["gold_advice"]
        return numbered(table.read(), "period", self._unit_us("period")) if table.commits() else None

    def _unit_us(self, unit: str) -> int:
        return self._options.window_us * (1 if unit == "w" else self._options.windows_per_period)


def _group(unit: str) -> int:
    return GROUP if unit == "w" else 1
