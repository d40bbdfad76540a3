"""`parti --help` is quick: it lists the commands without importing them, and in their own words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.table import Table

from parti.cli import main as cli_main
from parti.cli.control import open_console
from parti.cli.main import build_command, main


def listing(*arguments: str) -> list[str]:
    script = f"import sys; from parti.cli.main import main; main({list(arguments)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


def test_the_list_says_of_each_command_what_its_own_help_begins_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    build_command().main(args=["--help"], prog_name="parti", standalone_mode=False)
    # Commands that have commands of their own come last when all are imported.
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(listed.splitlines())
    for name in ("worker", "resume", "dev"):
        assert name in listed


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", {})
    for name, each in below.items():
        yield from commands(each, *path, name)
    if not below:
        yield path, command


COMMANDS = dict(commands(build_command()))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_explains_each_option_and_the_exit_codes(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert "Exit codes: 0 " in command.help
    for parameter in command.params:
        assert parameter.help, f"{parameter.name} is not explained"
        assert parameter.help.endswith("."), parameter.help
        takes = getattr(parameter, "is_flag", False) or parameter.metavar
        assert takes, f"{parameter.name} does not say what it takes"
        assert not (parameter.metavar or "").startswith("["), f"{parameter.name}: usage adds the brackets itself"


def test_help_shows_no_value_behind_a_flag_and_fills_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["move", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown
    assert "--timeout" in shown
    assert "SECONDS" in shown
    text = [line for line in shown.split("Arguments")[0].splitlines() if line.strip()][2:-1]
    assert all(len(line.rstrip()) > 60 for line in text[:-1]), "lines end where the docstring's do"


def test_ctrl_c_while_a_command_is_imported_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_main, "import_module", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("no-such-command",)], ids=" ".join)
def test_what_needs_no_command_imports_none(arguments: tuple[str, ...]) -> None:
    modules = listing(*arguments)[-1].split()
    assert "parti.cli.main" in modules
    assert not {"parti.config", "parti.jetstream", "nats", "pyspark"} & set(modules)


def test_a_command_is_found_behind_the_mark_that_ends_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "sim", "--retention", "forever"]) == 2
    assert "--retention is 'forever'" in capsys.readouterr().err


def test_a_shell_can_complete_the_options_of_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from parti.cli.main import run; run()"],
        env={"_PARTI_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "parti status --wa"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "--watch" in done.stdout, done


def test_lines_of_a_table_end_with_their_text_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None)
    table.add_column("what")
    table.add_row("short")
    table.add_row("a row that is longer")
    open_console().print(table)
    shown = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in shown] == shown
    assert any("short" in line for line in shown)
