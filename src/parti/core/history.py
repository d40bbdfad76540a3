"""Which changes of claims are worth a record in the history, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from parti.model.fleet import Claim
from parti.model.history import HistoryRecord, Step


def changes(
    before: Mapping[str, Claim | None],
    after: Mapping[str, Claim],
    *,
    by: str,
    at: datetime,
    took_s: Mapping[str, float] = MappingProxyType({}),
) -> Iterator[HistoryRecord]:
    """One record for each claim with which a partition got an owner, lost it, or kept it after all.

    The steps of a move that is under way are none: the claim itself tells of them.
    """
    for partition, claim in after.items():
        found = before.get(partition)
        step = _step(found, claim)
        if step is None:
            continue
        yield HistoryRecord(
            partition=partition,
            step=step,
            source=found.owner if found and found.state != "free" else "",
            target=claim.owner,
            cause=claim.cause,
            why=claim.reason,
            position=claim.position,
            fence_token=claim.fence_token,
            term=claim.term,
            by=by,
            took_s=round(took_s.get(partition, 0.0), 3),
            at=at,
        )


def _step(before: Claim | None, after: Claim) -> Step | None:
    if after.state == "free":
        return "freed" if before and before.state != "free" else None
    if before is None or before.fence_token != after.fence_token:
        return "given"
    return "kept" if after.state == "owned" and before.state in {"preparing", "moving"} else None
