"""The comparison of topologies runs; what it finds at full size is a benchmark's business."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_quick_comparison_measures_every_phase_and_writes_its_page(tmp_path: Path) -> None:
    # These two have the most to do: many streams, created, changed and deleted consumers, and a mirror.
    command = [sys.executable, "-m", "benchmarks.approaches", "--quick", "--only", "C+mirror,B"]
    command += ["--results", str(tmp_path), "--docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    result = json.loads((tmp_path / "approaches.json").read_text())
    assert list(result["topologies"]) == ["B", "C+mirror"]
    for found in result["topologies"].values():
        assert found["refused"] == 0
        assert found["drain"]["finished"]
        assert found["stall"]["backlog_at_resume"] > 0
        assert found["rebalance"]["rebalance_ms"] > 0
        assert all(row["delivered_per_s"] > 0 for row in found["rates"])
    assert result["machine"]["nats_server"] != "unknown"
    page = (tmp_path / "approaches.md").read_text()
    assert "| drain of 200 messages |" in page
    for plot in re.findall(r"\((\S+\.svg)\)", page):
        assert ElementTree.parse(tmp_path / plot).getroot().get("aria-label")
