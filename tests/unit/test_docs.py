"""The documents hold together: Python in them compiles, links lead somewhere, words stay the project's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def all_python() -> list[tuple[str, str]]:
    blocks = ((page_id(page), FENCE.findall(page.read_text())) for page in PAGES)
    return [(name, code) for name, found in blocks for language, code in found if language == "python"]


@pytest.mark.parametrize(("page", "code"), all_python(), ids=lambda value: value if "\n" not in value else "")
def test_python_in_the_documents_compiles(page: str, code: str) -> None:
    compile(code, page, "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_something_that_exists(page: Path) -> None:
    text = page.read_text()
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        known = file.is_file() and file.suffix == ".md"
        if not file.exists() or (anchor and not (known and anchor in anchors(file.read_text()))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_fences_are_closed(page: Path) -> None:
    assert len(re.findall(r"^```", page.read_text(), re.MULTILINE)) % 2 == 0


def test_every_page_of_the_documentation_is_reachable_from_its_index() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file() or page.suffix != ".md":
            continue
        reached.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target)
        waiting += [(page.parent / target).resolve() for target in targets if target]
    assert {page_id(page) for page in PAGES} - {page_id(page) for page in reached} == set()
