"""Keeping the hot mirror: what every worker has finished is dropped from it, and a full one is made anew further on.

One process at a time does this: the holder of the cleanup role, or a worker on its own. It never drops what somebody
still has to be given (see `parti.core.hot_mirror` for the order of steps that this rests on).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from parti.config import Settings
from parti.core.hot_mirror import OFF, Bounds, Keeper, MirrorState, Readers, Upkeep, mirror_config, mirror_name
from parti.core.progress import decode_progress
from parti.errors import DecodeError, PartiError
from parti.jetstream.api import JetStreamApi
from parti.jetstream.kv import Bucket
from parti.jetstream.mirror import Mirror
from parti.model.fleet import MirrorRecord, decode, encode, key_of
from parti.telemetry.refusals import Refusals

_log = structlog.get_logger("parti.mirror")

KEY = "mirror"
_LOOK_S, _LOOK_FOR_IT_S, _LOOK_PRESSED_S = 1.0, 5.0, 0.25
_FILL_S, _FILL_LOOK_S = 3.0, 0.1


class MirrorKeeper:
    """Keeps one mirror; `workers` names those that may be reading it."""

    def __init__(
        self,
        api: JetStreamApi,
        bucket: Bucket,
        settings: Settings,
        stream: str,
        workers: Callable[[], Awaitable[Iterable[str]]],
        refusals: Refusals,
        *,
        alone: str = "",
    ) -> None:
        self._api = api
        self._stream = stream
        self._mirror = Mirror(api, mirror_name(settings.prefix, stream, alone))
        self._settings = settings
        self._bounds = Bounds(settings.hot_mirror_max_bytes, settings.hot_mirror_max_age_s)
        self._bucket = bucket
        self._workers = workers
        self._refusals = refusals
        self._keeper = Keeper(self._bounds)

    async def run(self) -> None:
        """Look after it until cancelled."""
        while self._settings.hot_mirror != OFF:
            wait_s = _LOOK_FOR_IT_S
            try:
                if state := await self._mirror.state():
                    await self.keep(state)
                    wait_s = _LOOK_PRESSED_S if self._bounds.pressed(state) else _LOOK_S
            except PartiError as error:
                _log.debug("the hot mirror cannot be looked after, will try again", error=str(error))
            await asyncio.sleep(wait_s)

    async def keep(self, state: MirrorState) -> Upkeep:
        """Do what it needs now; returns what that was."""
        now_s = time.monotonic()
        stream = await self._api.stream_info(self._stream)
        if self._keeper.stands_still(state, stream.last_seq, now_s):
            readers = Readers(await self._needs(state), await self._mirror.unread())
            upkeep = self._keeper.has_stopped(state, readers, now_s)
        else:
            upkeep = self._keeper.follows(state, Readers(await self._needs(state)), now_s)
        if upkeep.remake:
            await self._remake(state, upkeep.remake)
        elif upkeep.drop:
            _log.info("hot mirror deleted: it stands still and nobody reads it", mirror=self._mirror.name)
            await self._mirror.delete()
        elif upkeep.trim or upkeep.room:
            await self._trim(state, upkeep)
        return upkeep

    async def _trim(self, state: MirrorState, upkeep: Upkeep) -> None:
        """Trim as far as everybody has got."""
        record = await self._announce(state, trim=upkeep.trim, room=upkeep.room)
        if not upkeep.trim:
            return
        # Again: somebody may have begun below before it could see the announcement.
        agreed = min(record.trim, *await self._needs(state), record.trim)
        if agreed > state.begins:
            await self._mirror.trim(agreed)

    async def _remake(self, state: MirrorState, start: int) -> None:
        """Let a mirror that has stopped go on, with the next part of its stream."""
        s = self._settings
        await self._announce(state, trim=start, remaking=True)
        try:
            await self._mirror.delete()
            await self._mirror.make(
                mirror_config(
                    self._mirror.name,
                    self._stream,
                    state.origin_created,
                    start=start,
                    max_bytes=s.hot_mirror_max_bytes,
                    replicas=s.replicas,
                )
            )
            _log.info("hot mirror made anew: it was full", mirror=self._mirror.name, start=start, was=state.begins)
            await self._await_filled()
        finally:
            await self._announce(state, trim=start)

    async def _await_filled(self) -> None:
        """Let it copy for a while before anybody reads."""
        deadline_s = time.monotonic() + _FILL_S
        while time.monotonic() < deadline_s:
            stream, state = await self._api.stream_info(self._stream), await self._mirror.state()
            if state is None or self._bounds.filled(state, stream.last_seq):
                return
            await asyncio.sleep(_FILL_LOOK_S)

    async def _needs(self, state: MirrorState) -> list[int]:
        """What workers have stored that have positions in this stream: the lowest that each may have to be given."""
        needs = []
        for worker in await self._workers():
            entry_key = key_of("progress", worker)
            entry = await self._bucket.get(entry_key)
            if entry is None or not entry.value:
                continue  # it has not stored a need, so it does not read from the mirror
            try:
                progress = decode_progress(entry.value)
            except DecodeError as error:
                self._refusals.note(entry_key, entry.revision, error, "the hot mirror is not trimmed meanwhile")
                raise
            if progress.stream_created == state.origin_created:
                needs.append(progress.need)
        return needs

    async def _announce(
        self, state: MirrorState, *, trim: int = 0, room: int = 0, remaking: bool = False
    ) -> MirrorRecord:
        """Write down what is going to happen; marks never go back."""
        entry, before, spoilt = await self._bucket.get(KEY), None, False
        if entry and entry.value:
            try:
                before = decode(entry.value, MirrorRecord)
            except DecodeError as error:
                spoilt = True
                self._refusals.note(KEY, entry.revision, error, "it is written again")
        if before is None or before.stream_created != state.origin_created:
            before = MirrorRecord(stream_created=state.origin_created, trim=0)
        record = msgspec.structs.replace(
            before, trim=max(before.trim, trim), room=max(before.room, room), remaking=remaking
        )
        if record != before or spoilt:
            await self._bucket.put(KEY, encode(record), revision=entry.revision if entry else 0)
        return record
