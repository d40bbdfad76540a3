"""The reference page of the command line is what the commands say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

from parti.cli.reference import cli_reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_page_of_the_command_line_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == cli_reference(), "run: python docs/generate.py"


def test_every_command_says_what_its_exit_codes_mean_or_has_commands_of_its_own() -> None:
    sections = re.split(r"^#+ `parti ", cli_reference(), flags=re.MULTILINE)[1:]
    silent = [s.partition("`")[0] for s in sections if not re.search(r"xit\s+code", s) and "**Commands**" not in s]
    assert silent == []


def test_no_place_of_one_machine_is_in_it() -> None:
    assert not re.search(r"/(work|root|home|tmp)/", cli_reference())
