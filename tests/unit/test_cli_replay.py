"""`parti replay` refuses what cannot be done in one line, before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import parti
from parti.cli.main import main
from parti.cli.replay import chooser, importable_for_tasks, load_function
from parti.errors import ConfigError

KNOWN = ["e1.c1", "e1.c2", "e2.c1", "e3.c1"]


def app() -> parti.App:
    return parti.App(stream="DC", subject="dc.{tool}.{chamber}.completion", partitions=KNOWN)


@pytest.mark.parametrize(
    ("named", "all_of", "everything", "chosen"),
    [
        ("e1.c1, e2.c1,e1.c1", [], False, ["e1.c1", "e2.c1"]),
        (None, ["tool=e1"], False, ["e1.c1", "e1.c2"]),
        (None, ["tool=e1", "tool=e2", "chamber=c1"], False, ["e1.c1", "e2.c1"]),
        (None, [], True, KNOWN),
    ],
)
def test_partitions_are_chosen(named: str | None, all_of: list[str], everything: bool, chosen: list[str]) -> None:
    assert list(chooser(app(), named, all_of, everything=everything)(KNOWN)) == chosen


@pytest.mark.parametrize(
    ("named", "all_of", "everything", "error"),
    [
        (None, [], False, "say which partitions"),
        ("e1.c1", ["tool=e1"], False, "one of them"),
        (None, ["color=red"], False, "expected KEY=VALUE with a key of .*: tool, chamber"),
        (None, ["tool"], False, "expected KEY=VALUE"),
        (None, ["tool=e9"], False, "no partition has tool=e9; there are e1.c1"),
    ],
)
def test_a_choice_that_is_none_is_refused(named: str | None, all_of: list[str], everything: bool, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        chooser(app(), named, all_of, everything=everything)(KNOWN)


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("json", "expected MODULE:FUNCTION"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("json:no_such_function", "has no function named 'no_such_function'"),
    ],
)
def test_a_function_that_is_none_is_refused(target: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_function(target)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run", "shop:app", "--all", "--until", "yesterday"], "--until: 'yesterday'; expected"),
        (["run", "shop:app", "--all", "--until", "earliest"], "nothing comes before that"),
        (["run", "shop:app", "--all", "--name", "a b"], "expected letters, digits"),
        (["run", "nowhere:app", "--all"], "there is no module 'nowhere' here"),
        (["run", "shop:app"], "say which partitions"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    arguments: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = (
        "import parti\n"
        "app = parti.App(stream='DC', subject='dc.{tool}.done', partitions=['e1'])\n"
        "@app.handler\n"
        "def handle(message): pass\n"
    )
    (tmp_path / "shop.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["replay", *arguments]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert len(told.strip().splitlines()) == 1


def test_tasks_on_this_machine_find_modules_of_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with importable_for_tasks():
        assert str(Path.cwd()) in os.environ["PYTHONPATH"]
    assert "PYTHONPATH" not in os.environ
