"""A standalone cluster and a Spark Connect server: everything that tasks need is sent to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.spark_cluster import bare_python, connect_server, standalone

from parti.jetstream.blocking import BlockingClient
from parti.jetstream.target import Target
from parti.spark.shipping import pack

if TYPE_CHECKING:
    from parti.embedded import Server
    from parti.spark.java import Java

pytestmark = pytest.mark.timeout(400)

ROWS = 2000
THERE_AND_BACK = """
import json, sys
from parti.spark.session import open_session

master, url, where = sys.argv[1:]
with open_session("there-and-back", master, conf={"spark.sql.shuffle.partitions": "2"}) as spark:
    def read(stream, **options):
        reader = spark.read.format("jetstream").option("servers", url).option("stream", stream)
        return reader.options(**options).load()

    events = read("DC", minPartitions="2", subjectTemplate="dc.{tool}.{chamber}.completion")
    by_tool = {row["tool"]: row["count"] for row in events.groupBy("tool").count().collect()}
    copied = events.selectExpr("concat('copy.', tool) AS subject", "payload", "cast(seq AS string) AS msg_id")
    for _ in range(2):
        copied.write.format("jetstream").option("servers", url).option("stream", "COPY").mode("append").save()
    stream = spark.readStream.format("jetstream").option("servers", url).option("stream", "DC")
    query = (
        stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "900").load()
        .writeStream.format("parquet").option("path", where + "/out")
        .option("checkpointLocation", where + "/checkpoint").trigger(availableNow=True).start()
    )
    query.awaitTermination()
    streamed = spark.read.parquet(where + "/out").selectExpr("count(*) n", "count(distinct seq) s").collect()[0]
    found = {
        "by_tool": by_tool,
        "pushed": read("DC").where("seq > 1990").count(),
        "copies": read("COPY").count(),
        "streamed": [streamed["n"], streamed["s"]],
    }
    print("FOUND " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def full_streams(nats_server: Server) -> Iterator[str]:
    with BlockingClient.open(Target(servers=(nats_server.url,)), name="test") as client:
        for name, subject in (("DC", "dc.>"), ("COPY", "copy.>")):
            client.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [subject], "storage": "memory"})
        for number in range(ROWS):
            client.request(f"dc.t{number % 4}.c1.completion", b"%d" % number)
        yield nats_server.url
        for name in ("DC", "COPY"):
            client.api(f"STREAM.DELETE.{name}")


def there_and_back(master: str, url: str, directory: Path, **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", THERE_AND_BACK, master, url, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return found


def is_all_there(found: dict[str, Any]) -> None:
    assert found["by_tool"] == {f"t{n}": ROWS // 4 for n in range(4)}
    assert found["pushed"] == 10
    assert found["copies"] == ROWS  # written twice, stored once
    assert found["streamed"] == [ROWS, ROWS]


@pytest.mark.slow  # a minute; `make test-slow`
def test_executors_that_have_only_pyspark_are_sent_what_they_need(
    java: Java, full_streams: str, tmp_path: Path
) -> None:
    bare = bare_python(tmp_path / "bare")
    without = subprocess.run([bare, "-c", "import parti"], capture_output=True, text=True, check=False)
    assert "No module named 'parti'" in without.stderr
    with standalone(tmp_path) as master:
        is_all_there(there_and_back(master, full_streams, tmp_path, PYSPARK_PYTHON=str(bare)))


@pytest.mark.slow
def test_everything_works_by_spark_connect(java: Java, full_streams: str, tmp_path: Path) -> None:
    # A streaming read is planned on the server, before anything that a client has sent counts: parti must be there.
    bare, modules = bare_python(tmp_path / "bare"), pack(tmp_path)
    with connect_server(tmp_path, environment={"PYSPARK_PYTHON": str(bare), "PYTHONPATH": str(modules)}) as address:
        is_all_there(there_and_back(address, full_streams, tmp_path))


def test_the_same_modules_give_the_same_archive(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert pack(tmp_path / "a").read_bytes() == pack(tmp_path / "b").read_bytes()
