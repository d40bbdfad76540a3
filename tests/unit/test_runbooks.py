"""Every alert has a page that says what to do, and what the pages name exists: commands, options, metrics, alerts."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_alert_rules import declared
from typer.main import get_command

from parti.cli.main import build_app
from parti.config import Settings
from parti.jobs.settings import JobSettings
from parti.telemetry.rules import all_alerts

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOKS = DOCS / "runbooks"
NAMES = sorted({alert.name for alert in all_alerts()})
PAGES = [*(RUNBOOKS / f"{name}.md" for name in NAMES), DOCS / "observability.md"]
HEADINGS = [
    "Meaning",
    "What users notice",
    "How to look",
    "Causes, the likeliest first",
    "What to do",
    "It is over when",
]


@cache
def command_line() -> Any:
    return get_command(build_app())


def commands_in(text: str) -> list[str]:
    """What a page tells to type: lines of code blocks, and code in sentences."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    sentences = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", sentences)]
    return [code for code in (*lines, *inline) if code.startswith("parti ")]


def check_command(typed: str) -> None:
    """Fail for a command, a subcommand or an option that there is not."""
    command = command_line()
    words = shlex.split(typed)[1:]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]!r}: {typed}"
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word for word in words if word.startswith("--")} - options - {"--help"}
    assert not unknown, f"there is no option {unknown}: {typed}"


def test_there_is_a_page_for_each_alert_and_no_other() -> None:
    assert sorted(page.stem for page in RUNBOOKS.glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_all_that_somebody_needs_at_night(name: str) -> None:
    text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS
    for section in re.split(r"^## .*$", text, flags=re.M)[1:]:
        assert len(section.split()) >= 1
    assert len(commands_in(text)) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for typed in commands_in(text):
        check_command(typed)
    known = {name for series in declared() for name in (series, re.sub(r"_(bucket|count|sum)$", "", series))}
    assert set(re.findall(r"(?<![\w:])parti_[a-z_]+", text)) <= known
    for link in re.findall(r"\]\(([^)#]+\.md)", text):
        assert (page.parent / link).is_file(), f"{page.name} links to {link}"
    settings = {*Settings.model_fields, *JobSettings.model_fields}
    for name in re.findall(r"`([a-z_]+) = ", text):
        assert name in settings, f"{page.name} names the setting {name}"


def test_a_command_that_there_is_not_is_found() -> None:
    for typed in ("parti stauts", "parti dlq sl", "parti dlq ls --resaon x"):
        with pytest.raises(AssertionError, match="there is no"):
            check_command(typed)
