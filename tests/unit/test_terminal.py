"""The terminal of tests hears a command out."""

from __future__ import annotations

from tests.integration.terminal import Terminal


async def test_nothing_is_lost_of_what_a_command_has_said_while_nobody_read() -> None:
    terminal = Terminal(code="print('x' * 3_000 + '\\n' + 'y' * 3_000 + ' the end')")
    terminal.process.wait(20)  # on the event loop, as on a machine that is busy with something else
    assert await terminal.ends() == 0
    assert terminal.text == "x" * 3_000 + "\r\n" + "y" * 3_000 + " the end\r\n"
