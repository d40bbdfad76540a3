"""Local sessions: real jobs on a real JVM, on loopback, that leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parti.errors import ConfigError
from parti.spark import session as session_module
from parti.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from parti.spark.java import Java

# A JVM and its first job take 10 s on a slow machine.
pytestmark = pytest.mark.timeout(180)

WHOLE_LIFE = """
import os
from parti.spark.session import local_session

before = dict(os.environ)
with local_session("first", cores=1) as spark:
    assert dict(os.environ) == before
    spark.range(10).write.saveAsTable("ten")
    print("first", spark.table("ten").count())
with local_session("second", cores=1) as spark:
    print("second", spark.range(20).count())
"""


def test_without_java_the_session_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="install a Java 17 runtime"), local_session("never"):
        pass


def test_without_pyspark_the_session_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_installed(name: str) -> None:
        return None

    monkeypatch.setattr(session_module, "find_spec", nothing_installed)
    with pytest.raises(ConfigError, match=r"parti\[spark\]"), local_session("never"):
        pass


def test_a_query_with_a_shuffle_runs(spark: SparkSession) -> None:
    rows = spark.range(1000).selectExpr("id % 10 AS digit").groupBy("digit").count().collect()
    assert sorted((row["digit"], row["count"]) for row in rows) == [(digit, 100) for digit in range(10)]


def test_python_workers_use_this_interpreter(spark: SparkSession) -> None:
    assert spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect() == [sys.executable]


def test_it_listens_on_loopback_and_has_no_ui(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None


@pytest.mark.usefixtures("spark")
def test_a_second_session_at_the_same_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="already runs Spark"), local_session("second"):
        pass


@pytest.mark.slow
def test_sessions_follow_each_other_and_leave_nothing_behind(java: Java, tmp_path: Path) -> None:
    """By default: test_secrets, whose process has two sessions as well and checks what they leave."""
    temporary, working = tmp_path / "tmp", tmp_path / "cwd"
    temporary.mkdir()
    working.mkdir()
    script = tmp_path / "whole_life.py"
    script.write_text(WHOLE_LIFE)
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=working,
        env=os.environ | {"TMPDIR": str(temporary), "JAVA_HOME": str(java.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["first", "10", "second", "20"]
    # Java itself announces that Spark uses its vector module; no option silences it.
    said = [line for line in done.stderr.splitlines() if "jdk.incubator.vector" not in line]
    assert said == []
    assert list(temporary.iterdir()) == []
    assert list(working.iterdir()) == []
