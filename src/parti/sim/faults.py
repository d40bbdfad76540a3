"""What is done to a fleet: each kind of fault, from its beginning to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from parti.model.fleet import Orders
from parti.sim.scenario import SAFETY_S, Fault, FaultKind

if TYPE_CHECKING:
    from parti.sim.member import Member
    from parti.sim.world import World

_REQUEST_S = 5.5
"""A request that got lost is waited for so long, and positions are not stored meanwhile."""
_SETTLE_S = 2.0


class Faults:
    """Strikes one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._network = world.network
        self._history = world.history
        self._orders: dict[str, Any] = {"placed": {}, "drained": [], "paused": []}
        self._acts: Mapping[FaultKind, Callable[[Fault], Awaitable[None]]] = {
            FaultKind.JOIN: self._join,
            FaultKind.LEAVE: self._leave,
            FaultKind.MOVE: self._move,
            FaultKind.DRAIN: self._drain,
            FaultKind.HALT: self._halt,
            FaultKind.CRASH: self._crash,
            FaultKind.PAUSE: self._pause,
            FaultKind.CUT: self._cut,
            FaultKind.SLOW: self._slow,
            FaultKind.LOSS: self._lose,
            FaultKind.CLOCK: self._set_clock,
            FaultKind.SERVER: self._restart_server,
            FaultKind.LEADER: self._change_leader,
        }

    async def strike(self, fault: Fault) -> None:
        """Let a fault happen when its time has come; returns when it is over."""
        await asyncio.sleep(fault.at_s)
        await self._acts[fault.kind](fault)

    # ── planned ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _join(self, fault: Fault) -> None:
        member = self._world.start_worker(self._world.new_slot())
        await asyncio.sleep(fault.lasts_s)
        if fault.lasts_s < SAFETY_S:
            await self._world.stop_worker(member)

    async def _leave(self, fault: Fault) -> None:
        if member := self._world.member(fault.slot):
            await self._world.stop_worker(member)
            await asyncio.sleep(fault.lasts_s)
            self._world.start_worker(fault.slot)

    async def _move(self, fault: Fault) -> None:
        self._orders["placed"][fault.partition] = f"worker-{fault.slot}"
        await self._give_orders()
        await asyncio.sleep(fault.lasts_s)
        self._orders["placed"].pop(fault.partition, None)
        await self._give_orders()

    async def _drain(self, fault: Fault) -> None:
        await self._order_for_a_while("drained", f"worker-{fault.slot}", fault.lasts_s)

    async def _halt(self, fault: Fault) -> None:
        await self._order_for_a_while("paused", fault.partition, fault.lasts_s)

    async def _order_for_a_while(self, kind: str, name: str, lasts_s: float) -> None:
        self._orders[kind].append(name)
        await self._give_orders()
        await asyncio.sleep(lasts_s)
        self._orders[kind].remove(name)
        await self._give_orders()

    def _wanted(self) -> Orders:
        return Orders(
            placed=dict(self._orders["placed"]),
            drained=tuple(dict.fromkeys(self._orders["drained"])),
            paused=tuple(dict.fromkeys(self._orders["paused"])),
        )

    async def _give_orders(self) -> None:
        orders = await self._world.give_orders(self._wanted)
        self._history.note(
            f"an operator orders: placed {orders.placed}, drained {orders.drained}, paused {orders.paused}"
        )

    # ── processes ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _crash(self, fault: Fault) -> None:
        if member := self._world.member(fault.slot):
            self._world.kill_worker(member)
            await asyncio.sleep(fault.lasts_s)
            self._world.start_worker(fault.slot)

    async def _pause(self, fault: Fault) -> None:
        if (member := self._world.member(fault.slot)) and member.process.runs:
            self._history.note(f"is stopped for {fault.lasts_s:.2f} s", member.name)
            member.process.stop()
            await asyncio.sleep(fault.lasts_s)
            member.process.cont()
            self._history.note("continues", member.name)
            self._lapse(fault, _SETTLE_S, member)

    async def _set_clock(self, fault: Fault) -> None:
        if member := self._world.member(fault.slot):
            self._history.note(f"wall clock jumps by {fault.size:g} s", member.name)
            member.process.wall_offset_s += fault.size

    # ── links ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _cut(self, fault: Fault) -> None:
        member = self._world.member(fault.slot)
        if member and not self._network.conditions[member.process].cut:
            self._history.note(f"is cut off for {fault.lasts_s:.2f} s", member.name)
            self._network.cut(member.process)
            await asyncio.sleep(fault.lasts_s)
            self._network.heal(member.process)
            self._history.note("is connected again", member.name)
            self._lapse(fault, _REQUEST_S, member)

    async def _slow(self, fault: Fault) -> None:
        if member := self._world.member(fault.slot):
            conditions = self._network.conditions[member.process]
            self._history.note(f"gets slow, {fault.size:.3f} s each way, for {fault.lasts_s:.2f} s", member.name)
            conditions.latency_s += fault.size
            await asyncio.sleep(fault.lasts_s)
            conditions.latency_s -= fault.size
            self._history.note("is fast again", member.name)
            self._lapse(fault, _SETTLE_S, member)

    async def _lose(self, fault: Fault) -> None:
        if member := self._world.member(fault.slot):
            conditions = self._network.conditions[member.process]
            self._history.note(f"loses {fault.size:.0%} of its messages for {fault.lasts_s:.2f} s", member.name)
            conditions.loss = fault.size
            await asyncio.sleep(fault.lasts_s)
            conditions.loss = 0.0
            self._history.note("loses no more messages", member.name)
            self._lapse(fault, _REQUEST_S, member)

    # ── the server ────────────────────────────────────────────────────────────────────────────────────────────

    async def _restart_server(self, fault: Fault) -> None:
        if not self._network.up:
            return
        self._history.note(f"the server is killed, for {fault.lasts_s:.2f} s")
        self._network.crash_server(lose_unsynced_acks_s=fault.size)
        self._world.listen()
        await asyncio.sleep(fault.lasts_s)
        self._network.start_server()
        self._history.note("the server runs again")
        self._lapse(fault, _SETTLE_S, *self._world.members)

    async def _change_leader(self, fault: Fault) -> None:
        if not self._network.up or self._network.leaderless:
            return
        self._history.note(f"the server's leader is gone, for {fault.lasts_s:.2f} s")
        self._network.leaderless = True
        await asyncio.sleep(fault.lasts_s)
        self._network.leaderless = False
        self._network.server.step_down()
        self._network.touch()
        self._history.note("there is a leader again")
        self._lapse(fault, _REQUEST_S, *self._world.members)

    def _lapse(self, fault: Fault, aftermath_s: float, *members: Member) -> None:
        now_s = self._world.loop.now_s
        for member in members:
            self._history.lapsed(member.name, now_s - fault.lasts_s, now_s + aftermath_s)
