"""The settings file that `parti init` writes, and its refusals."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from parti.cli.init import config_template
from parti.cli.main import main
from parti.config import Settings, load_settings


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PARTI_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_every_setting_is_in_it_with_its_description() -> None:
    text = config_template({})
    words = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for name, field in Settings.model_fields.items():
        assert re.search(rf"^# {name}( = |: | is not set)", text, re.MULTILINE), name
        assert " ".join((field.description or "").split()) in words, name


def test_its_comments_are_the_defaults(tmp_path: Path) -> None:
    text = config_template({"bucket": "mine"})
    uncommented = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "all.toml").write_text(uncommented)
    assert load_settings(config_file=tmp_path / "all.toml") == load_settings({"bucket": "mine"})
    assert tomllib.loads(text) == {"bucket": "mine"}


def test_no_secret_is_asked_for_in_a_file() -> None:
    secrets = [line for line in config_template({}).splitlines() if re.match(r"# \w*(password|token)\b.* = ", line)]
    assert secrets == []


def test_files_that_are_there_are_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "new"]) == 0
    before = {path.name: path.read_text() for path in Path("new").iterdir()}
    assert set(before) == {"parti.toml", "handlers.py"}
    capsys.readouterr()
    assert main(["init", "new"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "parti.toml, handlers.py are in new already, and nothing is overwritten" in err
    assert {path.name: path.read_text() for path in Path("new").iterdir()} == before
    Path("half").mkdir()
    Path("half/handlers.py").write_text("mine")
    assert main(["init", "half"]) == 2
    assert [path.name for path in Path("half").iterdir()] == ["handlers.py"]


def test_a_place_that_cannot_be_written_to_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert main(["init", "file/below"]) == 2
    assert "cannot be written to: Not a directory" in capsys.readouterr().err


def test_an_app_gets_a_prefix_and_a_bucket_after_its_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "My Orders!", "--nats", "nats://10.1.2.3:4222", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["next"] == ["parti doctor", "python handlers.py", "parti worker handlers:app"]
    written = tomllib.loads(Path("My Orders!/parti.toml").read_text())
    assert written == {"nats": ["nats://10.1.2.3:4222"], "prefix": "My-Orders", "bucket": "My-Orders"}
    assert (
        'parti.App(stream="MY-ORDERS", subject="my-orders.orders.{region}.{customer}")'
        in Path("My Orders!/handlers.py").read_text()
    )
