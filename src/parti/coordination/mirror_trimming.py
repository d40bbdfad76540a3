"""Trimming the hot mirror: what every worker has finished need not be kept in memory.

One process at a time does this: the holder of the cleanup role, or a worker on its own. It never drops what somebody
still has to be given (see `parti.core.hot_mirror` for the order of steps that this rests on).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from parti.config import Settings
from parti.core.hot_mirror import OFF, Bounds, MirrorState, mirror_name, trim_to
from parti.core.progress import decode_progress
from parti.errors import ApiError, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.kv import Bucket
from parti.jetstream.mirror import Mirror
from parti.model.fleet import MirrorRecord, decode, encode, key_of

_log = structlog.get_logger("parti.mirror")

KEY = "mirror"
_LOOK_S, _LOOK_FOR_IT_S = 1.0, 5.0


class Trimmer:
    """Trims one mirror; `workers` names those that may be reading it."""

    def __init__(
        self,
        api: JetStreamApi,
        bucket: Bucket,
        settings: Settings,
        stream: str,
        workers: Callable[[], Awaitable[Iterable[str]]],
        *,
        alone: str = "",
    ) -> None:
        self._mirror = Mirror(api, mirror_name(settings.prefix, stream, alone))
        self._bounds = Bounds(settings.hot_mirror_max_bytes, settings.hot_mirror_max_age_s)
        self._off = settings.hot_mirror == OFF
        self._bucket = bucket
        self._workers = workers

    async def run(self) -> None:
        """Trim now and then until cancelled."""
        while not self._off:
            there = False
            try:
                state = await self._mirror.state()
                there = state is not None
                if state:
                    await self.trim(state)
            except PartiError as error:
                _log.debug("the hot mirror cannot be trimmed, will try again", error=str(error))
            await asyncio.sleep(_LOOK_S if there else _LOOK_FOR_IT_S)

    async def trim(self, state: MirrorState) -> int:
        """Trim as far as everybody has got; returns how far that was, 0 if it was not worth it."""
        wanted = trim_to(state, await self._floors(state), self._bounds)
        if not wanted:
            return 0
        await self._announce(MirrorRecord(stream_created=state.origin_created, trim=wanted))
        # Again: somebody may have begun below before it could see the announcement.
        agreed = min(wanted, *await self._floors(state), wanted)
        if agreed > state.begins:
            await self._mirror.trim(agreed)
        return agreed

    async def _floors(self, state: MirrorState) -> list[int]:
        """The stored floors of all workers that have one in this stream."""
        floors = []
        for worker in await self._workers():
            entry = await self._bucket.get(key_of("progress", worker))
            if entry is None or not entry.value:
                continue  # it has not stored a floor, so it does not read from the mirror
            try:
                progress = decode_progress(entry.value)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise ApiError(0, f"the positions of {worker} are unreadable: {error}") from None
            if progress.stream_created == state.origin_created:
                floors.append(progress.floor)
        return floors

    async def _announce(self, record: MirrorRecord) -> None:
        """Write down how far trimming is going to go; never less far than was written before."""
        entry = await self._bucket.get(KEY)
        if entry and entry.value:
            try:
                before = decode(entry.value, MirrorRecord)
            except (msgspec.ValidationError, msgspec.DecodeError):
                before = None
            if before and before.stream_created == record.stream_created and before.trim >= record.trim:
                return
        await self._bucket.put(KEY, encode(record), revision=entry.revision if entry else 0)
