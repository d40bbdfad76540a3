"""What stands in for parts of parti during runs: the network, and what would only cost time or spoil the order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

from parti.app import worker as worker_module
from parti.coordination import candidacy as candidacy_module
from parti.core.lane import Lane
from parti.jetstream import connection as connection_module
from parti.jetstream import pull as pull_module
from parti.model.fleet import Role
from parti.sim.client import SimClient, SimWire
from parti.sim.loop import VirtualLoop
from parti.sim.patches import Patches, simulated
from parti.worker import parking as parking_module
from parti.worker import runners as runners_module


@contextmanager
def simulation(logger: object | None = None) -> Iterator[Patches]:
    """Everything that is needed to run worlds, as many as one likes, one after the other."""
    with simulated(logger) as patches:
        patches.set(connection_module, "MendedClient", SimClient)
        patches.set(worker_module, "Wire", SimWire)
        patches.set(worker_module, "MicroService", _NoService)
        patches.set(worker_module, "Watchdog", _NoWatchdog)
        patches.set(candidacy_module, "ROLES", _roles)
        patches.set(runners_module, "_Runner", _NumberedRunner)
        patches.set(Lane, "__hash__", lambda lane: crc32(lane.ownership.partition.id.encode()))
        patches.set(pull_module, "_ADAPT_INTERVAL_S", 0.25)
        patches.set(parking_module, "_LOOK_INTERVAL_S", 0.5)
        enabled = gc.isenabled()
        # A collection at a moment that no seed decides would run the `finally` blocks of dead processes.
        gc.disable()
        try:
            yield patches
        finally:
            if enabled:
                gc.enable()


_roles: list[Role] = []


def stand_for(roles: Sequence[Role]) -> None:
    """Let workers stand for these roles only; the lesser ones decide nothing and cost a third of a run's time."""
    _roles[:] = roles


class _NumberedRunner(runners_module._Runner):
    """A runner whose place in a set does not depend on its address; lanes get the same by their partition."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._number = loop.callbacks

    def __hash__(self) -> int:
        return self._number


class _NoWatchdog:
    """In place of the watchdog: its thread lives in real time."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        """Watch nothing."""

    def stop(self) -> None:
        """There is nothing to stop."""


class _NoService:
    """In place of the micro service: nobody asks it, and each worker would make nine subscriptions."""

    id = "none"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def start(self) -> None:
        """Answer nothing."""

    async def stop(self) -> None:
        """There is nothing to stop."""
