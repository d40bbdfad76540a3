"""An app that cannot be imported: one line that names file and line."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from parti.cli.worker import load_app
from parti.errors import HandlerMissing


def complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, **others: str) -> tuple[str, str]:
    """The name of a module with this text, and what is said when it is imported."""
    name = f"orders_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(text)
    for other, its_text in others.items():
        (tmp_path / f"{other}.py").write_text(its_text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HandlerMissing) as caught:
        load_app(f"{name}:app")
    return name, str(caught.value)


def test_an_error_names_the_line_that_raised_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = complaint(tmp_path, monkeypatch, "import os\n\nos.environ['no_such_variable_at_all']\n")
    assert text == f"module '{name}' fails on import: KeyError: 'no_such_variable_at_all' (at {name}.py, line 3)"


def test_an_error_in_a_library_names_the_line_that_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = complaint(tmp_path, monkeypatch, "import json\n\n\njson.loads('{')\n")
    assert text.endswith(f"(at {name}.py, line 4)")
    assert "JSONDecodeError" in text


def test_a_mistake_in_the_syntax_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = complaint(tmp_path, monkeypatch, "x = 1\ndef broken(:\n")
    assert "SyntaxError" in text
    assert text.endswith(f"(at {name}.py, line 2)")


def test_a_missing_module_names_the_line_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"own_{uuid.uuid4().hex}"
    name, text = complaint(tmp_path, monkeypatch, f"\nimport {own}\n", **{own: "\n\nimport no_such_library\n"})
    assert text == f"module '{name}' cannot be imported: it needs 'no_such_library' (at {own}.py, line 3)"
