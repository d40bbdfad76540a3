"""How the tests themselves are shared out: files stay whole, and Spark's sessions come together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.distribution import TOGETHER, TwoJavas, longest_first

TESTS = Path(__file__).parents[1]
SESSION = "spark: SparkSession"
"""How a test asks for the session that all share."""


def scope(file: str) -> str:
    return str(object.__new__(TwoJavas)._split_scope(f"{file}::TestThing::test_it[a::b]"))


def test_whoever_shares_the_session_is_in_one_of_two_processes_that_have_it() -> None:
    scopes = {path: scope(f"{TOGETHER}/{path.name}") for path in (TESTS / "spark").glob("test_*.py")}
    sharing = {path for path in scopes if SESSION in path.read_text()}
    assert len(sharing) > 8
    assert {scopes[path] for path in sharing} == {TOGETHER, f"{TOGETHER} 2"}
    apart = {path for path, found in scopes.items() if not found.startswith(TOGETHER) or found.endswith(".py")}
    assert apart
    assert not apart & sharing


def test_other_files_stay_whole() -> None:
    assert scope("tests/unit/test_lane.py") == "tests/unit/test_lane.py"
    assert scope("tests/integration/jobs/test_cli.py") == "tests/integration/jobs/test_cli.py"


def test_long_ones_come_first_and_directories_keep_their_order() -> None:
    names = (
        "unit/test_b.py",
        "integration/jobs/test_x.py",
        "unit/test_a.py",
        "integration/test_a.py",
        "spark/test_s.py",
    )
    items: list[Any] = [SimpleNamespace(path=TESTS / name) for name in names]
    longest_first(items)
    assert [str(item.path.relative_to(TESTS)) for item in items] == [
        "spark/test_s.py",
        "integration/jobs/test_x.py",
        "integration/test_a.py",
        "unit/test_b.py",
        "unit/test_a.py",
    ]
