"""Every metric of parti, declared once.

Names, types and labels are promises to dashboards and alerts; a test locks them. What an instrument is, and which
thread may count on it, is in `instruments`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from parti.core.fleet_view import FleetState
from parti.core.stall import StallKind
from parti.model.fleet import ROLES
from parti.telemetry.instruments import Counter, Gauge, Histogram, Instrument, LabelledCounter, StateGauge
from parti.telemetry.refusals import KINDS, Refusals
from parti.version import __version__

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
        self.stalled = add(
            Gauge("parti_stalled", "1 while this worker should make progress and makes none; see `stall_after_s`.")
        )
        self.stalls = add(
            LabelledCounter(
                "parti_stalls_total", "Times this worker was found to stand still.", "kind", tuple(StallKind)
            )
        )
        self.task_deaths = add(
            LabelledCounter(
                "parti_task_deaths_total",
                "Anomaly: background tasks that died of an error that nobody had foreseen, restarted or not.",
                "task",
            )
        )
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
        self.records_refused = add(
            LabelledCounter(
                "parti_records_refused_total",
                "Values in the bucket, or in the history, that are not the record that belongs there.",
                "kind",
                KINDS,
            )
        )
        self.refusals = Refusals(self.records_refused)
        """Where readers report them."""
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
