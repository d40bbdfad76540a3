"""Small plots as inline SVG: bars with a cumulative line, stacked areas, lines, and bars of who owned what when.

Text and lines take their colours from the page (`currentColor` and CSS variables of `STYLE`), so one plot is readable
on light and on dark ground. Nothing is loaded from elsewhere. Pure functions: numbers in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

COLOURS = 8
"""Series that have a colour of their own; all further ones are grey."""
STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2430; --faint: #d9dee5; --muted: #5d6b7d; --card: #f6f8fa;
  --good: #1a7f37; --bad: #c4231c; --s0: #2f6fd6; --s1: #e07b12; --s2: #1f9d6b; --s3: #b0389b; --s4: #8a6d00;
  --s5: #0c8da5; --s6: #d1495b; --s7: #6b5bd2; --s8: #8b95a3; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --ink: #e4e9f0; --faint: #323b47; --muted: #9aa7b8;
  --card: #1a2029; --good: #4cc26b; --bad: #ff7b72; --s0: #6ea8ff; --s1: #ffae57; --s2: #4fd1a1; --s3: #e58ad3;
  --s4: #d8bd4a; --s5: #55c7dc; --s6: #ff8a99; --s7: #a99cff; --s8: #7b8696; } }
svg.plot { width: 100%; height: auto; display: block; color: var(--ink); }
svg.plot text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg.plot .grid { stroke: var(--faint); stroke-width: 1; }
svg.plot .axis { stroke: var(--muted); stroke-width: 1; }
svg.plot .mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; }
svg.plot text.mark-name { fill: var(--ink); font-weight: 600; }
"""

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 10, 30
_TICKS = 5
_STEPS_S, _MOST_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600), 10
_MARK_PX, _LETTER_PX = 15, 6.4


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a timeline: from when to when, and the index of its series."""

    start: float
    end: float
    series: int
    label: str


@dataclass(frozen=True, slots=True)
class Moments:
    """What an axis of time tells besides times."""

    marks: Sequence[tuple[float, str]] = ()
    """Moments (seconds since 1970) with a name, drawn as lines from top to bottom."""
    since: float | None = None
    """Seconds are counted from this moment; None: times of day, UTC."""
    span: tuple[float, float] | None = None
    """From when to when; None: as the values are."""


_NO_MOMENTS = Moments()


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    first_px: float
    last_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(max(value, self.low)) if self.log else value
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.first_px + share * (self.last_px - self.first_px), 2)


def bars_with_share(values: Sequence[float], *, unit: str = "s", width: int = 720, height: int = 260) -> str:
    """How values are spread: bars on a logarithmic axis, and the share of values up to each point as a line."""
    if not values:
        return _empty(width, height)
    ordered = sorted(max(value, 1e-6) for value in values)
    low, high = 10 ** math.floor(math.log10(ordered[0])), 10 ** math.ceil(math.log10(ordered[-1]) + 1e-9)
    x = _Scale(low, max(high, low * 10), _LEFT, width - 44, log=True)
    places = 8 * round(math.log10(x.high / x.low))
    edges = [x.low * (x.high / x.low) ** (i / places) for i in range(places + 1)]
    counts = [0] * places
    for value in ordered:
        place = int(places * math.log10(value / x.low) / math.log10(x.high / x.low))
        counts[min(max(place, 0), places - 1)] += 1
    y = _Scale(0, _nice(max(counts)), height - _BOTTOM, _TOP)
    share = _Scale(0, 1, height - _BOTTOM, _TOP)
    parts = [_grid_y(y, width - 44, _number)]
    for power in range(round(math.log10(x.low)), round(math.log10(x.high)) + 1):
        parts.append(_tick_x(x(10**power), height, _length(10**power, unit)))
    for count, left, right in zip(counts, edges, edges[1:], strict=False):
        if count:
            parts.append(
                f'<rect x="{x(left)}" y="{y(count)}" width="{max(1.0, x(right) - x(left) - 1):.2f}" '
                f'height="{y(0) - y(count):.2f}" fill="var(--s0)"><title>{count} of {_length(left, unit)} to '
                f"{_length(right, unit)}</title></rect>"
            )
    points = [(x(x.low), share(0.0))]
    step = max(1, len(ordered) // 400)
    for index in [*range(0, len(ordered), step), len(ordered) - 1]:
        points.append((x(ordered[index]), share((index + 1) / len(ordered))))
    parts.append(_path(points, "var(--s1)"))
    for part in (0, 0.5, 1):
        parts.append(f'<text x="{width - 40}" y="{share(part) + 4}">{part:.0%}</text>')
    return _svg(parts, width, height, f"distribution of {len(values)} values")


def areas(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    width: int = 720,
    height: int = 260,
    label: str = "",
    when: Moments = _NO_MOMENTS,
) -> str:
    """Series of the same moments (seconds since 1970, value), one on top of the other."""
    moments = sorted({at for points in series.values() for at, _ in points})
    if len(moments) < 2:
        return _empty(width, height)
    totals = dict.fromkeys(moments, 0.0)
    for points in series.values():
        for at, value in points:
            totals[at] += value
    x = _Scale(*(when.span or (moments[0], moments[-1])), _LEFT, width - _RIGHT)
    marks, top = _marks(x, height, when)
    y = _Scale(0, _nice(max(totals.values())), height - _BOTTOM, top)
    parts = [_grid_y(y, width - _RIGHT, _number), _ticks_time(x, height, when.since)]
    below = dict.fromkeys(moments, 0.0)
    for index, (name, points) in enumerate(series.items()):
        at_values = dict(points)
        above = {at: below[at] + at_values.get(at, 0.0) for at in moments}
        outline = [(x(at), y(above[at])) for at in moments] + [(x(at), y(below[at])) for at in reversed(moments)]
        title = f"<title>{escape(name)}</title>"
        parts.append(f'<path d="{_steps(outline)}Z" fill="{colour(index)}" fill-opacity="0.8">{title}</path>')
        below = above
    return _svg([*parts, marks], width, height, label or "values over time")


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    unit: str = "s",
    width: int = 720,
    height: int = 260,
    label: str = "",
    when: Moments = _NO_MOMENTS,
) -> str:
    """Series of (seconds since 1970, value above 0) on a logarithmic axis."""
    values = [value for points in series.values() for _, value in points if value > 0]
    moments = [at for points in series.values() for at, _ in points]
    if len(set(moments)) < 2 or not values:
        return _empty(width, height)
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)) + 1e-9)
    x = _Scale(*(when.span or (min(moments), max(moments))), _LEFT, width - _RIGHT)
    marks, top = _marks(x, height, when)
    y = _Scale(low, max(high, low * 10), height - _BOTTOM, top, log=True)
    parts = [_ticks_time(x, height, when.since)]
    for power in range(round(math.log10(y.low)), round(math.log10(y.high)) + 1):
        parts.append(_rule(y(10**power), width - _RIGHT, _length(10**power, unit)))
    for index, (_, points) in enumerate(series.items()):
        parts.append(_path([(x(at), y(value)) for at, value in points], colour(index)))
    return _svg([*parts, marks], width, height, label or "values over time")


def timeline(
    rows: Sequence[tuple[str, Sequence[Span]]], *, width: int = 720, row_px: int = 13, when: Moments = _NO_MOMENTS
) -> str:
    """One line for each name: who had it from when to when."""
    spans = [span for _, found in rows for span in found]
    if not spans:
        return _empty(width, 80)
    wide = max(len(name) for name, _ in rows)
    left = min(220, max(_LEFT, 10 + round(wide * 6.2)))
    span = when.span or (min(s.start for s in spans), max(s.end for s in spans))
    x = _Scale(*span, left, width - _RIGHT)
    head = _marks(x, 0, when)[1]
    height = head + row_px * len(rows) + _BOTTOM
    parts = [_ticks_time(x, height, when.since)]
    for index, (name, found) in enumerate(rows):
        top = head + index * row_px
        shown = name if len(name) <= 34 else f"{name[:33]}…"
        parts.append(f'<text x="{left - 6}" y="{top + row_px - 4}" text-anchor="end">{escape(shown)}</text>')
        for bar in found:
            wide_px, title = max(0.8, x(bar.end) - x(bar.start)), f"<title>{escape(bar.label)}</title>"
            parts.append(
                f'<rect x="{x(bar.start)}" y="{top + 1}" width="{wide_px:.2f}" height="{row_px - 3}" rx="1.5" '
                f'fill="{colour(bar.series)}">{title}</rect>'
            )
    return _svg([*parts, _marks(x, height, when)[0]], width, height, f"owners of {len(rows)} partitions over time")


def legend(names: Sequence[str]) -> str:
    """The colours of series, in their order."""
    items = "".join(
        f'<span class="key"><i style="background:{colour(index)}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<div class="legend">{items}</div>'


def colour(index: int) -> str:
    """The colour of the n-th series."""
    return f"var(--s{min(index, COLOURS)})"


# ── parts of a plot ───────────────────────────────────────────────────────────────────────────────────────────────


def _svg(parts: Sequence[str], width: int, height: int, label: str) -> str:
    head = f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(parts)}</svg>"


def _empty(width: int, height: int) -> str:
    text = f'<text x="{width / 2}" y="{height / 2}" text-anchor="middle">nothing to show</text>'
    return _svg([text], width, height, "nothing to show")


def _rule(at_px: float, right_px: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{right_px}" y1="{at_px}" y2="{at_px}"/>'
        f'<text x="{_LEFT - 6}" y="{at_px + 4}" text-anchor="end">{escape(text)}</text>'
    )


def _grid_y(y: _Scale, right_px: float, form: Callable[[float], str]) -> str:
    steps = [y.high * index / 4 for index in range(5)]
    return "".join(_rule(y(value), right_px, form(value)) for value in steps)


def _tick_x(at_px: float, height: int, text: str) -> str:
    foot = height - _BOTTOM
    return (
        f'<line class="axis" x1="{at_px}" x2="{at_px}" y1="{foot}" y2="{foot + 4}"/>'
        f'<text x="{at_px}" y="{foot + 17}" text-anchor="middle">{escape(text)}</text>'
    )


def _ticks_time(x: _Scale, height: int, since: float | None) -> str:
    if since is not None:
        step = next((s for s in _STEPS_S if (x.high - x.low) / s <= _MOST_TICKS), _STEPS_S[-1])
        first, last = math.ceil((x.low - since) / step), math.floor((x.high - since) / step)
        return "".join(_tick_x(x(since + n * step), height, f"{n * step:g} s") for n in range(first, last + 1))
    days = x.high - x.low > 86_400
    fine = x.high - x.low < 10
    ticks = []
    for index in range(_TICKS):
        at = x.low + (x.high - x.low) * index / (_TICKS - 1)
        moment = datetime.fromtimestamp(at, UTC)
        text = f"{moment:%m-%d %H:%M}" if days else f"{moment:%H:%M:%S}" + (f".{moment:%f}"[:3] if fine else "")
        inside = min(max(x(at), x.first_px + 14), x.last_px - 18)
        ticks.append(_tick_x(round(inside, 1), height, text))
    return "".join(ticks)


def _marks(x: _Scale, height: int, when: Moments) -> tuple[str, int]:
    """The named moments, and where the plot begins below their names; names that would meet take another line."""
    parts: list[str] = []
    ends_px: list[float] = []
    for at, name in sorted(mark for mark in when.marks if x.low <= mark[0] <= x.high):
        at_px, wide_px = x(at), len(name) * _LETTER_PX + 8
        left_px = min(at_px - 2, x.last_px - wide_px)
        line = next((n for n, end_px in enumerate(ends_px) if end_px <= left_px), len(ends_px))
        ends_px[line : line + 1] = [left_px + wide_px]
        top = _TOP + line * _MARK_PX
        parts.append(
            f'<line class="mark" x1="{at_px}" x2="{at_px}" y1="{top + 4}" y2="{height - _BOTTOM}"/>'
            f'<text class="mark-name" x="{round(left_px, 1)}" y="{top}">{escape(name)}</text>'
        )
    return "".join(parts), _TOP + _MARK_PX * len(ends_px)


def _steps(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _path(points: Sequence[tuple[float, float]], stroke: str) -> str:
    return f'<path d="{_steps(points)}" fill="none" stroke="{stroke}" stroke-width="1.8" stroke-linejoin="round"/>'


def _nice(value: float) -> float:
    """The next number above that divides well by four."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * 0.999999)


def _number(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def _length(value: float, unit: str) -> str:
    """A length of time in the unit that suits it; other units as they are."""
    if unit != "s":
        return f"{value:g} {unit}"
    for limit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= limit * 0.999:
            return f"{value / limit:.3g} {name}"
    return f"{value * 1e6:.3g} µs"
