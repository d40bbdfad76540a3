"""The page of an audit: verdicts in plain English, pauses by reason, named moments, nothing from elsewhere."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from parti.core.invariants import Invariant
from parti.spark.plots import Moments
from parti.spark.promises import RULES, TITLES, Check
from parti.spark.report_page import Move, Picture, Section, Traffic, quantile, rates_by_worker, write_report

CHECKS = [Check(name.value, 0) for name in Invariant]
OWNERS = [("etch<1>", [(100.0, 105.0, "worker-0", 1), (106.0, 110.0, "worker-1", 2)])]
MOVES = [
    Move("etch<1>", 106.0, "worker-0", "worker-1", "SIGKILL", 2.0),
    Move("etch2", 103.0, "worker-0", "worker-1", "join", 0.01),
    Move("etch3", 104.0, "worker-0", "worker-1", "join", 0.03),
]


def page(**more: object) -> str:
    given = {"title": "Report", "facts": {}, "checks": CHECKS, "seen": {"messages": 5}, "traffic": Traffic()}
    return write_report(Picture(**{**given, "moves": MOVES, "owners": OWNERS, **more}))  # type: ignore[arg-type]


def rows(text: str) -> list[list[str]]:
    """Every row of every table, as text."""
    found = re.findall(r"<tr>(.*?)</tr>", text)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in found]


def test_every_promise_has_a_rule_in_plain_english() -> None:
    assert set(RULES) == set(TITLES) >= {name.value for name in Invariant}
    text = page()
    assert "Every promise was kept" in text
    for check in CHECKS:
        assert check.rule in text


def test_a_broken_promise_is_named_with_examples() -> None:
    broken = Check("NoLoss", 3, 0, ({"partition": "etch<1>", "seq": 7, "detail": "never finished"},))
    text = page(checks=[broken, *CHECKS[1:]])
    assert "NoLoss violated" in text
    assert ["etch&lt;1&gt;", "7", "never finished"] in rows(text)


def test_pauses_are_told_by_reason_in_the_order_of_the_story() -> None:
    told = [row for row in rows(page()) if len(row) == 5 and row[0] in {"join", "SIGKILL", "all"}]
    assert told == [
        ["join", "2", "10 ms", "30 ms", "30 ms"],
        ["SIGKILL", "1", "2 s", "2 s", "2 s"],
        ["all", "3", "30 ms", "2 s", "2 s"],
    ]


def test_named_moments_are_in_every_plot_over_time_and_seconds_are_counted_from_the_beginning() -> None:
    traffic = Traffic(
        by_worker={"worker-0": [(100.0, 5.0), (110.0, 6.0)]},
        latencies={"p50": [(100.0, 0.1), (110.0, 0.2)]},
        waiting=[(100.0, 1.0), (110.0, 0.0)],
    )
    text = page(traffic=traffic, when=Moments(marks=[(105.0, "kill <w>")], since=100.0, span=(100.0, 110.0)))
    plots = [ElementTree.fromstring(plot) for plot in re.findall(r"<svg.*?</svg>", text)]
    named = [plot for plot in plots if any(element.text == "kill <w>" for element in plot.iter("text"))]
    assert len(named) == 4  # owners, rates, waiting, latencies; the pauses have no axis of time
    assert all(any(element.text == "5 s" for element in plot.iter("text")) for plot in named)


def test_sections_tell_commands_and_tables_and_nothing_is_loaded_from_elsewhere() -> None:
    section = Section(
        "Check <it>", ("A & B.",), "parti audit --stream 'DC'", [{"what": "seed", "value": "1"}], CHECKS
    )
    text = page(sections=[section], lead=["In short."])
    assert "<h2>Check &lt;it&gt;</h2><p>A &amp; B.</p>" in text
    assert "parti audit --stream &#x27;DC&#x27;" in text
    assert ["seed", "1"] in rows(text)
    assert "<p>In short.</p>" in text
    assert not re.search(r"<script|<link|<img|\ssrc=|https?://|url\(", text)


@pytest.mark.parametrize(("part", "value"), [(0.5, 2.0), (0.99, 4.0), (1.0, 4.0), (0.01, 1.0)])
def test_a_quantile_is_a_value_that_occurred(part: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], part) == value


def test_workers_without_a_colour_are_added_up() -> None:
    counts = {f"w{n}": {0: n + 1} for n in range(10)}
    rates = rates_by_worker(counts, 0, 1_000_000, 1_000_000)
    assert list(rates) == [*(f"w{n}" for n in range(2, 10)), "others"]
    assert rates["others"][0] == (0.5, 3.0)
