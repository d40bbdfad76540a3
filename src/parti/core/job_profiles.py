"""Tuning by the size of the machine, the length of the jobs and how often they come: tables, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BATCH_BY_MACHINE: Mapping[str, int] = MappingProxyType({"small": 2, "medium": 5, "large": 10})
"""`fetch_batch_size`."""
HEARTBEAT_BY_LENGTH_S: Mapping[str, float] = MappingProxyType({"short": 30.0, "long": 60.0, "very-long": 60.0})
"""`heartbeat_interval_s`."""
ACK_WAIT_BY_LENGTH_MIN: Mapping[str, float] = MappingProxyType({"short": 5.0, "long": 15.0, "very-long": 30.0})
"""`ack_wait_minutes`."""
TIMEOUT_BY_TRAFFIC_S: Mapping[str, float] = MappingProxyType({"low": 5.0, "normal": 2.0, "high": 1.0})
"""`fetch_timeout_s`."""
_SMALL_CORES, _LARGE_CORES = 4, 16
HEARTBEATS_IN_ACK_WAIT = 10
"""ack_wait must be at least so many heartbeat intervals."""


def machine_size(cores: int | None) -> str:
    """The profile of a machine: up to 4 cores, 5 to 15, 16 and more. An unknown number is the middle.

    >>> machine_size(2), machine_size(8), machine_size(32), machine_size(None)
    ('small', 'medium', 'large', 'medium')
    """
    if cores is None:
        return "medium"
    return "small" if cores <= _SMALL_CORES else "large" if cores >= _LARGE_CORES else "medium"


def tuned(values: Mapping[str, object], cores: int | None) -> dict[str, object]:
    """The settings, with what was left out taken from the tables; names that no table has are left to be refused."""
    given = {name: value for name, value in values.items() if value is not None}
    machine = given.get("profile", "auto")
    machine = machine_size(cores) if machine == "auto" else machine
    length, traffic = given.get("length", "short"), given.get("traffic", "normal")
    capacity = given.get("max_capacity")
    batch = BATCH_BY_MACHINE.get(str(machine))
    if batch is not None and str(capacity).isdecimal():
        batch = max(1, min(batch, int(str(capacity))))
    chosen = {
        "fetch_batch_size": batch,
        "heartbeat_interval_s": HEARTBEAT_BY_LENGTH_S.get(str(length)),
        "ack_wait_minutes": ACK_WAIT_BY_LENGTH_MIN.get(str(length)),
        "fetch_timeout_s": TIMEOUT_BY_TRAFFIC_S.get(str(traffic)),
    }
    return {**{name: value for name, value in chosen.items() if value is not None}, **given}
