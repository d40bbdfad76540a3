"""Expressions of Prometheus over declared metrics: what is not declared cannot be named.

`METRICS` and `BATCH` hold every instrument; the functions turn one of them, with labels, into the text of a selector.
A label, a state or a bucket that the metric does not have raises ValueError, so a rule that names one does not exist.
"""

from __future__ import annotations

from typing import Final

from parti.telemetry.batch_metrics import BatchMetrics
from parti.telemetry.instruments import Histogram, Instrument, LabelledCounter, StateGauge
from parti.telemetry.metrics import Metrics

METRICS: Final = Metrics("declared", per_partition=True)
BATCH: Final = BatchMetrics()


def series(metric: Instrument, **labels: str) -> str:
    """The selector of a metric: `parti_fleet_state{state="degraded"}`; a value may begin with `!` to exclude it."""
    if isinstance(metric, Histogram):
        raise ValueError(f"{metric.name} is a histogram; select its count or its buckets")
    matchers = []
    for label, value in labels.items():
        if label not in metric.labels:
            raise ValueError(f"{metric.name} has no label {label!r}; expected one of {', '.join(metric.labels)}")
        wanted = value.removeprefix("!")
        known = _values(metric) if label == metric.label else ()
        if known and wanted not in known:
            raise ValueError(f"{metric.name} has no {label} {wanted!r}; expected one of {', '.join(known)}")
        matchers.append(f'{label}{"!=" if value.startswith("!") else "="}"{wanted}"')
    return f"{metric.name}{{{','.join(matchers)}}}" if matchers else metric.name


def count(metric: Histogram) -> str:
    """The selector of how many observations a histogram has."""
    return f"{metric.name}_count"


def buckets(metric: Histogram, le: float | None = None) -> str:
    """The selector of a histogram's buckets, or of the one with that upper bound."""
    if le is None:
        return f"{metric.name}_bucket"
    if le not in metric.bounds:
        bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
        raise ValueError(f"{metric.name} has no bucket up to {le:g}; expected one of {bounds}")
    return f'{metric.name}_bucket{{le="{float(le)}"}}'


def rate(selector: str, window: str) -> str:
    """Growth in a second, over a window."""
    return f"rate({selector}[{window}])"


def increase(selector: str, window: str) -> str:
    """Growth over a window."""
    return f"increase({selector}[{window}])"


def grown(selector: str, window_s: int) -> str:
    """Growth over a window, with what a worker that began within it counted before it was scraped for the first time.

    Such a worker has counted all that it says within the window, which `increase` does not see; but it sees what the
    process before it counted under the same name. Hence the larger one of both. A Prometheus that was away makes
    nobody young: workers themselves say when they began.
    """
    seen = increase(selector, f"{window_s // 60}m")
    young = f"time() - {series(METRICS.started)} < {window_s}"
    return f"(({selector} and on (job, instance, worker) ({young})) > {seen} or {seen})"


def total(expression: str, *by: str) -> str:
    """The sum over everything but these labels."""
    return f"sum by ({', '.join(by)}) ({expression})"


def largest(expression: str, *by: str) -> str:
    """The maximum over everything but these labels."""
    return f"max by ({', '.join(by)}) ({expression})"


def quantile(share: float, metric: Histogram, window: str, *by: str) -> str:
    """A quantile of a histogram over a window."""
    return f"histogram_quantile({share:g}, {total(rate(buckets(metric), window), *by, 'le')})"


def _values(metric: Instrument) -> tuple[str, ...]:
    if isinstance(metric, StateGauge):
        return metric.states
    return metric.values if isinstance(metric, LabelledCounter) else ()
