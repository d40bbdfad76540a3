"""What the demo uploads, in which events, and what is to become of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.transcode.demo.videos import cut_off, make_video


@dataclass(frozen=True, slots=True)
class Sample:
    """A file to upload."""

    key: str
    path: Path
    resolutions: tuple[str, ...] = ()
    """What it is to become; nothing for a bad one."""
    refused_for: str = ""
    """Words of the reason for which a bad one is refused."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of the object store."""

    samples: Sequence[Sample]
    name: str = "s3:ObjectCreated:Put"

    @property
    def created(self) -> bool:
        """Whether it says that objects were created."""
        return "ObjectCreated" in self.name

    @property
    def refused(self) -> tuple[str, ...]:
        """The bad files among them."""
        return tuple(sample.key for sample in self.samples if sample.refused_for)


# Written out once more, so that the check does not believe what it is to check.
_LINES = (("144p", 144), ("240p", 240), ("360p", 360), ("480p", 480), ("720p", 720), ("1080p", 1080))


def make_happenings(directory: Path, *, small: bool = False) -> list[Happening]:
    """Make the files; the events in the order in which they are sent. `small`: tiny and short ones, for tests."""

    def video(key: str, width: int, height: int, seconds: float, muxer: str = "") -> Sample:
        if small:
            width, height, seconds = width // 4 * 2, height // 4 * 2, seconds / 3
        path = make_video(directory / key.replace("/", "_"), width, height, seconds, muxer=muxer)
        return Sample(key, path, tuple(name for name, lines in _LINES if lines <= min(width, height)) or ("144p",))

    cinema = video("cinema.mp4", 1920, 1080, 1.5)
    holiday = video("holiday.mov", 1280, 720, 3)
    phone = video("my phone/dog & cat.mp4", 360, 640, 4)
    lecture = video("lecture.mkv", 854, 480, 5)
    renamed = video("really-mkv.avi", 640, 360, 4, muxer="matroska")
    clips = [video(f"clip-{number}.mp4", 426, 240, 4) for number in range(1, 5)]
    tiny = video("tiny.ts", 96, 64, 2)
    notes = directory / "notes.mp4"
    notes.write_text("These are the minutes of a meeting. Whoever named them .mp4 meant well.\n" * 40)
    text = Sample("notes.mp4", notes, refused_for="its content is no video: text")
    broken = Sample("broken.mp4", cut_off(holiday.path, directory / "broken.mp4", 0.5), refused_for="moov atom")
    whole = make_video(directory / "whole.mp4", 320, 240, 4, faststart=True)
    torn = Sample("torn.mp4", cut_off(whole, directory / "torn.mp4", 0.4), refused_for="it was cut off")
    return [
        Happening([lecture]),
        Happening([holiday, phone]),
        Happening(clips),
        Happening([cinema], "ObjectCreated:CompleteMultipartUpload"),
        Happening([renamed, text, tiny]),
        Happening([broken]),
        Happening([torn]),
        Happening([lecture], "s3:ObjectRemoved:Delete"),
    ]
