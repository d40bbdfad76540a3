"""A notice in the bucket that a process stands by, for operators: nobody decides by it."""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime

import structlog

from parti.coordination.worker_ids import Profile
from parti.errors import PartiError, WrongRevision
from parti.jetstream.kv import MARKER_TTL_S, Bucket, Write
from parti.model.fleet import StandbyRecord, encode, key_of

_log = structlog.get_logger("parti.standby")

_FIRST_S = 0.2
"""Whoever finds the worker id free has it by then, and never stood by."""
_RENEW_SHARE = 1 / 3
_WRITE_S = 1.0


class StandbyNotice:
    """The key `standby.<worker>.<random>`, renewed for as long as `keep` runs and removed at its end.

    One that could not be removed ends by itself, as after a crash. The token of the process is not in it: whoever
    knows that may take over its lease.
    """

    def __init__(self, bucket: Bucket, worker_id: str, profile: Profile, *, rank: int, ttl_s: float) -> None:
        self._bucket = bucket
        self._key = key_of("standby", f"{worker_id}.{secrets.token_hex(4)}")
        self._value = encode(
            StandbyRecord(
                worker=worker_id,
                rank=rank,
                host=profile.host,
                pid=profile.pid,
                version=profile.version,
                since=datetime.now(UTC),
                ttl_seconds=ttl_s,
            )
        )
        self._ttl_s = ttl_s
        self._revision = 0

    async def keep(self) -> None:
        """Keep it up until cancelled."""
        await asyncio.sleep(_FIRST_S)
        try:
            while True:
                await self._try(Write(self._key, self._value, self._revision, self._ttl_s))
                await asyncio.sleep(self._ttl_s * _RENEW_SHARE)
        finally:
            if self._revision:
                await self._try(Write(self._key, b"", self._revision, MARKER_TTL_S, deletes=True))

    async def _try(self, write: Write) -> None:
        try:
            self._revision = (await self._bucket.write([write], timeout_s=_WRITE_S))[0]
        except WrongRevision:
            # It has ended meanwhile, or the answer to the last write got lost: the next one goes on from there.
            try:
                found = await self._bucket.get(self._key)
            except PartiError:
                return
            self._revision = found.revision if found else 0
        except PartiError as error:
            _log.debug("cannot say that this process stands by", error=str(error))
