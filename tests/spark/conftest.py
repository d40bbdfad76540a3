"""The one Spark session that the Spark tests share, and the one line they leave when there is no Java."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parti.errors import ConfigError
from parti.spark.java import Java, find_java
from parti.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SKIPPED = pytest.StashKey[str]()
PRELOAD = Path(__file__).with_name("preload")


@pytest.fixture(scope="session")
def java() -> Java:
    return find_java()


@pytest.fixture(scope="session")
def spark(java: Java) -> Iterator[SparkSession]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # For the processes that Java starts, which remembers it; see what is in there.
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PRELOAD), os.environ.get("PYTHONPATH")))))
            session = stack.enter_context(local_session("parti-tests"))
        yield session


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Deselected and not skipped: pytest would repeat the reason for every test.
    need_java = [item for item in items if "java" in getattr(item, "fixturenames", ())]
    if not need_java:
        return
    try:
        find_java()
    except ConfigError as missing:
        config.stash[SKIPPED] = f"Spark part skipped ({len(need_java)} tests): {missing}"
        items[:] = [item for item in items if item not in need_java]
        config.hook.pytest_deselected(items=need_java)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if line := config.stash.get(SKIPPED, None):
        terminalreporter.write_line(line, yellow=True)
