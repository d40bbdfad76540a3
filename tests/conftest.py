"""What all tests share: none of them leaves its logging to the next, and all see the same terminal."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import settings
from tests.distribution import OneJava, longest_first
from tests.trials import examples_of

from parti.telemetry import logs

# CI judges a commit, so it tries the same examples each time; everybody else tries new ones.
# No example has a deadline: on a busy machine any of them may take 200 ms, whatever it does.
settings.register_profile("mine", max_examples=examples_of(100), deadline=None)
settings.register_profile("ci", max_examples=examples_of(100), deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "mine")
# A session of a test lives for seconds: Java's second compiler and its parallel collector take longer than they save
# (two files of Spark tests: 37 s of CPU instead of 66).
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneJava | None:
    """Share out as `tests.distribution` says where files are to stay whole, as `make test` asks for."""
    return OneJava(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)


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


@pytest.fixture(scope="session")
def debian_tool() -> Callable[[str], str]:
    """A function that says where a program that PyPI has not is; without it the test is left out, but not in CI."""

    def find(program: str) -> str:
        path = shutil.which(program)
        if path is None and os.environ.get("CI"):
            pytest.fail(f"{program} is not installed: run `make tools` first")
        if path is None:
            pytest.skip(f"needs {program}: run `make tools` as root, or install it yourself")
        return path

    return find
