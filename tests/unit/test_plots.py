"""Plots: well-formed SVG that shows what it was given, for every kind of input."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from parti.spark.plots import (
    COLOURS,
    STYLE,
    Moments,
    Span,
    areas,
    bars_with_share,
    colour,
    legend,
    lines,
    timeline,
)


def parse(plot: str) -> ElementTree.Element:
    root = ElementTree.fromstring(plot)
    numbers = [float(n) for n in re.findall(r'="(-?[\d.]+)"', plot)]
    assert all(math.isfinite(n) for n in numbers)
    assert root.get("aria-label")
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter("text")]


def test_bars_hold_every_value_and_the_line_ends_at_all_of_them() -> None:
    values = [0.006, 0.007, 0.012, 0.045, 0.4, 2.0]
    root = parse(bars_with_share(values))
    shown = [int((rect[0].text or "0").split()[0]) for rect in root.iter("rect")]
    assert sum(shown) == len(values)
    assert {"1 ms", "1 s", "100%"} <= set(texts(root))


@pytest.mark.parametrize("values", [[0.0], [1.0], [1e-9, 5.0], [0.01] * 1000, [10.0, 10.0]])
def test_bars_of_odd_values_are_drawn(values: list[float]) -> None:
    root = parse(bars_with_share(values))
    assert sum(int((rect[0].text or "0").split()[0]) for rect in root.iter("rect")) == len(values)


def test_areas_lie_on_top_of_each_other() -> None:
    series = {"w-1": [(0.0, 10.0), (60.0, 20.0)], "w-2": [(0.0, 5.0), (60.0, 0.0)]}
    root = parse(areas(series))
    first, second = (path.get("d") or "" for path in root.iter("path"))
    # What is the lower edge of the second is the upper edge of the first.
    upper = first.split("L")[:2]
    lower = second.removesuffix("Z").split("L")[-2:]
    assert [p.lstrip("M") for p in upper] == lower[::-1]
    assert "00:00:00" in texts(root)


def test_lines_have_an_axis_of_powers() -> None:
    root = parse(lines({"p50": [(0.0, 0.002), (1.0, 0.004)], "p99": [(0.0, 0.2), (1.0, 0.9)]}))
    assert {"1 ms", "10 ms", "100 ms", "1 s"} <= set(texts(root))
    assert len(list(root.iter("path"))) == 2


def test_a_timeline_names_partitions_and_owners() -> None:
    root = parse(timeline([("etch<1>.c1", [Span(0, 5, 0, "w-1"), Span(5, 9, 1, "w-2")]), ("etch1.c2", [])]))
    assert "etch<1>.c1" in texts(root)
    assert [rect[0].text for rect in root.iter("rect")] == ["w-1", "w-2"]


def test_names_of_moments_do_not_lie_on_each_other_and_those_outside_are_left_out() -> None:
    when = Moments(marks=[(1.0, "first of them"), (1.1, "second of them"), (9.9, "at the end"), (11.0, "too late")])
    root = parse(timeline([("p", [Span(0, 10, 0, "w")])], when=when))
    names = [element for element in root.iter("text") if element.get("class") == "mark-name"]
    assert [element.text for element in names] == ["first of them", "second of them", "at the end"]
    first, second, last = names
    assert first.get("y") != second.get("y")
    assert float(last.get("x") or 0) + len(last.text or "") * 6 < 720, "it ends within the plot"
    assert len([line for line in root.iter("line") if line.get("class") == "mark"]) == 3


def test_an_axis_of_seconds_counts_from_its_beginning() -> None:
    root = parse(areas({"w": [(1000.0, 1.0), (1040.0, 2.0)]}, when=Moments(since=1000.0, span=(1000.0, 1040.0))))
    assert [text for text in texts(root) if text.endswith(" s")] == [f"{n} s" for n in range(0, 41, 5)]


@pytest.mark.parametrize(
    "plot", [bars_with_share([]), areas({}), areas({"w": [(0.0, 1.0)]}), lines({}), timeline([])]
)
def test_nothing_is_shown_as_nothing(plot: str) -> None:
    assert texts(parse(plot)) == ["nothing to show"]


def test_every_series_has_a_colour_on_light_and_dark_ground() -> None:
    assert colour(99) == f"var(--s{COLOURS})"
    for index in range(COLOURS + 1):
        assert STYLE.count(f"--s{index}:") == 2
    assert "&lt;w&gt;" in legend(["<w>"])
