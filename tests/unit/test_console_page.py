"""The files of the console's page: complete, from here only, and within what its content policy allows."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from parti.console.document import Document
from parti.console.picture import SECTIONS

STATIC = Path(str(files("parti.console"))) / "static"
FILES = {file.name: file.read_text(encoding="utf-8") for file in sorted(STATIC.iterdir()) if file.is_file()}
PAGES = [name for name in FILES if name.endswith(".html")]
NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_only_files_that_are_shipped(name: str) -> None:
    named = re.findall(r'(?:src|href)="static/([^"]+)"', FILES[name])
    assert named
    assert set(named) <= FILES.keys()


def test_modules_import_only_files_that_are_shipped_and_all_of_it_is_in_the_page() -> None:
    imported = {found for text in FILES.values() for found in re.findall(r'from "\./([^"]+)"', text)}
    assert imported <= FILES.keys()
    page = Document(FILES).fill(b"{}").decode()
    for name in imported:
        body = re.sub(r"^(export |import .*\n)", "", FILES[name], flags=re.MULTILINE)
        assert page.count(body.strip()) == 1, name
    assert not re.search(r"^(export|import) ", page, flags=re.MULTILINE), "the page would fetch more"


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", FILES[name].replace(NAMESPACE, "")) == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_no_script_and_no_style_of_their_own(name: str) -> None:
    text = FILES[name]
    assert not re.search(r"\s(style|on\w+)=", text)
    assert "<style" not in text
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_scripts_never_make_markup_of_texts(name: str) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", FILES[name])


def test_page_and_server_know_the_same_sections() -> None:
    found = re.search(r"const SECTIONS = (\[[^\]]*\])", FILES["feed.js"])
    assert found
    assert json.loads(found[1]) == list(SECTIONS)
