"""How the tests themselves are shared out: files stay whole, and those of Spark come together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.distribution import TOGETHER, OneJava, longest_first

TESTS = Path(__file__).parents[1]


def scope(file: str) -> str:
    return str(object.__new__(OneJava)._split_scope(f"{file}::TestThing::test_it[a::b]"))


def test_spark_is_one_portion() -> None:
    files = [f"{TOGETHER}/{path.name}" for path in (TESTS / "spark").glob("test_*.py")]
    assert len(files) > 8
    assert {scope(file) for file in files} == {TOGETHER}


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
