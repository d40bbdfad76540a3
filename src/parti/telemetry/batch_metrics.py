"""Metrics of commands that end, such as `parti audit`: written to a file that a collector of text files picks up.

Declared here as those of workers are in `parti.telemetry.metrics`: names and labels are promises to dashboards. Each
has the label `stream`. A file is replaced as a whole, so that nobody ever reads half of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from parti.errors import ConfigError
from parti.telemetry.instruments import Instrument


class BatchGauge(Instrument):
    """What a command found out about a stream, and by one more label where there is one; absent until it is set."""

    __slots__ = ("_values",)
    kind = "gauge"

    def __init__(self, name: str, help: str, label: str | None = None) -> None:
        super().__init__(name, help, label)
        self._values: dict[tuple[str, ...], float] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the exported labels."""
        return ("stream",) if self.label is None else ("stream", self.label)

    def set(self, value: float, stream: str, label: str = "") -> None:
        """Say what was found."""
        self._values[(stream, label) if self.label else (stream,)] = value

    def export(self, worker: str) -> Metric:
        """Return one sample for each stream and label value; no worker has found them."""
        family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


_I = TypeVar("_I", bound=Instrument)


class BatchMetrics(Collector):
    """All instruments of commands that end."""

    def __init__(self) -> None:
        self._instruments: list[Instrument] = []
        self.audit_violations = self._add(
            BatchGauge("parti_audit_violations", "Violations of a promise that the last audit found.", "invariant")
        )
        self.audit_messages = self._add(BatchGauge("parti_audit_messages", "Stored messages that it looked at."))
        self.audit_finished = self._add(
            BatchGauge("parti_audit_finished_timestamp_seconds", "When it ended, in seconds since 1970.")
        )
        self.pipeline_lag = self._add(
            BatchGauge(
                "parti_pipeline_lag", "Messages (silver: rows of bronze) that a table has not taken in.", "table"
            )
        )
        self.pipeline_rows = self._add(BatchGauge("parti_pipeline_rows", "Rows of a table.", "table"))
        self.pipeline_looked = self._add(
            BatchGauge("parti_pipeline_looked_timestamp_seconds", "When that was looked up, in seconds since 1970.")
        )

    def _add(self, instrument: _I) -> _I:
        self._instruments.append(instrument)
        return instrument

    @property
    def declared(self) -> tuple[Instrument, ...]:
        """All instruments in the order of their declaration."""
        return tuple(self._instruments)

    def collect(self) -> Iterator[Metric]:
        """Yield what was set."""
        for instrument in self._instruments:
            family = instrument.export("")
            if family.samples:
                yield family

    def write(self, path: Path) -> None:
        """Replace the file by what was set; `ConfigError` when that is not possible."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            write_to_textfile(str(path), registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics {path} cannot be written: {error.strerror or error}; name a file in a directory that "
                f"exists and is yours to write to"
            ) from None


def check_metrics_file(path: Path | None) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--metrics {path} is no file in a directory that exists; create the directory first")
    if path.suffix != ".prom":
        raise ConfigError(f"--metrics {path} must end in .prom, or the collector of text files does not see it")
