"""The demo with the audit in Spark: both witnesses find a message that was lost on purpose, and nothing else."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.integration.test_demo import COMMAND, gone, run_demo, surroundings

from parti.spark.java import Java


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_message_is_found_by_both_witnesses_and_named(java: Java, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    done = run_demo("--seconds", "5", "--workers", "2", "--partitions", "8", "--lose-one", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"^([A-Z]\w+) .*?(?: (\d+))? {2,}(\d+)  (held|broken)", done.stdout, re.MULTILINE)
    verdicts = {name: (notes, spark, verdict) for name, notes, spark, verdict in found}
    assert verdicts.pop("NoLoss") == ("1", "1", "broken")
    assert {"Order", "OneOwner", "NoRepeatOnPlannedMove", "BoundedRepeatOnCrash", "LedgerWhole"} <= set(verdicts)
    assert {spark for _, spark, _ in verdicts.values()} == {"0"}
    assert {verdict for _, _, verdict in verdicts.values()} == {"held"}
    assert "Broken: NoLoss." in done.stdout
    page = (tmp_path / "build" / "demo-report.html").read_text()
    assert "NoLoss violated" in page
    assert "The second witness" in page
    assert re.search(r"SIGKILL worker-\d</text>", page)
    # The data is left for whoever wants to look; Spark's own files are not.
    assert {path.name for path in (tmp_path / "build").iterdir()} == {"demo-report.html", "demo-report-data"}
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupt_ends_spark_too(java: Java, tmp_path: Path) -> None:
    options = ("--seconds", "5", "--workers", "2", "--partitions", "8")
    with subprocess.Popen(
        [*COMMAND, *options], cwd=tmp_path, env=surroundings(tmp_path), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        while "audit: reading" not in (line := process.stdout.readline()):
            assert line, "it ended before"
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("java" in each.name() for each in started)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in output
    psutil.wait_procs(started, timeout=20)  # Spark's own workers end with their JVM, a moment later
    assert all(gone(each) for each in started)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert list((tmp_path / "tmp").iterdir()) == []
