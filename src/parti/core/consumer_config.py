"""The one place that builds a consumer's configuration, for creation and for updates.

`deliver_policy` is always `all`: it is the only policy that work-queue streams accept and the only one under
which the server lets RESET move a consumer to any sequence. Where to begin is said by RESET, never by the
configuration, so no immutable field ever has to change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parti.core.priority import PriorityGroup
from parti.core.shards import MOST_SHARDS

NANOSECONDS = 1_000_000_000
HOLD = "-hold-"
"""Between the name of a worker's consumer and the rest of the name of a hold (`parti.worker.holds`)."""
PREFIX = "parti.prefix"
"""Metadata of all consumers since version 0.1: the prefix of the deployment."""
FLEET = "parti.fleet"
"""Metadata of all consumers since version 0.1: the bucket of the fleet, which two fleets never share."""
SHARD = "parti.shard"
"""Metadata of a worker's second and further consumers: worker id and number, which the name alone leaves open."""

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
    acks: bool = True
    """False on a hot mirror: positions say what is finished, and the server need not keep account of it."""


def consumer_name(prefix: str, worker_id: str, shard: int = 1) -> str:
    """Name (and durable name) of a worker's consumer, or of a further one (`shard`).

    >>> consumer_name("parti", "worker-7"), consumer_name("parti", "worker-7", 2)
    ('parti-worker-7', 'parti-worker-7-2')
    """
    return f"{prefix}-{worker_id}" if shard == 1 else f"{prefix}-{worker_id}-{shard}"


def shard_number(consumer: str, first: str) -> int:
    """Which shard of the worker whose first consumer is `first` a consumer is by its name; 0 for none."""
    number = consumer.removeprefix(f"{first}-")
    found = re.fullmatch("[1-9][0-9]?", number) and 2 <= int(number) <= MOST_SHARDS
    return int(number) if found and number != consumer else 0


def workers_of(consumer: str, prefix: str) -> tuple[str, ...]:
    """Whose consumer, shard or hold this can be, by its name; nothing when it is nobody's of this fleet.

    The second consumer of `worker` and the first of `worker-2` have one name. Which of the two it is, its metadata
    tell (`shard_metadata`).

    >>> workers_of("parti-worker-7", "parti"), workers_of("parti-worker-7-2", "parti"), workers_of("x", "parti")
    (('worker-7', 'worker'), ('worker-7-2', 'worker-7'), ())
    """
    rest = consumer.removeprefix(f"{prefix}-")
    if rest == consumer:
        return ()
    worker = rest.partition(HOLD)[0]
    base, _, _ = worker.rpartition("-")
    return (worker, base) if base and shard_number(worker, base) else (worker,)


def surely_of(worker: str, known: Collection[str]) -> bool:
    """Whether a worker id that was read from a name is one of this fleet.

    Another deployment's prefix may begin with ours: `a-b-worker-0` could be `b-worker-0` of prefix `a`. So it has to
    be an id that workers get by default, or one that the fleet has heard of.

    >>> surely_of("worker-3", ()), surely_of("b-worker-3", ()), surely_of("etch", {"etch"})
    (True, False, True)
    """
    return worker in known or re.fullmatch(r"worker-\d+", worker) is not None


def shard_metadata(worker_id: str, shard: int) -> dict[str, str]:
    """What a worker's consumer says of itself; its first one says nothing."""
    return {SHARD: f"{worker_id}/{shard}"} if shard > 1 else {}


def consumer_metadata(prefix: str, worker_id: str, shard: int, *, fleet: str) -> dict[str, str]:
    """What a worker's consumer says of itself: whose it is, where two deployments could give it the same name."""
    return {**fleet_metadata(prefix, fleet), **shard_metadata(worker_id, shard)}


def fleet_metadata(prefix: str, fleet: str) -> dict[str, str]:
    """What every consumer says that parti makes: prefix and bucket of its fleet.

    The name of the bucket and not its time of creation: a fleet whose bucket was made anew is the same fleet.
    """
    return {PREFIX: prefix, FLEET: fleet}


def fleet_of(config: Mapping[str, Any]) -> str:
    """The fleet that a consumer belongs to, by the mark that it carries; empty when it carries none."""
    return str((config.get("metadata") or {}).get(FLEET, ""))


def is_foreign(config: Mapping[str, Any], fleet: str) -> bool:
    """Whether a consumer carries the mark of another fleet."""
    return fleet_of(config) not in {"", fleet}


def why_not_adopted(config: Mapping[str, Any]) -> str:
    """Why a consumer that carries no mark cannot be taken for one of a worker; empty when it can.

    One that an earlier version made says its prefix. Others have to be of the kind that a worker makes: it could read
    no other, and somebody else reads them.
    """
    if PREFIX in (config.get("metadata") or {}):
        return ""
    if config.get("deliver_subject"):
        return "it is a push consumer"
    for field, wanted in (("ack_policy", "explicit"), ("deliver_policy", "all")):
        if (found := config.get(field, wanted)) != wanted:
            return f"its {field} is {found}, not {wanted}"
    return ""


def owner_of(config: Mapping[str, Any], prefix: str) -> tuple[str, int]:
    """Whose consumer this is, and which shard, by its configuration."""
    worker, _, shard = str((config.get("metadata") or {}).get(SHARD, "")).rpartition("/")
    if worker and shard.isdecimal():
        return worker, int(shard)
    return next(iter(workers_of(str(config.get("name", "")), prefix)), ""), 1


def build_config(
    name: str,
    subjects: Sequence[str],
    tuning: ConsumerTuning,
    *,
    existing: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    group: PriorityGroup | None = None,
) -> dict[str, Any]:
    """Build the configuration of the consumer `name` with exactly these subjects.

    With `existing`, the result is an update of it: every immutable field, every field that parti does not know, and
    the priority group (`group` is for a new consumer) keep their values; `metadata` is added to what it has.
    `subjects` must not be empty: the server would take that for "all subjects". `max_deliver` is unlimited, because a
    message that the server gives up on is lost without a trace; attempts are counted by the worker, which
    dead-letters.
    """
    if not subjects:
        raise ValueError("a consumer without subjects would receive every message of the stream")
    mutable: dict[str, Any] = {
        "filter_subjects": list(subjects),
        "max_deliver": -1,
        "inactive_threshold": int(tuning.inactive_threshold_s * NANOSECONDS),
    }
    if tuning.acks:
        mutable |= {
            "ack_wait": int(tuning.ack_wait_s * NANOSECONDS),
            "max_ack_pending": tuning.max_ack_pending,
        }
    if existing is not None:
        kept = {k: v for k, v in existing.items() if k not in {"filter_subject", "filter_subjects"}}
        said = {"metadata": {**(existing.get("metadata") or {}), **metadata}} if metadata else {}
        return {**kept, **said, **mutable}
    said = {"metadata": dict(metadata)} if metadata else {}
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit" if tuning.acks else "none",
        "replay_policy": "instant",
        "max_waiting": tuning.max_waiting,
        "num_replicas": 0,  # as many as the stream has
        **said,
        **(group.fields() if group else {}),
        **mutable,
    }
