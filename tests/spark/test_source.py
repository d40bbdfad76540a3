"""`format("jetstream")`: what a read gives, what it spares the server, and what it says when it cannot.

Most of it is asked of the source itself, as Spark would ask; the rest shows in a real Spark that Spark does.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    Not,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType
from tests.integration.streams import Stream, block

from parti.embedded import Server
from parti.embedded.monitor import ask
from parti.errors import ConfigError, DataLost
from parti.jetstream.target import Target
from parti.spark.keys import with_keys
from parti.spark.source import JetStreamDataSource, JetStreamStreamReader, RangePartition, lag_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(180)
SECRET = "s3cret-never-shown"


@dataclass
class Source:
    """A stream, and the source that reads it as Spark would."""

    stream: Stream

    def options(self, **more: Any) -> dict[str, str]:
        given = {"servers": self.stream.target.servers[0], "stream": self.stream.name, **more}
        return {name: str(value) for name, value in given.items()}

    def read(self, *filters: Filter, **options: Any) -> list[int]:
        """The sequences of a batch."""
        return [seq for part in self.read_parts(*filters, **options) for seq in part]

    def read_parts(self, *filters: Filter, **options: Any) -> list[list[int]]:
        if filters:
            options["filterPushdown"] = "true"
        reader = JetStreamDataSource(self.options(**options)).reader(StructType())
        assert list(reader.pushFilters(list(filters))) == [one for one in filters if "seq" not in str(one)]
        parts = reader.partitions()
        return [_read(pickle.loads(pickle.dumps(reader)), part) for part in parts]

    def stream_reader(self, **options: Any) -> JetStreamStreamReader:
        reader = JetStreamDataSource(self.options(**options)).streamReader(StructType())
        assert isinstance(reader, JetStreamStreamReader)
        return reader

    def follow(self, start: dict[str, Any] | None = None, **options: Any) -> tuple[list[int], dict[str, Any]]:
        """One micro-batch: its sequences, and the offset behind it."""
        reader = self.stream_reader(**options)
        try:
            begin = start or reader.initialOffset()
            end = reader.latestOffset(begin, reader.getDefaultReadLimit())
            if end == begin:
                return [], end
            parts = reader.partitions(begin, end)
            return [seq for part in parts for seq in _read(pickle.loads(pickle.dumps(reader)), part)], end
        finally:
            reader.stop()


def _read(reader: Any, partition: Any) -> list[int]:
    assert isinstance(pickle.loads(pickle.dumps(partition)), RangePartition)
    return [seq for batch in reader.read(partition) for seq in batch.column("seq").to_pylist()]


@pytest.fixture
def source(nats_server: Server, stream_name: str) -> Iterator[Source]:
    stream = Stream(Target(servers=(nats_server.url,)), stream_name)
    yield Source(stream)
    stream.remove()


# ── batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_where_a_batch_begins_and_ends(source: Source) -> None:
    source.stream.create()
    source.stream.fill(10)
    time.sleep(0.001)
    between = datetime.now(UTC).isoformat()
    source.stream.fill(20)
    assert source.read() == list(range(1, 31))
    assert source.read(startingOffsets=10, endingOffsets=15) == [10, 11, 12, 13, 14]
    assert source.read(startingOffsets=between) == list(range(11, 31))
    assert source.read(endingOffsets=between) == list(range(1, 11))
    assert source.read(startingOffsets="2001-01-01", endingOffsets="latest") == list(range(1, 31))
    assert source.read(startingOffsets="2101-01-01") == []
    assert source.read(startingOffsets=31) == []
    assert source.read(startingOffsets=500, endingOffsets=1000) == []
    assert source.read(startingOffsets=20, endingOffsets=1000) == list(range(20, 31))
    assert source.read(startingOffsets=20, endingOffsets=10) == []
    # A moment is found also where messages are gone around it.
    source.stream.delete(9, 10, 11, 12)
    assert source.read(startingOffsets=between, failOnDataLoss="false") == list(range(13, 31))
    assert source.read(endingOffsets=between, failOnDataLoss="false") == list(range(1, 9))


def test_an_empty_stream_is_an_empty_table(source: Source) -> None:
    source.stream.create()
    assert source.read() == []
    source.stream.fill(3)
    source.stream.purge()
    assert source.read() == []


def test_a_read_is_split_as_asked(source: Source) -> None:
    source.stream.create()
    source.stream.fill(30)
    thirds = [list(range(1, 11)), list(range(11, 21)), list(range(21, 31))]
    assert source.read_parts(minPartitions=3) == thirds
    assert source.read_parts(maxRecordsPerPartition=10) == thirds
    assert source.read_parts() == [list(range(1, 31))]
    assert len(source.read_parts(minPartitions=100)) == 30


def test_subjects(source: Source) -> None:
    source.stream.create()
    source.stream.fill(30, subjects=("a.x", "a.y", "b.x"))
    root = source.stream.root
    assert source.read(subject=f"{root}.b.*") == list(range(3, 31, 3))
    assert source.read(subject=f"{root}.a.x, {root}.*.x") == [s for s in range(1, 31) if s % 3 != 2]
    assert source.read(subject=f"{root}.c") == []


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_queues_are_read_without_being_touched(source: Source, retention: str) -> None:
    source.stream.create(retention=retention)
    config = {"durable_name": "worker", "ack_policy": "explicit"}
    with source.stream.client() as client:
        call = {"stream_name": source.stream.name, "config": config}
        client.api(f"CONSUMER.CREATE.{source.stream.name}.worker", call)
        source.stream.fill(20)
        source.stream.delete(5)
        assert source.read() == [seq for seq in range(1, 21) if seq != 5]
        after = client.api(f"CONSUMER.INFO.{source.stream.name}.worker")
    assert (after["num_pending"], after["num_ack_pending"], after["delivered"]["stream_seq"]) == (19, 0, 0)
    assert source.stream.consumers() == ["worker"]


def test_filters_spare_the_server_what_they_can(source: Source, nats_server: Server) -> None:
    """A message is gone, so that whoever reads the place where it was fails."""
    source.stream.create()
    source.stream.publish([("rare" if seq % 50 == 0 else "common", b"x", None) for seq in range(1, 501)])
    source.stream.delete(10)
    seq, subject, at = ("seq",), ("subject",), ("timestamp",)
    with pytest.raises(DataLost):
        source.read()
    assert source.read(GreaterThan(seq, 490)) == list(range(491, 501))
    assert source.read(GreaterThanOrEqual(seq, 11), LessThan(seq, 14)) == [11, 12, 13]
    assert source.read(EqualTo(seq, 9)) == [9]
    assert source.read(EqualTo(seq, 9), EqualTo(seq, 11)) == []
    assert source.read(GreaterThan(at, datetime(2101, 1, 1, tzinfo=UTC))) == []
    assert source.read(LessThan(at, datetime(2001, 1, 1, tzinfo=UTC))) == []
    soon = datetime.now(UTC) - timedelta(hours=1)
    lossy: dict[str, Any] = {"failOnDataLoss": "false"}
    assert len(source.read(GreaterThan(at, soon), Not(EqualTo(subject, "x")), IsNotNull(subject), **lossy)) == 499
    name, tens = f"{source.stream.root}.rare", list(range(50, 501, 50))
    for one in (EqualTo(subject, name), In(subject, (name, "other")), EqualTo(subject, "nothing")):
        before = _sent(nats_server)
        assert source.read(one, **lossy) == (tens if name in str(one) else [])
        assert _sent(nats_server) - before < 100
    # A prefix narrows by whole tokens only, the rest is left to Spark.
    assert len(source.read(StringStartsWith(subject, f"{source.stream.root}.ra"), **lossy)) == 499
    assert source.read(StringStartsWith(subject, "other."), **lossy) == []


def _lose(stream: Stream, way: str) -> None:
    """Of messages 1-20, lose 4 to 6 or everything up to 6; the rest stays."""
    if way == "expire":
        stream.create(max_age=500_000_000)
        stream.fill(6)
        _until(lambda: not stream.info()["state"]["messages"])
        stream.call("STREAM.UPDATE", {**stream.info()["config"], "max_age": 0})
        stream.fill(14)
        return
    stream.create()
    stream.fill(20)
    if way == "purge":
        stream.purge(seq=7)
    else:
        stream.delete(4, 5, 6)


ways_to_lose = pytest.mark.parametrize(("way", "gone"), [("purge", "3-6"), ("delete", "4-6"), ("expire", "3-6")])


@ways_to_lose
def test_lost_messages(source: Source, way: str, gone: str, capfd: pytest.CaptureFixture[str]) -> None:
    _lose(source.stream, way)
    left = ([3] if way == "delete" else []) + list(range(7, 21))
    line = f"of stream '{source.stream.name}' are gone (purged, deleted or expired): {gone};"
    with pytest.raises(DataLost, match="set failOnDataLoss=false to go on without them") as error:
        source.read(startingOffsets=3)
    assert line in str(error.value)
    with pytest.raises(DataLost) as error:
        source.follow(startingOffsets=3)
    assert line in str(error.value)
    assert source.read(startingOffsets=3, failOnDataLoss="false") == left
    seqs, end = source.follow(startingOffsets=3, failOnDataLoss="false")
    assert (seqs, end["missed"], end["next"]) == (left, 3 if way == "delete" else 4, 21)
    told = capfd.readouterr().err
    assert f"{end['missed']} messages of stream '{source.stream.name}' between 3 and 20 are gone" in told
    # What is gone does not matter to a read that does not want it.
    assert source.read(startingOffsets=7) == list(range(7, 21))
    if way != "delete":
        assert source.read() == list(range(7, 21))


def test_messages_lost_after_planning_are_told_by_the_task(source: Source) -> None:
    source.stream.create()
    source.stream.fill(20)
    for strict in ("true", "false"):
        reader = JetStreamDataSource(source.options(failOnDataLoss=strict)).reader(StructType())
        (part,) = reader.partitions()
        source.stream.delete(7 if strict == "true" else 8)
        if strict == "true":
            with pytest.raises(DataLost, match=r"1 messages of stream .*: 7;"):
                _read(reader, part)
            source.stream.purge(seq=8)
        else:
            assert _read(reader, part) == list(range(9, 21))


def test_gaps_of_streams_that_thin_out_by_design_are_no_loss(source: Source) -> None:
    source.stream.create(max_msgs_per_subject=1)
    source.stream.fill(20, subjects=("a", "b", "c"))
    assert source.read(startingOffsets=1) == [18, 19, 20]
    assert source.follow(startingOffsets=1)[0] == [18, 19, 20]


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_of_a_stream(source: Source) -> None:
    source.stream.create()
    source.stream.fill(25)
    options: dict[str, Any] = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 10}
    seqs, end = source.follow(**options)
    assert seqs == list(range(1, 11))
    assert end == {"created": source.stream.created, "missed": 0, "next": 11}
    assert list(end) == sorted(end)
    seqs, end = source.follow(json.loads(json.dumps(end)), **options)
    assert seqs == list(range(11, 21))
    seqs, end = source.follow(end, **options, minPartitions=2)
    assert seqs == [21, 22, 23, 24, 25]
    assert source.follow(end, **options) == ([], end)


def test_available_now_ends_where_the_stream_ended(source: Source) -> None:
    source.stream.create()
    source.stream.fill(10)
    reader = source.stream_reader(startingOffsets="earliest")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    source.stream.fill(10)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end["next"] == 11
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    assert (reader.reportLatestOffset() or {})["next"] == 21
    reader.stop()


def test_latest_is_the_first_answer(source: Source) -> None:
    """Spark asks for the beginning twice; what comes in between must not be lost."""
    source.stream.create()
    source.stream.fill(10)
    reader = source.stream_reader()
    start = reader.initialOffset()
    source.stream.fill(5)
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    assert reader.initialOffset()["next"] == 16
    # Batch 0 was empty and has made the first answer durable; Spark goes on from there.
    reader.stop()
    seqs, _ = source.follow(start)
    assert seqs == [11, 12, 13, 14, 15]


def test_a_stream_made_anew_is_noticed(source: Source) -> None:
    source.stream.create()
    source.stream.fill(10)
    _, end = source.follow(startingOffsets="earliest")
    source.stream.remove()
    source.stream.create()
    source.stream.fill(15)
    with pytest.raises(DataLost, match="deleted and made anew since the checkpoint: what came after 10 is gone"):
        source.follow(end)
    seqs, after = source.follow(end, failOnDataLoss="false")
    assert seqs == list(range(1, 16))
    assert after == {"created": source.stream.created, "missed": 0, "next": 16}
    reader = source.stream_reader(failOnDataLoss="false")
    with pytest.raises(DataLost, match="this batch cannot be read again"):
        reader.partitions({**end, "next": 5}, end)
    reader.stop()


def test_a_stream_that_is_behind_the_checkpoint_is_waited_for(
    source: Source, capfd: pytest.CaptureFixture[str]
) -> None:
    source.stream.create()
    source.stream.fill(10)
    reader = source.stream_reader(startingOffsets=16)
    start = reader.initialOffset()
    for _ in range(3):
        assert reader.latestOffset(start, ReadMaxRows(5)) == start
    assert capfd.readouterr().err.count("ends at 10, before the query's 15; waiting") == 1
    source.stream.fill(10)
    assert reader.latestOffset(start, ReadMaxRows(3))["next"] == 19
    reader.stop()


def test_options_of_the_other_kind_are_refused_at_the_first_question(source: Source) -> None:
    source.stream.create()
    with pytest.raises(ConfigError, match="only streaming queries have triggers"):
        source.read(maxOffsetsPerTrigger=5)
    reader = source.stream_reader(endingOffsets=5)
    with pytest.raises(ConfigError, match="a streaming query has no end"):
        reader.initialOffset()
    with pytest.raises(ConfigError, match="use mode"):
        JetStreamDataSource(source.options()).writer(StructType(), overwrite=True)


def test_lag_of_what_is_no_progress_of_ours() -> None:
    assert lag_of({"sources": []}) is None
    assert lag_of({"sources": [{"endOffset": None, "latestOffset": None}]}) is None
    assert lag_of({"sources": [{"endOffset": {"next": 5}, "latestOffset": {"next": 3}}]}) == 0


# ── in Spark ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class InSpark(Source):
    """The same, asked by Spark."""

    spark: SparkSession

    def batch(self, **options: Any) -> DataFrame:
        return self.spark.read.format("jetstream").options(**self.options(**options)).load()

    def seqs(self, frame: DataFrame) -> list[int]:
        return sorted(row.seq for row in frame.select("seq").collect())

    def run(self, checkpoint: Path, **options: Any) -> Run:
        """A streaming query over what is there now, to its end."""
        run = self.start(checkpoint, {"availableNow": True}, **options)
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
    def failed(self) -> bool:
        return self.query.exception() is not None

    @property
    def progress(self) -> list[dict[str, Any]]:
        return [json.loads(one.json) for one in self.query.recentProgress]


@pytest.fixture
def in_spark(source: Source, spark: SparkSession) -> InSpark:
    return InSpark(source.stream, spark)


def message_of(error: pytest.ExceptionInfo[Exception]) -> str:
    """What a person sees: our line, without the path that led to it."""
    text = str(error.value)
    assert "Traceback" not in text
    assert "source.py" not in text
    return text


def test_all_columns_in_spark(in_spark: InSpark) -> None:
    stream, root = in_spark.stream, in_spark.stream.root
    stream.create()
    raw = block("A: 1", "B: 2", "A: 3")
    stream.publish([("e1.done", b"\x00\xff", None), ("e2.done", b"", raw), (b"n\xff", b"x", None)])
    frame = in_spark.batch(includeHeaders="parsed", subjectTemplate=f"{root}.{{tool}}.done")
    assert dict(frame.dtypes) == {
        "stream": "string",
        "seq": "bigint",
        "subject": "string",
        "timestamp": "timestamp",
        "headers": "map<string,array<string>>",
        "payload": "binary",
        "tool": "string",
    }
    keyed = with_keys(frame.withColumnRenamed("tool", "mine"), f"{root}.{{tool}}.done", partition="partition")
    one, two, three = keyed.selectExpr("*", "unix_micros(timestamp) AS us").orderBy("seq").collect()
    assert (one.stream, one.seq, one.subject, bytes(one.payload)) == (stream.name, 1, f"{root}.e1.done", b"\x00\xff")
    assert (two.seq, bytes(two.payload), two.headers) == (2, b"", {"A": ["1", "3"], "B": ["2"]})
    assert (one.headers, one.mine, two.mine, three.mine) == ({}, "e1", "e2", None)
    assert [(row.tool, row.partition) for row in (one, two, three)] == [("e1", "e1"), ("e2", "e2"), (None, None)]
    assert three.subject == f"{root}.n\\xff"
    assert abs(one.us / 1e6 - time.time()) < 150
    raw_frame = in_spark.batch(includeHeaders="raw", includePayload="false", minPartitions=3)
    assert raw_frame.columns == ["stream", "seq", "subject", "timestamp", "headers"]
    assert raw_frame.rdd.getNumPartitions() == 3
    assert [row.headers for row in raw_frame.orderBy("seq").collect()] == [None, raw, None]


def test_filters_in_spark(in_spark: InSpark) -> None:
    in_spark.stream.create()
    in_spark.stream.publish([("rare" if seq % 50 == 0 else "common", b"x", None) for seq in range(1, 501)])
    frame, rare = in_spark.batch(), f"subject = '{in_spark.stream.root}.rare'"
    # Spark keeps what a filtered query planned; whoever asks the same table without a filter must see all of it.
    assert in_spark.seqs(frame.where("seq between 12 and 13 and payload is not null")) == [12, 13]
    times = {row.seq: row.us for row in frame.selectExpr("seq", "unix_micros(timestamp) AS us").collect()}
    assert len(times) == 500
    both = frame.where("seq <= 3").union(frame.where(f"{rare} and seq > 400"))
    assert in_spark.seqs(both) == [1, 2, 3, 450, 500]
    # A message is gone, so that a read that is not narrowed fails.
    in_spark.stream.delete(10)
    with pytest.raises(Exception, match=r"1 messages of stream .* are gone .*: 10;") as error:
        in_spark.batch().collect()
    message_of(error)
    assert in_spark.seqs(in_spark.batch(filterPushdown="true").where(f"{rare} and seq > 100")) == list(
        range(150, 501, 50)
    )
    spark, zone = in_spark.spark, in_spark.spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        kept = in_spark.batch(filterPushdown="true", failOnDataLoss="false")
        late = in_spark.seqs(kept.where(f"timestamp >= timestamp_micros({times[300]})"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert late == [seq for seq, us in times.items() if us >= times[300] and seq != 10]


def test_a_session_that_was_told_nothing(in_spark: InSpark) -> None:
    """Spark finds the format by its package, and leaves push-down off."""
    in_spark.stream.create()
    in_spark.stream.fill(10)
    fresh = in_spark.spark.newSession()
    fresh.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    options = in_spark.options()
    assert fresh.read.format("jetstream").options(**options).load().where("seq > 4").count() == 6


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
            "startingoffset: format jetstream has no such option; did you mean startingOffsets?",
        ),
        ({"password": SECRET}, "parti.errors.ConfigError: password: Spark shows options in its plans"),
    ],
    ids=["stream", "server", "option", "secret"],
)
def test_load_says_what_is_wrong_in_one_line(in_spark: InSpark, options: dict[str, str], line: str) -> None:
    with pytest.raises(Exception, match="PYTHON_DATA_SOURCE_ERROR") as error:
        in_spark.batch(**options)
    assert line in message_of(error)
    assert SECRET not in str(error.value)


def test_restarts_read_every_message_once_in_steps(in_spark: InSpark, tmp_path: Path) -> None:
    stream = in_spark.stream
    stream.create()
    stream.fill(25)
    first = in_spark.run(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    assert first.batches == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert first.progress[-1]["sources"][0]["endOffset"] == {"created": stream.created, "missed": 0, "next": 26}
    assert [lag_of(one) for one in first.progress if one["numInputRows"]] == [15, 5, 0]
    stream.fill(5)
    second = in_spark.run(tmp_path, startingOffsets="earliest", minPartitions=2)
    assert second.seqs == [26, 27, 28, 29, 30]
    stream.fill(5)
    stream.purge()
    stream.fill(5)
    with pytest.raises(Exception, match=r"5 messages of stream .* are gone .*: 31-35;") as error:
        in_spark.run(tmp_path)
    message_of(error)
    third = in_spark.run(tmp_path, failOnDataLoss="false")
    assert third.seqs == [36, 37, 38, 39, 40]
    assert third.progress[-1]["sources"][0]["endOffset"]["missed"] == 5
    assert stream.consumers() == []


def test_latest_begins_where_the_query_began_and_outlives_the_server(
    spark: SparkSession, nats_server_factory: Callable[..., Server], stream_name: str, tmp_path: Path
) -> None:
    server = nats_server_factory()
    source = InSpark(Stream(Target(servers=(server.url,)), stream_name), spark)
    source.stream.create(storage="file")
    source.stream.fill(10)
    ended = threading.Event()

    def publish() -> None:
        while not ended.wait(0.01):
            source.stream.fill(20)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        run = source.start(tmp_path, {"processingTime": "0 seconds"})
        _until(lambda: len(run.seqs) > 100 or run.failed, 120)
    finally:
        ended.set()
        publisher.join()
    server.kill_sync()
    server.restart_sync()
    source.stream.fill(20)
    last = source.stream.last
    _until(lambda: run.seqs[-1:] == [last] or run.failed, 120)
    assert not run.failed, run.query.exception()
    run.query.stop()
    beginning = json.loads((tmp_path / "offsets" / "0").read_text().splitlines()[-1])["next"]
    assert beginning > 10
    assert run.seqs == list(range(beginning, last + 1))


def _sent(server: Server) -> int:
    return int((ask(server.monitor_port, "/varz") or {})["out_msgs"])


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s:g} s"
        time.sleep(0.05)
