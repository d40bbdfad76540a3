"""The documentation is a site: it builds without a warning, holds every page, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parti import errors
from parti.cli.reference import errors_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning fails it."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    pages |= {f"project/{name}.html" for name in ("index", "CHANGELOG", "CONTRIBUTING", "examples/index")}
    assert {page for page in pages if not (site / page).is_file()} == set()
    home = (site / "index.html").read_text(encoding="utf-8")
    assert {page for page in pages if f'href="{page}"' not in home and page != "index.html"} == set()


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    found = {page.name: LOADED.findall(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert {page: loaded for page, loaded in found.items() if loaded} == {}
    imported = [
        sheet.name for sheet in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", sheet.read_text())
    ]
    assert imported == []


def test_files_beside_the_documentation_come_along(site: Path) -> None:
    handlers = (site / "handlers.html").read_text(encoding="utf-8")
    assert 'href="project/examples/sql_sink.py"' in handlers
    assert (site / "project/examples/sql_sink.py").read_text() == (ROOT / "examples/sql_sink.py").read_text()


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "site_hooks.py"))


def test_a_page_that_nobody_has_placed_is_a_guide(hooks: dict[str, Any]) -> None:
    nav = hooks["navigation"](["index.md", "brand-new.md", "runbooks/lost.md", "other/page.md", "concepts.md"])
    sections = {title: pages for each in nav[1:] for title, pages in each.items()}
    assert nav[0] == "index.md"
    assert sections["Concepts"] == ["concepts.md"]
    assert sections["Further guides"] == ["brand-new.md", "other/page.md"]
    assert sections["Runbooks"] == ["runbooks/lost.md"]


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](concepts.md#positions)", "[a](concepts.md#positions)"),
        ("[a](../README.md)", "[a](project/README.md)"),
        ("[a](../examples/sql_sink.py)", "[a](project/examples/sql_sink.py)"),
        ("[a](../examples)", "a"),
        ("[a](#b)", "[a](#b)"),
        ("[![a](../LICENSE)](../README.md)", "[![a](project/LICENSE)](project/README.md)"),
        ("[a](https://nats.io)", "[a](https://nats.io)"),
        ("```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_lead_to_where_things_are_on_the_site(hooks: dict[str, Any], link: str, expected: str) -> None:
    assert hooks["relink"](link, DOCS / "handlers.md") == expected


def test_the_page_of_errors_is_current() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    assert page == errors_reference(), "run: python docs/generate.py"
    named = set(re.findall(r"^\| (?:&nbsp;)*`(\w+)`", page, re.MULTILINE))
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert named == classes
