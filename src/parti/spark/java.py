"""The Java runtime that Spark runs on: where it is, its version, and what to do when it is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from parti.errors import ConfigError

MINIMUM_VERSION = 17
INSTALL_HINT = (
    f"install a Java {MINIMUM_VERSION} runtime "
    f"(Debian: apt-get install openjdk-{MINIMUM_VERSION}-jre-headless) or point JAVA_HOME to one"
)

# The runtime's own properties, not its banner: they have one form in all versions, and `java.home` is right even
# where the `java` on PATH is a version manager's script. Java 8 calls itself 1.8.
_VERSION = re.compile(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", re.MULTILINE)
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
# A cold JVM needs about a second; this only bounds one that hangs.
_ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Java:
    """A usable Java runtime: its home (what JAVA_HOME should be) and its major version."""

    home: Path
    version: int


def find_java() -> Java:
    """Return the Java runtime that Spark will use: that of JAVA_HOME, else the first `java` on PATH.

    A JAVA_HOME without a runtime is an error and not passed over: Spark's launcher would take it as well.
    Raises ConfigError, with one line that says what to install, if there is none or it is too old.
    """
    executable = _locate()
    java = _ask(executable)
    if java.version < MINIMUM_VERSION:
        raise ConfigError(
            f"Java {java.version} at {executable} is too old, Spark needs Java {MINIMUM_VERSION}+; {INSTALL_HINT}"
        )
    return java


def _locate() -> Path:
    if home := os.environ.get("JAVA_HOME"):
        found = shutil.which("java", path=str(Path(home) / "bin"))
        where = f"in JAVA_HOME={home}"
    else:
        found = shutil.which("java")
        where = "on PATH, and JAVA_HOME is not set"
    if found is None:
        raise ConfigError(f"Java {MINIMUM_VERSION}+ not found {where}; {INSTALL_HINT}")
    return Path(found)


def _ask(executable: Path) -> Java:
    try:
        answer = subprocess.run(
            [executable, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise _not_working(executable) from failure
    version, home = _VERSION.search(answer.stdout), _HOME.search(answer.stdout)
    # macOS ships a `java` that only says there is no runtime, and fails.
    if answer.returncode != 0 or version is None or home is None:
        raise _not_working(executable)
    return Java(home=Path(home.group(1)), version=int(version.group(1)))


def _not_working(executable: Path) -> ConfigError:
    return ConfigError(
        f"Java {MINIMUM_VERSION}+ not found: {executable} does not work as a Java runtime; {INSTALL_HINT}"
    )
