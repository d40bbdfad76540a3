"""The three plots of `benchmarks.approaches`, as SVG files that stand alone.

The plots of `parti.spark.plots` are parts of a page: they take colours and fonts from it and have an axis of time.
These are shown as images, so they bring ground, colours and legend along. Pure: figures in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.svg import FAINT as _FAINT
from benchmarks.svg import INK as _INK
from benchmarks.svg import MUTED as _MUTED
from benchmarks.svg import WIDTH as _WIDTH
from benchmarks.svg import line as _line
from benchmarks.svg import nice as _nice
from benchmarks.svg import rule as _rule
from benchmarks.svg import svg
from benchmarks.svg import text as _text

COLOURS = {"P": "#d1495b", "A": "#b0389b", "B": "#e07b12", "C": "#2f6fd6", "C+mirror": "#1f9d6b"}
_HEIGHT, _TOP, _BOTTOM = 360, 62, 46
_svg = partial(svg, height=_HEIGHT)
_FLOOR = 10.0

Results = Mapping[str, Mapping[str, Any]]
Point = tuple[float, float]


def latency(results: Results) -> str:
    """Age of messages by the offered rate: a panel for p50, one for p99."""
    rates = sorted({row["offered_per_s"] for found in results.values() for row in found.get("rates", ())})
    ages = [row[key] for found in results.values() for row in found.get("rates", ()) for key in ("p50_ms", "p99_ms")]
    low, high = _decades([age for age in ages if age])
    parts = [_legend(results), _states_legend()]
    for panel, (key, title) in enumerate((("p50_ms", "p50"), ("p99_ms", "p99"))):
        left, right = 64 + panel * 430, 64 + panel * 430 + 374
        parts += _log_axis(low, high, left, right, _length_ms)
        place = {rate: left + 30 + (right - left - 60) * i / max(1, len(rates) - 1) for i, rate in enumerate(rates)}
        parts += [_text(at, _HEIGHT - _BOTTOM + 18, short(rate), "middle") for rate, at in place.items()]
        parts.append(_text((left + right) / 2, _HEIGHT - 8, f"{title} by offered messages a second", "middle", _INK))
        for name, found in results.items():
            rows = [row for row in found.get("rates", ()) if row[key]]
            points = [(place[row["offered_per_s"]], _log_y(row[key], low, high)) for row in rows]
            parts.append(_line(points, COLOURS[name]))
            parts += [_mark(at, state(row), COLOURS[name]) for at, row in zip(points, rows, strict=True)]
    return _svg(parts, "latency by offered rate, p50 and p99, for each topology")


def cpu(results: Results) -> str:
    """CPU time of the server for each delivered message, by the offered rate."""
    rates = sorted({row["offered_per_s"] for found in results.values() for row in found.get("rates", ())})
    costs = {
        (row["offered_per_s"], name): row
        for name, found in results.items()
        for row in found.get("rates", ())
        if row["server_cpu_us_per_msg"]
    }
    top = _nice(max((row["server_cpu_us_per_msg"] for row in costs.values()), default=1.0))
    left, right, foot = 64, _WIDTH - 16, _HEIGHT - _BOTTOM
    parts = [_legend(results), _text(right, 44, "pale: collapsed or short of the offered rate", "end")]
    for index in range(5):
        at = foot - (foot - _TOP) * index / 4
        parts += [_rule(left, right, at), _text(left - 6, at + 4, f"{top * index / 4:g} µs", "end")]
    group_px = (right - left) / max(1, len(rates))
    bar_px = group_px / (len(results) + 1)
    for number, rate in enumerate(rates):
        begin = left + number * group_px + bar_px / 2
        parts.append(_text(begin + group_px / 2 - bar_px / 2, foot + 18, short(rate), "middle"))
        for index, name in enumerate(results):
            if (row := costs.get((rate, name))) is None:
                continue
            value = row["server_cpu_us_per_msg"]
            height, pale = (foot - _TOP) * value / top, "" if state(row) == "held" else ' fill-opacity="0.35"'
            x = begin + index * bar_px
            parts.append(
                f'<rect x="{x:.1f}" y="{foot - height:.1f}" width="{bar_px - 3:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[name]}"{pale}/>'
            )
            parts.append(_text(x + bar_px / 2 - 1.5, foot - height - 4, f"{value:.0f}", "middle", size=10))
    parts.append(_text((left + right) / 2, _HEIGHT - 8, "offered messages a second", "middle", _INK))
    return _svg(parts, "CPU time of the server for each message by offered rate, for each topology")


def recovery(results: Results) -> str:
    """The backlog before, in and after a stall of all readers."""
    stalls = {name: found["stall"] for name, found in results.items() if "stall" in found}
    curves = {name: _curve(stall["curve"]) for name, stall in stalls.items()}
    low, high = _FLOOR, _decades([100, *(backlog for curve in curves.values() for _, backlog in curve)])[1]
    seconds = [at for curve in curves.values() for at, _ in curve] or [0.0, 1.0]
    stall_s = max((stall["stall_s"] for stall in stalls.values()), default=0.0)
    left, right, foot = 64, _WIDTH - 16, _HEIGHT - _BOTTOM
    first, last = float(min(seconds)), float(max(seconds))

    def x(at: float) -> float:
        return left + (right - left) * (at - first) / max(last - first, 1e-9)

    parts = [
        f'<rect x="{x(-stall_s):.1f}" y="{_TOP}" width="{x(0) - x(-stall_s):.1f}" height="{foot - _TOP}" '
        f'fill="{_FAINT}" fill-opacity="0.6"/>',
        _text(x(-stall_s / 2), _TOP + 14, "stall", "middle"),
        _legend(results),
        *_log_axis(low, high, left, right, lambda value: f"≤ {value:g}" if value <= _FLOOR else short(value)),
    ]
    step = 1 if last <= 6 else 2 if last <= 16 else 5
    for at in range(0, math.floor(last) + 1, step):
        parts.append(_text(x(at), foot + 18, f"{at} s", "middle"))
    for name, curve in curves.items():
        parts.append(_line([(x(at), _log_y(backlog, low, high)) for at, backlog in curve], COLOURS[name]))
    parts.append(
        _text(
            (left + right) / 2,
            _HEIGHT - 8,
            "messages stored and not come yet, by seconds since the readers came back",
            "middle",
            _INK,
        )
    )
    return _svg(parts, "backlog over time around a stall of all readers, for each topology")


def _curve(curve: Mapping[str, Any]) -> list[Point]:
    """Seconds since the end of the stall, and the backlog, which is not shown below a floor."""
    first_s, step_s = float(curve["first_s"]), float(curve["step_s"])
    return [(first_s + n * step_s, max(_FLOOR, float(b))) for n, b in enumerate(curve["backlog_msgs"])]


def state(row: Mapping[str, Any]) -> str:
    """How a load was kept up with: `held`, `short` (less was sent than offered) or `collapsed`."""
    if row["collapsed"]:
        return "collapsed"
    return "short" if row["sent_per_s"] < 0.95 * row["offered_per_s"] else "held"


def short(value: float) -> str:
    """A number, with k or M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g} {unit}"
    return f"{value:g}"


# ── parts of a plot ───────────────────────────────────────────────────────────────────────────────────────────────


def _legend(results: Results) -> str:
    parts, x = [], 64.0
    for name, found in results.items():
        text = f"{name}: {found['consumers']:,} consumers" if "consumers" in found else name
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" rx="2" fill="{COLOURS[name]}"/>')
        parts.append(_text(x + 18, 24, text, fill=_INK))
        x += 36 + 6.4 * len(text)
    return "\n".join(parts)


def _states_legend() -> str:
    parts, x = [], 64.0
    for word, text in (("held", "held"), ("short", "short of the offered rate"), ("collapsed", "collapsed")):
        parts += [_mark((x + 6, 42), word, _MUTED), _text(x + 18, 46, text)]
        x += 44 + 6.4 * len(text)
    return "\n".join(parts)


def _mark(at: Point, word: str, colour: str) -> str:
    x, y = at
    if word == "collapsed":
        d = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return f'<path d="{d}" stroke="{colour}" stroke-width="2.4" fill="none"/>'
    fill = colour if word == "held" else "#fff"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="2"/>'


def _decades(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 1.0, 10.0
    low, high = 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)
    return low, max(high, low * 10)


def _log_y(value: float, low: float, high: float) -> float:
    share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _log_axis(low: float, high: float, left: float, right: float, form: Callable[[float], str]) -> list[str]:
    parts = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = _log_y(10.0**power, low, high)
        parts += [_rule(left, right, at), _text(left - 6, at + 4, form(10.0**power), "end")]
    return parts


def _length_ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms" if value >= 1 else f"{value * 1000:g} µs"
