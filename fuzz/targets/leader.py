"""The leader: members, claims and assignments as a rebalancer reads them, and what it decides and writes."""

from __future__ import annotations

from typing import Any, cast

from fuzz.target import Target
from fuzz.targets.records import readable
from fuzz.targets.situations import entries_in, odd_records, single_records, whole_fleet
from parti.coordination.assignments import Assignments
from parti.coordination.claims import ClaimStore
from parti.coordination.membership import Membership
from parti.coordination.orders import Situation
from parti.core.fleet_view import FleetView, Policy
from parti.core.loads import LoadBook
from parti.core.planner import Planner
from parti.model.fleet import HealthRecord, LoadRecord, decode, encode, is_key, name_of
from parti.strategies import strategy_named

_STRATEGIES = ("sticky", "weighted")
_PARTITIONS = ("p0", "p1", "p2")


class _Office:
    """The office of a rebalancer that writes nothing."""

    term = 7


def one(data: bytes) -> None:
    """Read a fleet as a new rebalancer does, and take a few decisions."""
    strategy, body = _STRATEGIES[(data[0] if data else 0) % len(_STRATEGIES)], data[1:]
    entries = {key: entry for key, entry in entries_in(body).items() if is_key(key)}  # as the control plane reads

    def of(kind: str) -> dict[str, Any]:
        return {key: entry for key, entry in entries.items() if key.startswith(f"{kind}.")}

    members = Membership(cast("Any", None))
    for key, entry in of("ids").items():
        members.entry(key, entry)
    claims = ClaimStore(cast("Any", None), cast("Any", _Office()), ttl_s=2.0)
    claims.load(of("claims"))
    assignments = Assignments(overlap=True)
    assignments.load(of("assignment"))
    health = {}
    for key, entry in of("health").items():
        said = readable(lambda value: decode(value, HealthRecord), entry.value)
        if said is not None:
            health[name_of(key)] = said
    book = LoadBook()
    for key, entry in of("load").items():
        load = readable(lambda value: decode(value, LoadRecord), entry.value)
        if load is not None:
            book.take(name_of(key), load)
    orders = Situation.of({key: entry for key, entry in entries.items() if key == "orders"}).orders
    weights = book.weights({partition: claim.owner for partition, claim in claims.claims.items()})
    planner = Planner(strategy_named(strategy), Policy(), elected_s=0.0)
    for now_s in (1.0, 3.0, 20.0, 100.0):
        planner.step(
            FleetView(
                now_s,
                members.view(),
                _PARTITIONS,
                claims.claims,
                health,
                frozenset(members.left),
                weights,
                orders,
            )
        )
    changed = assignments.changed(claims.claims, members.members, health, term=7, stream_created="c")
    assignments.writes(list(changed.items()))
    claims.next_fence()
    for partition in claims.claims:
        encode(claims.changed(partition, fence_token=claims.next_fence()))


def seeds() -> list[bytes]:
    """A whole fleet for each strategy, each record alone, and fleets with odd keys."""
    alone = [b"\0" + each for each in (*single_records(), *odd_records())]
    return [b"\0" + whole_fleet(), b"\1" + whole_fleet(), *alone]


TARGET = Target("leader", one, seeds)
