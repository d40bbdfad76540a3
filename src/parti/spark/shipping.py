"""What executors need of parti, in one file that Spark sends them.

Source and sink need nothing but the standard library, pyarrow and parti's own modules, so a cluster whose machines
have PySpark has all that is needed once this file is there. Handlers that run on executors (`parti replay`) need
parti's dependencies too: install parti there.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

_PACKAGES = ("parti", "pyspark_jetstream")


def pack(directory: Path) -> Path:
    """Write a zip file with parti's modules into a directory; the same modules give the same bytes."""
    root = Path(__file__).parents[2]
    target = directory / "parti-modules.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in _PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                entry = zipfile.ZipInfo(path.relative_to(root).as_posix())
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    return target
