"""What all tests share: none of them leaves its logging to the next, and all see the same terminal."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
import structlog

from parti.telemetry import logs


@pytest.fixture(autouse=True)
def own_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command run inside the test process has set up; hide the width that a test runner sets."""
    monkeypatch.delenv("COLUMNS", raising=False)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    logs.forget_process()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _signals() -> None:
    """Processes that tests start obey signals, also when whoever runs the tests ignores them (nohup, background)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
