"""What was handled again is told apart: running, just finished, or finished for long."""

from __future__ import annotations

import pytest
from chaos.faults import Fault
from chaos.notes import Call
from chaos.standby import AGAIN, RUNNING, UNACKNOWLEDGED, _repeats, _what
from chaos.witness import Witness
from nats.aio.msg import Msg

S = 1_000_000_000
STOP = Fault("stop", "w0-1", 10 * S, 13 * S, interrupts=True)
LATE = Fault("stop", "w0-1", 10 * S, 13 * S, interrupts=True, sent_ns=round(9.7 * S))
KILL = Fault("kill", "w0-1", 10 * S, interrupts=True)


def call(start_s: float, end_s: float, process: int = 0) -> Call:
    return Call(7, 1, process, round(start_s * S), round(end_s * S))


@pytest.mark.parametrize(
    ("fault", "before", "said"),
    [
        pytest.param(STOP, call(9.9, 0.0), RUNNING, id="never ended"),
        pytest.param(STOP, call(9.9, 13.0), RUNNING, id="ended when it woke"),
        pytest.param(STOP, call(9.8, 9.99), UNACKNOWLEDGED, id="just ended"),
        pytest.param(STOP, call(8.0, 8.4), AGAIN, id="ended long before"),
        pytest.param(STOP, call(10.001, 10.002), UNACKNOWLEDGED, id="begun and ended before the stop worked"),
        pytest.param(LATE, call(9.6, 9.65), UNACKNOWLEDGED, id="just ended, and the stop was noted late"),
        pytest.param(STOP, call(13.1, 13.2), AGAIN, id="begun when it woke"),
        pytest.param(KILL, call(10.001, 0.0), RUNNING, id="begun between the note of a kill and the kill"),
        pytest.param(KILL, call(9.9, 10.001), UNACKNOWLEDGED, id="ended between the note of a kill and the kill"),
        pytest.param(KILL, call(8.0, 8.4), AGAIN, id="ended long before a kill"),
    ],
)
def test_a_repeat_is_what_its_first_call_was_doing(fault: Fault, before: Call, said: str) -> None:
    assert _what(before, [fault], acknowledged=False) == said


@pytest.mark.parametrize("before", [call(9.9, 0.0), call(9.9, 13.0), call(9.8, 9.99)])
def test_what_was_acknowledged_is_never_excused(before: Call) -> None:
    assert _what(before, [STOP], acknowledged=True) == AGAIN


def test_without_a_fault_every_repeat_counts() -> None:
    assert _what(call(9.8, 9.9), [], acknowledged=False) == AGAIN


def test_each_repeat_comes_with_the_call_before_it() -> None:
    first, second, third = call(1, 2), call(3, 4, 1), call(5, 6, 2)
    assert list(_repeats([first, Call(8, 1, 0, S, 2 * S), second, third])) == [(first, second), (second, third)]


async def test_the_first_acknowledgement_counts_and_nothing_else_does() -> None:
    witness = Witness()
    for body in (b"+WPI", b"-NAK", b"+ACK", b"+ACK"):
        await witness.see(Msg(_client=None, subject="$JS.ACK.S.c.1.7.3.1794801123202392000.0", data=body))  # type: ignore[arg-type]
    (at_ns,) = witness.at_ns.values()
    assert witness.before(7, at_ns + 1)
    assert not witness.before(7, at_ns)
    assert not witness.before(8, at_ns + 1)
