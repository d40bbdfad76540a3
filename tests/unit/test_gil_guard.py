"""A process whose threads cannot run is ended, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parti.core.stall import gil_timeout_s, grace_s

TIMEOUT_S = 1.5
PROGRAM = """
import ctypes, io, sys, time
from parti.app.gil_guard import exit_when_gil_is_held

{before}
with exit_when_gil_is_held({timeout_s}):
    {inside}
{after}
"""
HOLD_GIL = f"ctypes.PyDLL(None).usleep({int(3 * TIMEOUT_S * 1e6)})"
LEAVE_GIL_FREE = f"time.sleep({2 * TIMEOUT_S})"


def run(
    *, before: str = "", inside: str = "pass", after: str = "", timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(before=before, inside=inside, after=after, timeout_s=timeout_s)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_code_that_holds_the_gil_ends_the_process_and_its_stack_is_told() -> None:
    ended = run(inside=HOLD_GIL)
    assert ended.returncode == 1
    assert 'File "<string>"' in ended.stderr
    assert "Timeout" in ended.stderr


@pytest.mark.parametrize("stderr", ["None", "io.StringIO()"])
def test_it_needs_no_stderr_of_python(stderr: str) -> None:
    ended = run(before=f"sys.stderr = {stderr}", inside=HOLD_GIL)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr


def test_code_that_blocks_and_leaves_the_gil_free_is_not_its_business() -> None:
    ended = run(inside=LEAVE_GIL_FREE)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_after_the_block_nothing_is_ended() -> None:
    ended = run(after=HOLD_GIL)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_timeout_that_no_clock_can_wait_for_is_none() -> None:
    ended = run(timeout_s=1e300)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("stall_after_s", "lease_ttl_s"), [(10.0, 5.0), (0.5, 1.0), (3.0, 60.0)])
def test_it_waits_at_least_as_long_as_the_watchdog_takes_to_end_a_process(
    stall_after_s: float, lease_ttl_s: float
) -> None:
    told_s, left_s, ended_s = stall_after_s, grace_s(stall_after_s, lease_ttl_s), lease_ttl_s
    assert gil_timeout_s(stall_after_s, lease_ttl_s) >= told_s + left_s + ended_s


def test_it_has_patience_with_a_process_that_is_only_stopped() -> None:
    assert gil_timeout_s(10.0, 5.0) == 60.0
