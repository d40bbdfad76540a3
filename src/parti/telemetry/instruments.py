"""Instruments: what a worker counts and measures with, made so that counting costs next to nothing.

The hot path touches plain Python attributes (`metrics.messages.value += n`); prometheus-client only turns them into
text when a scrape comes. `value += n` is not atomic across threads, so each instrument belongs to one thread: the
runtime counts on its event loop only, never inside a handler's thread. Scrapes read from another thread and may be
one message behind, which is harmless.

Which ones there are, and under which names, is declared in `metrics` and `batch_metrics` alone. Guarded here: a
probe that fails costs its own sample, never the scrape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import ClassVar

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

_log = structlog.get_logger("parti.telemetry.metrics")


class Instrument(ABC):
    """What all instruments share: the exported name, its meaning, and the labels besides `worker`."""

    __slots__ = ("help", "label", "name")
    kind: ClassVar[str]

    def __init__(self, name: str, help: str, label: str | None = None) -> None:
        self.name = name
        self.help = help
        self.label = label

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the exported labels."""
        return ("worker",) if self.label is None else ("worker", self.label)

    @abstractmethod
    def export(self, worker: str) -> Metric:
        """Return the current state in prometheus-client's terms; called at scrape time."""


class Counter(Instrument):
    """A number that only grows: `counter.value += n` on the hot path, `inc` elsewhere."""

    __slots__ = ("value",)
    kind = "counter"

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help)
        self.value = 0

    def inc(self, n: int = 1) -> None:
        """Add `n`."""
        self.value += n

    def export(self, worker: str) -> Metric:
        """Return one sample."""
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        family.add_metric((worker,), self.value)
        return family


class LabelledCounter(Instrument):
    """Counters told apart by one label with few values.

    Declared values exist from the start, so that their rates are defined; others appear when first counted. For a
    hot path, keep what `child` returns and add to its `value`. If not exported, counting is accepted and dropped.
    """

    __slots__ = ("_children", "_dropped", "exported")
    kind = "counter"

    def __init__(
        self, name: str, help: str, label: str, values: Iterable[str] = (), *, exported: bool = True
    ) -> None:
        super().__init__(name, help, label)
        self.exported = exported
        self._dropped = Counter(name, help)
        self._children = {value: Counter(name, help) for value in values}

    @property
    def values(self) -> tuple[str, ...]:
        """The label values that there are."""
        return tuple(self._children)

    @property
    def total(self) -> int:
        """All label values together."""
        return sum(counter.value for counter in self._children.values())

    def child(self, value: str) -> Counter:
        """Return the counter of one label value, made when first asked for."""
        if not self.exported:
            return self._dropped
        counter = self._children.get(value)
        if counter is None:
            counter = self._children[value] = Counter(self.name, self.help)
        return counter

    def inc(self, value: str, n: int = 1) -> None:
        """Add `n` to the counter of one label value."""
        self.child(value).value += n

    def remove(self, value: str) -> None:
        """Stop exporting one label value, such as a partition that moved away."""
        self._children.pop(value, None)

    def export(self, worker: str) -> Metric:
        """Return one sample for each label value."""
        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for value, counter in list(self._children.items()):
            family.add_metric((worker, value), counter.value)
        return family


class Gauge(Instrument):
    """A number that goes up and down: set `value`, or let a probe compute it at scrape time."""

    __slots__ = ("_probe_failed", "probe", "value")
    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help)
        self.value: float = 0
        self.probe: Callable[[], float] | None = None
        self._probe_failed = False

    def export(self, worker: str) -> Metric:
        """Return one sample; none if the probe fails, which is logged once and never breaks the scrape."""
        family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        try:
            family.add_metric((worker,), float(self.value if self.probe is None else self.probe()))
        except Exception:
            if not self._probe_failed:
                self._probe_failed = True
                _log.exception("metric probe failed", metric=self.name)
        return family


class StateGauge(Instrument):
    """Which of a few states holds: 1 for the current one, 0 for the others, all 0 before the first `set`."""

    __slots__ = ("current", "states")
    kind = "gauge"

    def __init__(self, name: str, help: str, label: str, states: tuple[str, ...]) -> None:
        super().__init__(name, help, label)
        self.states = states
        self.current: str | None = None

    def set(self, state: str) -> None:
        """Make `state` the current one; raises ValueError for a state that was not declared."""
        if state not in self.states:
            raise ValueError(f"{self.name} has no state {state!r}; expected one of {', '.join(self.states)}")
        self.current = state

    def export(self, worker: str) -> Metric:
        """Return one sample for each state."""
        family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        current = self.current
        for state in self.states:
            family.add_metric((worker, state), float(state == current))
        return family


class Histogram(Instrument):
    """Counts observations in buckets with fixed upper bounds."""

    __slots__ = ("bounds", "counts", "sum")
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, help)
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count `value` in its bucket; on the event loop only."""
        self.counts[0 if value <= self.bounds[0] else bisect_left(self.bounds, value)] += 1
        self.sum += value

    def export(self, worker: str) -> Metric:
        """Return the cumulative buckets and the sum."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        buckets = list(zip(names, accumulate(list(self.counts)), strict=True))
        family.add_metric((worker,), buckets, self.sum)
        return family
