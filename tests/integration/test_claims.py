"""Claiming one partition at a time: claim, release, is_owner, and who may."""

from __future__ import annotations

import pytest
from tests.integration.conftest import Kit

from parti.coordination.claims import ClaimStore
from parti.coordination.election import Office
from parti.core.lease import LeaseTerms
from parti.errors import LeaseLost
from parti.jetstream.kv import Bucket
from parti.model.fleet import Claim, decode


async def elected(bucket: Bucket, holder: str) -> Office:
    office = Office(bucket, LeaseTerms(5.0, 0.75), "rebalancer", holder, f"token of {holder}")
    await office.take(await bucket.get("leader.rebalancer"))
    return office


@pytest.fixture
async def bucket(kit: Kit) -> Bucket:
    return await Bucket.open(kit.api, f"b{kit.root}", replicas=1)


async def stored(bucket: Bucket, partition: str) -> Claim:
    entry = await bucket.get(f"claims.{partition}")
    assert entry
    return decode(entry.value, Claim)


async def test_a_partition_has_one_owner_until_it_is_released(bucket: Bucket) -> None:
    claims = ClaimStore(bucket, await elected(bucket, "worker-0"), ttl_s=5.0)
    assert await claims.claim("a.b", "worker-1")
    assert await claims.claim("a.b", "worker-1"), "it has it already"
    assert not await claims.claim("a.b", "worker-2")
    assert await claims.is_owner("a.b", "worker-1")
    assert not await claims.is_owner("a.b", "worker-2")
    first = await stored(bucket, "a.b")
    await claims.release("a.b", "worker-2")
    assert await claims.is_owner("a.b", "worker-1"), "only its owner lets go of it"
    await claims.release("a.b", "worker-1")
    assert not await claims.is_owner("a.b", "worker-1")
    assert await claims.claim("a.b", "worker-2")
    assert (await stored(bucket, "a.b")).fence_token > first.fence_token


async def test_who_is_no_longer_elected_claims_nothing(bucket: Bucket) -> None:
    old = ClaimStore(bucket, await elected(bucket, "worker-0"), ttl_s=5.0)
    assert await old.claim("a", "worker-1")
    new_office = await elected(bucket, "worker-9")
    for attempt in (old.claim("b", "worker-1"), old.release("a", "worker-1")):
        with pytest.raises(LeaseLost):
            await attempt
    assert await bucket.get("claims.b") is None
    assert (await stored(bucket, "a")).owner == "worker-1"
    assert await ClaimStore(bucket, new_office, ttl_s=5.0).is_owner("a", "worker-1")


async def test_a_claim_that_somebody_else_has_changed_is_not_overwritten(bucket: Bucket) -> None:
    office = await elected(bucket, "worker-0")
    one, other = ClaimStore(bucket, office, ttl_s=5.0), ClaimStore(bucket, office, ttl_s=5.0)
    assert await one.claim("a", "worker-1")
    assert not await other.claim("a", "worker-2"), "it believed that nobody had it"
    assert await other.is_owner("a", "worker-1")
