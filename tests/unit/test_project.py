"""The project keeps its promises about itself: pinned requirements, described rooms, no trace of one machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
# A requirement with its markers and hashes is one logical line, continued with backslashes.
PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^\s;]+)(?: ; (?P<marker>[^\\]+?))?(?= --hash)")
HASH = re.compile(r" --hash=sha256:[0-9a-f]{64}")
# Home directories, put together here so that this file does not match, and the place of this very checkout.
HOMES = "|".join(f"/{home}" for home in ("root/", r"home/\w", r"Users/\w"))
MACHINE_PATH = re.compile(rf"(?<![\w.])({HOMES}|{re.escape(str(ROOT))}\b)")


def pins_of(file: Path) -> dict[tuple[str, str], str]:
    """Return version by (name, marker); fails on anything that is not a pinned and hashed requirement."""
    text = file.read_text().replace("\\\n", "")
    lines = [re.sub(r"\s+", " ", line) for line in text.splitlines()]
    pins: dict[tuple[str, str], str] = {}
    for line in lines:
        if not line or line.lstrip().startswith("#"):
            continue
        pin = PIN.match(line)
        assert pin, f"{file.name}: not a pinned and hashed requirement: {line[:80]}"
        rest = HASH.sub("", line[pin.end() :])
        assert not rest, f"{file.name}: more than hashes after the version: {rest[:80]}"
        pins[pin["name"], pin["marker"] or ""] = pin["version"]
    return pins


def tracked_files() -> list[Path]:
    """Return the files that are, or would be, committed; skips the test outside a git checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_there_is_a_requirement_file_for_the_core_the_build_and_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = {"core", "build", "fuzz", *project["optional-dependencies"]}
    assert {file.stem for file in REQUIREMENTS} == expected


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: file.stem)
def test_every_requirement_is_pinned_and_hashed(file: Path) -> None:
    assert pins_of(file)


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: file.stem)
def test_requirements_name_no_index_no_host_and_no_path(file: Path) -> None:
    text = file.read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(--?(i|f|e|index|extra|find|trusted|editable)\b|\.?/)", text, re.MULTILINE)
    assert not re.search(r"(^|[\s=@])/", text, re.MULTILINE)


def test_requirement_files_agree_on_versions() -> None:
    everything = pins_of(ROOT / "requirements" / "dev.txt")
    of_the_name: dict[str, set[str]] = {}
    for (name, _marker), version in everything.items():
        of_the_name.setdefault(name, set()).add(version)
    for file in REQUIREMENTS:
        for (name, _marker), version in pins_of(file).items():
            if file.stem not in {"build", "fuzz"} or name in of_the_name:
                assert version in of_the_name[name], f"{file.name} has {name}=={version}, dev.txt another one"


def test_every_package_says_what_lives_in_it() -> None:
    packages = sorted({module.parent for module in (ROOT / "src" / "parti").rglob("*.py")})
    silent = []
    for package in packages:
        init = package / "__init__.py"
        if not init.is_file() or not ast.get_docstring(ast.parse(init.read_text())):
            silent.append(str(package.relative_to(ROOT)))
    assert silent == []


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for file in tracked_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        if match := MACHINE_PATH.search(text):
            found.append(f"{file.relative_to(ROOT)}: {match.group()}")
    assert found == []
