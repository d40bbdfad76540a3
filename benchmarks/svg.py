"""Parts of the plots of benchmarks: SVG that stands alone, with ground and colours. Pure: figures in, text out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

INK, MUTED, FAINT = "#1c2430", "#5d6b7d", "#d9dee5"
WIDTH = 880


def svg(parts: Sequence[str], label: str, height: int) -> str:
    """A whole plot; `label` says what it shows to whoever cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(label)}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, said: str, anchor: str = "start", fill: str = MUTED, size: int = 12) -> str:
    """A piece of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{escape(said)}</text>'
    )


def rule(left: float, right: float, at: float) -> str:
    """A faint line across."""
    return f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{FAINT}"/>'


def line(points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
    """A line through points."""
    if not points:
        return ""
    steps, dashed = "L".join(f"{x:.1f} {y:.1f}" for x, y in points), f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{steps}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"{dashed}/>'


def nice(value: float) -> float:
    """The next number above that divides well by four."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value)
