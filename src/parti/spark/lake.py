"""The files of a lake: directories that are listed, renamed and deleted, here or on any Hadoop file system.

With a JVM everything goes through Hadoop's FileSystem, so that a path means here what it means to Spark. Without one
(Spark Connect, or no Spark at all) only local paths work, by plain file operations.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from parti.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


class LakeFiles(Protocol):
    """What a table needs of a file system. Renaming a directory must be atomic."""

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""

    def sizes(self, directory: str) -> dict[str, int]:
        """Size in bytes of each file in a directory, by name."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""

    def read(self, path: str) -> str:
        """The text of a file; raises FileNotFoundError if there is none."""

    def write(self, path: str, text: str) -> None:
        """Write a file that is not there yet."""

    def rename(self, source: str, target: str) -> None:
        """Rename a directory; raises FileExistsError if the new name is taken."""

    def delete(self, path: str) -> None:
        """Delete a directory with everything in it, or nothing if it is gone."""


class LocalFiles:
    """Files of this machine."""

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""
        path = local_path(directory)
        return sorted(child.name for child in path.iterdir()) if path.is_dir() else []

    def sizes(self, directory: str) -> dict[str, int]:
        """Size in bytes of each file in a directory, by name."""
        return {child.name: child.stat().st_size for child in local_path(directory).iterdir() if child.is_file()}

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""
        return local_path(path).exists()

    def read(self, path: str) -> str:
        """The text of a file; raises FileNotFoundError if there is none."""
        return local_path(path).read_text(encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        """Write a file that is not there yet."""
        with local_path(path).open("x", encoding="utf-8") as file:
            file.write(text)

    def rename(self, source: str, target: str) -> None:
        """Rename a directory; raises FileExistsError if the new name is taken."""
        end = local_path(target)
        end.parent.mkdir(parents=True, exist_ok=True)
        if end.exists():
            raise FileExistsError(target)
        local_path(source).rename(end)

    def delete(self, path: str) -> None:
        """Delete a directory with everything in it, or nothing if it is gone."""
        if local_path(path).exists():
            shutil.rmtree(local_path(path))


class HadoopFiles:
    """Files of any file system that the JVM of a Spark session knows."""

    def __init__(self, spark: SparkSession) -> None:
        self._jvm: Any = spark._jvm
        self._conf: Any = spark._jsc.hadoopConfiguration()

    def _open(self, path: str) -> tuple[Any, Any]:
        place = self._jvm.org.apache.hadoop.fs.Path(path)
        return place.getFileSystem(self._conf), place

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""
        system, place = self._open(directory)
        if not system.exists(place):
            return []
        return sorted(str(status.getPath().getName()) for status in system.listStatus(place))

    def sizes(self, directory: str) -> dict[str, int]:
        """Size in bytes of each file in a directory, by name."""
        system, place = self._open(directory)
        found = [status for status in system.listStatus(place) if status.isFile()]
        return {str(status.getPath().getName()): int(status.getLen()) for status in found}

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""
        system, place = self._open(path)
        return bool(system.exists(place))

    def read(self, path: str) -> str:
        """The text of a file; raises FileNotFoundError if there is none."""
        system, place = self._open(path)
        if not system.exists(place):
            raise FileNotFoundError(path)
        stream = system.open(place)
        try:
            return bytes(stream.readAllBytes()).decode("utf-8")
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """Write a file that is not there yet."""
        system, place = self._open(path)
        stream = system.create(place, False)
        try:
            stream.write(bytearray(text.encode("utf-8")))
        finally:
            stream.close()

    def rename(self, source: str, target: str) -> None:
        """Rename a directory; raises FileExistsError if the new name is taken."""
        system, end = self._open(target)
        # Hadoop would move the directory into one that is there already.
        if system.exists(end):
            raise FileExistsError(target)
        system.mkdirs(end.getParent())
        if not system.rename(self._open(source)[1], end):
            raise OSError(f"{source} could not be renamed to {target}")

    def delete(self, path: str) -> None:
        """Delete a directory with everything in it, or nothing if it is gone."""
        system, place = self._open(path)
        system.delete(place, True)


def files_of(spark: SparkSession | None, root: str) -> LakeFiles:
    """The files under a path: through the JVM of the session if it has one, else those of this machine."""
    if spark is not None and hasattr(spark, "_jvm"):
        return HadoopFiles(spark)
    if not is_local(root):
        raise ConfigError(
            f"{root} can only be reached through a Spark session with a JVM; use a local directory here"
        )
    return LocalFiles()


def is_local(path: str) -> bool:
    """Whether a path names no other file system than that of this machine."""
    scheme = _SCHEME.match(path)
    return scheme is None or scheme[1].lower() == "file"


def local_path(path: str) -> Path:
    """A local path, which may be written as a `file:` URI."""
    return Path(re.sub(r"^file:(//)?", "", path))
