"""`parti --help` is quick: it lists the commands without importing them, and in their own words."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command

from parti.cli.main import build_app, main


def listing(*arguments: str) -> list[str]:
    script = f"import sys; from parti.cli.main import main; main({list(arguments)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


def test_the_list_says_of_each_command_what_its_own_help_begins_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    get_command(build_app()).main(args=["--help"], prog_name="parti", standalone_mode=False)
    # Commands that have commands of their own come last when all are imported.
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(listed.splitlines())
    for name in ("worker", "resume", "dev"):
        assert name in listed


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
