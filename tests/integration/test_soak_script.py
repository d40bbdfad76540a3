"""The soak script works; what it finds in five minutes is a benchmark's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_short_soak_reports_throughput_and_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak_worker", "--seconds", "5", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode in {0, 1}, done.stderr
    result = json.loads((tmp_path / "soak_worker.json").read_text())
    assert done.returncode == (0 if result["passed"] else 1)
    assert result["handled"] > 10_000
    assert 20 < result["rss_last_mb"] < 300
    assert result["machine"]["nats_server"] != "unknown"
    assert not done.stderr
