"""An app that cannot be imported: one line that names file and line."""

from __future__ import annotations

import importlib
import subprocess
import sys
import sysconfig
import uuid
import venv
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


def install(site: Path, name: str, text: str) -> str:
    """Put a package with this module `main` among the libraries; its name."""
    name = f"{name}_{uuid.uuid4().hex}"
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").touch()
    (site / name / "main.py").write_text(text)
    return name


def test_an_app_installed_in_an_environment_names_its_own_line(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    name = install(site, "orders", "import json\n\njson.loads('{')\n")
    ran = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-m", "parti", "worker", f"{name}.main:app"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert ran.returncode == 2, ran.stderr
    assert "JSONDecodeError: Expecting property name" in ran.stderr
    assert ran.stderr.endswith(f"(at {site.relative_to(tmp_path)}/{name}/main.py, line 3)\n")


def test_an_installed_app_names_the_line_that_called_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib" / "site-packages"
    library = install(site, "library", "\ndef fail():\n    raise OSError('no disk')\n")
    name = install(site, "orders", f"import {library}.main\n\n{library}.main.fail()\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HandlerMissing) as caught:
        load_app(f"{name}.main:app")
    assert str(caught.value).endswith(f"OSError: no disk (at lib/site-packages/{name}/main.py, line 3)")


def test_a_library_that_fails_before_the_app_runs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "lib" / "site-packages"
    finder = "class Finder:\n    @staticmethod\n    def find_spec(*_):\n        return 1 / 0\n"
    library = install(site, "library", finder)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    found = importlib.import_module(f"{library}.main").Finder
    monkeypatch.setattr(sys, "meta_path", [found, *sys.meta_path])
    with pytest.raises(HandlerMissing) as caught:
        load_app("orders_that_nobody_has:app")
    assert str(caught.value).endswith(f"(at lib/site-packages/{library}/main.py, line 4)")


def test_a_mistake_in_a_call_of_parti_names_the_line_of_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = "parti.App(stream='S', subject='a..{p}')"
    name, text = complaint(tmp_path, monkeypatch, f"import parti\n\napp = {app}\n")
    assert "'a..{p}' has an empty token" in text
    assert text.endswith(f"(at {name}.py, line 3)")


def test_a_mistake_in_the_syntax_of_a_text_names_the_line_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text = complaint(tmp_path, monkeypatch, "import ast\n\nast.literal_eval('1 +')\n")
    assert text.endswith(f"(at {name}.py, line 3)")
