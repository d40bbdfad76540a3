"""How far a worker's consumers are behind the stream, as the server counts, for the metric of that."""

from __future__ import annotations

import asyncio

import structlog

from parti.errors import PartiError
from parti.telemetry.instruments import Gauge
from parti.worker.shards import Shards

_log = structlog.get_logger("parti.lag")

LOOK_S = 10.0
"""Between two looks: a request for each consumer, and Prometheus seldom asks more often."""


async def keep_lag(shards: Shards, lag: Gauge) -> None:
    """Ask again and again what each consumer has not delivered yet; an answer that fails leaves the last one."""
    try:
        while True:
            try:
                found = [await vehicle.find() for vehicle in shards.vehicles]
                lag.value = sum(info.pending for info in found if info)
            except PartiError as error:
                _log.debug("the lag is not known at present", error=str(error))
            await asyncio.sleep(LOOK_S)
    finally:
        lag.value = 0  # whoever has the partitions next tells
