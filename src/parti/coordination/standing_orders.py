"""The orders of operators as the rebalancer follows them, also while their record cannot be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import structlog

from parti.core.retention import INTEREST, Retention
from parti.errors import DecodeError
from parti.jetstream.kv import Entry
from parti.model.fleet import Claim, Orders, decode
from parti.telemetry.refusals import Refusals

_log = structlog.get_logger("parti.rebalancer")


class StandingOrders:
    """The last orders that could be read.

    A record that cannot be read says nothing, least of all that there are no orders: the last known ones stand. A
    rebalancer that has never seen any does no more than it must. What has an owner keeps one; what has none may be
    paused, or be handled by an older consumer, and rests; nothing moves between live workers.
    """

    def __init__(self, retention: Retention, refusals: Refusals) -> None:
        self.revision = -1
        """Of the newest record that was seen; -1: nobody has looked."""
        self._retention = retention
        self._refusals = refusals
        self._known: Orders | None = None

    def take(self, entry: Entry) -> None:
        """Take in the record as it is now; an empty one says that there are no orders."""
        self.revision = entry.revision
        try:
            orders = decode(entry.value, Orders) if entry.value else Orders()
        except DecodeError as error:
            then = "the last orders stand" if self._known else "nothing moves and what has no owner rests"
            self._refusals.note("orders", entry.revision, error, f"{then} until 'parti doctor --repair orders'")
            return
        if orders.paused and self._retention is INTEREST:
            _log.error("paused partitions are handled all the same: an interest stream would drop their messages")
            orders = msgspec.structs.replace(orders, paused=())
        self._known = orders

    def now(self, partitions: Iterable[str], claims: Mapping[str, Claim]) -> Orders:
        """What to follow, given the partitions that there are and their claims."""
        if self._known is not None:
            return self._known
        return Orders(hold_moves=True, withheld=tuple(p for p in partitions if _unowned(claims.get(p))))

    def rests(self, partition: str, claim: Claim | None) -> bool:
        """Whether nobody of the fleet is to handle a partition."""
        return partition in self._known.resting if self._known is not None else _unowned(claim)


def _unowned(claim: Claim | None) -> bool:
    return claim is None or claim.state == "free"
