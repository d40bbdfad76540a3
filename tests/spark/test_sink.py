"""`format("jetstream")` as a sink: rows become messages once, and what cannot work is said at start, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from benchmarks.sink_kills import run_kills
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from parti.embedded import Server
from parti.errors import ConfigError, ConnectionFailed, PartiError, StreamNotFound, SubjectMismatch
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import Chunk, RangeReader, Wanted
from parti.jetstream.target import Target
from parti.model.headers import parse_all_headers, parse_headers
from parti.spark.sink import (
    JetStreamStreamWriter,
    JetStreamWriter,
    Shape,
    check_stream,
    messages_of,
    read_sink_options,
    values_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(180)


@dataclass
class Stream:
    """A stream of the test's own, as options of the sink, and what is in it."""

    url: str
    name: str

    @property
    def options(self) -> dict[str, str]:
        return {"servers": self.url, "stream": self.name}

    def create(self, **config: Any) -> None:
        with BlockingClient.open(Target(servers=(self.url,)), name="test") as client:
            body = {"name": self.name, "subjects": [f"{self.name}.>"], "storage": "memory", **config}
            client.api(f"STREAM.CREATE.{self.name}", body)

    def read(self) -> Chunk:
        target = Target(servers=(self.url,))
        with BlockingClient.open(target, name="test") as client:
            info = client.stream_info(self.name)
        last = int(info["state"]["last_seq"])
        whole = Chunk()
        for chunk in RangeReader(
            target, Wanted(stream=self.name, created=info["created"], start=1, end=last + 1)
        ).chunks():
            whole.subjects += chunk.subjects
            whole.headers += chunk.headers
            whole.payloads += chunk.payloads
        return whole

    def ids(self) -> list[str | None]:
        return [parse_headers(block or b"").get("Nats-Msg-Id") for block in self.read().headers]


@pytest.fixture
def stream(nats_server: Server, stream_name: str) -> Iterator[Stream]:
    made = Stream(nats_server.url, stream_name)
    made.create()
    yield made
    with BlockingClient.open(Target(servers=(made.url,)), name="test") as client:
        client.api(f"STREAM.DELETE.{made.name}")


def save(rows: DataFrame, options: dict[str, str]) -> None:
    rows.write.format("jetstream").mode("append").options(**options).save()


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


# ── batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_is_published_once_with_headers_and_ids(spark: SparkSession, stream: Stream) -> None:
    rows = spark.range(0, 3000, numPartitions=2).selectExpr(
        f"concat('{stream.name}.', id % 5) AS subject",
        "cast(id AS string) AS payload",
        "if(id % 2 = 0, map('Tool', concat('t', id)), null) AS headers",
        "concat('id-', id) AS msg_id",
    )
    save(rows, stream.options)
    save(rows, stream.options)
    found = stream.read()
    assert sorted(map(int, found.payloads)) == list(range(3000))
    for subject, block, payload in zip(found.subjects, found.headers, found.payloads, strict=True):
        number = int(payload)
        assert subject == f"{stream.name}.{number % 5}".encode()
        expected = {"Nats-Expected-Stream": stream.name, "Nats-Msg-Id": f"id-{number}"}
        assert parse_headers(block or b"") == expected | ({} if number % 2 else {"Tool": f"t{number}"})
    # Within a task the order of the rows is the order of the stream.
    order = [int(payload) for payload in found.payloads]
    assert [n for n in order if n < 1500] == list(range(1500))
    assert [n for n in order if n >= 1500] == list(range(1500, 3000))


def test_a_batch_has_ids_only_when_asked_for(spark: SparkSession, stream: Stream) -> None:
    rows = spark.range(0, 10, numPartitions=2).selectExpr("cast(cast(id AS string) AS binary) AS payload")
    options = {**stream.options, "subject": f"{stream.name}.all"}
    save(rows, options)
    assert stream.ids() == [None] * 10
    for _ in range(2):
        save(rows, {**options, "idPrefix": "load-7"})
    ids = stream.ids()[10:]
    assert len(set(ids)) == len(ids) == 10
    assert all(re.fullmatch(r"load-7\.[01]\.\d\.[0-9a-f]{16}", name or "") for name in ids)


def test_a_bad_row_is_named(spark: SparkSession, stream: Stream) -> None:
    rows = spark.range(0, 10, numPartitions=1).selectExpr(
        f"if(id = 7, 'no such', '{stream.name}.x') AS subject", "cast(id AS string) AS payload"
    )
    with pytest.raises(PythonException, match=r"row 8 \(subject 'no such'\): subject 'no such' contains white space"):
        save(rows, stream.options)


def test_the_error_at_start_is_one_line_for_whoever_called(spark: SparkSession, stream: Stream) -> None:
    with pytest.raises(AnalysisException) as raised:
        save(spark.range(3).selectExpr("id", "'x' AS subject", "'y' AS payload"), stream.options)
    said = str(raised.value)
    assert "ConfigError: column 'id': format jetstream takes subject, payload, headers, msg_id; select those" in said
    assert "Traceback" not in said
    with pytest.raises(AnalysisException, match="a stream can only be added to"):
        spark.range(3).selectExpr("'x' AS subject", "'y' AS payload").write.format("jetstream").mode(
            "overwrite"
        ).options(**stream.options).save()


# ── streaming ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Query:
    """Numbers from files, published by a query that can be restarted."""

    spark: SparkSession
    directory: Path
    stream: Stream

    def add(self, numbers: range) -> None:
        files = self.directory / "in"
        files.mkdir(exist_ok=True)
        name = f"{len(list(files.iterdir())):04}.json"
        part = self.directory / name
        part.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
        part.rename(files / name)

    def run(self, *columns: str, **options: str) -> None:
        """Publish everything that is there, a file at a time."""
        rows = (
            self.spark.readStream.schema("n bigint").option("maxFilesPerTrigger", 1).json(str(self.directory / "in"))
        )
        chosen = rows.selectExpr(f"'{self.stream.name}.x' AS subject", "cast(n AS string) AS payload", *columns)
        query = (
            chosen.writeStream.format("jetstream")
            .options(**self.stream.options, **options)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    def forget_commit(self, batch: int) -> None:
        """As after a crash between the last acknowledgement and Spark's own note."""
        (self.checkpoint / "commits" / str(batch)).unlink()
        (self.checkpoint / "commits" / f".{batch}.crc").unlink(missing_ok=True)


@pytest.fixture
def query(spark: SparkSession, stream: Stream, tmp_path: Path) -> Query:
    return Query(spark, tmp_path, stream)


def test_a_restarted_query_publishes_nothing_twice(query: Query) -> None:
    query.add(range(1000))
    query.add(range(1000, 2500))
    query.run()
    query.forget_commit(1)
    query.add(range(2500, 3000))
    query.run()
    found = query.stream.read()
    assert [int(payload) for payload in found.payloads] == list(range(3000))
    ids = query.stream.ids()
    uuid = json.loads((query.checkpoint / "metadata").read_text().splitlines()[0])["id"]
    assert all(re.fullmatch(rf"{uuid}\.[012]\.\d\.\d+\.[0-9a-f]{{16}}", name or "") for name in ids)
    assert len(set(ids)) == 3000


def test_without_ids_what_is_run_again_is_stored_again(query: Query) -> None:
    query.add(range(100))
    query.run(msgId="none")
    query.forget_commit(0)
    query.run(msgId="none")
    assert sorted(int(payload) for payload in query.stream.read().payloads) == sorted([*range(100)] * 2)
    assert set(query.stream.ids()) == {None}


def test_a_new_query_stops_at_once_when_no_server_answers(query: Query) -> None:
    query.add(range(10))
    query.stream = Stream("nats://127.0.0.1:1", query.stream.name)
    with pytest.raises(StreamingQueryException, match=r"could not connect within 1 s: nats://127\.0\.0\.1:1"):
        query.run(connectTimeout="1")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("java")
def test_a_query_killed_in_the_middle_of_a_batch_publishes_everything_once() -> None:
    findings = run_kills(kills=2, files=5, rows=20_000)
    assert findings.clean, findings
    assert findings.stored == 100_000
    assert findings.kills_in_a_batch == 2


# ── what is refused at start ──────────────────────────────────────────────────────────────────────────────────────


def refusal(call: Callable[[], object], kind: type[PartiError] = ConfigError) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


TEXT, BYTES, INTEGER = StringType(), BinaryType(), IntegerType()
BOTH: dict[str, DataType] = {"subject": TEXT, "payload": BYTES}


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"subject": TEXT}, {}, "column 'payload' is missing; expected one of type binary or string"),
        ({"payload": BYTES}, {}, "column 'subject' is missing; add it, or set .option('subject', ...) for all rows"),
        (BOTH, {"subject": "a"}, "subject: given as an option and as a column"),
        (BOTH | {"subject": INTEGER}, {}, "column 'subject' has type int; expected string"),
        (BOTH | {"payload": ArrayType(TEXT)}, {}, "column 'payload' has type array<string>; expected binary or"),
        (BOTH | {"msg_id": LongType()}, {}, "column 'msg_id' has type bigint; expected string"),
        (BOTH | {"headers": TEXT}, {}, "column 'headers' has type string; expected map<"),
        (BOTH | {"headers": MapType(TEXT, INTEGER)}, {}, "column 'headers' has type map<string,int>"),
        (BOTH | {"seq": LongType()}, {}, "column 'seq': format jetstream takes subject, payload"),
        (BOTH | {"msg_id": TEXT}, {"msgId": "none"}, "msgId: none, but there is a column"),
        (BOTH | {"msg_id": TEXT}, {"idPrefix": "a"}, "idPrefix: there is a column 'msg_id'"),
    ],
)
def test_a_schema_that_cannot_be_published(columns: dict[str, DataType], options: dict[str, str], said: str) -> None:
    wanted = read_sink_options(options, streaming=False)
    assert refusal(lambda: Shape.of(schema(**columns), wanted)).startswith(said)


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        ({"payload": BYTES, "Subject": TEXT}, Shape(1, 0, -1, -1)),
        (BOTH | {"headers": MapType(TEXT, TEXT), "msg_id": TEXT}, Shape(0, 1, 2, 3)),
        (BOTH | {"headers": MapType(TEXT, ArrayType(TEXT))}, Shape(0, 1, 2, -1)),
        ({"headers": BYTES, **BOTH}, Shape(1, 2, 0, -1)),
    ],
)
def test_a_schema_that_can_be_published(columns: dict[str, DataType], shape: Shape) -> None:
    assert Shape.of(schema(**columns), read_sink_options({}, streaming=True)) == shape


@pytest.mark.parametrize(
    ("options", "streaming", "said"),
    [
        ({"windw": "3"}, False, "windw: format jetstream has no such option; did you mean window?"),
        ({"window": "0"}, False, "window: '0'; expected a number from 1 to 100,000"),
        ({"msgId": "some"}, False, "msgId: 'some'; expected auto or none"),
        ({"subject": "a.*"}, False, "subject: the subject has a wildcard"),
        ({"subject": "a b"}, False, "subject: subject 'a b' contains white space"),
        ({"stream": "A.B"}, False, "stream: 'A.B' is no stream name"),
        ({"idPrefix": "a"}, True, "idPrefix: a streaming query has ids of its own"),
        ({"idPrefix": "a", "msgId": "none"}, False, "idPrefix: msgId=none asks for messages without ids"),
        ({"path": "x"}, False, "path: a stream has no path"),
        ({"servers": "http://x"}, False, "servers: 'http://x' is no server address"),
        ({"password": "secret-1"}, False, "password: Spark shows options in its plans"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, str], streaming: bool, said: str) -> None:
    line = refusal(lambda: read_sink_options(options, streaming=streaming))
    assert line.startswith(said)
    assert "secret-1" not in line


def test_streams_that_cannot_take_the_messages(stream: Stream) -> None:
    def write(kind: type[PartiError], **options: str) -> str:
        given = {**stream.options, "subject": f"{stream.name}.a", **options}
        return refusal(lambda: JetStreamWriter(given, schema(payload=BYTES)), kind)

    assert "does not exist" in write(StreamNotFound, stream="NOWHERE")
    line = write(SubjectMismatch, subject="elsewhere.a")
    assert line.startswith(f"subject: stream {stream.name!r} takes {stream.name}.>, not 'elsewhere.a'")
    mirror = Stream(stream.url, f"M{stream.name}")
    mirror.create(mirror={"name": stream.name}, subjects=[])
    try:
        assert "is a mirror and takes no messages" in write(ConfigError, stream=mirror.name)
    finally:
        with BlockingClient.open(Target(servers=(stream.url,)), name="test") as client:
            client.api(f"STREAM.DELETE.{mirror.name}")
    assert "could not connect within 1 s" in write(ConnectionFailed, servers="nats://127.0.0.1:1", connectTimeout="1")
    options = read_sink_options({"servers": stream.url, "subject": "elsewhere.a"}, streaming=False)
    assert "no stream takes 'elsewhere.a'" in refusal(lambda: check_stream(options), SubjectMismatch)


def test_a_short_duplicate_window_is_told(
    nats_server: Server, stream_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    short = Stream(nats_server.url, stream_name)
    short.create(duplicate_window=5_000_000_000)
    rows = schema(**BOTH, msg_id=TEXT)
    JetStreamWriter(short.options, rows)
    assert "remembers message ids for 5 s only" in capfd.readouterr().err
    JetStreamWriter(short.options, schema(**BOTH))
    assert capfd.readouterr().err == ""
    writer = JetStreamStreamWriter(short.options, rows)
    writer.commit([], 0)
    assert "remembers message ids for 5 s only" in capfd.readouterr().err
    writer.commit([], 1)
    assert capfd.readouterr().err == ""


# ── rows become messages ──────────────────────────────────────────────────────────────────────────────────────────


def batch_of(**columns: Any) -> tuple[Any, Shape]:
    batch = pa.RecordBatch.from_pydict(columns)
    places = [batch.schema.get_field_index(name) for name in ("subject", "payload", "headers", "msg_id")]
    return batch, Shape(*places)


def lines_of(headers: Any) -> list[bytes]:
    batch, shape = batch_of(payload=["p"] * len(headers), headers=headers)
    return [lines for _, _, lines, _ in messages_of(batch, shape, "s", 0, None)]


def test_ids_tell_rows_apart_by_place_and_content() -> None:
    batch, shape = batch_of(subject=["a", "b", "a"], payload=["1", "2", "1"])
    swapped, _ = batch_of(subject=["b", "a", "a"], payload=["2", "1", "1"])
    ids, again, other = (
        [row[3] for row in messages_of(one, shape, None, 100, "q.1.0")] for one in (batch, batch, swapped)
    )
    assert ids == again
    assert len(set(ids)) == 3
    assert [name.split(b".")[3] for name in ids] == [b"100", b"101", b"102"]
    # In another order, what stands elsewhere is another message; what stays in its place is the same.
    assert not set(ids[:2]) & set(other)
    assert ids[2] == other[2]


def test_rows_without_an_id_of_their_own_get_none() -> None:
    batch, shape = batch_of(payload=[b"1", b"2"], msg_id=["x", None])
    assert list(messages_of(batch, shape, "s", 0, None)) == [(b"s", b"1", b"", b"x"), (b"s", b"2", b"", b"")]


def test_null_payloads_and_subjects_are_refused() -> None:
    for name in ("subject", "payload"):
        batch, shape = batch_of(**{"subject": ["a", "b"], "payload": ["1", "2"], name: ["x", None]})
        line = refusal(lambda batch=batch, shape=shape: list(messages_of(batch, shape, None, 40, None)))  # type: ignore[misc]
        assert line.startswith(f"row 42 of the task: {name} is null")


def test_headers_of_every_form() -> None:
    texts = pa.array([[("A", "1"), ("B", None)], None, []], pa.map_(pa.string(), pa.string()))
    assert lines_of(texts) == [b"A: 1\r\n", b"", b""]
    lists = pa.array([[("A", ["1", "2"])], [("B", [])]], pa.map_(pa.string(), pa.list_(pa.string())))
    assert lines_of(lists) == [b"A: 1\r\nA: 2\r\n", b""]
    assert lines_of(pa.array([b"NATS/1.0\r\nA: 1\r\nA:2\r\n\r\n", None], pa.binary())) == [b"A: 1\r\nA:2\r\n", b""]


def test_headers_that_steer_the_server_are_left_out() -> None:
    steering = {
        "Nats-Msg-Id": "7",
        "Nats-Expected-Last-Sequence": "9",
        "Nats-Rollup": "all",
        "Nats-Batch-Id": "b",
        "Tool": "a",
        "Nats-TTL": "1h",
    }
    mapped = pa.array([list(steering.items())], pa.map_(pa.string(), pa.string()))
    block = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in steering.items()) + "\r\n"
    for lines in (*lines_of(mapped), *lines_of(pa.array([block.encode()], pa.binary()))):
        assert parse_all_headers(b"NATS/1.0\r\n" + lines) == {"Tool": ["a"], "Nats-TTL": ["1h"]}


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (pa.array([[("a b", "1")]], pa.map_(pa.string(), pa.string())), "'a b' is no name of a header"),
        (pa.array([[("a", "1\r\nb: 2")]], pa.map_(pa.string(), pa.string())), "the value of 'a' holds a line break"),
        (pa.array([b"A: 1\r\n"], pa.binary()), "not a raw block"),
        (pa.array([b"NATS/1.0\r\nA: 1\r\n\r\nB: 2\r\n\r\n"], pa.binary()), "an empty line within a raw block"),
    ],
)
def test_headers_that_are_none(headers: Any, said: str) -> None:
    assert refusal(lambda: lines_of(headers)).startswith(f"row 1 of the task: headers: {said}")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()])
def test_values_are_read_from_arrow(kind: Any) -> None:
    array = pa.array(["ä", "", "bcd", "e"], kind)
    expected = ["ä".encode(), b"", b"bcd", b"e"]
    assert values_of(array) == expected
    assert values_of(array[1:3]) == expected[1:3]
    assert values_of(array[1:2]) == [b""]
    assert values_of(array[:0]) == []
