"""No secret appears in logs, event logs, plans or the UI, whatever way it is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parti.core.permissions import permissions_of
from parti.core.role_calls import Names

if TYPE_CHECKING:
    from parti.embedded import Server
    from parti.spark.java import Java

pytestmark = pytest.mark.timeout(240)

PASSWORD = "hunter2-not-to-be-seen"
READER_PASSWORD = "hunter3-not-to-be-seen"
WRONG_PASSWORD = "hunter4-not-to-be-seen"
NAMES = Names("DC", "parti", "parti", "parti-dlq", "parti.dlq")
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
    def writing(**options):
        return out.write.format("jetstream").options(servers=url, stream="DC", **options).mode("append")
    # With the permissions of the role spark-reader, and an inbox of its own, reading works and writing does not.
    reader = {"user": "reader", "passwordEnv": "READER_PASSWORD", "inboxPrefix": "_INBOX_reader"}
    print("READER", read(**reader).count())
    writing(user="ingest", passwordEnv="INGEST_PASSWORD").save()
    attempts = {
        "WRITING": lambda: writing(**reader).save(),
        "SHARED": lambda: read(**{**reader, "inboxPrefix": "_INBOX"}),
        "WRONG": lambda: read(**{**reader, "passwordEnv": "WRONG_PASSWORD"}),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            print("NOT REFUSED", name)
        except Exception as error:
            print(name, [line for line in str(error).splitlines() if "may not" in line or "refused" in line][:1])
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
# A session may follow, in a Java of its own.
with local_session("second", cores=1) as spark:
    print("SECOND", spark.range(20).count())
"""


@pytest.fixture
def guarded_server(nats_server_factory: Callable[..., Server]) -> Server:
    granted = permissions_of(["spark-reader"], NAMES, user="reader", inbox_prefix="_INBOX_reader")
    allowed = f"publish: {json.dumps(granted.publish_subjects)}, subscribe: {json.dumps(granted.subscribe_subjects)}"
    users = (
        f'{{ user: "ingest", password: "{PASSWORD}" }}, '
        f'{{ user: "reader", password: "{READER_PASSWORD}", permissions: {{ {allowed} }} }}'
    )
    return nats_server_factory(config=f"authorization {{ users: [{users}] }}")


def test_a_password_is_nowhere_to_be_seen(java: Java, guarded_server: Server, tmp_path: Path) -> None:
    from parti.jetstream.blocking import BlockingClient  # noqa: PLC0415
    from parti.jetstream.target import Target  # noqa: PLC0415

    variables = {
        **os.environ,
        "INGEST_PASSWORD": PASSWORD,
        "READER_PASSWORD": READER_PASSWORD,
        "WRONG_PASSWORD": WRONG_PASSWORD,
    }
    os.environ["INGEST_PASSWORD"] = PASSWORD
    try:
        target = Target(servers=(guarded_server.url,), user="ingest", password_env="INGEST_PASSWORD")
        with BlockingClient.open(target, name="test") as client:
            client.api("STREAM.CREATE.DC", {"name": "DC", "subjects": ["dc.>"], "storage": "memory"})
            for number in range(50):
                client.request("dc.t1", b"%d" % number)
    finally:
        del os.environ["INGEST_PASSWORD"]
    events, temporary, working = tmp_path / "events", tmp_path / "tmp", tmp_path / "cwd"
    for directory in (events, temporary, working):
        directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", QUERY, guarded_server.url, str(events)],
        capture_output=True,
        text=True,
        check=False,
        env={**variables, "TMPDIR": str(temporary)},
        cwd=working,
    )
    assert "ROWS 50" in done.stdout, done.stderr[-5000:]
    assert "READER 50" in done.stdout
    assert "NOT REFUSED" not in done.stdout
    said = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("WRIT", "SHA", "WRONG"))}
    assert "this account may not publish to" in said["WRITING"]
    assert "this account may not subscribe" in said["SHARED"]
    assert "refused the connection" in said["WRONG"]
    assert done.stdout.count("UI ") == 5
    # Whoever gives a secret as an option has shown it to Spark; what is said about it does not repeat it.
    assert done.stdout.count("REFUSED by name") == 2
    logs = done.stderr + "".join(path.read_text(errors="replace") for path in events.rglob("*") if path.is_file())
    assert len(logs) > 10_000
    for secret in (PASSWORD, READER_PASSWORD, WRONG_PASSWORD):
        assert secret not in done.stdout
        assert secret not in logs
    assert "SECOND 20" in done.stdout, done.stderr[-5000:]
    assert [*temporary.iterdir(), *working.iterdir()] == [], "sessions leave nothing behind"
