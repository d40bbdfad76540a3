"""The benchmark check: what counts as a loss, when it looks twice, and how it says that it cannot tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import check
from benchmarks.check import Verdict, compare, passed
from benchmarks.ratios import GROUPS, Found, Size, turned


def verdicts(then: dict[str, float], now: dict[str, float]) -> dict[str, Verdict]:
    return {row.name: row.verdict for row in compare(then, now)}


class Script:
    """Stands in for a group of ratios: each run takes its next median, and the rounds are noted."""

    def __init__(self, **medians: list[float]) -> None:
        self._medians = medians
        self.rounds: list[int] = []

    async def __call__(self, size: Size) -> Found:
        run = len(self.rounds)
        self.rounds.append(size.rounds)
        return {name: [values[run]] * size.rounds for name, values in self._medians.items()}


@pytest.fixture
def groups() -> Iterator[dict[str, Any]]:
    """The groups that are measured, empty to begin with."""
    kept = dict(GROUPS)
    GROUPS.clear()
    yield GROUPS
    GROUPS.clear()
    GROUPS.update(kept)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check", *arguments])
    return check.main()


def accepted(directory: Path, ratios: dict[str, float], messages: int = 4000) -> str:
    (directory / "check.json").write_text(json.dumps({"settings": {"messages": messages}, "ratios": ratios}))
    return str(directory)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [(0.74, Verdict.LOST), (0.75, Verdict.OK), (0.76, Verdict.OK), (1.0, Verdict.OK), (9.0, Verdict.OK)],
)
def test_a_loss_of_more_than_a_quarter_fails(now: float, verdict: Verdict) -> None:
    rows = compare({"a / b": 1.0, "c / d": 2.0}, {"a / b": now, "c / d": 2.0})
    assert [row.verdict for row in rows] == [verdict, Verdict.OK]
    assert passed(rows) == (verdict is Verdict.OK)
    assert rows[0].change == pytest.approx(now - 1.0)


def test_the_loss_counts_in_proportion_to_what_was() -> None:
    assert verdicts({"big": 20.0, "small": 0.4}, {"big": 14.9, "small": 0.31}) == {
        "big": Verdict.LOST,
        "small": Verdict.OK,
    }


def test_a_new_ratio_is_reported_and_passes_and_a_missing_one_fails() -> None:
    rows = compare({"gone": 1.0}, {"fresh": 2.0})
    assert [(row.name, row.then, row.now, row.change, row.verdict) for row in rows] == [
        ("gone", 1.0, None, None, Verdict.MISSING),
        ("fresh", None, 2.0, None, Verdict.NEW),
    ]
    assert not passed(rows)
    assert passed(compare({}, {"fresh": 2.0}))


def test_what_seems_lost_counts_only_after_a_second_longer_look(
    monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups["noisy"] = noisy = Script(first=[0.5, 1.1], other=[1.0, 0.1])
    groups["quiet"] = quiet = Script(second=[2.0])
    results = accepted(tmp_path, {"first": 1.0, "other": 1.0, "second": 2.0})
    assert run(monkeypatch, "--messages", "4000", "--rounds", "3", "--results", results) == 0
    assert noisy.rounds == [3, 6]
    assert quiet.rounds == [3]
    said = capsys.readouterr().out
    assert "first: 0.50 after 1.00 seems lost; measuring it again" in said
    assert "ok, second look; first 0.50" in said
    assert "LOST" not in said  # `other` was fine at the first look and is not judged by the second


def test_what_is_lost_twice_is_lost(
    monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups["slow"] = slow = Script(first=[0.74, 0.7])
    results = accepted(tmp_path, {"first": 1.0})
    assert run(monkeypatch, "--messages", "4000", "--rounds", "2", "--results", results) == 1
    assert slow.rounds == [2, 4]
    assert "LOST, second look; first 0.74" in capsys.readouterr().out


def test_accepting_writes_what_the_next_run_is_held_against(
    monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any], tmp_path: Path
) -> None:
    groups["only"] = only = Script(ratio=[3.0, 2.2, 2.2])
    small = ("--messages", "4000", "--rounds", "2", "--results", str(tmp_path))
    assert run(monkeypatch, *small, "--accept") == 0
    assert json.loads((tmp_path / "check.json").read_text())["ratios"] == {"ratio": 3.0}
    assert run(monkeypatch, *small) == 1
    assert only.rounds == [4, 2, 4]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is missing; make it with: make bench-check BENCH_ARGS=--accept"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"settings": {"messages": 4000}, "ratios": {"a": null}}', "is damaged"),
        ('{"settings": {"messages": 4000}, "ratios": {}}', "has no ratios above zero"),
        ('{"settings": {"messages": 4000}, "ratios": {"a": 0}}', "has no ratios above zero"),
        ('{"settings": {"messages": 5000}, "ratios": {"a": 1}}', "was measured with --messages 5000, not 4000"),
    ],
)
def test_without_something_to_compare_with_it_says_why_in_one_line_before_it_measures(
    monkeypatch: pytest.MonkeyPatch,
    groups: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    reason: str,
) -> None:
    groups["never"] = never = Script(ratio=[])
    if content is not None:
        (tmp_path / "check.json").write_text(content)
    assert run(monkeypatch, "--messages", "4000", "--results", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.err.count("\n") == 1
    assert (said.out, never.rounds) == ("", [])


@pytest.mark.parametrize(
    "arguments", [["--messages", "1999"], ["--messages", "many"], ["--rounds", "0"], ["--rounds", "-1"], ["--accpt"]]
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, *arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("bench-check: ")
    assert said.count("\n") == 1


def test_each_round_begins_with_another_one() -> None:
    assert [turned("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
