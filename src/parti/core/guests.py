"""Guests: members that are here for a while, for partitions that are placed on them, and get no others.

A guest takes part in no sharing. What it has counts as what its last owner has, its *home*: nobody's share changes
when a guest comes, takes partitions, gives them back, leaves or dies, so nothing else moves for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from parti.core.fleet_view import MemberView
from parti.model.fleet import Claim


def guests_among(members: Mapping[str, MemberView]) -> frozenset[str]:
    """The members that are guests."""
    return frozenset(worker for worker, member in members.items() if member.guest)


def home_after(claim: Claim | None, owner: str, guests: Collection[str]) -> str:
    """The home of a partition that is given to `owner`: empty, unless that one is a guest."""
    if claim is None or owner not in guests:
        return ""
    return claim.home or ("" if claim.owner in guests else claim.owner)


def share_of(claim: Claim, guests: Collection[str]) -> str:
    """Whose share a partition counts to, once the moves that have begun are over."""
    if claim.next and claim.next not in guests:
        return claim.next
    return claim.home or ("" if claim.owner in guests else claim.owner)
