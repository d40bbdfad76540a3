"""Election of one worker for a role: a lease with a term that only grows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import msgspec
import structlog

from parti.coordination.lease import Lease, clock
from parti.core.fleet_view import Decision
from parti.core.lease import LeaseTerms
from parti.errors import (
    ConnectionFailed,
    ControlPlaneReset,
    DecodeError,
    LeaseLost,
    NoResponders,
    PartiError,
    PermissionDenied,
    RequestTimeout,
)
from parti.jetstream.kv import Bucket, Entry, Write
from parti.model.fleet import LeaderRecord, Role, decode, encode, key_of
from parti.telemetry.tasks import beside, death_of, is_only

_log = structlog.get_logger("parti.election")

RENEW_SHARE = 0.75
_LOOK_AGAIN_S = 2.0
"""How often a candidate looks by itself: the watch that should wake it is only a hint."""
_DENIED_S = 30.0
"""Between two tries of somebody whom the server does not let be elected."""


class Office:
    """A role, held: what its holder writes goes through here and takes effect only while it holds the role."""

    def __init__(self, bucket: Bucket, terms: LeaseTerms, role: Role, holder: str, token: str) -> None:
        self.role = role
        self.record = LeaderRecord(
            holder=holder, token=token, term=0, since=datetime.now(UTC), ttl_seconds=terms.ttl_s
        )
        self.lease = Lease(bucket, key_of("leader", role), terms, self._is_ours)

    def _is_ours(self, value: bytes) -> bool:
        found = _decoded(value)
        return found is not None and (found.token, found.term) == (self.record.token, self.record.term)

    @property
    def term(self) -> int:
        """Number of this holding; larger than that of every earlier holder."""
        return self.record.term

    async def take(self, over: Entry | None, *, floor: int = 0) -> None:
        """Win the role with a term above `floor`; raises `LeaseLost` when somebody else does."""

        def value_of(term: int) -> bytes:
            self.record = msgspec.structs.replace(self.record, term=term, since=datetime.now(UTC))
            return encode(self.record)

        await self.lease.acquire(over, value_of, floor=floor)

    def describe(self, decision: Decision, strategy: str, wanted: int) -> bool:
        """Change what the next renewal says; True if that is news."""
        before = self.record
        self.record = msgspec.structs.replace(
            before, state=decision.state.value, reason=decision.reason, strategy=strategy, wanted=wanted
        )
        return self.record != before

    async def write(self, writes: Sequence[Write] = ()) -> list[int]:
        """Renew the lease and write, in one batch or not at all; returns the revisions.

        Raises `LeaseLost` when the role is somebody else's now: nothing was written then.
        """
        return await self.lease.renew(encode(self.record), writes)


class Election:
    """Stands for a role as long as it runs, and serves while it is elected.

    `serve` is cancelled before the lease can have ended for others; should it end by itself, the role is given up.
    """

    def __init__(
        self,
        bucket: Bucket,
        role: Role,
        *,
        holder: str,
        token: str,
        ttl_s: float,
        serve: Callable[[Office], Awaitable[None]],
        floor: Callable[[], int] = lambda: 0,
    ) -> None:
        self.role = role
        self.office: Office | None = None
        self._bucket = bucket
        self._holder = holder
        self._token = token
        self._terms = LeaseTerms(ttl_s, RENEW_SHARE)
        self._serve = serve
        self._floor = floor
        self._news = asyncio.Event()
        self._denied = False

    def hint(self) -> None:
        """The key of this role changed: look at it."""
        self._news.set()

    async def run(self) -> None:
        """Stand for the role until cancelled; the role is resigned then."""
        while True:
            office = await self._campaign()
            self.office = office
            _log.info("elected", role=self.role, worker=self._holder, term=office.term)
            try:
                await self._hold(office)
            finally:
                self.office = None
                resigned = await asyncio.shield(office.lease.release())
                _log.info("no longer leading", role=self.role, term=office.term, resigned=resigned)

    async def _campaign(self) -> Office:
        while True:
            self._news.clear()
            try:
                entry = await self._bucket.get(key_of("leader", self.role))
                if entry is None or not entry.value or self._is_left_over(entry.value):
                    office = Office(self._bucket, self._terms, self.role, self._holder, self._token)
                    await office.take(entry, floor=self._floor())
                    return office
            except LeaseLost:
                pass
            except PermissionDenied as error:
                # It works all the same, for a rebalancer that another one is; the server may grant it some day.
                if not self._denied:
                    _log.error("this user may not be elected; set may_lead=false", role=self.role, error=str(error))
                self._denied = True
                await asyncio.sleep(_DENIED_S)
            except PartiError as error:
                _log.debug("cannot stand for a role now", role=self.role, error=str(error))
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S * random.uniform(0.75, 1.25)):
                    await self._news.wait()
            except TimeoutError:
                pass

    def _is_left_over(self, value: bytes) -> bool:
        """Whether nobody else holds the role: this process won it without learning of it, or nobody can read it."""
        found = _decoded(value)
        return found is None or found.token == self._token

    async def _hold(self, office: Office) -> None:
        # Only what is foreseen to end it is told below: the rest is reported with its traceback.
        async with beside(self._work(office), self._keep(office), name=f"role-{self.role}") as both:
            serving = both[0]
            while office.lease.held and not any(task.done() for task in both):
                # Not a moment longer than the lease, even if the answer to a renewal is still awaited.
                left_s = office.lease.ends_at_s - clock()
                await asyncio.wait(both, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        error = death_of(serving)
        if error and not is_only(error, LeaseLost):
            # An outage is foreseen, and told by the connection; what nobody has foreseen is reported already.
            outage = is_only(error, (ConnectionFailed, RequestTimeout, NoResponders))
            tell = _log.error if is_only(error, PartiError) and not outage else _log.warning
            tell("the work of a role failed; it is given up", role=self.role, error=repr(error))
            await asyncio.sleep(1.0)

    async def _work(self, office: Office) -> None:
        await self._serve(office)

    async def _keep(self, office: Office) -> None:
        """Renew the lease again and again; returns when it is lost."""
        while True:
            await asyncio.sleep(max(0.0, office.lease.renew_at_s - clock()))
            try:
                await office.write()
            except (LeaseLost, ControlPlaneReset) as error:
                _log.warning("lost a role", role=self.role, reason=str(error))
                return
            except PartiError as error:
                _log.warning("could not renew a role", role=self.role, error=str(error))
                await asyncio.sleep(self._terms.retry_after(clock(), office.lease.ends_at_s))


def _decoded(value: bytes) -> LeaderRecord | None:
    try:
        return decode(value, LeaderRecord)
    except DecodeError:
        return None
