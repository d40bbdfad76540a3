"""`format("jetstream")` in a real Spark: what a read gives, what it spares the server, and what it says when it cannot."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.streams import Stream, block

from parti.embedded import Server
from parti.embedded.monitor import ask
from parti.jetstream.target import Target
from parti.spark.keys import with_keys
from parti.spark.source import lag_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(180)
SECRET = "s3cret-never-shown"


@dataclass
class Source:
    """A stream, and Spark to read it with."""

    spark: SparkSession
    stream: Stream

    def options(self, **more: Any) -> dict[str, str]:
        given = {"servers": self.stream.target.servers[0], "stream": self.stream.name, **more}
        return {name: str(value) for name, value in given.items()}

    def batch(self, **options: Any) -> DataFrame:
        return self.spark.read.format("jetstream").options(**self.options(**options)).load()

    def seqs(self, frame: DataFrame) -> list[int]:
        return sorted(row.seq for row in frame.select("seq").collect())

    def run(self, checkpoint: Path, trigger: dict[str, Any] | None = None, **options: Any) -> Run:
        """A streaming query over what is there now, to its end."""
        run = self.start(checkpoint, trigger or {"availableNow": True}, **options)
        run.query.awaitTermination(120)
        return run

    def start(self, checkpoint: Path, trigger: dict[str, Any], **options: Any) -> Run:
        frame = self.spark.readStream.format("jetstream").options(**self.options(**options)).load()
        run = Run()
        writer = frame.writeStream.foreachBatch(run.take).option("checkpointLocation", str(checkpoint))
        run.query = writer.trigger(**trigger).start()
        return run


@dataclass
class Run:
    """What one streaming query gave."""

    batches: list[list[int]] = field(default_factory=list)
    query: Any = None

    def take(self, frame: DataFrame, _: int) -> None:
        self.batches.append(sorted(row.seq for row in frame.select("seq").collect()))

    @property
    def seqs(self) -> list[int]:
        return [seq for batch in self.batches for seq in batch]

    @property
    def end(self) -> dict[str, Any]:
        """The last offset, as Spark keeps it."""
        progress = json.loads(self.query.lastProgress.json)
        found: dict[str, Any] = progress["sources"][0]["endOffset"]
        return found


@pytest.fixture
def source(spark: SparkSession, nats_server: Server, stream_name: str) -> Iterator[Source]:
    stream = Stream(Target(servers=(nats_server.url,)), stream_name)
    yield Source(spark, stream)
    stream.remove()


def message_of(error: pytest.ExceptionInfo[Exception]) -> str:
    """What a person sees: our line is in it, and no traceback of ours."""
    text = str(error.value)
    assert "Traceback" not in text
    return text


# ── batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_all_columns(source: Source) -> None:
    source.stream.create(subjects=[f"{source.stream.root}.>"])
    raw = block("A: 1", "B: 2", "A: 3")
    source.stream.publish([("e1.done", b"\x00\xff", None), ("e2.done", b"", raw), (b"n\xff", b"x", None)])
    before = datetime.now(UTC)
    frame = source.batch(includeHeaders="parsed", subjectTemplate=f"{source.stream.root}.{{tool}}.done")
    assert dict(frame.dtypes) == {
        "stream": "string",
        "seq": "bigint",
        "subject": "string",
        "timestamp": "timestamp",
        "headers": "map<string,array<string>>",
        "payload": "binary",
        "tool": "string",
    }
    one, two, three = frame.orderBy("seq").collect()
    root = source.stream.root
    assert (one.stream, one.seq, one.subject, bytes(one.payload)) == (
        source.stream.name,
        1,
        f"{root}.e1.done",
        b"\x00\xff",
    )
    assert (two.seq, bytes(two.payload), two.headers) == (2, b"", {"A": ["1", "3"], "B": ["2"]})
    assert (one.headers, one.tool, two.tool, three.tool) == ({}, "e1", "e2", None)
    assert three.subject == f"{root}.n\ufffd"
    stored = frame.where("seq = 1").selectExpr("unix_micros(timestamp) AS us").first()
    assert stored is not None
    assert abs(stored.us / 1e6 - before.timestamp()) < 60
    assert [row.headers for row in source.batch(includeHeaders="raw").orderBy("seq").collect()] == [None, raw, None]
    assert source.batch(includePayload="false").columns == ["stream", "seq", "subject", "timestamp"]
    keyed = with_keys(source.batch(), f"{root}.{{tool}}.done", partition="partition").orderBy("seq").collect()
    assert [(row.tool, row.partition) for row in keyed] == [("e1", "e1"), ("e2", "e2"), (None, None)]


def test_where_a_batch_begins_and_ends(source: Source) -> None:
    source.stream.create()
    source.stream.fill(30)
    times = {row.seq: row.us for row in source.batch().selectExpr("seq", "unix_micros(timestamp) AS us").collect()}
    at = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=times[20])).isoformat()
    first_at_that_time = min(seq for seq, us in times.items() if us >= times[20])
    assert source.seqs(source.batch()) == list(range(1, 31))
    assert source.seqs(source.batch(startingOffsets=10, endingOffsets=15)) == [10, 11, 12, 13, 14]
    assert source.seqs(source.batch(startingOffsets=at)) == list(range(first_at_that_time, 31))
    assert source.seqs(source.batch(startingOffsets="earliest", endingOffsets=at)) == list(
        range(1, first_at_that_time)
    )
    assert source.seqs(source.batch(startingOffsets="2001-01-01", endingOffsets="latest")) == list(range(1, 31))
    assert source.seqs(source.batch(startingOffsets="2101-01-01")) == []
    assert source.seqs(source.batch(startingOffsets=31)) == []
    assert source.seqs(source.batch(startingOffsets=500, endingOffsets=1000)) == []
    assert source.seqs(source.batch(startingOffsets=20, endingOffsets=1000)) == list(range(20, 31))


def test_an_empty_stream_is_an_empty_table(source: Source) -> None:
    source.stream.create()
    assert source.batch().count() == 0
    source.stream.fill(3)
    source.stream.purge()
    assert source.batch().count() == 0


def test_a_read_is_split_as_asked(source: Source) -> None:
    source.stream.create()
    source.stream.fill(30)
    frame = source.batch(minPartitions=3)
    assert frame.rdd.getNumPartitions() == 3
    assert source.seqs(frame) == list(range(1, 31))
    assert source.batch(maxRecordsPerPartition=6).rdd.getNumPartitions() == 5
    assert source.batch().rdd.getNumPartitions() == 1


def test_subjects(source: Source) -> None:
    source.stream.create()
    source.stream.fill(30, subjects=("a.x", "a.y", "b.x"))
    root = source.stream.root
    assert source.seqs(source.batch(subject=f"{root}.b.*")) == list(range(3, 31, 3))
    assert source.seqs(source.batch(subject=f"{root}.a.x, {root}.*.x")) == [s for s in range(1, 31) if s % 3 != 2]
    assert source.batch(subject=f"{root}.c").count() == 0


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_queues_are_read_without_being_touched(source: Source, retention: str) -> None:
    source.stream.create(retention=retention)
    config = {"durable_name": "worker", "ack_policy": "explicit"}
    with source.stream.client() as client:
        call = {"stream_name": source.stream.name, "config": config}
        client.api(f"CONSUMER.CREATE.{source.stream.name}.worker", call)
        source.stream.fill(20)
        source.stream.delete(5)
        assert source.seqs(source.batch()) == [seq for seq in range(1, 21) if seq != 5]
        after = client.api(f"CONSUMER.INFO.{source.stream.name}.worker")
    assert (after["num_pending"], after["num_ack_pending"], after["delivered"]["stream_seq"]) == (19, 0, 0)
    assert source.stream.consumers() == ["worker"]


def test_filters_spare_the_server_what_they_can(source: Source, nats_server: Server) -> None:
    """A message is gone, so that whoever reads the place where it was fails."""
    source.stream.create()
    source.stream.publish([("rare" if seq % 50 == 0 else "common", b"x", None) for seq in range(1, 501)])
    source.stream.delete(10)
    frame = source.batch()
    assert source.seqs(frame.where("seq > 490")) == list(range(491, 501))
    assert source.seqs(frame.where("seq >= 11 and seq < 14")) == [11, 12, 13]
    assert source.seqs(frame.where("seq = 9")) == [9]
    assert source.seqs(frame.where("seq between 12 and 13 and payload is not null")) == [12, 13]
    assert frame.where("timestamp > '2101-01-01'").count() == 0
    assert frame.where("timestamp < timestamp'2001-01-01'").count() == 0
    lossy = source.batch(failOnDataLoss="false")
    root = source.stream.root
    for condition, expected in (
        (f"subject = '{root}.rare'", list(range(50, 501, 50))),
        (f"subject in ('{root}.rare', '{root}.other')", list(range(50, 501, 50))),
        (f"subject like '{root}.rare%' and seq > 100", list(range(150, 501, 50))),
        (f"subject = '{root}.rare' or seq = 3", [3, *range(50, 501, 50)]),
        (f"subject <> '{root}.common' and not seq = 50", list(range(100, 501, 50))),
    ):
        assert source.seqs(lossy.where(condition)) == expected
    before = _sent(nats_server)
    assert lossy.where(f"subject = '{root}.rare'").count() == 10
    assert _sent(nats_server) - before < 100
    assert lossy.count() == 499
    assert _sent(nats_server) - before > 499


def test_times_of_filters_are_those_of_the_session(source: Source) -> None:
    source.stream.create()
    source.stream.fill(20)
    rows = source.batch().selectExpr("seq", "unix_micros(timestamp) AS us").collect()
    middle = sorted(row.us for row in rows)[10]
    spark = source.spark
    zone = spark.conf.get("spark.sql.session.timeZone")
    assert zone is not None
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        kept = source.batch().where(f"timestamp >= timestamp_micros({middle})")
        assert source.seqs(kept) == sorted(row.seq for row in rows if row.us >= middle)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def _lose(stream: Stream, way: str) -> None:
    """Of messages 1-20, lose 4 to 6 or everything up to 6; the rest stays."""
    if way == "expire":
        stream.create(max_age=1_000_000_000)
        stream.fill(6)
        _until(lambda: not stream.info()["state"]["messages"])
        config = stream.info()["config"]
        stream.call("STREAM.UPDATE", {**config, "max_age": 0})
        stream.fill(14)
        return
    stream.create()
    stream.fill(20)
    if way == "purge":
        stream.purge(seq=7)
    else:
        stream.delete(4, 5, 6)


@pytest.mark.parametrize(("way", "gone"), [("purge", "3-6"), ("delete", "4-6"), ("expire", "3-6")])
def test_lost_messages_of_a_batch(source: Source, way: str, gone: str) -> None:
    _lose(source.stream, way)
    with pytest.raises(Exception, match="set failOnDataLoss=false to go on without them") as error:
        source.batch(startingOffsets=3).collect()
    assert f"of stream '{source.stream.name}' are gone (purged, deleted or expired): {gone};" in message_of(error)
    found = source.seqs(source.batch(startingOffsets=3, failOnDataLoss="false"))
    assert found == ([3] if way == "delete" else []) + list(range(7, 21))
    # What is gone does not matter to a read that does not want it.
    assert source.seqs(source.batch(startingOffsets=7)) == list(range(7, 21))
    if way != "delete":
        assert source.seqs(source.batch()) == list(range(7, 21))


def test_gaps_of_streams_that_thin_out_by_design_are_no_loss(source: Source) -> None:
    source.stream.create(max_msgs_per_subject=1)
    source.stream.fill(20, subjects=("a", "b", "c"))
    assert source.seqs(source.batch(startingOffsets=1)) == [18, 19, 20]


# ── what is wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"stream": "no-such"}, "parti.errors.StreamNotFound: stream 'no-such' does not exist on 127.0.0.1:"),
        (
            {"servers": "nats://127.0.0.1:1", "connectTimeout": "1"},
            "parti.errors.ConnectionFailed: could not connect within 1 s: nats://127.0.0.1:1: Connection refused",
        ),
        (
            {"startingOffset": "5"},
            "startingOffset: format jetstream has no such option; did you mean startingOffsets?",
        ),
        ({"minPartitions": "few"}, "parti.errors.ConfigError: minPartitions: 'few' is no number above 0"),
        ({"password": SECRET}, "parti.errors.ConfigError: password: Spark shows options in its plans"),
        ({"tokenEnv": "NOT_SET_ANYWHERE"}, "token: the environment variable NOT_SET_ANYWHERE is not set"),
        ({"servers": f"nats://ann:{SECRET}@127.0.0.1:1"}, "carries a user name or password"),
    ],
)
def test_load_says_what_is_wrong_in_one_line(source: Source, options: dict[str, str], line: str) -> None:
    source.stream.create()
    with pytest.raises(Exception, match="jetstream") as error:
        source.batch(**options)
    assert line in message_of(error)
    assert SECRET not in str(error.value)


def test_what_only_one_kind_of_query_has_is_told_by_the_other(source: Source, tmp_path: Path) -> None:
    source.stream.create()
    with pytest.raises(Exception, match="only streaming queries have triggers") as error:
        source.batch(maxOffsetsPerTrigger=5).collect()
    message_of(error)
    with pytest.raises(Exception, match="a streaming query has no end; leave it out, or use spark.read") as error:
        source.run(tmp_path, endingOffsets=5)
    message_of(error)


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_restarts_read_every_message_once_in_steps(source: Source, tmp_path: Path) -> None:
    source.stream.create()
    source.stream.fill(25, subjects=("a", "b"))
    first = source.run(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    assert first.batches == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert first.end == {"created": source.stream.created, "missed": 0, "next": 26}
    source.stream.fill(5)
    second = source.run(tmp_path, startingOffsets="earliest", minPartitions=2)
    assert second.seqs == [26, 27, 28, 29, 30]
    third = source.run(tmp_path, startingOffsets="earliest")
    assert third.seqs == []
    assert source.stream.consumers() == []


def test_latest_begins_where_the_query_began(source: Source, tmp_path: Path) -> None:
    """Spark asks for the beginning twice; what comes in between must not be lost."""
    source.stream.create()
    source.stream.fill(10)
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            source.stream.fill(20)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        run = source.start(tmp_path, {"processingTime": "0 seconds"}, maxOffsetsPerTrigger=5000)
        _until(lambda: len(run.seqs) > 100, 60)
    finally:
        ended.set()
        publisher.join()
    _until(lambda: run.seqs[-1] == source.stream.last, 60)
    progress = json.loads(run.query.lastProgress.json)
    run.query.stop()
    beginning = json.loads((tmp_path / "offsets" / "0").read_text().splitlines()[-1])["next"]
    assert beginning > 10
    assert run.seqs == list(range(beginning, source.stream.last + 1))
    assert lag_of(progress) is not None


def test_lag_is_what_the_query_has_not_read(source: Source, tmp_path: Path) -> None:
    source.stream.create()
    source.stream.fill(30)
    run = source.run(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger=20)
    progress = [json.loads(one.json) for one in run.query.recentProgress]
    assert [lag_of(one) for one in progress if one["numInputRows"]] == [10, 0]
    assert lag_of({"sources": []}) is None
    assert lag_of({"sources": [{"endOffset": None, "latestOffset": None}]}) is None


@pytest.mark.parametrize(("way", "gone"), [("purge", "3-6"), ("delete", "4-6"), ("expire", "3-6")])
def test_lost_messages_of_a_stream(source: Source, tmp_path: Path, way: str, gone: str) -> None:
    _lose(source.stream, way)
    with pytest.raises(Exception, match="set failOnDataLoss=false to go on without them") as error:
        source.run(tmp_path / "strict", startingOffsets=3)
    assert f"of stream '{source.stream.name}' are gone (purged, deleted or expired): {gone};" in message_of(error)
    run = source.run(tmp_path / "lossy", startingOffsets=3, failOnDataLoss="false")
    assert run.seqs == ([3] if way == "delete" else []) + list(range(7, 21))
    assert (run.end["missed"], run.end["next"]) == (3 if way == "delete" else 4, 21)


def test_losses_between_two_runs(source: Source, tmp_path: Path) -> None:
    source.stream.create()
    source.stream.fill(10)
    assert source.run(tmp_path, startingOffsets="earliest").seqs == list(range(1, 11))
    source.stream.fill(10)
    source.stream.purge()
    source.stream.fill(5)
    with pytest.raises(Exception, match=r"10 messages of stream .* are gone .*: 11-20;"):
        source.run(tmp_path)
    again = source.run(tmp_path, failOnDataLoss="false")
    assert again.seqs == [21, 22, 23, 24, 25]
    assert again.end["missed"] == 10


def test_a_stream_made_anew_is_noticed(source: Source, tmp_path: Path) -> None:
    source.stream.create()
    source.stream.fill(10)
    assert source.run(tmp_path, startingOffsets="earliest").seqs == list(range(1, 11))
    source.stream.remove()
    source.stream.create()
    source.stream.fill(15)
    with pytest.raises(Exception, match="was deleted and made anew since the checkpoint: what came after 10 is gone"):
        source.run(tmp_path)
    again = source.run(tmp_path, failOnDataLoss="false")
    assert again.seqs == list(range(1, 16))
    assert again.end == {"created": source.stream.created, "missed": 0, "next": 16}


def test_a_query_outlives_the_server(
    spark: SparkSession, nats_server_factory: Callable[..., Server], stream_name: str, tmp_path: Path
) -> None:
    server = nats_server_factory()
    source = Source(spark, Stream(Target(servers=(server.url,)), stream_name))
    source.stream.create(storage="file")
    source.stream.fill(10)
    run = source.start(tmp_path, {"processingTime": "0 seconds"}, startingOffsets="earliest")
    _until(lambda: run.seqs == list(range(1, 11)), 60)
    server.kill_sync()
    server.restart_sync()
    source.stream.fill(10)
    _until(lambda: len(run.seqs) >= 20, 60)
    run.query.stop()
    assert run.seqs == list(range(1, 21))


def _sent(server: Server) -> int:
    return int((ask(server.monitor_port, "/varz") or {})["out_msgs"])


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s:g} s"
        time.sleep(0.05)
