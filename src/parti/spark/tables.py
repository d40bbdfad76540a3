"""Tables of a lake: a directory of commits, each in by one rename, each batch of rows there exactly once.

    <lake>/<table>/commit=<first>-<last>/part-*.parquet    live rows, and `_meta.json` that says what they are
    <lake>/_staging/<table>.*                              what is being written or thrown away

Readers never see a commit that is half written, because it is renamed in when it is complete. A batch that is
committed again takes the place of what it wrote before, so a query that is killed at any moment and repeats its last
batch leaves each row once. One process writes to a table at a time; any number read it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from parti.errors import ConfigError
from parti.spark import commits as rules
from parti.spark.commits import META_FILE, Commit
from parti.spark.lake import LakeFiles, files_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

STAGING = "_staging"
TARGET_BYTES = 128 * 1024 * 1024
"""Size that compaction aims at: what one task of a later read takes."""
_WRITTEN_BY = f"parti {version('parti')}"


class Table:
    """One table of a lake.

    Without a session (None) its history can be looked at, but no row. Raises ConfigError, in one line, for a name
    that is none and for a table that is damaged.

        table = Table(spark, "lake", "bronze")
        table.commit(7, rows)
        table.commit(7, rows)  # takes the place of the first
        table.read().count()
    """

    def __init__(self, spark: SparkSession | None, root: str, name: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ConfigError(f"{name!r} is no name of a table; expected small letters, digits and '_'")
        self.name = name
        self.root = str(root).rstrip("/")
        self.path = f"{self.root}/{name}"
        self._spark = spark
        self._files: LakeFiles = files_of(spark, self.root)
        self._known: dict[str, Commit] = {}

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────

    def commits(self) -> tuple[Commit, ...]:
        """The live commits, in the order of their batches; none if the table does not exist yet."""
        return rules.live(self.name, self._all())

    @property
    def last(self) -> int:
        """The newest batch that is in the table; -1 if there is none."""
        return max((commit.last for commit in self.commits()), default=-1)

    def schema(self) -> tuple[rules.Field, ...]:
        """The columns of all commits, as Spark writes them in JSON."""
        columns: tuple[rules.Field, ...] = ()
        for commit in self.commits():
            # Each commit was checked against the ones before it, so the newest one has all columns.
            columns = commit.schema if len(commit.schema) >= len(columns) else columns
        return columns

    def read(self, commits: Sequence[Commit] | None = None) -> DataFrame:
        """The rows of these commits, or of all; columns that were added later are null in older rows.

        The files are those of now: a compaction that ends before the rows are fetched takes them away.
        """
        from pyspark.sql.types import StructType  # noqa: PLC0415

        wanted = self.commits() if commits is None else commits
        if not wanted:
            raise ConfigError(
                f"table {self.name} in {self.root} has no commit yet; run 'parti pipeline run {self.name}'"
            )
        schema = StructType.fromJson({"type": "struct", "fields": [dict(c) for c in self.schema()]})
        places = [f"{self.path}/{commit.directory}" for commit in wanted]
        return self._session.read.schema(schema).parquet(*places)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self,
        batch: int | tuple[int, int],
        rows: DataFrame,
        meta: Mapping[str, Any] | None = None,
        *,
        stats: Mapping[str, Column] | None = None,
        keep_empty: bool = True,
    ) -> Commit | None:
        """Write the rows of a batch, or of a range of batches; what they wrote before is replaced.

        `stats` are aggregates of the rows, counted while they are written and added to the meta. Returns None if
        there was no row and `keep_empty` is false. Raises ConfigError, with nothing changed, if a column of the table
        is missing or has another type, or if the batch has been merged with others.
        """
        first, last = rules.as_range(batch)
        columns = tuple(json.loads(rows.schema.json())["fields"])
        new = Commit(first, last, schema=columns, written_at=_now(), written_by=_WRITTEN_BY, meta=dict(meta or {}))
        rules.encode(new)
        there = self.commits()
        gone = rules.replaced(self.name, there, new)
        remaining = [c for c in there if c not in gone]
        if remaining:
            widest = max(remaining, key=lambda c: len(c.schema))
            new = replace(new, schema=rules.merge_schema(self.name, widest.schema, columns))
        staged = self._staged(new.span)
        found = self._write(staged, rows, stats or {})
        new = replace(new, rows=found.pop("rows"), meta={**new.meta, **found})
        keep = new.rows > 0 or keep_empty
        if keep:
            new = self._seal(staged, new)
        asides = [self._put_aside(old) for old in gone]
        if keep:
            self._put_in_place(staged, new)
        else:
            self._files.delete(staged)
        for aside in asides:
            self._files.delete(aside)
        return new if keep else None

    def withdraw(self, after: int) -> int:
        """Take away every commit that begins after a batch; returns how many. For what was never finished."""
        gone = [commit for commit in self.commits() if commit.first > after]
        for commit in gone:
            self._files.delete(self._put_aside(commit))
        return len(gone)

    def recover(self) -> None:
        """Clear away what a killed writer left, before writing; a commit that it was about to replace comes back."""
        staging = f"{self.root}/{STAGING}"
        for name in self._files.names(staging):
            table, _, rest = name.partition(".")
            if table != self.name:
                continue
            _, _, kind = rest.rpartition(".")
            span = rest.partition(".")[0]
            target = f"{self.path}/commit={span}"
            bounds = rules.range_of(f"commit={span}")
            if kind == "aside" and bounds is not None:
                old = Commit(*bounds)
                if not any(commit.meets(old) for commit in self._all()):
                    self._files.rename(f"{staging}/{name}", target)
                    continue
            self._files.delete(f"{staging}/{name}")
        everything = self._all()
        for commit in rules.dead(everything, rules.live(self.name, everything)):
            self._files.delete(self._put_aside(commit))

    def compact(self, *, target_bytes: int = TARGET_BYTES, boundaries: Iterable[int] = ()) -> list[Commit]:
        """Put small neighbouring commits together and return the new ones; no row changes.

        The larger commit is put in place before the smaller ones go, and `read` leaves out what lies in a larger
        one: killed in between, nothing is missing and nothing counts twice. Other readers may see rows twice for that
        moment, and after a kill until the next `recover`. `boundaries` are batches up to which others have read.
        """
        made = []
        for group in rules.plan_compaction(self.commits(), target_bytes, boundaries):
            new = Commit(
                group[0].first,
                group[-1].last,
                schema=max((c.schema for c in group), key=len),
                written_at=_now(),
                written_by=_WRITTEN_BY,
                merged=tuple(part for c in group for part in (c.merged or ((c.first, c.last, c.rows),))),
                meta=rules.merge_meta(group),
            )
            staged = self._staged(new.span)
            found = self._write(staged, self.read(group).coalesce(1), {})
            new = self._seal(staged, replace(new, rows=found["rows"]))
            if new.rows != sum(c.rows for c in group):
                raise ConfigError(
                    f"table {self.name}: commits {new.span} hold {new.rows:,} rows, their metas say "
                    f"{sum(c.rows for c in group):,}; nothing was compacted: look for files that were lost or added"
                )
            self._put_in_place(staged, new)
            for old in group:
                self._files.delete(self._put_aside(old))
            made.append(new)
        return made

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _session(self) -> SparkSession:
        if self._spark is None:
            raise ConfigError(f"table {self.name} was opened without a Spark session, so its rows cannot be reached")
        return self._spark

    def _all(self) -> list[Commit]:
        """Every commit whose directory is there; what is known of one never changes while it is."""
        known: dict[str, Commit] = {}
        for name in self._files.names(self.path):
            if rules.range_of(name) is None:
                continue
            commit = self._known.get(name)
            if commit is None:
                place = f"{self.path}/{name}/{META_FILE}"
                try:
                    commit = rules.decode(self._files.read(place), place)
                except FileNotFoundError:
                    if not self._files.exists(f"{self.path}/{name}"):
                        continue  # somebody took it away after it was listed
                    raise ConfigError(f"{place} is missing; restore it or move the commit's directory away") from None
            known[name] = commit
        self._known = known
        return list(known.values())

    def _staged(self, span: str) -> str:
        return f"{self.root}/{STAGING}/{self.name}.{span}.{uuid.uuid4().hex[:12]}.new"

    def _write(self, place: str, rows: DataFrame, stats: Mapping[str, Column]) -> dict[str, Any]:
        """Write the rows as Parquet; returns their number and the stats."""
        from pyspark.sql import Observation  # noqa: PLC0415
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        observed = Observation(uuid.uuid4().hex)
        counts = [F.count(F.lit(1)).alias("rows"), *(column.alias(name) for name, column in stats.items())]
        # The default, INT96, is understood by few readers.
        rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        writer = rows.observe(observed, *counts).write
        writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(place)
        return dict(observed.get)

    def _seal(self, staged: str, new: Commit) -> Commit:
        """Write down what the staged files are; the last thing that happens to them before they are renamed."""
        sizes = [size for name, size in self._files.sizes(staged).items() if name.endswith(".parquet")]
        new = replace(new, files=len(sizes), bytes=sum(sizes))
        self._files.write(f"{staged}/{META_FILE}", rules.encode(new))
        return new

    def _put_in_place(self, staged: str, new: Commit) -> None:
        self._files.rename(staged, f"{self.path}/{new.directory}")
        self._known[new.directory] = new

    def _put_aside(self, old: Commit) -> str:
        """Take a commit out of the table by one rename; deleting its files one by one could be seen."""
        aside = f"{self.root}/{STAGING}/{self.name}.{old.span}.{uuid.uuid4().hex[:12]}.aside"
        self._files.rename(f"{self.path}/{old.directory}", aside)
        self._known.pop(old.directory, None)
        return aside


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
