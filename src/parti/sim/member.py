"""One process of a simulated fleet: a real worker, from its start to its end, and the settings that it runs with."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import TYPE_CHECKING

from parti.app.worker import Worker
from parti.config import Settings
from parti.errors import PartiError
from parti.sim.process import Process
from parti.sim.scenario import Scenario

if TYPE_CHECKING:
    from parti.sim.world import World

BUCKET, DEAD_LETTERS = "fleet", "dead"
AGAIN_S = 0.5
"""After so long a supervisor starts a process again that could not start, or that was killed by a message."""
_ATTEMPTS = 2


class Member:
    """One process of the fleet and the worker in it."""

    def __init__(self, world: World, process: Process, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.worker: Worker | None = None
        """None until it has started."""
        self.leaving = False
        self._world = world
        self._settings = world.settings
        if world.scenario.timing.identities:
            self._settings = world.settings.model_copy(update={"identity": f"slot-{slot}"})
        self._started = asyncio.Event()

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.process.name

    @property
    def owned(self) -> list[str]:
        """The partitions that its worker owns; none when the process is gone."""
        if self.process.gone or self.worker is None:
            return []
        return [partition.id for partition in self.worker.partitions]

    async def live(self) -> None:
        """Start the worker; what cannot start is started again by its supervisor."""
        while self.worker is None:
            worker = Worker(self._settings, self._world.job)
            try:
                await worker.start()
                self.worker = worker
            except PartiError as error:
                self._world.history.note(f"cannot start: {error}", self.name)
                await asyncio.sleep(AGAIN_S)
        self._started.set()

    async def leave(self) -> None:
        """Stop the worker in order and end the process."""
        await self._started.wait()
        assert self.worker
        clean = False
        try:
            clean = await self.worker.stop()
        finally:
            self._end(clean)

    def _end(self, clean: bool) -> None:
        self._world.history.note("has left" if clean else "has left, but could not store everything", self.name)
        if not clean:
            self._world.history.died(self.name)
        self.process.crash()


def make_settings(scenario: Scenario) -> Settings:
    """The settings of every worker of a run: as in production, but with short times."""
    timing = scenario.timing
    return _base_settings().model_copy(
        update={
            "lease_ttl_s": timing.lease_ttl_s,
            "leader_ttl_s": timing.leader_ttl_s,
            "scale_window_s": timing.scale_window_s,
            "cold_start_window_s": timing.cold_start_window_s,
            "min_rebalance_interval_s": timing.min_rebalance_interval_s,
            "progress_interval_s": timing.progress_interval_s,
            "update_min_interval_s": timing.update_min_interval_s,
            "ack_wait_s": timing.ack_wait_s,
            "pull_batch": timing.pull_batch,
            "max_ack_pending": timing.max_ack_pending,
            "rejoin_s": timing.rejoin_s,
        }
    )


@cache
def _base_settings() -> Settings:
    return Settings.model_construct(
        bucket=BUCKET,
        prefix="sim",
        attempts=_ATTEMPTS,
        backoff_s=(0.1,),
        dead_letter_stream="DEAD",
        dead_letter_subject=DEAD_LETTERS,
        ping_interval_s=0.4,
        reconnect_wait_s=0.1,
        lost_after_s=2.0,
        connect_timeout_s=5.0,
        pull_heartbeat_s=0.5,
        pull_expires_s=5.0,
        drain_timeout_s=3.0,
        hot_mirror="off",  # the model of the server has no mirrors
        history=False,  # nor streams whose messages expire
    )
