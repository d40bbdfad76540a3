"""Tables of a lake: a batch is there once, whatever happens; columns are added; small commits are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest

from parti.errors import ConfigError
from parti.spark.lake import HadoopFiles, LocalFiles, files_of, is_local
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(180)


class Killed(BaseException):
    """What a process that is killed would not live to see."""


class Fragile:
    """File operations that end before the n-th step; the first n - 1 are done."""

    STEPS = ("write", "rename", "delete")

    def __init__(self, files: Any, at: int) -> None:
        self.steps = 0
        self._files = files
        self._at = at

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._files, name)
        if name not in self.STEPS:
            return method

        def step(*arguments: Any) -> Any:
            self.steps += 1
            if self.steps == self._at:
                raise Killed
            return method(*arguments)

        return step


def numbers(table: Table) -> list[int]:
    return sorted(row[0] for row in table.read().select("id").collect())


def foreign(table: Table) -> list[int]:
    """What a reader sees that knows nothing of commits."""
    found: list[int] = ds.dataset(table.path, format="parquet").to_table(columns=["id"])["id"].to_pylist()
    return sorted(found)


def rows(spark: SparkSession, ids: Iterable[int], **more: Any) -> Any:
    values = list(ids)
    frame = spark.range(min(values), max(values) + 1).where(f"id IN ({','.join(map(str, values))})").coalesce(1)
    for name, value in more.items():
        frame = frame.selectExpr("*", f"{value} AS {name}")
    return frame


def killed_at_each_step(table: Table, act: Callable[[], object], check: Callable[[bool], object]) -> int:
    """Run something again and again, killed one step later each time; check before and after each recovery."""
    whole = table._files
    for at in range(1, 50):
        table._files = Fragile(whole, at)
        try:
            act()
            finished = True
        except Killed:
            finished = False
        table._files = whole
        table._known.clear()
        check(False)
        table.recover()
        check(True)
        if finished:
            return at
    raise AssertionError("never came to an end")


def test_a_batch_that_is_committed_again_replaces_itself(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, str(tmp_path), "bronze")
    assert table.commits() == ()
    assert table.last == -1
    table.commit(0, rows(spark, [1, 2]))
    table.commit(1, rows(spark, [3]), {"offsets": {"end": 4}})
    table.commit(1, rows(spark, [3, 4]), {"offsets": {"end": 5}})
    assert numbers(table) == foreign(table) == [1, 2, 3, 4]
    assert [(c.first, c.rows, c.files) for c in Table(None, str(tmp_path), "bronze").commits()] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    newest = table.commits()[-1]
    assert newest.meta["offsets"] == {"end": 5}
    assert newest.bytes > 0
    assert newest.written_by.startswith("parti ")
    assert list((tmp_path / "_staging").iterdir()) == []
    # Spark itself finds the commits too, as partitions.
    assert spark.read.parquet(table.path).count() == 4


def test_a_writer_killed_at_any_step_of_a_commit_leaves_every_row_once(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, str(tmp_path), "bronze")
    table.commit(0, rows(spark, [1, 2]))
    again = rows(spark, [3, 4])
    seen: list[list[int]] = []

    def check(recovered: bool) -> None:
        seen.append(foreign(table))
        assert seen[-1] in ([1, 2], [1, 2, 3, 4])
        assert sum(c.rows for c in table.commits()) == len(seen[-1])

    steps = killed_at_each_step(table, lambda: table.commit(1, again), check)
    assert steps == 3  # meta, rename, the end
    assert seen == [[1, 2]] * 4 + [[1, 2, 3, 4]] * 2
    seen.clear()
    steps = killed_at_each_step(table, lambda: table.commit(1, again), check)
    assert steps == 5  # meta, old one aside, rename, delete, the end
    # Once the batch was in, no kill took it away for good: that is what recovering is for.
    assert seen[1::2] == [[1, 2, 3, 4]] * 5
    assert numbers(table) == [1, 2, 3, 4]
    assert list((tmp_path / "_staging").iterdir()) == []


def test_a_compaction_killed_at_any_step_shows_every_row_once(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, str(tmp_path), "bronze")
    for batch in range(4):
        table.commit(batch, rows(spark, [batch]), {"offsets": {"start": batch, "end": batch + 1}})

    def check(recovered: bool) -> None:
        assert (foreign(table) if recovered else numbers(table)) == [0, 1, 2, 3]

    killed_at_each_step(table, lambda: table.compact(boundaries=[0]), check)
    assert [(c.first, c.last, c.rows) for c in table.commits()] == [(0, 0, 1), (1, 2, 2), (3, 3, 1)]
    merged = table.commits()[1]
    assert merged.merged == ((1, 1, 1), (2, 2, 1))
    assert merged.meta["offsets"] == {"start": 1, "end": 3}
    assert foreign(table) == [0, 1, 2, 3]
    table.compact()
    assert [(c.first, c.last) for c in table.commits()] == [(0, 2), (3, 3)]
    assert table.commits()[0].merged == ((0, 0, 1), (1, 1, 1), (2, 2, 1))
    with pytest.raises(ConfigError, match="part of commit"):
        table.commit(1, rows(spark, [1]))
    assert numbers(table) == foreign(table) == [0, 1, 2, 3]


def test_columns_are_added_and_older_rows_have_nulls(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, str(tmp_path), "silver")
    table.commit(0, rows(spark, [1]))
    table.commit(1, rows(spark, [2], tool="'etch'"))
    table.commit(2, rows(spark, [3], tool="'cvd'").select("tool", "id"))
    assert [tuple(row) for row in table.read().orderBy("id").collect()] == [(1, None), (2, "etch"), (3, "cvd")]
    for bad, said in (
        (rows(spark, [4]), "'tool' that is now missing"),
        (rows(spark, [4], tool=1), "cannot become int"),
    ):
        with pytest.raises(ConfigError, match=said):
            table.commit(3, bad)
    assert numbers(table) == [1, 2, 3]
    table.compact()
    assert [tuple(row) for row in table.read().orderBy("id").collect()] == [(1, None), (2, "etch"), (3, "cvd")]


def test_empty_batches_stats_and_withdrawn_commits(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    table = Table(spark, str(tmp_path), "silver")
    nothing = spark.range(0)
    assert table.commit(0, nothing, keep_empty=False) is None
    assert table.commits() == ()
    with pytest.raises(ConfigError, match="has no commit yet"):
        table.read()
    table.commit((0, 4), nothing, {"source": {"table": "bronze"}}, stats={"id_max": F.max("id")})
    table.commit((5, 6), rows(spark, [7, 9]), stats={"id_max": F.max("id")})
    assert [c.meta["id_max"] for c in table.commits()] == [None, 9]
    assert numbers(table) == [7, 9]
    assert table.withdraw(after=4) == 1
    assert table.withdraw(after=4) == 0
    assert (table.last, numbers(table)) == (4, [])


def test_timestamps_are_written_so_that_others_can_read_them(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, str(tmp_path), "bronze")
    table.commit(0, spark.sql("SELECT 1L AS id, TIMESTAMP '2026-11-16 10:00:00.123456' AS timestamp"))
    found = ds.dataset(table.path, format="parquet").to_table()["timestamp"]
    assert str(found.type) == "timestamp[us, tz=UTC]"
    assert found[0].as_py().isoformat() == "2026-11-16T10:00:00.123456+00:00"


def test_a_commit_without_its_meta_is_named(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, str(tmp_path), "bronze")
    table.commit(0, rows(spark, [1]))
    place = tmp_path / "bronze" / table.commits()[0].directory / "_meta.json"
    place.unlink()
    with pytest.raises(ConfigError, match=r"_meta\.json is missing; restore it"):
        Table(None, str(tmp_path), "bronze").commits()


def test_bad_names_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name of a table"):
        Table(None, str(tmp_path), "Bronze.2")
    with pytest.raises(ConfigError, match="only be reached through a Spark session"):
        Table(None, "s3a://bucket/lake", "bronze")
    with pytest.raises(ConfigError, match="without a Spark session"):
        _ = Table(None, str(tmp_path), "bronze")._session
    assert [is_local(p) for p in ("lake", "/lake", "file:///lake", "hdfs://n/lake", "s3a://b")] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize("kind", ["local", "hadoop"])
def test_both_kinds_of_files_do_the_same(kind: str, spark: SparkSession, tmp_path: Path) -> None:
    files = files_of(spark if kind == "hadoop" else None, str(tmp_path))
    assert isinstance(files, HadoopFiles if kind == "hadoop" else LocalFiles)
    root = f"file://{tmp_path}/a"
    assert files.names(root) == []
    with pytest.raises(FileNotFoundError):
        files.read(f"{root}/x")
    (tmp_path / "a").mkdir()
    files.write(f"{root}/x", "é\n")
    assert files.read(f"{root}/x") == "é\n"
    assert files.sizes(root)["x"] == 3
    with pytest.raises(Exception, match="exist"):
        files.write(f"{root}/x", "again")
    files.rename(root, f"file://{tmp_path}/c/b")
    assert not files.exists(root)
    assert "x" in files.names(f"file://{tmp_path}/c/b")
    (tmp_path / "a").mkdir()
    with pytest.raises(FileExistsError):
        files.rename(root, f"file://{tmp_path}/c/b")
    files.delete(f"file://{tmp_path}/c")
    files.delete(f"file://{tmp_path}/c")
    assert not files.exists(f"file://{tmp_path}/c")
