"""The ladder of resolutions: what each costs, and which of them a video gets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rung:
    """A resolution: at most so many lines, for so many slots."""

    name: str
    lines: int
    cost: int


RUNGS = (
    Rung("144p", 144, 1),
    Rung("240p", 240, 2),
    Rung("360p", 360, 4),
    Rung("480p", 480, 8),
    Rung("720p", 720, 16),
    Rung("1080p", 1080, 32),
    Rung("4K", 2160, 64),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One resolution of one video: a piece of work."""

    rung: Rung
    width: int
    height: int


def pieces_for(width: int, height: int, allowed: Collection[str]) -> list[Piece]:
    """The allowed resolutions that a picture of this size is scaled to, never up.

    Lines are counted along the shorter side, so a portrait video has the same names. One that is smaller than all of
    them keeps its size and gets the smallest.

    >>> [(p.rung.name, p.width, p.height) for p in pieces_for(640, 360, ["144p", "360p", "720p"])]
    [('144p', 256, 144), ('360p', 640, 360)]
    >>> [(p.rung.name, p.width, p.height) for p in pieces_for(48, 65, ["144p", "360p"])]
    [('144p', 48, 64)]
    """
    rungs = [rung for rung in RUNGS if rung.name in allowed]
    short = min(width, height)
    fitting = [rung for rung in rungs if rung.lines <= short] or rungs[:1]
    return [Piece(rung, *_scaled(width, height, min(rung.lines, short))) for rung in fitting]


def _scaled(width: int, height: int, lines: int) -> tuple[int, int]:
    """The size whose shorter side has so many lines; even, which the pixel format asks for, and never larger."""
    short = min(width, height)
    return _even(width * lines / short, width), _even(height * lines / short, height)


def _even(length: float, most: int) -> int:
    return max(2, min(2 * round(length / 2), most - most % 2))
