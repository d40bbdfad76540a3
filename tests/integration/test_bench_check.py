"""The benchmark check and the benchmark of acknowledgements work on a real server, in a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.drains import FILTERS, MIRROR, PATTERN, STREAM, Acks, drain, drain_mirror, filled

ROOT = Path(__file__).parents[2]
RATIOS = {
    "worker / nats-py fetch",
    "worker / bare pulls",
    "direct gets / leader gets",
    "no / single acks (mirror)",
    "mirror / stream (80 of 2000)",
}


def check(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    size = ("--messages", "2000", "--rounds", "1", "--consumers", "1", "--results", str(directory))
    command = [sys.executable, "-m", "benchmarks.check", *size, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)


def plant(directory: Path, factor: float) -> None:
    """Make the accepted ratios so many times what they are: in this size they vary widely, so far from both ends."""
    path = directory / "check.json"
    data = json.loads(path.read_text())
    data["ratios"] = {name: ratio * factor for name, ratio in data["ratios"].items()}
    path.write_text(json.dumps(data))


@pytest.mark.slow
def test_the_check_accepts_passes_and_fails_on_a_real_server(tmp_path: Path) -> None:
    done = check(tmp_path, "--accept")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "check.json").read_text())
    assert set(result["ratios"]) == RATIOS
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert {len(rounds) for rounds in result["rounds"].values()} == {2}

    plant(tmp_path, 0.001)
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bench-check: ok" in done.stdout

    plant(tmp_path, 1_000_000.0)
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("measuring it again") == len(RATIOS)
    assert done.stdout.count("LOST, second look") == len(RATIOS)


@pytest.mark.parametrize("acks", Acks)
async def test_every_way_to_acknowledge_drains_a_stream_and_its_mirror(acks: Acks) -> None:
    async with filled(4_100, 2_000) as source:
        assert source.messages == 4_000
        drained = await drain(source, STREAM, [PATTERN], acks, "stream")
        assert drained.messages == 4_000
        hot = await drain_mirror(source, acks, 2, "mirror")
        assert hot.messages == 2 * FILTERS * 2
        assert drained.seconds > 0
        assert drained.reader_cpu_s > 0
        # A drain leaves nothing behind that the next one would pay for.
        assert await source.api.consumer_names(STREAM) == []
        assert await source.api.consumer_names(MIRROR) == []
