"""What operators want, as the planner sees it.

Orders stand in one record until they are taken back; nothing has to be acknowledged, and a new rebalancer reads the
same record as the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from parti.core.fleet_view import FleetView
from parti.model.fleet import Orders
from parti.strategies.interface import Slot
from parti.strategies.ordering import natural_order


def obey(view: FleetView) -> FleetView:
    """The fleet with the orders applied: drained workers drain, paused and withheld partitions are not wanted."""
    orders = view.orders
    resting = orders.resting
    if not orders.drained and not resting:
        return view
    members = {
        worker: replace(member, state="draining") if worker in orders.drained and member.state == "active" else member
        for worker, member in view.members.items()
    }
    return replace(view, members=members, partitions=tuple(p for p in view.partitions if p not in resting))


def placements(orders: Orders, slots: Sequence[Slot], partitions: Collection[str]) -> dict[str, str]:
    """Where partitions go that an operator has placed: those whose worker is there and has room for them."""
    room = Counter({slot.worker: slot.capacity for slot in slots})
    placed = {}
    for partition, worker in orders.placed.items():
        if room[worker] > 0 and partition in partitions:
            placed[partition] = worker
            room[worker] -= 1
    return placed


def honour(placed: Mapping[str, str], target: Mapping[str, str], previous: Mapping[str, str]) -> dict[str, str]:
    """What a strategy wants, with placed partitions where they belong.

    Others give way to them, so that everybody has as many as the strategy wants and no more than it can take; those
    that are elsewhere already, if possible. What the strategy has no room for at all is not placed.
    """
    result = {partition: placed.get(partition, worker) for partition, worker in target.items()}
    surplus = Counter(result.values())
    surplus.subtract(target.values())
    movable = natural_order(p for p, worker in result.items() if surplus[worker] > 0 and p not in placed)
    for partition in movable:
        home = previous.get(partition, "")
        if surplus[result[partition]] > 0 > surplus[home]:
            surplus.subtract({result[partition]: 1, home: -1})
            result[partition] = home
    takers = iter(sorted((-surplus).elements()))
    for partition in reversed(movable):
        if surplus[result[partition]] > 0:
            surplus[result[partition]] -= 1
            result[partition] = next(takers)
    return result
