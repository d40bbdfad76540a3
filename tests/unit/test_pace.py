"""The clock of upper bounds: it stands still while processes wait for a processor, and never runs ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings
from tests import pace

BURNER = "print(flush=True)\nwhile True: pass"


def test_it_stands_still_while_processes_wait_for_a_processor() -> None:
    if not Path("/proc/pressure/cpu").exists():
        pytest.skip("this kernel does not tell how long processes wait")
    burners = [
        subprocess.Popen([sys.executable, "-c", BURNER], stdout=subprocess.PIPE)
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        for burner in burners:
            assert burner.stdout
            burner.stdout.readline()
        began_s, real_s = pace.unhindered_s(), time.monotonic()
        while time.monotonic() - real_s < 0.5:
            pass
        assert pace.unhindered_s() - began_s < 0.25
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
            assert burner.stdout
            burner.stdout.close()


def test_it_never_runs_ahead_of_the_wall_clock() -> None:
    real_s, began_s = time.monotonic(), pace.unhindered_s()
    for _ in range(1_000):
        assert pace.unhindered_s() - began_s <= time.monotonic() - real_s


def test_a_kernel_that_does_not_tell_leaves_the_wall_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in (None, ""):
        for name in ("_PRESSURE", "_STAT"):
            monkeypatch.setattr(pace, name, tmp_path / name)
            if text is not None:
                (tmp_path / name).write_text(text)
        before_s = time.monotonic()
        assert before_s <= pace.unhindered_s() <= time.monotonic()


def test_it_stands_still_while_the_host_gives_the_processors_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pace, "_PRESSURE", tmp_path / "none")
    monkeypatch.setattr(pace, "_STAT", stat := tmp_path / "stat")
    ticks = os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
    stat.write_text("cpu  1 2 3 4 5 6 7 0 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    began_s = pace.unhindered_s()
    stat.write_text(f"cpu  1 2 3 4 5 6 7 {5 * ticks} 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert pace.unhindered_s() - began_s < -4


def test_no_property_has_a_deadline_on_the_wall_clock() -> None:
    """Whoever stands still for a third of a second, as a virtual machine may, would fail any of them."""
    assert settings().deadline is None
