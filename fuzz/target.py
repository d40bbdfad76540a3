"""What a target is, and where an input is kept that it does not stand."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

BUILD = Path("build/fuzz")


class WrongError(AssertionError):
    """Something came out that must not: a wrong answer, where nothing raised."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that takes outside input."""

    name: str
    one: Callable[[bytes], None]
    """Takes one input; whatever it raises is a crash."""
    seeds: Callable[[], Sequence[bytes]]
    """Valid inputs, from which others are made."""
    opened: Callable[[], AbstractContextManager[object]] = nullcontext
    """What has to be open while inputs are tried, such as a server."""


@dataclass(slots=True)
class Crashes:
    """The crashes of one run, one for each place in the code; their inputs are kept in files."""

    directory: Path
    found: dict[str, int] = field(default_factory=dict)
    """How often, by what and where."""
    files: dict[str, Path] = field(default_factory=dict)

    def note(self, data: bytes, error: BaseException) -> bool:
        """Keep an input; True when nothing has crashed in this place before."""
        where = place_of(error)
        self.found[where] = self.found.get(where, 0) + 1
        if where in self.files and self.files[where].stat().st_size <= len(data):
            return False
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"crash-{hashlib.sha256(where.encode()).hexdigest()[:12]}"
        path.write_bytes(data)
        new = where not in self.files
        self.files[where] = path
        if new:
            story = "".join(traceback.format_exception(error))
            path.with_suffix(".txt").write_text(story[-20_000:], encoding="utf-8", errors="backslashreplace")
        return new


def place_of(error: BaseException) -> str:
    """The kind of an error, and the innermost place of parti that it came through, else of the target."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/src/parti/" in frame.filename]
    text = f": {error}"[:120] if isinstance(error, WrongError) else ""
    if not frames:
        return f"{type(error).__name__}{text}"
    frame = (ours or frames)[-1]
    name = frame.filename.rpartition("/src/" if ours else "/")[2]
    return f"{type(error).__name__} at {name}:{frame.lineno} in {frame.name}{text}"
