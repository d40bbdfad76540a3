"""A lease: a key that expires, held by compare-and-set, and the batches that are written under it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from parti.core.lease import NEVER_S, LeaseTerms, epoch
from parti.errors import ControlPlaneReset, LeaseLost, PartiError, RequestTimeout, WrongRevision
from parti.jetstream.kv import MARKER_TTL_S, Bucket, Entry, Guard, Write, epoch_base

_END_S = 2.0
_PUT_S = 1.0
"""A renewal waits for a write under the lease no longer than this."""
clock = time.perf_counter
"""The clock that runners look at too, before they start a handler."""


class Lease:
    """One key of the bucket, taken, kept and given back.

    `is_ours` recognises our own value: a write whose answer got lost is adopted, not mistaken for a rival's.

    Three answers are kept apart: success; `LeaseLost`, when somebody else holds the key or it has ended; any other
    `PartiError`, when the bucket cannot be reached or the outcome is unknown, which says nothing about the lease.
    """

    def __init__(self, bucket: Bucket, key: str, terms: LeaseTerms, is_ours: Callable[[bytes], bool]) -> None:
        self.key = key
        self.terms = terms
        self.ends_at_s = NEVER_S
        """Until when the holder may act, on this process' monotonic clock."""
        self.renew_at_s = NEVER_S
        self.on_renewed: Callable[[], None] = lambda: None
        self._bucket = bucket
        self._is_ours = is_ours
        self._revision = 0
        self._lock = asyncio.Lock()

    @property
    def held(self) -> bool:
        """Whether the holder may act now."""
        return clock() < self.ends_at_s

    async def acquire(
        self,
        over: Entry | None,
        value_of: Callable[[int], bytes],
        *,
        floor: int = 0,
    ) -> int:
        """Take the key over what was found there; returns the epoch of this holding.

        `value_of(epoch)` makes the value. Epochs grow by themselves, unless the bucket was restored from a copy: then
        `floor`, the largest one that this process knows of, sees to it. Raises `LeaseLost` when somebody else was
        quicker.
        """
        async with self._lock:
            info = await self._bucket.info()
            number = max(epoch(epoch_base(info.created), info.last_seq), floor + 1)
            self._revision = over.revision if over else 0
            try:
                await self._write(value_of(number), ())
            except WrongRevision:
                raise LeaseLost(f"{self.key} was taken by somebody else") from None
            return number

    async def renew(self, value: bytes, extra: Sequence[Write] = ()) -> list[int]:
        """Renew the lease and do the `extra` writes in the same batch, or none of it; returns their revisions.

        Raises `LeaseLost`, or `WrongRevision` when one of the extra writes named a revision that is over; the lease
        itself stands then.
        """
        async with self._lock:
            return await self._renew(value, extra)

    async def _renew(self, value: bytes, extra: Sequence[Write]) -> list[int]:
        for _ in range(3):
            try:
                return await self._write(value, extra)
            except WrongRevision:
                before = self._revision
                await self._adopt()
                if self._revision == before:
                    raise
            except RequestTimeout:
                # Known only after reading back; should the write arrive even later, it is adopted the next time.
                await self._adopt()
                raise
        raise WrongRevision(10071, f"{self.key} changes faster than it can be renewed")

    async def put(self, key: str, value: bytes) -> int:
        """Write another key, which takes effect only while this lease is ours and not renewed by anybody else.

        One at a time and never beside a renewal: a replicated bucket refuses writes that name the same key while one
        of them is under way. Raises `LeaseLost`, or another `PartiError` when the outcome is unknown.
        """
        async with self._lock:
            for _ in range(3):
                if not self.held:
                    raise LeaseLost(f"the lease {self.key} has ended")
                try:
                    guard = Guard(self.key, self._revision)
                    return await self._bucket.put_guarded(key, value, guard, timeout_s=_PUT_S)
                except WrongRevision:
                    # A renewal whose answer got lost may have taken effect.
                    await self._adopt()
            raise WrongRevision(10071, f"{self.key} changes faster than {key} can be written")

    async def _write(self, value: bytes, extra: Sequence[Write]) -> list[int]:
        sent_s = clock()
        left_s = self.ends_at_s - sent_s if self.ends_at_s > sent_s else self.terms.ttl_s
        writes = [Write(self.key, value, self._revision, self.terms.ttl_s), *extra]
        revisions = await self._bucket.write(writes, timeout_s=max(0.5, min(5.0, left_s)))
        self._revision = revisions[0]
        self.ends_at_s = self.terms.ends_at(sent_s)
        self.renew_at_s = self.terms.renew_at(sent_s)
        self.on_renewed()
        return revisions[1:]

    async def _adopt(self) -> None:
        """Find out whether the key is still ours, and its revision."""
        entry = await self._bucket.get(self.key)
        if entry is None or not entry.value or not self._is_ours(entry.value):
            self.ends_at_s = NEVER_S
            what = "has ended" if entry is None or not entry.value else "belongs to somebody else now"
            raise LeaseLost(f"the lease {self.key} {what}")
        if entry.revision < self._revision:
            self.ends_at_s = NEVER_S
            raise ControlPlaneReset("control plane was reset: the bucket was restored from an older copy")
        self._revision = entry.revision

    async def release(self) -> bool:
        """Give the key back; False when that is not certain."""
        return await self.hand_back(b"", MARKER_TTL_S)

    async def hand_back(self, value: bytes, ttl_s: float) -> bool:
        """Leave another value (none: a marker) in the key for a while; False when that is not certain."""
        async with self._lock:
            if self.ends_at_s == NEVER_S:
                return False
            for _ in range(2):
                last = Write(self.key, value, self._revision, ttl_s, deletes=not value)
                try:
                    await self._bucket.write([last], timeout_s=_END_S)
                except WrongRevision:
                    # A renewal that was cancelled before its answer came may have taken effect.
                    try:
                        await self._adopt()
                    except PartiError:
                        return False
                except PartiError:
                    return False
                else:
                    return True
                finally:
                    self.ends_at_s = NEVER_S
            return False
