"""The console's page as one answer: whole, and with nothing in it that could run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parti.console.document import Document, bundle

FILES = {
    "console.css": "body {}",
    "theme.js": "theme();",
    "words.js": "export const word = 1;\n",
    "tables.js": 'import { word } from "./words.js";\n\nexport const table = word;\n',
    "main.js": 'import { table } from "./tables.js";\nimport { word } from "./words.js";\n\nshow(table, word);\n',
    "index.html": '<link rel="stylesheet" href="static/console.css"><script src="static/theme.js"></script>'
    '<script type="module" src="static/main.js"></script><body><!-- picture --></body>',
}


def test_modules_come_once_and_after_what_they_need() -> None:
    lines = [line for line in bundle("main.js", FILES).splitlines() if line]
    assert lines == ["const word = 1;", "const table = word;", "show(table, word);"]


def test_no_name_in_the_picture_can_end_its_element() -> None:
    picture: dict[str, Any] = {"picture": {"partitions": {"</script><script>alert(1)</script><!--": []}}}
    page = Document(FILES).fill(json.dumps(picture).encode()).decode()
    inside = page.partition('id="picture">')[2].partition("</script>")[0]
    assert "<" not in inside
    assert json.loads(inside) == picture
    assert page.count("<script") == 3


def test_the_policy_names_what_is_in_the_page_and_nothing_else() -> None:
    policy = Document(FILES).policy
    assert policy.count("'sha256-") == 3
    assert "unsafe" not in policy


def test_a_page_without_a_place_for_something_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 0 times '<!-- picture -->'; expected it once"):
        Document({**FILES, "index.html": FILES["index.html"].replace("<!-- picture -->", "")})
