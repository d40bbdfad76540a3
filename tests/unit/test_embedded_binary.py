"""Which nats-server is chosen, and what is said when there is none to choose."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from parti.embedded import MIN_SERVER_VERSION, find_binary
from parti.errors import EmbeddedServerError, ServerTooOld


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An empty PATH directory and an empty scripts directory, with no binary named in the environment."""
    on_path, beside_python = tmp_path / "path", tmp_path / "scripts"
    on_path.mkdir()
    beside_python.mkdir()
    monkeypatch.setenv("PATH", str(on_path))
    monkeypatch.delenv("PARTI_NATS_SERVER", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(beside_python))
    return on_path, beside_python


def fake(place: Path, version: str, name: str = "nats-server") -> Path:
    """A program that only answers --version."""
    binary = place / name
    binary.write_text(f"#!/bin/sh\necho 'nats-server: v{version}'\n")
    binary.chmod(0o755)
    return binary


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_argument_wins_over_environment_and_path(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(places[0], "2.15.1")
    monkeypatch.setenv("PARTI_NATS_SERVER", str(fake(tmp_path, "2.15.2", "from-environment")))
    named = fake(tmp_path, "2.16.3", "named")
    assert find_binary(named).path == named
    assert find_binary(named).version == (2, 16, 3)


def test_environment_wins_over_path(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(places[0], "2.15.1")
    monkeypatch.setenv("PARTI_NATS_SERVER", str(fake(tmp_path, "2.15.2", "from-environment")))
    assert find_binary().version_text == "2.15.2"


def test_path_wins_over_the_wheel_when_new_enough(places: tuple[Path, Path]) -> None:
    expected = fake(places[0], "2.14.0")
    fake(places[1], "2.15.1")
    assert find_binary().path == expected


@pytest.mark.parametrize("version", ["2.13.9", "2.9.25", "1.99.0"])
def test_too_old_on_path_falls_back_to_the_wheel(places: tuple[Path, Path], version: str) -> None:
    fake(places[0], version)
    expected = fake(places[1], "2.15.1")
    assert find_binary().path == expected


def test_broken_on_path_falls_back_to_the_wheel(places: tuple[Path, Path]) -> None:
    fake(places[0], "").write_text("not a program")
    expected = fake(places[1], "2.15.1")
    assert find_binary().path == expected


def test_release_candidate_counts_by_its_numbers(places: tuple[Path, Path]) -> None:
    fake(places[0], "2.14.0-RC.1")
    assert find_binary().version == (2, 14, 0)


def test_nothing_found_says_how_to_install(places: tuple[Path, Path]) -> None:
    assert places
    with pytest.raises(EmbeddedServerError) as error:
        find_binary()
    assert "pip install 'parti[embedded]'" in one_line(error)


def test_only_a_too_old_one_found_names_it(places: tuple[Path, Path]) -> None:
    old = fake(places[0], "2.10.4")
    with pytest.raises(ServerTooOld) as error:
        find_binary()
    text = one_line(error)
    assert str(old) in text
    assert "2.10.4" in text
    assert f"expected {MIN_SERVER_VERSION[0]}.{MIN_SERVER_VERSION[1]} or newer" in text


def test_named_binary_is_never_replaced(places: tuple[Path, Path], tmp_path: Path) -> None:
    fake(places[0], "2.15.1")
    with pytest.raises(ServerTooOld, match=r"2\.13\.1"):
        find_binary(fake(tmp_path, "2.13.1", "old"))
    with pytest.raises(EmbeddedServerError) as error:
        find_binary(tmp_path / "missing")
    assert "missing" in one_line(error)


def test_environment_naming_a_missing_binary_is_refused(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(places[0], "2.15.1")
    monkeypatch.setenv("PARTI_NATS_SERVER", str(tmp_path / "gone"))
    with pytest.raises(EmbeddedServerError, match="PARTI_NATS_SERVER"):
        find_binary()


@pytest.mark.parametrize(("text", "mode"), [("#!/bin/sh\necho hello\n", 0o755), ("#!/bin/sh\n", 0o644)])
def test_named_file_that_is_no_server_is_refused(tmp_path: Path, text: str, mode: int) -> None:
    other = tmp_path / "other"
    other.write_text(text)
    other.chmod(mode)
    with pytest.raises(EmbeddedServerError) as error:
        find_binary(other)
    assert "nats-server" in one_line(error)
