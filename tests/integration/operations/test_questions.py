"""A command asks somebody at a terminal, and goes on with its connections meanwhile."""

from __future__ import annotations

import signal

import pytest
from tests.integration.conftest import eventually
from tests.integration.terminal import Terminal

ASKING = """
import asyncio
import sys

import typer

from parti.app.signals import run_interruptibly
from parti.cli.questions import confirmed


async def ask():
    ticking = asyncio.create_task(tick())
    try:
        print("answer:", await confirmed("Go on?"))
    finally:
        ticking.cancel()


async def tick():
    while True:
        await asyncio.sleep(0.01)
        print("tick", file=sys.stderr)


try:
    run_interruptibly(ask())
except KeyboardInterrupt:
    print("interrupted")
except typer.Abort:
    print("nobody answers")
"""


async def asked() -> Terminal:
    terminal = Terminal(code=ASKING)
    await eventually(lambda: "Go on? [y/N]: " in terminal.text)
    return terminal


@pytest.mark.parametrize(
    ("typed", "answer"),
    [("y\n", "answer: True"), ("YES\n", "answer: True"), ("\n", "answer: False"), ("no\n", "answer: False")],
    ids=["y", "YES", "Enter", "no"],
)
async def test_an_answer_is_taken(typed: str, answer: str) -> None:
    terminal = await asked()
    terminal.type(typed)
    assert await terminal.ends() == 0
    assert answer in terminal.text


async def test_the_event_loop_goes_on_and_what_is_no_answer_is_asked_again() -> None:
    terminal = await asked()
    await eventually(lambda: terminal.text.count("tick") > 3)
    terminal.type("perhaps\n")
    await eventually(lambda: terminal.text.count("Go on?") == 2 and "Please answer y or n." in terminal.text)
    terminal.type("n\n")
    assert await terminal.ends() == 0
    assert "answer: False" in terminal.text


async def test_ctrl_c_ends_it_without_enter() -> None:
    terminal = await asked()
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.ends() == 0
    assert "interrupted" in terminal.text


async def test_the_end_of_the_input_is_no_answer() -> None:
    terminal = await asked()
    terminal.type("\x04")
    assert await terminal.ends() == 0
    assert "nobody answers" in terminal.text
