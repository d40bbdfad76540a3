"""No secret appears in logs, event logs, plans or the UI, whatever way it is given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from parti.embedded import Server
    from parti.spark.java import Java

pytestmark = pytest.mark.timeout(240)

PASSWORD = "hunter2-not-to-be-seen"
QUERY = """
import json, os, sys, urllib.request
from parti.spark.session import local_session

url, events = sys.argv[1:]
password = os.environ["INGEST_PASSWORD"]
conf = {
    "spark.eventLog.enabled": "true", "spark.eventLog.dir": events, "spark.eventLog.compress": "false",
    "spark.ui.enabled": "true", "spark.ui.port": "0",
}
with local_session("secrets", conf=conf) as spark:
    spark.sparkContext.setLogLevel("INFO")
    def read(**options):
        found = {"servers": url, "stream": "DC", "user": "ingest", "passwordEnv": "INGEST_PASSWORD", **options}
        return spark.read.format("jetstream").options(**found).load()
    frame = read()
    frame.createOrReplaceTempView("events")
    spark.sql("CREATE OR REPLACE TEMP VIEW again AS SELECT subject, count(*) n FROM events GROUP BY subject")
    print("ROWS", spark.sql("SELECT sum(n) FROM again").collect()[0][0])
    frame.explain("extended")
    out = frame.selectExpr("'dc.copy' AS subject", "payload")
    out.write.format("jetstream").options(
        servers=url, stream="DC", user="ingest", passwordEnv="INGEST_PASSWORD"
    ).mode("append").save()
    for options in ({"password": password}, {"servers": f"nats://ingest:{password}@127.0.0.1:4222"}):
        try:
            read(**options)
            print("NOT REFUSED", sorted(options))
        except Exception as error:
            print("REFUSED", "by name" if password not in str(error) else "WITH THE SECRET")
    base = spark.sparkContext.uiWebUrl + "/api/v1/applications"
    app = json.load(urllib.request.urlopen(base))[0]["id"]
    for page in ("sql?details=true", "jobs", "stages", "environment", "executors"):
        print("UI", page, urllib.request.urlopen(f"{base}/{app}/{page}").read().decode())
"""


@pytest.fixture
def guarded_server(nats_server_factory: Callable[..., Server]) -> Server:
    users = f'authorization {{ users: [{{ user: "ingest", password: "{PASSWORD}" }}] }}'
    return nats_server_factory(config=users)


def test_a_password_is_nowhere_to_be_seen(java: Java, guarded_server: Server, tmp_path: Path) -> None:
    from parti.jetstream.blocking import BlockingClient  # noqa: PLC0415
    from parti.jetstream.target import Target  # noqa: PLC0415

    variables = {**os.environ, "INGEST_PASSWORD": PASSWORD}
    os.environ["INGEST_PASSWORD"] = PASSWORD
    try:
        target = Target(servers=(guarded_server.url,), user="ingest", password_env="INGEST_PASSWORD")
        with BlockingClient.open(target, name="test") as client:
            client.api("STREAM.CREATE.DC", {"name": "DC", "subjects": ["dc.>"], "storage": "memory"})
            for number in range(50):
                client.request("dc.t1", b"%d" % number)
    finally:
        del os.environ["INGEST_PASSWORD"]
    events = tmp_path / "events"
    events.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", QUERY, guarded_server.url, str(events)],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        cwd=tmp_path,
    )
    assert "ROWS 50" in done.stdout, done.stderr[-5000:]
    assert "NOT REFUSED" not in done.stdout
    assert done.stdout.count("UI ") == 5
    # Whoever gives a secret as an option has shown it to Spark; what is said about it does not repeat it.
    assert done.stdout.count("REFUSED by name") == 2
    logs = done.stderr + "".join(path.read_text(errors="replace") for path in events.rglob("*") if path.is_file())
    assert len(logs) > 10_000
    assert PASSWORD not in done.stdout
    assert PASSWORD not in logs
