"""The filters of a worker that reads the stream itself: its own ones, or one wide one (`parti.core.cliff`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from parti.core.cliff import Guard, Lag, cover
from parti.errors import NotFound, PartiError
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.streams import list_subjects
from parti.telemetry.metrics import Metrics

_log = structlog.get_logger("parti.widening")
_LOOK_S = 1.0
_LISTED = 4
"""With more than so many times its own subjects in the stream, a worker is not asked whether it has them all: to list
100,000 takes the server 100 ms."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """What is known of the filters that a worker would have, and the way to change them."""

    stream: str
    consumer: str
    subjects: Callable[[], tuple[str, ...]]
    """What it reads."""
    reached: Callable[[], int]
    widen: Callable[[str, str], None]
    """Read through this pattern from now on (empty: through the worker's own filters), for this reason."""
    mirrored: Callable[[], bool]
    """It reads from a hot mirror, where filters are cheap."""
    may_mirror: Callable[[], bool]
    """It can have a hot mirror as soon as it needs one, which is better than to read what is others'."""


class Widening:
    """Runs the guard for one worker until cancelled."""

    def __init__(self, api: JetStreamApi, narrow: Narrow, metrics: Metrics) -> None:
        self.pattern = ""
        """The wide filter in use; empty for none."""
        self._api = api
        self._narrow = narrow
        self._metrics = metrics
        self._guard = Guard()
        self._listed: tuple[tuple[str, ...], int] = ((), -1)
        self._alone = False

    async def run(self) -> None:
        """Look, decide and change the filter until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except PartiError as error:
                _log.debug("the lag cannot be looked at, will try again", error=str(error))

    async def look(self) -> None:
        """Look once."""
        subjects = self._narrow.subjects()
        if self._narrow.mirrored() or len(subjects) < 2:
            self._set("", "one filter for each subject costs nothing now")
            return
        reached = self._narrow.reached()
        stream = await self._api.stream_info(self._narrow.stream)
        behind, pending = stream.last_seq + 1 - reached, 0
        if behind > 0 and not self.pattern and not self._narrow.may_mirror():
            try:
                pending = (await self._api.consumer_info(self._narrow.stream, self._narrow.consumer)).pending
            except NotFound:
                return  # it is being made
        pattern = cover(subjects)
        alone = await self._is_alone(pattern, subjects, stream)
        lag = Lag(time.monotonic(), max(0, behind), pending, stream.num_subjects, len(subjects), alone)
        wide, why = self._guard.widen(lag, wide=bool(self.pattern))
        self._set(pattern if wide else "", why)

    async def _is_alone(self, pattern: str, subjects: tuple[str, ...], stream: StreamInfo) -> bool:
        """Whether nobody else's messages lie under the pattern; asked again when subjects have come or gone."""
        seen = (subjects, stream.num_subjects)
        if seen != self._listed:
            self._listed, self._alone = seen, False
            if stream.num_subjects <= _LISTED * len(subjects):
                listed = await list_subjects(self._api, stream.name, pattern)
                self._alone = listed.complete and listed.subjects <= set(subjects)
        return self._alone

    def _set(self, pattern: str, why: str) -> None:
        if pattern == self.pattern:
            return
        self.pattern = pattern
        self._metrics.wide_filter.value = int(bool(pattern))
        said = "reads through one wide filter" if pattern else "reads through its own filters"
        _log.info(said, filter=pattern, reason=why)
        self._narrow.widen(pattern, why)
