"""Slots in use over time as an SVG file that stands alone. Pure: pieces of work in, text out.

Each piece of work is a block as high as its slots and as long as it took, on top of those that had begun before; so
the height of all is what was in use, and blocks move down when one below them ends. Underneath: how many waited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from examples.transcode.ladder import RUNGS

_WIDTH, _LEFT, _RIGHT = 960, 64, 20
_TOP, _HEIGHT = 92, 300
_WAIT_TOP, _WAIT_HEIGHT = _TOP + _HEIGHT + 44, 64
_BOTTOM = _WAIT_TOP + _WAIT_HEIGHT + 48
_LABEL_W, _LABEL_H = 34, 13
_WAITED_S = 0.01
_LIGHT = ("#7f8c9b", "#3b8fd1", "#1f9d6b", "#c79310", "#e07b12", "#d1495b", "#8a5bd2")
_DARK = ("#8593a3", "#3f93d6", "#2aa776", "#c99c22", "#e38428", "#dc5c6e", "#9a70e0")
"""A colour for each rung of the ladder."""


def _style(ground: str, ink: str, muted: str, faint: str, limit: str, rungs: Sequence[str]) -> str:
    # No CSS variables: viewers other than browsers do not know them.
    return (
        f".ground {{ fill: {ground}; }} text {{ fill: {muted}; }} .title {{ fill: {ink}; }} "
        f".over {{ fill: {limit}; }} .grid {{ stroke: {faint}; }} .axis {{ stroke: {muted}; }} "
        f".limit {{ stroke: {limit}; }} .piece {{ stroke: {ground}; }} .waiting {{ fill: {muted}; "
        f"stroke: {muted}; }} "
        + ".name { fill: #fff; } "
        + " ".join(f".r{number} {{ fill: {colour}; }}" for number, colour in enumerate(rungs))
    )


_STYLE = f"""
text {{ font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }}
.title {{ font-size: 16px; font-weight: 600; }}
.name {{ font-size: 10px; font-weight: 600; }} .limit {{ stroke-width: 1.6; stroke-dasharray: 6 4; }}
.piece {{ stroke-width: 1.2; stroke-linejoin: round; }} .waiting {{ fill-opacity: 0.35; }}
{_style("#ffffff", "#1c2430", "#5d6b7d", "#e1e6ec", "#c4231c", _LIGHT)}
@media (prefers-color-scheme: dark) {{ {_style("#12161c", "#e4e9f0", "#9aa7b8", "#29323d", "#ff7b72", _DARK)} }}
"""


@dataclass(frozen=True, slots=True)
class Used:
    """Slots that one piece of work had, and for how long; seconds on any clock."""

    name: str
    """Its resolution."""
    of: str
    """What it was made of."""
    slots: int
    asked_s: float
    started_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """The same as figures."""

    seconds: float
    most: int
    """Slots in use at once, at most."""
    mean: float
    """Slots in use over the time in which any were."""
    side_by_side: int
    """Pieces at once, at most."""
    longest_wait_s: float


def measure(pieces: Sequence[Used]) -> Usage:
    """The figures of some pieces of work."""
    if not pieces:
        return Usage(0.0, 0, 0.0, 0, 0.0)
    spans = list(_spans(pieces))
    seconds = spans[-1][1] - spans[0][0]
    busy = sum((end - start) * sum(p.slots for p in running) for start, end, running in spans)
    used_s = sum(end - start for start, end, running in spans if running)
    return Usage(
        seconds,
        max(sum(p.slots for p in running) for _, _, running in spans),
        busy / used_s,
        max(len(running) for _, _, running in spans),
        max(p.started_s - p.asked_s for p in pieces),
    )


def draw(pieces: Sequence[Used], capacity: int, title: str) -> str:
    """The picture."""
    spans = list(_spans(pieces))
    zero, end = (spans[0][0], spans[-1][1]) if spans else (0.0, 1.0)
    usage = measure(pieces)
    top = max(capacity, usage.most)
    x = _Scale(zero, end, _LEFT, _WIDTH - _RIGHT)
    y = _Scale(0, top * 1.06, _TOP + _HEIGHT, _TOP)
    share = usage.mean / capacity
    said = (
        f"{len(pieces)} pieces of work in {usage.seconds:.1f} s, up to {usage.side_by_side} side by side; "
        f"{share:.0%} of the slots in use; longest wait {usage.longest_wait_s:.1f} s"
    )
    parts = [
        _text(_LEFT, 26, title, css="title"),
        _text(_LEFT, 46, said),
        *_legend({piece.name for piece in pieces}),
        *_grid(x, y, top, zero, end),
        *_blocks(spans, x, y),
        f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(capacity)}" y2="{y(capacity)}"/>',
        _text(_WIDTH - _RIGHT, y(capacity) - 6, f"capacity: {capacity} slots", "end", css="over"),
        *_waiting(pieces, x),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _BOTTOM - 10, "seconds since the first piece asked for slots", "middle"),
        _turned(16, _TOP + _HEIGHT / 2, "slots in use"),
        _turned(16, _WAIT_TOP + _WAIT_HEIGHT / 2, "waiting"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_BOTTOM}" width="{_WIDTH}" '
        f'height="{_BOTTOM}" role="img" aria-label="{escape(title)}">\n<style>{_STYLE}</style>\n'
        f'<rect width="{_WIDTH}" height="{_BOTTOM}" class="ground"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


# ── parts of the picture ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    first_px: float
    last_px: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.first_px + share * (self.last_px - self.first_px), 1)


def _spans(pieces: Sequence[Used]) -> Iterator[tuple[float, float, list[Used]]]:
    """From when to when which pieces ran, those that began first in front."""
    ordered = sorted(pieces, key=lambda piece: (piece.started_s, -piece.slots))
    moments = sorted({at for p in pieces for at in (p.asked_s, p.started_s, p.finished_s)})
    for start, end in pairwise(moments):
        yield start, end, [p for p in ordered if p.started_s <= start < p.finished_s]


def _blocks(spans: Sequence[tuple[float, float, list[Used]]], x: _Scale, y: _Scale) -> Iterator[str]:
    """An outline for each piece, which steps down where one below it ends, and its name where there is room."""
    steps: dict[Used, list[tuple[float, float, int]]] = {}
    for start, end, running in spans:
        below = 0
        for piece in running:
            steps.setdefault(piece, []).append((start, end, below))
            below += piece.slots
    for piece, places in steps.items():
        upper = [(x(at), y(low + piece.slots)) for start, end, low in places for at in (start, end)]
        lower = [(x(at), y(low)) for start, end, low in reversed(places) for at in (end, start)]
        outline = "L".join(f"{a:g} {b:g}" for a, b in [*upper, *lower])
        took = piece.finished_s - piece.started_s
        title = escape(f"{piece.of} {piece.name}: {piece.slots} slots for {took:.2f} s")
        yield f'<path class="piece {_colour(piece.name)}" d="M{outline}Z"><title>{title}</title></path>'
        yield from _label(piece, places, x, y)


def _label(piece: Used, places: Sequence[tuple[float, float, int]], x: _Scale, y: _Scale) -> Iterator[str]:
    """The name, in the longest part of the block that stays in its place."""
    best = (0.0, 0.0, 0)
    start, end, low = places[0]
    for next_start, next_end, next_low in [*places[1:], (0.0, 0.0, -1)]:
        if next_low == low:
            end = next_end
            continue
        best = max(best, (end - start, start, low))
        start, end, low = next_start, next_end, next_low
    length, start, low = best
    wide, high = x(start + length) - x(start), y(low) - y(low + piece.slots)
    if wide >= _LABEL_W and high >= _LABEL_H:
        full = f"{piece.of} {piece.name}"
        text = full if wide >= 6.4 * len(full) + 8 else piece.name
        yield _text(x(start) + wide / 2, (y(low) + y(low + piece.slots)) / 2 + 3.5, text, "middle", css="name")


def _waiting(pieces: Sequence[Used], x: _Scale) -> Iterator[str]:
    """How many pieces waited for slots, over time."""
    waited = [p for p in pieces if p.started_s - p.asked_s > _WAITED_S]
    changes = sorted([(p.asked_s, 1) for p in waited] + [(p.started_s, -1) for p in waited])
    counts, number = [(changes[0][0] if changes else 0.0, 0)], 0
    for at, change in changes:
        counts.append((at, number))
        number += change
        counts.append((at, number))
    most = max([1, *(n for _, n in counts)])
    y = _Scale(0, most, _WAIT_TOP + _WAIT_HEIGHT, _WAIT_TOP)
    foot = y(0)
    for value in (0, most):
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
        yield _text(_LEFT - 8, y(value) + 4, str(value), "end")
    outline = "L".join(f"{x(at):g} {y(n):g}" for at, n in counts)
    yield f'<path class="waiting" d="M{x(counts[0][0]):g} {foot:g}L{outline}Z"/>'


def _grid(x: _Scale, y: _Scale, top: int, zero: float, end: float) -> Iterator[str]:
    step = max(1, round(top / 7))
    for value in range(0, top + 1, step):
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
        yield _text(_LEFT - 8, y(value) + 4, str(value), "end")
    every = _nice((end - zero) / 8)
    foot = _WAIT_TOP + _WAIT_HEIGHT
    for number in range(math.floor((end - zero) / every) + 1):
        at = x(zero + number * every)
        for base in (_TOP + _HEIGHT, foot):
            yield f'<line class="axis" x1="{at}" x2="{at}" y1="{base}" y2="{base + 4}"/>'
        yield _text(at, foot + 18, f"{number * every:g}", "middle")
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(0)}" y2="{y(0)}"/>'


def _legend(names: set[str]) -> Iterator[str]:
    at = float(_LEFT)
    for rung in RUNGS:
        if rung.name in names:
            text = f"{rung.name} (cost {rung.cost})"
            yield f'<rect x="{at}" y="60" width="12" height="12" rx="2" class="{_colour(rung.name)}"/>'
            yield _text(at + 18, 70, text)
            at += 34 + 6.6 * len(text)


def _colour(name: str) -> str:
    return f"r{next(number for number, rung in enumerate(RUNGS) if rung.name == name)}"


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _turned(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" transform="rotate(-90 {x} {y})">{escape(text)}</text>'


def _nice(value: float) -> float:
    """The next round length above."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
