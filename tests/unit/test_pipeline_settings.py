"""`[pipeline]` of parti.toml: what is declared, what is refused, in one line each; watermarks by plain arithmetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.config import load_settings
from parti.config.loading import load_table
from parti.errors import ConfigError
from parti.spark.commits import Commit
from parti.spark.lake import LocalFiles
from parti.spark.pipelines.bronze import failure, offsets_of
from parti.spark.pipelines.columns import Column, parse_columns
from parti.spark.pipelines.compaction import boundaries
from parti.spark.pipelines.locks import compacting, writing
from parti.spark.pipelines.settings import PipelineSettings, load_pipeline, pipeline_reference
from parti.spark.pipelines.watermark import later, moment, watermarks

EXAMPLE = """
nats = "nats://127.0.0.1:4222"

[pipeline]
stream = "DC"
lake = "lake"
template = "dc.{tool}.{chamber}.completion"
event_time = "finished_at"
lateness_s = 300
dedup = ["lot", "wafer", "tool"]

[pipeline.schema]
lot = "string not null"
wafer = "INT NOT NULL"
finished_at = "timestamp not null"
measurements = "struct<temperature_c: double, particles: int>"

[pipeline.gold]
period_s = 3600
"""


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARTI_CONFIG", raising=False)


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_pipeline({"stream": "DC", **values})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_table_is_read_beside_the_other_settings(tmp_path: Path) -> None:
    Path("parti.toml").write_text(EXAMPLE, encoding="utf-8")
    assert load_settings().nats == ("nats://127.0.0.1:4222",)
    settings = load_pipeline({"lake": None, "window_s": 30})
    assert settings.columns == (
        Column("lot", "string", required=True),
        Column("wafer", "int", required=True),
        Column("finished_at", "timestamp", required=True),
        Column("measurements", "struct<`temperature_c`:double,`particles`:int>"),
    )
    assert settings.keys == ("tool", "chamber")
    assert settings.lake == str(tmp_path / "lake")
    assert (settings.lateness_us, settings.window_s, settings.gold) == (300_000_000, 30, {"period_s": 3600})
    assert load_pipeline({"lake": "/other/lake"}).lake == "/other/lake"
    assert load_pipeline({"lake": "hdfs://name/lake/"}).lake == "hdfs://name/lake"


def test_without_the_table_it_is_said_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"there is no table \[pipeline\] \(no parti.toml here\); write one"):
        load_pipeline()
    Path("parti.toml").write_text('pipeline = "DC"', encoding="utf-8")
    with pytest.raises(ConfigError, match="must be a table"):
        load_table("pipeline")


def test_tables_that_nobody_knows_are_still_refused() -> None:
    Path("parti.toml").write_text("[pipelines]\nstream = 'DC'", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown setting 'pipelines'"):
        load_settings()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stream": "a b"}, "stream must be a stream name"),
        ({"scema": "a int"}, "unknown setting 'scema' ([pipeline], no parti.toml here); did you mean schema?"),
        ({"lateness_s": -1}, "lateness_s must be greater than or equal to 0"),
        ({"headers": "yes"}, "headers must be 'none', 'raw' or 'parsed'"),
        ({"start": "yesterday"}, "start must be earliest, latest, a sequence or a time"),
        ({"template": "dc.*.x"}, "template 'dc.*.x' contains the wildcard '*'"),
        ({"subjects": "dc..x"}, "subject 'dc..x' has an empty token"),
        ({"lake": " "}, "lake must be a directory"),
        ({"schema": 3}, "schema must be a table of name"),
        ({"schema": {"a": "strin"}}, "schema: column 'a': unknown type 'strin'; expected one of string"),
        ({"schema": {"a": 3}}, "schema: column 'a' needs a type in quotes"),
        ({"schema": {"a b": "int"}}, "schema: 'a b' is no name of a column"),
        ({"schema": "a int, A string"}, "column 'a' is declared twice"),
        ({"schema": "a int b"}, "schema: column 'a': did not expect 'b' here"),
        ({"schema": "a array<int"}, "schema: column 'a': expected '>'"),
        ({"schema": "a map<int,int>"}, "keys of a map must be strings"),
        ({"schema": "a decimal(50,2)"}, "decimal(50,2) is no type"),
        ({"schema": "a int not nil"}, "expected 'not null'"),
        ({"schema": "a struct<x int, x int>"}, "'x' is no name of a field, or there twice"),
        ({"schema": ""}, "expected a name of a column"),
        ({"schema": "Seq int"}, "column 'Seq' has a name that silver uses itself"),
        ({"schema": "_x int"}, "or begins with '_'"),
        (
            {"schema": "tool string", "template": "dc.{tool}"},
            "tool: both a key of the template and a declared column",
        ),
        ({"event_time": "at"}, "event_time is 'at', which is no declared column of type timestamp"),
        ({"event_time": "at", "schema": "at timestamp"}, "must be declared 'timestamp not null'"),
        ({"dedup": ["lot"], "schema": "lot string"}, "dedup: 'lot' must be a column declared 'not null' or a key"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(values: dict[str, Any], said: str) -> None:
    assert said in refused(**values)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Long", "bigint"),
        ("decimal", "decimal(10,0)"),
        ("decimal( 12 , 3 )", "decimal(12,3)"),
        ("array<map<string, array<double>>>", "array<map<string,array<double>>>"),
        ("struct<a-b: int, c struct<d: date>>", "struct<`a-b`:int,`c`:struct<`d`:date>>"),
    ],
)
def test_types_are_read_as_spark_writes_them(text: str, read: str) -> None:
    assert parse_columns({"x": text}) == (Column("x", read),)
    assert parse_columns(f"x {text} not null, y int") == (Column("x", read, required=True), Column("y", "int"))


def test_the_settings_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "pipeline.md"
    assert page.read_text(encoding="utf-8") == pipeline_reference(), "run: python docs/generate.py"
    known = {field.alias or name for name, field in PipelineSettings.model_fields.items()}
    assert set(re.findall(r"^\| `(\w+)`", pipeline_reference(), re.M)) == known


# ── watermarks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_watermark_follows_the_newest_event_of_earlier_batches() -> None:
    assert watermarks({3: 100, 4: 50, 7: None, 9: 200}, None, 10) == {3: None, 4: 90, 7: 90, 9: 90}
    assert watermarks({0: 100, 1: 300}, 250, 10) == {0: 240, 1: 240}
    assert later(None, None) is None


@given(
    newest=st.lists(st.none() | st.integers(-(10**6), 10**6), max_size=12),
    lateness=st.integers(0, 1000),
    cut=st.integers(0, 12),
)
def test_watermarks_do_not_depend_on_how_batches_are_grouped(
    newest: list[int | None], lateness: int, cut: int
) -> None:
    batches = dict(enumerate(newest))
    first = {b: us for b, us in batches.items() if b < cut}
    second = {b: us for b, us in batches.items() if b >= cut}
    before = None
    for us in first.values():
        before = later(before, us)
    assert watermarks(batches, None, lateness) == {
        **watermarks(first, None, lateness),
        **watermarks(second, before, lateness),
    }


def test_times_are_shown_for_people_as_far_as_the_calendar_goes() -> None:
    assert moment(None) is None
    assert moment(1_500_000) == "1970-01-01T00:00:01.500Z"
    assert moment(10**18) == f"{10**18} us"


# ── around the query ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_range_of_a_batch_stands_in_sparks_own_log(tmp_path: Path) -> None:
    log = tmp_path / "offsets"
    log.mkdir()
    (log / "0").write_text('v1\n{"batchWatermarkMs":0}\n{"created":"c","next":5}')
    (log / "1").write_text('v1\n{"batchWatermarkMs":0}\n{"created":"c","next":9}')
    files, five, nine = LocalFiles(), {"created": "c", "next": 5}, {"created": "c", "next": 9}
    assert offsets_of(files, str(tmp_path), 0) == {"start": None, "end": five}
    assert offsets_of(files, str(tmp_path), 1) == {"start": five, "end": nine}
    assert offsets_of(files, str(tmp_path), 2) is None
    (log / "1").write_text("v9")
    assert offsets_of(files, str(tmp_path), 1) is None


def test_what_ended_a_query_is_told_in_one_line() -> None:
    ours = "[STREAM_FAILED] Query failed\nTraceback …\n  parti.errors.DataLost: 5 to 9 are gone; do this\n\n== Plan"
    assert str(failure("bronze", Exception(ours))) == "bronze: 5 to 9 are gone; do this"
    other = "An error\njava.lang.RuntimeException: disk full\n\tat x"
    assert str(failure("bronze", Exception(other))) == "bronze: disk full"
    assert str(failure("bronze", Exception("just text\nmore"))) == "bronze: just text"


def test_what_others_have_read_is_found_in_their_metas() -> None:
    commits = [
        Commit(0, 3, meta={"source": {"table": "bronze", "first": 0, "last": 3}}),
        Commit(0, 0, meta={"read": {"bronze": 5, "ledger": 2}}),
        Commit(4, 4, meta={}),
    ]
    assert boundaries("bronze", commits) == {3, 5}
    assert boundaries("ledger", commits) == {2}
    assert boundaries("silver", commits) == set()


def test_one_writer_for_each_table_and_compaction_only_alone(tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    with writing(lake, ["bronze"]) as mine:
        with pytest.raises(ConfigError, match="another process writes to table bronze"), writing(lake, ["bronze"]):
            pass
        with pytest.raises(ConfigError, match="another process is at work on this lake"), compacting(lake):
            pass
        with mine.alone() as alone:
            assert alone
            with pytest.raises(ConfigError, match="is compacting"), writing(lake, ["silver"]):
                pass
        with writing(lake, ["silver"]), mine.alone() as alone:
            assert not alone
        with pytest.raises(ConfigError, match="at work"), compacting(lake):
            pass
    with compacting(lake):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), writing(str(tmp_path / "file"), ["bronze"]):
        pass
