"""Finding Java: the runtime that Spark will use, or one line that says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from parti.errors import ConfigError
from parti.spark.java import Java, find_java


def fake_java(directory: Path, *, version: str, exit_code: int = 0) -> Path:
    """Write a `java` that describes itself as the real ones do, and return its home."""
    home = directory / f"java-{version}"
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        "#!/bin/sh\n"
        "echo 'Picked up JAVA_TOOL_OPTIONS: -Dsome.version=99' >&2\n"
        "echo 'Property settings:' >&2\n"
        f"echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {version}' >&2\n"
        f"exit {exit_code}\n"
    )
    executable.chmod(0o755)
    return home


def the_one_line() -> str:
    with pytest.raises(ConfigError) as raised:
        find_java()
    line = str(raised.value)
    assert "\n" not in line
    assert "openjdk-17-jre-headless" in line
    return line


def test_java_home_wins_over_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = fake_java(tmp_path, version="21")
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path, version="17") / "bin"))
    assert find_java() == Java(home=chosen, version=21)


@pytest.mark.parametrize("java_home", [None, ""])
def test_java_on_path_is_used_without_java_home(
    java_home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path, version="17")
    if java_home is None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
    else:
        monkeypatch.setenv("JAVA_HOME", java_home)
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert find_java() == Java(home=home, version=17)


def test_home_is_the_runtimes_own_where_path_has_a_version_managers_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path, version="17")
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / "java").write_text(f'#!/bin/sh\nexec "{home}/bin/java" "$@"\n')
    (shims / "java").chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(shims))
    assert find_java() == Java(home=home, version=17)


def test_no_java_anywhere_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert the_one_line().startswith("Java 17+ not found on PATH, and JAVA_HOME is not set; install")


def test_java_home_pointing_to_nothing_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("PATH", "")
    assert the_one_line().startswith(f"Java 17+ not found in JAVA_HOME={tmp_path / 'nothing'}; install")


@pytest.mark.parametrize(("version", "named"), [("1.8", "Java 8"), ("11", "Java 11")])
def test_old_java_gives_one_line(version: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, version=version)))
    line = the_one_line()
    assert line.startswith(f"{named} at ")
    assert "is too old, Spark needs Java 17+" in line


def test_a_java_that_fails_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, version="17", exit_code=1)))
    assert "does not work as a Java runtime" in the_one_line()


def test_a_file_that_is_no_program_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path, version="17")
    (home / "bin" / "java").write_bytes(b"\x7fELF")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert "does not work as a Java runtime" in the_one_line()


def test_the_java_of_this_machine_is_new_enough(java: Java) -> None:
    assert java.version >= 17
    assert (java.home / "bin" / "java").exists()
