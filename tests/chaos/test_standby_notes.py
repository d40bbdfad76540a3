"""What was handled again is told apart: running, just finished, or finished for long."""

from __future__ import annotations

import pytest
from chaos.faults import Fault
from chaos.notes import Call
from chaos.standby import AGAIN, RUNNING, UNSTORED, _repeats, _what

S = 1_000_000_000
STOP = Fault("stop", "w0-1", 10 * S, 13 * S, interrupts=True)
KILL = Fault("kill", "w0-1", 10 * S, interrupts=True)


def call(start_s: float, end_s: float, process: int = 0) -> Call:
    return Call(7, 1, process, round(start_s * S), round(end_s * S))


@pytest.mark.parametrize(
    ("fault", "before", "said"),
    [
        pytest.param(STOP, call(9.9, 0.0), RUNNING, id="never ended"),
        pytest.param(STOP, call(9.9, 13.0), RUNNING, id="ended when it woke"),
        pytest.param(STOP, call(9.8, 9.9), UNSTORED, id="just finished"),
        pytest.param(STOP, call(8.0, 8.4), AGAIN, id="finished long before"),
        pytest.param(STOP, call(13.1, 13.2), AGAIN, id="begun when it woke"),
        pytest.param(KILL, call(10.001, 0.0), RUNNING, id="begun between the note of a kill and the kill"),
        pytest.param(KILL, call(9.9, 10.001), UNSTORED, id="finished between the note of a kill and the kill"),
        pytest.param(KILL, call(8.0, 8.4), AGAIN, id="finished long before a kill"),
    ],
)
def test_a_repeat_is_what_its_first_call_was_doing(fault: Fault, before: Call, said: str) -> None:
    assert _what(before, [fault], 1.5) == said


def test_without_a_fault_every_repeat_counts() -> None:
    assert _what(call(9.8, 9.9), [], 1.5) == AGAIN


def test_each_repeat_comes_with_the_call_before_it() -> None:
    first, second, third = call(1, 2), call(3, 4, 1), call(5, 6, 2)
    assert list(_repeats([first, Call(8, 1, 0, S, 2 * S), second, third])) == [(first, second), (second, third)]
