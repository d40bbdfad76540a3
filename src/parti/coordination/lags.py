"""What the workers' consumers have not delivered yet, as the server counts it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from parti.coordination.orders import Situation
from parti.core.consumer_config import owner_of
from parti.core.hot_mirror import mirror_name
from parti.errors import NotFound, PartiError
from parti.jetstream.api import JetStreamApi


@dataclass(slots=True)
class Lags:
    """What the server says of the workers' consumers, on the stream and on its hot mirror."""

    api: JetStreamApi
    by_worker: dict[str, int] = field(default_factory=dict)
    trouble: str = ""

    async def read(self, situation: Situation) -> None:
        """Ask again; trouble is told and changes nothing."""
        fleet = situation.fleet
        if fleet is None:
            return
        lags: dict[str, tuple[str, int]] = {}
        try:
            # Who reads the mirror has a consumer of the same name on the stream, which it does not read.
            for name in (fleet.stream, mirror_name(fleet.prefix, fleet.stream)):
                with contextlib.suppress(NotFound):
                    for info in await self.api.consumers(name):
                        worker, _ = owner_of(info.config, fleet.prefix)
                        lags[str(info.config.get("name", ""))] = (worker, info.pending)
        except PartiError as error:
            self.trouble = f"lags are not known: {error}"
            return
        self.trouble = ""
        self.by_worker = dict.fromkeys((worker for worker, _ in lags.values() if worker), 0)
        for worker, pending in lags.values():
            if worker:
                self.by_worker[worker] += pending
