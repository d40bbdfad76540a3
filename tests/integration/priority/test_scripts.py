"""The example of two regions and the two benchmarks run; what they find at full size is their own business."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.integration.processes import environment

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def test_the_example_shows_who_works_under_each_policy() -> None:
    said = run("examples/two_regions.py", "--quick")
    counts = re.findall(r"^  (.+?) +near (\d+), far (\d+); ", said, re.MULTILINE)
    did = {what: (int(near), int(far)) for what, near, far in counts}
    assert len(did) == 8
    assert did["50 a second, which near can do"][1] == 0
    assert did["near is gone, so far does it"][0] == 0
    assert did["near came first, so it is pinned"][1] == did["far stands by"][1] == 0
    assert did["near has left and given its pin up"] == (0, did["far stands by"][0])


def test_a_short_ramp_and_a_short_drain_write_results_plot_and_page(tmp_path: Path) -> None:
    where = ("--results", str(tmp_path), "--docs", str(tmp_path))
    run("-m", "benchmarks.bench_overflow", "--seconds", "2.4", "--near", "200", "--min-pending", "10", *where)
    # So few messages say nothing about throughput, and the exit code is not asked for.
    pinned = [sys.executable, "-m", "benchmarks.bench_pinned", "--messages", "2000", "--rounds", "1", *where]
    subprocess.run(pinned, cwd=ROOT, capture_output=True, timeout=50, check=False, env=environment())
    overflow = json.loads((tmp_path / "overflow.json").read_text())
    assert (overflow["far_below_threshold"], overflow["lost"], overflow["repeated"]) == (0, 0, 0)
    assert overflow["near"] + overflow["far"] == overflow["published"]
    ways = json.loads((tmp_path / "pinned.json").read_text())["ways"]
    assert all(row["msg_per_s"] > 0 for row in ways.values())
    page = (tmp_path / "priority.md").read_text()
    assert f"| published | {overflow['published']:,} |" in page
    assert "| worker, pinned (standby) |" in page
    assert "| client, pinned |" in page
    (plot,) = re.findall(r"\((\S+\.svg)\)", page)
    assert ElementTree.parse(tmp_path / plot).getroot().get("aria-label")
