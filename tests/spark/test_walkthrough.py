"""The walk-through in the documents runs as written, and says what it says there."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "walkthrough.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[int, str, str | None]]:
    """Line, code and expected output (None: any) of each block of Python, in order."""
    text = PAGE.read_text()
    found: list[tuple[int, str, str | None]] = []
    for block in BLOCK.finditer(text):
        if block[1] == "python":
            found.append((text.count("\n", 0, block.start()) + 1, block[2], None))
        else:
            line, code, _ = found.pop()
            found.append((line, code, block[2]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_walk_through_runs_as_written(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def shared_session(app_name: str, master: str | None = None, **options: Any) -> Iterator[SparkSession]:
        """The session of the tests: a process has one JVM, and starting more of them takes long."""
        yield spark

    monkeypatch.setattr("parti.spark.session.open_session", shared_session)
    monkeypatch.setattr("parti.spark.pipelines.run.open_session", shared_session)
    namespace: dict[str, Any] = {"__name__": "walkthrough"}
    compared = 0
    try:
        for line, code, expected in steps():
            exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
            said = capsys.readouterr().out
            if expected is not None:
                same = doctest.OutputChecker().check_output(expected, said, doctest.ELLIPSIS)
                assert same, f"line {line} of {PAGE.name} printed:\n{said}\nexpected:\n{expected}"
                compared += 1
    finally:
        # The page does this itself, unless a block before that has failed.
        if "lake" in namespace:
            namespace["lake"].cleanup()
        if "server" in namespace:
            namespace["server"].stop_sync()
    assert compared >= 5
