"""Configurations of streams and consumers as the server completes and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parti.model.subjects import first_overlap
from parti.sim.messages import SECOND_NS, RefusalError

if TYPE_CHECKING:
    from parti.sim.streams import Stream

_STREAM_DEFAULTS: dict[str, Any] = {
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120 * SECOND_NS,
    "compression": "none",
    "allow_direct": False,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
}
_STREAM_OPTIONAL = frozenset(
    {"name", "subjects", "subject_delete_marker_ttl", "allow_atomic", "metadata", "description"}
)
_STREAM_FIXED = ("max_consumers", "max_bytes", "max_msg_size", "mirror_direct", "sealed", "deny_purge")
_NEVER_AGED_NS = 24 * 3600 * SECOND_NS
"""No run lasts so long, so messages that may get as old as this are never removed for it."""

_CONSUMER_FIELDS = frozenset(
    {
        "name",
        "durable_name",
        "description",
        "deliver_subject",
        "deliver_policy",
        "opt_start_seq",
        "ack_policy",
        "ack_wait",
        "max_deliver",
        "filter_subject",
        "filter_subjects",
        "replay_policy",
        "max_waiting",
        "max_ack_pending",
        "idle_heartbeat",
        "flow_control",
        "inactive_threshold",
        "num_replicas",
        "mem_storage",
        "metadata",
    }
)
_CONSUMER_METADATA = {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"}
# The server's words for what an update may not change.
_UNCHANGEABLE = {
    "deliver_policy": "deliver policy",
    "mem_storage": "storage type",
    "opt_start_seq": "start sequence",
    "ack_policy": "ack policy",
    "replay_policy": "replay policy",
    "idle_heartbeat": "heart beats",
    "flow_control": "flow control",
    "max_waiting": "max waiting",
}


def stream_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with everything that the server adds; raises for what the model cannot do."""
    unknown = given.keys() - _STREAM_DEFAULTS.keys() - _STREAM_OPTIONAL
    config = {**_STREAM_DEFAULTS, **given}
    unknown |= {key for key in _STREAM_FIXED if config[key] != _STREAM_DEFAULTS[key] and config[key] not in {0, -1}}
    if 0 < config["max_age"] < _NEVER_AGED_NS:
        unknown |= {"max_age"}
    if unknown or not config.get("subjects"):
        raise NotImplementedError(f"the model has no streams with {sorted(unknown) or 'no subjects'}")
    for key in ("max_msgs", "max_msgs_per_subject", "max_consumers", "max_bytes", "max_msg_size"):
        config[key] = config[key] or -1
    config["num_replicas"] = 1
    config["duplicate_window"] = config["duplicate_window"] or 120 * SECOND_NS
    if config.get("subject_delete_marker_ttl"):
        config["allow_msg_ttl"] = config["allow_rollup_hdrs"] = True
    level = "2" if config.get("allow_atomic") else "1" if config["allow_msg_ttl"] else "0"
    config["metadata"] = {**config.get("metadata", {}), **_CONSUMER_METADATA, "_nats.req.level": level}
    optional = ("subject_delete_marker_ttl", "allow_atomic", "description")
    return {key: value for key, value in config.items() if value or key not in optional}


def consumer_config(given: Mapping[str, Any], stream: Stream) -> dict[str, Any]:
    """The configuration with everything that the server adds; raises `RefusalError` for what it refuses."""
    if unknown := given.keys() - _CONSUMER_FIELDS:
        raise NotImplementedError(f"the model has no consumers with {sorted(unknown)}")
    push = bool(given.get("deliver_subject"))
    config: dict[str, Any] = {
        "deliver_policy": "all",
        "ack_policy": "none",
        "replay_policy": "instant",
        "num_replicas": 0,
        **given,
    }
    acks = config["ack_policy"] == "explicit"
    if config["ack_policy"] == "all" or config["replay_policy"] != "instant":
        raise NotImplementedError(
            "the model has consumers with explicit acknowledgement, or none, and instant replay"
        )
    max_deliver = config.get("max_deliver", -1)
    if acks and max_deliver > 0:
        raise NotImplementedError("the model gives up on no message: it wants max_deliver -1")
    config["max_deliver"] = max_deliver if max_deliver > 0 else -1
    if acks:
        config["ack_wait"] = config.get("ack_wait") or 30 * SECOND_NS
        config["max_ack_pending"] = config.get("max_ack_pending") or 1000
    if not push:
        config["max_waiting"] = config.get("max_waiting") or 512
    config["metadata"] = {**config.get("metadata", {}), **_CONSUMER_METADATA}
    _check_filters(config)
    _check_kind(config, stream, push=push, acks=acks)
    return {key: value for key, value in config.items() if value or key == "num_replicas"}


def _check_filters(config: Mapping[str, Any]) -> None:
    many = list(config.get("filter_subjects") or ())
    if config.get("filter_subject") and many:
        raise RefusalError(400, 10136, "consumer cannot have both FilterSubject and FilterSubjects specified")
    if "" in many:
        raise RefusalError(400, 10139, "consumer filter in FilterSubjects cannot be empty")
    if len(set(many)) < len(many) or first_overlap(many):
        raise RefusalError(400, 10138, "consumer subject filters cannot overlap")


def _check_kind(config: Mapping[str, Any], stream: Stream, *, push: bool, acks: bool) -> None:
    if push:
        if config.get("flow_control") and not config.get("idle_heartbeat"):
            raise RefusalError(400, 10108, "consumer with flow control also needs heartbeats")
        return
    if not acks and stream.retention == "workqueue":
        raise RefusalError(400, 10084, "consumer in pull mode requires explicit ack policy on workqueue stream")
    if config.get("idle_heartbeat"):
        raise RefusalError(400, 10088, "consumer idle heartbeat requires a push based consumer")
    if config.get("flow_control"):
        raise RefusalError(400, 10089, "consumer flow control requires a push based consumer")


def refuse_update(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise what the server says when an update changes what cannot be changed."""
    for key, name in _UNCHANGEABLE.items():
        if before.get(key) != after.get(key):
            raise RefusalError(500, 10012, f"{name} can not be updated")
    if before.get("deliver_subject") != after.get("deliver_subject"):
        raise NotImplementedError("the model does not change where a consumer delivers")
