"""Every metric of parti, declared once.

The hot path touches plain Python attributes (`metrics.messages.value += n`); prometheus-client only turns them into
text when a scrape comes. `value += n` is not atomic across threads, so each instrument belongs to one thread: the
runtime counts on its event loop only, never inside a handler's thread. Scrapes read from another thread and may be
one message behind, which is harmless.

Names, types and labels are promises to dashboards and alerts; a test locks them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import ClassVar, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from parti.core.fleet_view import FleetState
from parti.model.fleet import ROLES
from parti.version import __version__

_log = structlog.get_logger("parti.telemetry.metrics")

PULL_STATUS: Mapping[int, str] = MappingProxyType(
    {
        100: "heartbeat",
        400: "bad_request",
        404: "no_messages",
        408: "expired",
        409: "conflict",
        423: "wrong_pin",
        503: "no_responders",
    }
)
"""The label of each status that answers a pull; count others as `other`."""

_HANDLER_BOUNDS_S = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_UPDATE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_JOB_BOUNDS_S = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)


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


_I = TypeVar("_I", bound=Instrument)


class Metrics(Collector):
    """All instruments of one worker; `registry` exposes them to prometheus-client.

    Collecting never raises and never blocks the event loop. Use one per registry, since a registry cannot hold
    the same names twice.
    """

    def __init__(self, worker_id: str, *, per_partition: bool = False) -> None:
        self.worker_id = worker_id
        self._instruments: dict[str, Instrument] = {}
        self._declare_consumer()
        self._declare_handlers(per_partition)
        self._declare_pulls()
        self._declare_worker()
        self._declare_fleet()
        self._declare_jobs()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def _declare_consumer(self) -> None:
        add = self._add
        self.messages = add(Counter("parti_consumer_messages_total", "Messages received from the server."))
        self.redeliveries = add(
            Counter("parti_consumer_redeliveries_total", "Messages received that had been delivered before.")
        )
        self.skipped = add(
            Counter(
                "parti_consumer_skipped_total",
                "Deliveries below the position, acknowledged without being handled again.",
            )
        )
        self.inflight = add(
            Gauge("parti_consumer_inflight", "Messages received and not yet acknowledged or given back.")
        )
        self.update_duration = add(
            Histogram(
                "parti_consumer_update_duration_seconds",
                "Time that an update of the consumer's subjects took.",
                _UPDATE_BOUNDS_S,
            )
        )
        self.inflight_limit = add(
            Gauge("parti_consumer_inflight_limit", "Messages in flight at which pulling pauses; 0 before it began.")
        )
        self.lag = add(
            Gauge(
                "parti_consumer_lag", "Messages that the server has not delivered yet, as it said at the last look."
            )
        )
        self.subject_count = add(Gauge("parti_consumer_subject_count", "Subjects in the consumer's filter."))
        self.subject_limit = add(
            Gauge("parti_consumer_subject_limit", "Most subjects that the worker's consumers may carry; 0 before.")
        )
        self.update_failures = add(
            Counter("parti_consumer_update_failures_total", "Consumer updates that failed after all tries.")
        )
        self.update_skipped = add(
            Counter("parti_consumer_update_skipped_total", "Consumer updates not sent: nothing had changed.")
        )
        self.update_changes = add(
            LabelledCounter(
                "parti_consumer_update_changes_total",
                "Subjects added to and removed from the consumer.",
                "change",
                ("added", "removed"),
            )
        )
        self.duplicate_subjects = add(
            Counter(
                "parti_consumer_duplicate_subjects_total",
                "Anomaly: subjects found more than once where each must be unique.",
            )
        )
        self.recreated = add(
            Counter("parti_consumer_recreated_total", "Times the consumer was gone and was made again.")
        )
        self.resets = add(
            LabelledCounter("parti_consumer_resets_total", "Times the consumer was set back to a position.", "reason")
        )
        self.wide_filter = add(
            Gauge("parti_consumer_wide_filter", "1 while one wide filter stands for the worker's own ones.")
        )
        self.mirror_inside = add(Gauge("parti_mirror_inside", "1 while the consumer is on the hot mirror."))
        self.mirror_bytes = add(Gauge("parti_mirror_bytes", "Bytes in the hot mirror, as seen at the last look."))
        self.mirror_limit = add(
            Gauge("parti_mirror_limit_bytes", "Most bytes that the hot mirror may hold; 0 where none is used.")
        )
        self.mirror_moves = add(
            LabelledCounter(
                "parti_mirror_moves_total",
                "Times the consumer changed between the stream and its hot mirror, or began anew on it.",
                "move",
                ("enter", "leave", "rebuild", "make room"),
            )
        )

    def _declare_handlers(self, per_partition: bool) -> None:
        add = self._add
        self.handler_latency = add(
            Histogram(
                "parti_handler_latency_seconds",
                "Time from the start of a handler call to its end.",
                _HANDLER_BOUNDS_S,
            )
        )
        self.handler_failures = add(
            LabelledCounter(
                "parti_handler_failures_total",
                "Handler calls that failed, by what followed.",
                "outcome",
                ("retry", "dead_letter", "timeout", "reject"),
            )
        )
        self.handler_running = add(Gauge("parti_handler_running", "Handler calls running now."))
        self.lane_depth = add(Gauge("parti_lane_depth", "Messages waiting in lanes for their handler."))
        self.lane_count = add(Gauge("parti_lane_count", "Lanes, one for each active partition."))
        self.parked = add(Counter("parti_lane_parked_total", "Times a partition did not move and was parked."))
        self.move_duration = add(
            Histogram(
                "parti_move_seconds",
                "Time from the order to move a partition until the next owner has it; seen by the rebalancer.",
                _UPDATE_BOUNDS_S,
            )
        )
        self.state_duration = add(
            Histogram("parti_state_seconds", "Seconds to save or restore the state of a partition.", _UPDATE_BOUNDS_S)
        )
        self.state_bytes = add(Counter("parti_state_bytes_total", "Bytes of state saved."))
        self.state_failures = add(
            Counter("parti_state_failures_total", "States that could not be saved or restored; tried again.")
        )
        self.dead_letters = add(Counter("parti_dead_letters_total", "Messages published as dead letters."))
        self.acks = add(Counter("parti_acks_total", "Acknowledgements sent."))
        self.partition_messages = add(
            LabelledCounter(
                "parti_partition_messages_total",
                "Messages received by partition; only with metrics_per_partition.",
                "partition",
                exported=per_partition,
            )
        )

    def _declare_pulls(self) -> None:
        add = self._add
        self.pull_healthy = add(Gauge("parti_pull_healthy", "1 while pulls are answered or heartbeats come."))
        self.pull_requests = add(Counter("parti_pull_requests_total", "Pull requests sent."))
        self.pull_status = add(
            LabelledCounter(
                "parti_pull_status_total",
                "Status messages that answered a pull.",
                "status",
                (*PULL_STATUS.values(), "other"),
            )
        )
        self.pull_missed_heartbeats = add(
            Counter("parti_pull_missed_heartbeats_total", "Times that idle heartbeats stayed away.")
        )
        self.pull_batch_size = add(Gauge("parti_pull_batch_size", "Messages that one pull request asks for."))
        self.pull_credit = add(Gauge("parti_pull_credit", "Messages asked for and not yet received."))
        self.pinned = add(Gauge("parti_pinned", "1 while this client believes that it is pinned."))
        self.pins_taken = add(Counter("parti_pins_taken_total", "Times the server has pinned this client."))
        self.pins_lost = add(Counter("parti_pins_lost_total", "Times this client found its pin gone."))
        self.pin_switches = add(
            Counter("parti_pin_switches_total", "Times any client of the watched groups was pinned; by advisories.")
        )

    def _declare_worker(self) -> None:
        add = self._add
        self.progress_writes = add(Counter("parti_progress_writes_total", "Writes of changed positions."))
        self.progress_failures = add(Counter("parti_progress_failures_total", "Such writes that failed."))
        self.ledger_rows = add(Counter("parti_ledger_rows_total", "Rows that the ledger stream has stored."))
        self.ledger_bytes = add(Counter("parti_ledger_bytes_total", "Bytes of their batches."))
        self.ledger_failures = add(
            Counter("parti_ledger_failures_total", "Batches that the ledger stream did not take; tried again.")
        )
        self.ledger_duration = add(
            Histogram(
                "parti_ledger_flush_seconds",
                "Time from the end of a ledger batch until it is stored.",
                _UPDATE_BOUNDS_S,
            )
        )
        self.connection_state = add(
            StateGauge(
                "parti_connection_state",
                "1 for the current state of the connection.",
                "state",
                ("connected", "suspended", "lost"),
            )
        )
        self.reconnects = add(Counter("parti_reconnects_total", "Times the connection came back."))
        self.build_info = add(
            StateGauge("parti_build_info", "Always 1; the label tells the version.", "version", (__version__,))
        )
        self.build_info.set(__version__)
        self.started = add(
            Gauge("parti_started_timestamp_seconds", "When this worker began to count, in seconds since 1970.")
        )
        self.started.value = time.time()

    def _declare_fleet(self) -> None:
        add = self._add
        self.fleet_state = add(
            StateGauge("parti_fleet_state", "1 for what this worker is doing.", "state", tuple(FleetState))
        )
        self.leading = add(Gauge("parti_leading", "1 while this worker is the rebalancer."))
        self.standby = add(
            Gauge("parti_standby", "1 in a process that shares its worker id with others, waiting or at work.")
        )
        self.elections = add(LabelledCounter("parti_elections_total", "Elections won.", "role", ROLES))
        self.lease_renewals = add(Counter("parti_lease_renewals_total", "Renewals of the worker id's lease."))
        self.lease_losses = add(
            LabelledCounter(
                "parti_lease_losses_total",
                "Times the worker id was lost or the control plane was reset.",
                "cause",
                ("ended", "reset"),
            )
        )
        self.assignment_changes = add(
            Counter("parti_assignment_changes_total", "Assignments taken over by this worker.")
        )
        self.hook_failures = add(Counter("parti_hook_failures_total", "Hooks of the user that raised."))
        self.fleet_workers = add(Gauge("parti_fleet_workers", "Workers in the fleet; told by the monitor."))
        self.fleet_partitions = add(Gauge("parti_fleet_partitions", "Partitions claimed; told by the monitor."))
        self.fleet_unowned = add(
            Gauge("parti_fleet_unowned_partitions", "Partitions without a live owner; told by the monitor.")
        )
        self.fleet_moving = add(
            Gauge("parti_fleet_moving_partitions", "Partitions on the move; told by the monitor.")
        )
        self.claims_given = add(
            LabelledCounter(
                "parti_claims_given_total",
                "Claims written by this rebalancer.",
                "kind",
                ("new", "moved", "kept"),
            )
        )
        self.claim_failures = add(Counter("parti_claim_failures_total", "Claims that somebody else had changed."))
        self.history_lost = add(
            Counter("parti_history_lost_total", "Changes of owners that could not be recorded for `parti explain`.")
        )

    def _declare_jobs(self) -> None:
        add = self._add
        self.jobs_held = add(Gauge("parti_jobs_held", "Jobs that this worker has received and not yet settled."))
        self.jobs_running = add(Gauge("parti_jobs_running", "Jobs whose handler runs now, waiting for slots or not."))
        self.jobs_slots = add(Gauge("parti_jobs_slots", "Slots that there are for the work of jobs."))
        self.jobs_slots_used = add(Gauge("parti_jobs_slots_used", "Slots in use."))
        self.jobs_slot_queue = add(Gauge("parti_jobs_slot_queue", "Pieces of work that wait for slots."))
        self.jobs_slot_wait = add(
            Histogram("parti_jobs_slot_wait_seconds", "Time from asking for slots to having them.", _JOB_BOUNDS_S)
        )
        self.jobs_duration = add(
            Histogram("parti_jobs_duration_seconds", "Time from the start of a job to its end.", _JOB_BOUNDS_S)
        )
        self.jobs_ended = add(
            LabelledCounter(
                "parti_jobs_ended_total",
                "Jobs that this worker has settled, by how.",
                "outcome",
                ("done", "retry", "failed", "cancelled", "given_back", "elsewhere", "repeated"),
            )
        )
        self.jobs_heartbeats = add(
            Counter("parti_jobs_heartbeats_total", "Times the server was told that a job is still worked on.")
        )
        self.jobs_recognised = add(
            Counter(
                "parti_jobs_recognised_total", "Deliveries of jobs that run here already, and were not started again."
            )
        )
        self.jobs_writes = add(Counter("parti_jobs_record_writes_total", "Writes of job records."))

    def _add(self, instrument: _I) -> _I:
        assert instrument.name not in self._instruments, instrument.name
        self._instruments[instrument.name] = instrument
        return instrument

    @property
    def declared(self) -> tuple[Instrument, ...]:
        """All instruments in the order of their declaration, exported or not."""
        return tuple(self._instruments.values())

    def set_probe(self, name: str, probe: Callable[[], float]) -> None:
        """Let `probe` compute the gauge `name` (its exported name) at each scrape.

        It runs in the scrape's thread, so it must only read. Raises KeyError for a name that is not a gauge.
        """
        gauge = self._instruments.get(name)
        if not isinstance(gauge, Gauge):
            raise KeyError(f"no gauge named {name!r}")
        gauge.probe = probe

    def collect(self) -> Iterator[Metric]:
        """Yield the current state of every exported metric."""
        for instrument in self._instruments.values():
            if not isinstance(instrument, LabelledCounter) or instrument.exported:
                yield instrument.export(self.worker_id)


def metrics_table(instruments: Iterable[Instrument]) -> list[str]:
    """The lines of a table of metrics as Markdown."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for each in instruments:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return lines
