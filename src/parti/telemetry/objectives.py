"""The objectives of `parti.core.slo` for Prometheus: bad shares over windows, error budgets, and how fast they burn.

Latency needs a limit that is fixed beforehand, where the gold tables can look at a whole period first: twice the p95
that is usual for the handlers at hand (`Thresholds.latency_p95_s`). Burning is looked at over a long and a short
window at once: the long one tells that it matters, the short one that it still goes on. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parti.core import slo
from parti.telemetry.alerts import FLEET, Alert, Thresholds
from parti.telemetry.queries import METRICS, buckets, count, increase, quantile, rate, series, total

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
PERIOD = "30d"
"""What an error budget is for."""
BAD = "job:parti_slo_bad:ratio_rate"
"""Recorded share of bad ones, by objective; a window follows."""
BUDGET = "job:parti_slo_budget:remaining_ratio"
TAIL = "job:parti_handler_latency_seconds:p99_over_p95_1h"
PAGE = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))
"""Times faster than allowed, over a long and a short window: 2 % of the budget of 30 days in an hour, 5 % in six."""
TICKET = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))
LEAST_BAD = 5
"""Fewer than so many bad ones in the long window alarm nobody: with few events one of them is a large share."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus works out beforehand."""

    record: str
    expr: str
    objective: str = ""


@dataclass(frozen=True, slots=True)
class _Measure:
    """How good and bad ones of an objective are counted; each function takes what is done with a counter."""

    objective: slo.Objective
    alert: str
    what: str
    bad: Callable[[Callable[[str], str]], str]
    all: Callable[[Callable[[str], str]], str]


def _measures(t: Thresholds) -> tuple[_Measure, ...]:
    m = METRICS
    in_time = buckets(m.handler_latency, slo.LATENCY_FACTOR * t.latency_p95_s)
    calls, updates = count(m.handler_latency), count(m.update_duration)
    failed = series(m.update_failures)
    return (
        _Measure(
            slo.LATENCY,
            "PartiLatencyBudget",
            f"of the handler calls took longer than {slo.LATENCY_FACTOR * t.latency_p95_s:g} s",
            bad=lambda f: f"({f(calls)} - {f(in_time)})",
            all=lambda f: f(calls),
        ),
        _Measure(
            slo.REDELIVERY,
            "PartiRedeliveryBudget",
            "of the messages were delivered again",
            bad=lambda f: f(series(m.redeliveries)),
            all=lambda f: f(series(m.messages)),
        ),
        _Measure(
            slo.UPDATES,
            "PartiUpdateBudget",
            "of the consumer updates failed",
            bad=lambda f: f(failed),
            all=lambda f: f"({f(updates)} + {f(failed)})",
        ),
    )


def recordings(t: Thresholds) -> Iterator[Recording]:
    """The shares of bad ones over each window, what is left of the budgets, and how long the tail is."""
    for measure in _measures(t):
        name = measure.objective.name
        for window in (*WINDOWS, PERIOD):
            yield Recording(f"{BAD}{window}", _share(measure, window), name)
        allowed = _allowed(measure)
        yield Recording(BUDGET, f'1 - {BAD}{PERIOD}{{objective="{name}"}} / {allowed:g}', name)
    slow, usual = (quantile(share, METRICS.handler_latency, "1h", FLEET) for share in (0.99, 0.95))
    yield Recording(TAIL, f"{slow} / {usual}")


def budget_alerts(t: Thresholds) -> Iterator[Alert]:
    """Two for each objective: one that pages when the budget burns fast, one that does not when it burns slowly."""
    for measure in _measures(t):
        what = measure.what
        yield Alert(
            measure.alert,
            _burns(measure, PAGE),
            f"The error budget of {{{{ $labels.job }}}} burns fast: {{{{ $value | humanizePercentage }}}} {what}",
            lasts="2m",
            severity="page",
        )
        yield Alert(
            measure.alert,
            _burns(measure, TICKET),
            f"The error budget of {{{{ $labels.job }}}} does not last: {{{{ $value | humanizePercentage }}}} {what}",
            lasts="15m",
        )


def _share(measure: _Measure, window: str) -> str:
    def over(selector: str) -> str:
        return total(rate(selector, window), FLEET)

    return f"{measure.bad(over)} / {measure.all(over)}"


def _allowed(measure: _Measure) -> float:
    return round(1 - measure.objective.target, 6)


def _burns(measure: _Measure, speeds: tuple[tuple[float, str, str], ...]) -> str:
    where = f'{{objective="{measure.objective.name}"}}'
    either = []
    for times, long, short in speeds:
        limit = f"{times * _allowed(measure):g}"
        enough = measure.bad(lambda selector, window=long: total(increase(selector, window), FLEET))  # type: ignore[misc]
        either.append(
            f"({BAD}{long}{where} > {limit} and {BAD}{short}{where} > {limit}"
            f" and on ({FLEET}) {enough} >= {LEAST_BAD})"
        )
    return " or ".join(either)
