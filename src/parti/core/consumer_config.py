"""The one place that builds a consumer's configuration, for creation and for updates.

`deliver_policy` is always `all`: it is the only policy that work-queue streams accept and the only one under
which the server lets RESET move a consumer to any sequence. Where to begin is said by RESET, never by the
configuration, so no immutable field ever has to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NANOSECONDS = 1_000_000_000
HOLD = "-hold-"
"""Between the name of a worker's consumer and the rest of the name of a hold (`parti.worker.holds`)."""

# The server refuses an update that changes one of these (nats-server 2.15).
IMMUTABLE_FIELDS = frozenset(
    {
        "name",
        "durable_name",
        "deliver_policy",
        "opt_start_seq",
        "opt_start_time",
        "ack_policy",
        "replay_policy",
        "idle_heartbeat",
        "flow_control",
        "max_waiting",
        "mem_storage",
        "direct",
    }
)


@dataclass(frozen=True, slots=True)
class ConsumerTuning:
    """The tunable part of a consumer, from the settings."""

    ack_wait_s: float
    max_ack_pending: int
    max_waiting: int
    inactive_threshold_s: float


def consumer_name(prefix: str, worker_id: str) -> str:
    """Name (and durable name) of a worker's consumer."""
    return f"{prefix}-{worker_id}"


def worker_of(consumer: str, prefix: str) -> str:
    """Whose consumer or hold this is; empty when it is nobody's of this fleet."""
    rest = consumer.removeprefix(f"{prefix}-")
    return "" if rest == consumer else rest.partition(HOLD)[0]


def build_config(
    name: str,
    subjects: Sequence[str],
    tuning: ConsumerTuning,
    *,
    existing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the configuration of the consumer `name` with exactly these subjects.

    With `existing`, the result is an update of it: every immutable field, and every field that parti does not
    know, keeps its value. `subjects` must not be empty: the server would take that for "all subjects".
    `max_deliver` is unlimited, because a message that the server gives up on is lost without a trace; attempts
    are counted by the worker, which dead-letters.
    """
    if not subjects:
        raise ValueError("a consumer without subjects would receive every message of the stream")
    mutable: dict[str, Any] = {
        "filter_subjects": list(subjects),
        "ack_wait": int(tuning.ack_wait_s * NANOSECONDS),
        "max_ack_pending": tuning.max_ack_pending,
        "max_deliver": -1,
        "inactive_threshold": int(tuning.inactive_threshold_s * NANOSECONDS),
    }
    if existing is not None:
        kept = {k: v for k, v in existing.items() if k not in {"filter_subject", "filter_subjects"}}
        return {**kept, **mutable}
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "max_waiting": tuning.max_waiting,
        "num_replicas": 0,  # as many as the stream has
        **mutable,
    }
