"""Claims: who owns which partition. Written by the holder of the rebalancer's office and by nobody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from parti.coordination.election import Office
from parti.coordination.takeover import Estate
from parti.errors import DecodeError, WrongRevision
from parti.jetstream.kv import Bucket, Entry, Write
from parti.model.fleet import Assignment, Claim, decode, encode, key_of, name_of
from parti.telemetry.refusals import Refusals

_REPAIRED_AT_ONCE = 800
_HIGHEST_ABOVE_TERM = 2**40
"""Fence tokens begin at the term and grow by one with each claim: none of this fleet is higher above it."""


class PartitionClaimer(Protocol):
    """Claiming as others see it."""

    async def claim(self, partition: str, worker_id: str) -> bool:
        """Make a worker the owner; False when somebody else owns the partition."""

    async def release(self, partition: str, worker_id: str) -> None:
        """Let nobody own the partition, if this worker does."""

    async def is_owner(self, partition: str, worker_id: str) -> bool:
        """Whether this worker owns the partition, by the leader's answer."""


class ClaimStore:
    """All claims, as last read or written, and the way to change them.

    Everything is written in one atomic batch with a renewal of the office, so nothing takes effect once the office
    is lost; each claim is compared and set besides. Fence tokens start at the term, or above the largest one found,
    and only grow.
    """

    def __init__(
        self,
        bucket: Bucket,
        office: Office,
        *,
        ttl_s: float,
        refusals: Refusals | None = None,
        fits: Callable[[str], bool] = lambda partition: True,
    ) -> None:
        """`fits`: whether there can be a partition of that name; claims of others are nobody's."""
        self.claims: dict[str, Claim] = {}
        self.recovered: dict[str, Claim] = {}
        """Claims that are known, but not as they lie in the bucket: to be written again as they are here."""
        self.unknown: set[str] = set()
        """Partitions whose claim is unreadable and of which nobody was told: somebody may still be letting go."""
        self._refusals = refusals
        self._fits = fits
        self._bucket = bucket
        self._office = office
        self._ttl_s = ttl_s
        self._revisions: dict[str, int] = {}
        self._fence = office.term

    def load(self, entries: Mapping[str, Entry], assignments: Mapping[str, Assignment] | None = None) -> None:
        """Replace all that is known by what was read (`claims.…` keys).

        A claim that is unreadable, or gone, is made good from what is known of it: what this holder of the office has
        read or written before, or what its owner was told. Only a partition that nobody was told of is without one.
        """
        before, told = self.claims, self._told(assignments or {})
        self.claims, self._revisions, self.recovered, self.unknown = {}, {}, {}, set()
        for key, entry in entries.items():
            partition = name_of(key)
            if not self._fits(partition):
                if self._refusals:
                    self._refusals.note(key, entry.revision, DecodeError("no partition can have that name"))
                continue
            self._revisions[partition] = entry.revision
            if not entry.value:
                continue
            try:
                self.claims[partition] = self._decoded(entry)
            except DecodeError as error:
                if self._refusals:
                    then = "it is written again by what else is known of it"
                    self._refusals.note(key, entry.revision, error, then)
                self.unknown.add(partition)
        self.recovered = {p: claim for p, claim in {**told, **before}.items() if p not in self.claims}
        self.claims |= self.recovered
        self.unknown -= self.recovered.keys()
        self._fence = max([self._fence, *(claim.fence_token for claim in self.claims.values())])

    def _told(self, assignments: Mapping[str, Assignment]) -> dict[str, Claim]:
        """The claims that assignments were made from, as far as they tell; of two the newer one."""
        claims: dict[str, Claim] = {}
        for worker, assignment in assignments.items():
            for partition, grant in assignment.partitions.items():
                if partition in claims and claims[partition].fence_token > grant.fence_token:
                    continue
                if not self._may_be(grant.fence_token) or not self._fits(partition):
                    continue
                claims[partition] = Claim(
                    owner=worker,
                    incarnation=assignment.incarnation,
                    fence_token=grant.fence_token,
                    claimed_at=datetime.now(UTC),
                    ttl_seconds=self._ttl_s,
                    position=grant.position,
                    stream_created=assignment.stream_created,
                    careful_to=grant.careful_to,
                    suspect=grant.suspect,
                    deaths=grant.deaths,
                    failed=grant.failed,
                    attempts=grant.attempts,
                    term=self._office.term,
                    reason="its claim was unreadable",
                )
        return claims

    def _decoded(self, entry: Entry) -> Claim:
        claim = decode(entry.value, Claim)
        if not self._may_be(claim.fence_token):
            raise DecodeError(f"fence token {claim.fence_token} is far above the term {self._office.term}")
        return claim

    def _may_be(self, fence_token: int) -> bool:
        return fence_token <= self._office.term + _HIGHEST_ABOVE_TERM

    def revision(self, partition: str) -> int:
        """The newest revision of a claim that was read or written; 0: there was none."""
        return self._revisions.get(partition, 0)

    async def repair(self) -> None:
        """Write the claims again that are known, but unreadable in the bucket."""
        recovered = list(self.recovered.items())
        for begin in range(0, len(recovered), _REPAIRED_AT_ONCE):
            await self.write(dict(recovered[begin : begin + _REPAIRED_AT_ONCE]))
        self.recovered = {}

    @property
    def newest_fence(self) -> int:
        """The largest fence token given out or found."""
        return self._fence

    def next_fence(self) -> int:
        """A fence token larger than any before."""
        self._fence += 1
        return self._fence

    def given(
        self, owner: str, incarnation: int, estate: Estate, *, reason: str, cause: str = "", home: str = ""
    ) -> Claim:
        """The claim that makes somebody the owner of what the last one left behind; `home`: who lends it."""
        return Claim(
            owner=owner,
            incarnation=incarnation,
            fence_token=self.next_fence(),
            claimed_at=datetime.now(UTC),
            ttl_seconds=self._ttl_s,
            position=estate.position,
            stream_created=estate.stream_created,
            careful_to=estate.careful_to,
            suspect=estate.suspect,
            deaths=estate.deaths,
            failed=estate.failed,
            attempts=estate.attempts,
            term=self._office.term,
            reason=reason,
            cause=cause,
            home=home,
        )

    def changed(self, partition: str, **changes: object) -> Claim:
        """The present claim with some fields replaced, under this term."""
        return msgspec.structs.replace(self.claims[partition], term=self._office.term, **changes)

    async def write(self, claims: Mapping[str, Claim], also: Sequence[Write] = ()) -> list[int]:
        """Write these claims and something else, all or nothing; returns the revisions of the rest.

        Raises `LeaseLost` when the office is, `WrongRevision` when something was changed by somebody else.
        """
        writes = [
            Write(key_of("claims", partition), encode(claim), self._revisions.get(partition, 0))
            for partition, claim in claims.items()
        ]
        revisions = await self._office.write([*writes, *also])
        self.claims.update(claims)
        self._revisions.update(zip(claims, revisions, strict=False))
        return revisions[len(claims) :]

    # ── one at a time ─────────────────────────────────────────────────────────────────────────────────────────

    async def claim(self, partition: str, worker_id: str) -> bool:
        """Make a worker the owner of a partition that nobody owns; False when somebody else does."""
        found = self.claims.get(partition)
        if found and found.owner and found.state != "free":
            return found.owner == worker_id
        estate = Estate(found.position, found.stream_created) if found else Estate(0, "")
        claim = self.given(worker_id, 0, estate, reason="claimed")
        try:
            await self.write({partition: claim})
        except WrongRevision:
            await self._read(partition)
            return False
        return True

    async def release(self, partition: str, worker_id: str) -> None:
        """Let nobody own the partition, if this worker does; its position is kept."""
        found = self.claims.get(partition)
        if found and found.owner == worker_id:
            await self.write({partition: self.changed(partition, owner="", state="free", next="", home="")})

    async def is_owner(self, partition: str, worker_id: str) -> bool:
        """Whether this worker owns the partition, by the leader's answer."""
        await self._read(partition)
        found = self.claims.get(partition)
        return found is not None and found.owner == worker_id and found.state != "free"

    async def _read(self, partition: str) -> None:
        entry = await self._bucket.get(key_of("claims", partition))
        self._revisions[partition] = entry.revision if entry else 0
        if entry is None or not entry.value:
            self.claims.pop(partition, None)
            return
        try:
            self.claims[partition] = self._decoded(entry)
        except DecodeError as error:
            if self._refusals:
                self._refusals.note(key_of("claims", partition), entry.revision, error, "the last known one stands")
