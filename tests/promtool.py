"""Asks the real promtool what parti's rules make of given series: which alerts fire, and when."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parti.telemetry.alerts import Thresholds
from parti.telemetry.rules import alert_rules, objective_rules

Series = Mapping[str, str]
"""Values of each selector, one a minute, in promtool's notation: `0+100x30`, `1 1 1 _`."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Whether an alert fires at some minute."""

    alert: str
    minute: int
    fires: bool
    severity: str = ""
    where: str = ""
    """More matchers: `job="f"`."""

    @property
    def on_budget(self) -> bool:
        return self.alert.endswith("Budget")

    @property
    def test(self) -> dict[str, Any]:
        severity = f'severity="{self.severity}"' if self.severity else ""
        matchers = ",".join(filter(None, (f'alertname="{self.alert}"', 'alertstate="firing"', severity, self.where)))
        return {
            "expr": f"count(ALERTS{{{matchers}}}) > bool 0",
            "eval_time": f"{self.minute}m",
            "exp_samples": [{"value": 1}] if self.fires else [],
        }


class Promtool:
    """The program, with a directory for its files."""

    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._directory = directory

    def check(self, rules: str) -> None:
        """Fail where promtool does not take a rule file."""
        path = self._directory / "checked.yml"
        path.write_text(rules, encoding="utf-8")
        self._run("check", "rules", str(path))

    def ask(self, series: Series, expected: Iterable[Expected], thresholds: Thresholds | None = None) -> None:
        """Fail where alerts do not do what is expected of them with these series."""
        asked = list(expected)
        assert asked
        # Every rule is evaluated again and again up to the minute asked for: only the file that matters.
        self._ask(series, [each for each in asked if not each.on_budget], alert_rules(thresholds), "1m")
        self._ask(series, [each for each in asked if each.on_budget], objective_rules(thresholds), "5m")

    def _ask(self, series: Series, expected: list[Expected], rules: str, interval: str) -> None:
        if not expected:
            return
        (self._directory / "rules.yml").write_text(rules, encoding="utf-8")
        case = {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [each.test for each in expected],
        }
        test = {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": [case]}
        path = self._directory / "questions.yml"
        path.write_text(json.dumps(test), encoding="utf-8")
        self._run("test", "rules", str(path))

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([self._program, *arguments], capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
