"""Partitions of an interest stream that nobody owns, because nobody has room for them: their messages are kept.

The server deletes what no consumer carries. A worker that came back with less room carries such partitions on (see
`Cargo.leftovers`), but reads nothing of them, and what is delivered and not acknowledged would stop it in the end. So
a hold takes them over, until another worker carries them, or this one does again.
"""

from __future__ import annotations

from parti.errors import SubjectMismatch
from parti.model.partition import Template
from parti.worker.cargo import Cargo
from parti.worker.shards import Shards
from parti.worker.starts import Starts
from parti.worker.vehicle import ConsumerPorts, Vehicle


class Unowned:
    """Moves leftovers that wait for room to holds, and gives these up."""

    def __init__(
        self, ports: ConsumerPorts, template: Template, starts: Starts, shards: Shards, cargo: Cargo
    ) -> None:
        self._ports = ports
        self._template = template
        self._starts = starts
        self._shards = shards
        self._cargo = cargo

    async def keep(self) -> bool:
        """Let holds take over what waits for room; True when the consumers need not carry it any more."""
        ask, leftovers = self._ports.wait_for_room, self._cargo.leftovers
        if not leftovers or ask is None:
            return False
        waiting = await ask([partition.id for partition in leftovers.values()])
        changed = False
        for vehicle in self._shards.vehicles:
            carried = vehicle.carried.partitions
            mine = [s for s, p in leftovers.items() if p.id in waiting and s in carried]
            info = await vehicle.find() if mine else None
            if info is None:
                continue
            if new := sorted(set(mine) - self._shards.kept):
                # What was delivered of them is not acknowledged, so nothing of them is below the floor.
                await vehicle.holds.keep(new, info.ack_floor + 1)
            self._cargo.leftovers = {s: p for s, p in self._cargo.leftovers.items() if s not in mine}
            changed = True
        return changed

    async def release(self) -> None:
        """Give up holds whose partitions others carry, or this worker does."""
        for vehicle in self._shards.vehicles:
            for name, subjects in list(vehicle.holds.kept.items()):
                await self._release(vehicle, name, subjects)

    async def _release(self, vehicle: Vehicle, name: str, subjects: tuple[str, ...]) -> None:
        taken = self._cargo.taken & self._cargo.wanted.partitions.keys()
        others = [s for s in subjects if s not in taken]
        ask = self._ports.safe_elsewhere
        if others:
            ids = []
            for subject in others:
                try:
                    ids.append(self._template.parse(subject).id)
                except SubjectMismatch:
                    continue  # of an app with another template
            if ask is None or not await ask(ids) >= set(ids):
                return
        if len(others) < len(subjects):
            vehicle.holds.own(name, await self._starts.last_seq())
        else:
            await vehicle.holds.give_up(name)
