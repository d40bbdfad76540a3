"""The pipeline from a real stream to the tables: exactly once, restarted, refused, shown, compacted."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks import ingest_kills
from examples import tool_events

from parti.cli.main import main
from parti.config import Settings
from parti.embedded import Server
from parti.errors import ConfigError, PipelineFailed
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.model.ledger import LedgerBatch, encode_batch
from parti.spark.pipelines import bronze, run
from parti.spark.pipelines.progress import Step
from parti.spark.pipelines.settings import PipelineSettings
from parti.spark.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(180)

TOML = """
nats = "{url}"

[pipeline]
stream = "{stream}"
lake = "{lake}"
template = "{stream}.{{tool}}.{{chamber}}.completion"
schema = "{schema}"
event_time = "finished_at"
lateness_s = 120
dedup = ["lot", "wafer", "step"]
max_offsets_per_trigger = 300
"""
SCHEMA = (
    "lot string not null, wafer int not null, recipe string, step int not null, started_at timestamp, finished_at "
    "timestamp not null, status string, measurements map<string,double>"
)


@pytest.fixture
def client(nats_server: Server) -> Iterator[BlockingClient]:
    with BlockingClient.open(Target(servers=(nats_server.url,)), name="test") as client:
        yield client


@pytest.fixture
def toml(nats_server: Server, stream_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a parti.toml, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    text = TOML.format(url=nats_server.url, stream=stream_name, lake=tmp_path / "lake", schema=SCHEMA)
    (tmp_path / "parti.toml").write_text(text)
    return tmp_path


@pytest.fixture
def shared_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the session of the tests: a process has one."""

    @contextmanager
    def session(app_name: str, master: str | None = None) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(run, "open_session", session)


def publish(client: BlockingClient, stream: str, events: Iterator[tool_events.Event]) -> list[str]:
    """Publish events below the stream's own name; returns their subjects in the order of their sequences."""
    subjects = []
    for event in events:
        subject = event.subject.replace("dc.", f"{stream}.", 1)
        client.request(subject, event.payload)
        subjects.append(subject)
    return subjects


def create(client: BlockingClient, stream: str) -> None:
    config = {"name": stream, "subjects": [f"{stream}.>"], "storage": "memory", "allow_direct": True}
    client.api(f"STREAM.CREATE.{stream}", config)


@pytest.mark.usefixtures("shared_session")
def test_from_the_stream_to_silver_and_again(
    client: BlockingClient,
    stream_name: str,
    toml: Path,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create(client, stream_name)
    events = tool_events.generate(
        450, tools=3, chambers=2, seed=4, late_ratio=0.05, malformed_ratio=0.05, duplicate_ratio=0.05
    )
    subjects = publish(client, stream_name, iter(events))
    assert main(["pipeline", "run"]) == 0
    said = capsys.readouterr().out
    assert "bronze: batch 1, 150 rows in" in said
    assert "nothing left" in said
    lake = str(toml / "lake")
    rows = Table(spark, lake, "bronze").read().orderBy("seq").select("seq", "subject", "batch_id").collect()
    assert [(row["seq"], row["subject"]) for row in rows] == list(enumerate(subjects, 1))
    assert [row["batch_id"] for row in rows] == [0] * 300 + [1] * 150
    last = Table(None, lake, "bronze").commits()[-1]
    assert (last.meta["offsets"]["start"]["next"], last.meta["offsets"]["end"]["next"]) == (301, 451)
    silver, quarantine = Table(spark, lake, "silver"), Table(spark, lake, "quarantine")
    good, bad = (sum(c.rows for c in table.commits()) for table in (silver, quarantine))
    assert 300 < good < good + bad < 450
    reasons = {row["reason"] for row in quarantine.read().select("reason").distinct().collect()}
    assert {"malformed", "late"} <= reasons
    kept = silver.read().select("tool", "chamber", "subject", "lot", "wafer", "step").collect()
    assert all(row["subject"] == f"{stream_name}.{row['tool']}.{row['chamber']}.completion" for row in kept)
    assert len({(row["lot"], row["wafer"], row["step"]) for row in kept}) == good

    publish(client, stream_name, iter(tool_events.generate(30, tools=3, chambers=2, seed=5)))
    assert main(["pipeline", "status", "--json"]) == 0
    tables = {table["name"]: table for table in json.loads(capsys.readouterr().out)["tables"]}
    assert list(tables) == ["bronze", "silver", "quarantine"]
    assert (tables["bronze"]["lag"], tables["bronze"]["rows"], tables["bronze"]["last_batch"]) == (30, 450, 1)
    assert tables["silver"]["lag"] == 0
    assert tables["silver"]["watermark"].startswith("2026-01-05T")
    assert main(["pipeline", "run", "bronze"]) == 0
    assert main(["pipeline", "compact"]) == 0
    assert "bronze: 3 commits became 2" in capsys.readouterr().out
    # The fence is what silver has read: batch 1.
    assert [(c.first, c.last, c.rows) for c in Table(None, lake, "bronze").commits()] == [(0, 1, 450), (2, 2, 30)]
    assert main(["pipeline", "run", "silver"]) == 0
    assert main(["pipeline", "status"]) == 0
    assert "of 480 rows read" in capsys.readouterr().out
    assert [(c.first, c.last) for c in silver.commits()] == [(0, 1), (2, 2)]


def started(
    client: BlockingClient, nats_server: Server, stream: str, lake: Path, **changes: Any
) -> tuple[PipelineSettings, bronze.Ingest]:
    create(client, stream)
    given = {"stream": stream, "lake": str(lake), "max_offsets_per_trigger": 5, **changes}
    settings = PipelineSettings.model_validate(given)
    plan = run.make_plan(settings, Settings(nats=(nats_server.url,)), ["bronze"])
    return settings, plan.ingests[0]


def test_a_batch_that_is_run_again_is_there_once_and_what_is_gone_is_told(
    client: BlockingClient, nats_server: Server, stream_name: str, spark: SparkSession, tmp_path: Path
) -> None:
    settings, ingest = started(client, nats_server, stream_name, tmp_path)
    for number in range(9):
        client.request(f"{stream_name}.a", str(number).encode())
    steps: list[Step] = []
    ingest.prepare(spark)
    assert bronze.follow(ingest.start(spark), threading.Event(), steps.append) == 9
    assert [(step.batch, step.rows, step.lag) for step in steps] == [(0, 5, 4), (1, 4, 0)]
    # As if it had been killed after the table's commit and before Spark's own, with something half staged.
    for name in ("1", ".1.crc"):
        (tmp_path / "_checkpoints/bronze/commits" / name).unlink()
    (tmp_path / "_staging/bronze.000000000001-000000000001.0.new").mkdir()
    written = Table(None, settings.lake, "bronze").commits()[-1].written_at
    for _ in range(2):
        client.request(f"{stream_name}.a", b"9")
    client.api(f"STREAM.PURGE.{stream_name}", {"seq": 11})
    ingest.prepare(spark)
    assert list((tmp_path / "_staging").iterdir()) == []
    # The batch is run again and its messages are gone from the stream: that is told, and the table keeps them.
    with pytest.raises(PipelineFailed, match=r"^bronze: .*gone") as failed:
        bronze.follow(ingest.start(spark), threading.Event())
    assert "\n" not in str(failed.value)
    table = Table(spark, settings.lake, "bronze")
    assert table.commits()[-1].written_at == written
    assert sorted(int(row["payload"].decode()) for row in table.read().collect()) == list(range(9))

    # What would mix two streams, or take everything in again, is refused.
    with pytest.raises(ConfigError, match="holds stream"):
        replace(ingest, state=replace(ingest.state, name="OTHER")).prepare(spark)
    with pytest.raises(ConfigError, match="made anew"):
        replace(ingest, state=replace(ingest.state, created="2001-01-01T00:00:00Z")).prepare(spark)
    (tmp_path / "_checkpoints").rename(tmp_path / "_gone")
    with pytest.raises(ConfigError, match=r"the checkpoint .* is gone"):
        ingest.prepare(spark)


def test_the_ledger_is_decoded_into_two_tables(spark: SparkSession, tmp_path: Path) -> None:
    rows = LedgerBatch(
        "DC",
        "t0",
        "worker-0",
        "p1",
        0,
        partitions=("etch1.c3",),
        fences=(7,),
        partition_index=array("I", [0]),
        seq=array("q", [5]),
        attempt=array("I", [1]),
        outcome=array("B", [0]),
        received_us=array("q", [1]),
        started_us=array("q", [2]),
        finished_us=array("q", [3]),
    )
    batches = [rows, LedgerBatch("DC", "t0", "worker-0", "p1", 1, closed=True)]
    messages = spark.createDataFrame(
        [(seq, encode_batch(batch)) for seq, batch in enumerate(batches, 1)], "seq bigint, payload binary"
    )
    sink = bronze.Sink(str(tmp_path), "ledger", str(tmp_path / "_checkpoints/ledger"), "DC-ledger", "t1")
    sink(messages.coalesce(1), 0)
    ledger, chains = (Table(spark, str(tmp_path), name) for name in ("ledger", "ledger_batches"))
    row = ledger.read().select("stream", "seq", "partition", "fence", "outcome", "batch_id").collect()
    assert [tuple(r) for r in row] == [("DC", 5, "etch1.c3", 7, "handled", 0)]
    chain = chains.read().select("number", "closed", "rows", "ledger_seq").orderBy("number").collect()
    assert [tuple(r) for r in chain] == [(0, False, 1, 1), (1, True, 0, 2)]


def test_a_query_can_be_stopped(spark: SparkSession, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    endless = spark.readStream.format("rate").load()
    query = bronze.start_query(endless, lambda rows, batch: None, str(tmp_path / "c"), "rate", every_s=60)
    bronze.follow(query, stop)
    assert not query.isActive


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_ingest_that_is_killed_twice_has_every_message_once(tmp_path: Path) -> None:
    result = ingest_kills.Run(kills=2, rate=500, directory=tmp_path).measure()
    assert ingest_kills.passed(result), result


def test_everything_is_refused_before_spark_is_started(
    client: BlockingClient,
    stream_name: str,
    toml: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(app_name: str, master: str | None = None) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(run, "open_session", never)

    def refused(*arguments: str) -> str:
        assert main(["pipeline", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert f"stream {stream_name!r} does not exist" in refused("run")
    create(client, stream_name)
    assert "could not connect" in refused("run", "--nats", "nats://127.0.0.1:1")
    assert "there is no table 'brass' to run" in refused("run", "brass")
    assert "--every '3 parsecs' is no interval" in refused("run", "--every", "3 parsecs")
    assert "exclude each other" in refused("run", "--every", "3s", "--once")
    text = (toml / "parti.toml").read_text()
    for old, new, said in (
        ("int not null", "integr", "unknown type 'integr'"),
        (f'"{stream_name}.{{tool}}', '"elsewhere.{tool}', "fits no subject of stream"),
        ("dedup", "deduplicate", "unknown setting 'deduplicate'"),
    ):
        (toml / "parti.toml").write_text(text.replace(old, new, 1))
        assert said in refused("run")
    (toml / "parti.toml").write_text(text[: text.index("template")])
    assert "silver needs the columns" in refused("run", "silver")
    assert "gold needs to know the partitions" in refused("run", "gold")
    assert main(["pipeline", "status", "--nats", "nats://127.0.0.1:1"]) == 1
    shown = capsys.readouterr().out
    assert "There is no table yet" in shown
    assert "The lag is unknown: could not connect" in shown
