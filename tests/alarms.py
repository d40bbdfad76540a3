"""Alerts provoked for real: scrape before, make the trouble, scrape after, and let promtool evaluate the rules.

`@provokes` says which alerts a test provokes, and fails one that has not shown each of them with `alarm`. The scraped
values are held for a quarter of an hour, then the new ones for an hour; counters go on growing as they did.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.promtool import Expected, Promtool

from parti.telemetry.alerts import Thresholds
from parti.telemetry.objectives import recordings
from parti.telemetry.rules import all_alerts

Scrape = dict[str, float]
"""Values by selector, with the labels that Prometheus adds."""
PROVOKED: dict[str, list[str]] = {}
"""Tests by the alerts that they provoke."""
_CALM, _TROUBLE = 15, 60
_OLD_S = 86_400
_STARTED = "parti_started_timestamp_seconds"
_COUNTERS = ("_total", "_count", "_sum", "_bucket")
_F = TypeVar("_F", bound=Callable[..., Any])


def provokes(*alerts: str) -> Callable[[_F], _F]:
    """Mark a test that provokes these alerts; it must show them."""

    def note(test: _F) -> _F:
        for alert in alerts:
            PROVOKED.setdefault(alert, []).append(test.__name__)

        @wraps(test)
        async def checked(*, alarm: Alarm, **given: Any) -> None:
            await test(alarm=alarm, **given)
            assert alarm.shown == set(alerts), f"said to provoke {sorted(alerts)}, and has {sorted(alarm.shown)}"

        return cast("_F", checked)

    return note


def read(text: str, **labels: str) -> Scrape:
    """The samples of an exposition, in the text format of Prometheus."""
    found: Scrape = {}
    for family in parse_text(text):
        for sample in family.samples:
            matchers = ",".join(f'{name}="{value}"' for name, value in {**sample.labels, **labels}.items())
            # Promtool's clock begins at 0, and that is when it is scraped.
            now_s = time.time() if sample.name.endswith("_timestamp_seconds") else 0.0
            found[f"{sample.name}{{{matchers}}}"] = sample.value - now_s
    return found


async def scrape(*workers: Any) -> Scrape:
    """What `/metrics` of each worker says now, over HTTP."""

    def fetch(port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    found: Scrape = {}
    for worker in workers:
        text = await asyncio.to_thread(fetch, worker.metrics_port)
        found |= read(text, job="test", instance=f"127.0.0.1:{worker.metrics_port}")
    return found


def scrape_file(path: Path) -> Scrape:
    """What a command has written for the text file collector."""
    return read(path.read_text(encoding="utf-8"), job="node", instance="box")


class Alarm:
    """Shows that alerts fire."""

    def __init__(self, promtool: Promtool) -> None:
        self._promtool = promtool
        self.shown: set[str] = set()

    async def rings(
        self, before: Scrape, after: Scrape, alerts: Sequence[str], thresholds: Thresholds | None = None
    ) -> None:
        """Fail unless each alert is silent with the first scrape and fires with the second; workers are old."""
        t = thresholds or Thresholds()
        names = set().union(*(_names(alert, t) for alert in alerts))
        series = {
            selector: f"{-_OLD_S}x{_CALM + _TROUBLE}"
            if selector.startswith(_STARTED)
            else _values(selector, before.get(selector), after.get(selector))
            for selector in {**before, **after}
            if selector.partition("{")[0] in names
        }
        expected = [
            Expected(alert, minute, fires)
            for alert in alerts
            for minute, fires in ((_CALM - 1, False), (_CALM + _TROUBLE - 5, True))
        ]
        await asyncio.to_thread(self._promtool.ask, series, expected, t)
        self.shown |= set(alerts)

    async def rings_at_its_first_scrape(self, scraped: Scrape, alerts: Sequence[str]) -> None:
        """Fail unless each alert fires for what is counted before the first scrape, and ends in time."""
        t = Thresholds()
        names = set().union(*(_names(alert, t) for alert in alerts))
        series = {
            selector: f"_x{_CALM - 1} {value + (selector.startswith(_STARTED) and 60 * _CALM):.17g}x{_TROUBLE}"
            for selector, value in scraped.items()
            if selector.partition("{")[0] in names
        }
        moments = ((_CALM - 1, False), (_CALM + 3, True), (_CALM + 30, False))
        expected = [Expected(alert, minute, fires) for alert in alerts for minute, fires in moments]
        await asyncio.to_thread(self._promtool.ask, series, expected, t)
        self.shown |= set(alerts)


def _names(alert: str, t: Thresholds) -> set[str]:
    """Names of the series that an alert looks at."""
    expressions = [each.expr for each in all_alerts(t) if each.name == alert]
    assert expressions, f"there is no alert {alert}"
    if alert.endswith("Budget"):
        expressions += [recording.expr for recording in recordings(t)]
    return {name for expression in expressions for name in re.findall(r"(?<!:)\b(parti_\w+)", expression)}


def _values(selector: str, before: float | None, after: float | None) -> str:
    calm = "_x14" if before is None else f"{before:.17g}x{_CALM - 1}"
    if after is None:
        return f"{calm} _x{_TROUBLE}"
    if selector.partition("{")[0].endswith(_COUNTERS):
        return f"{calm} {after:.17g}+{after - (before or 0):.17g}x{_TROUBLE}"
    return f"{calm} {after:.17g}x{_TROUBLE}"


@pytest.fixture
def alarm(debian_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Alarm:
    """Shows that alerts fire."""
    return Alarm(Promtool(debian_tool("promtool"), tmp_path_factory.mktemp("promtool")))
