"""The network between simulated processes and the model server.

A connection keeps its bytes in order and loses none while it stands, as TCP does; they may take long, and when it
breaks, what was on its way is gone. Between the nodes of a server messages may get lost besides (`loss`).
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeAlias

from parti.sim.loop import VirtualLoop
from parti.sim.process import Process
from parti.sim.server import Delivery, ModelClient, ModelServer

Sent: TypeAlias = tuple[str, bytes, str, bytes | None]
"""Subject, payload, reply, header."""
_BACKLOG_S = 0.05
"""How long a TCP connection takes to notice that packets go through again."""

OUTSIDE = Context()
"""The context of what belongs to no process."""


class Conditions:
    """How one process is connected, now."""

    __slots__ = ("cut", "jitter_s", "latency_s", "loss")

    def __init__(self, latency_s: float, jitter_s: float) -> None:
        self.latency_s = latency_s
        self.jitter_s = jitter_s
        self.cut = False
        """No packet passes, in either direction."""
        self.loss = 0.0
        """Share of messages that get lost between the nodes of the server."""


class Network:
    """Links of all processes to one server."""

    def __init__(self, loop: VirtualLoop, server: ModelServer, chance: random.Random) -> None:
        self.loop = loop
        self.server = server
        self.chance = chance
        self.up = True
        """Whether the server runs."""
        self.leaderless = False
        """The server's nodes have no leader: nobody stores or answers anything."""
        self.conditions: dict[Process, Conditions] = {}
        self.channels: list[Channel] = []
        self._ids = itertools.count(1)
        self._due_s = float("inf")

    def join(self, process: Process, conditions: Conditions) -> None:
        """Connect a process to the network."""
        self.conditions[process] = conditions
        process.on_death.append(lambda: self._died(process))

    def new_id(self) -> int:
        """A number for a connection."""
        return next(self._ids)

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, process: Process) -> None:
        """Let no packet of this process pass."""
        self.conditions[process].cut = True
        for channel in self._of(process):
            channel.silenced()

    def heal(self, process: Process) -> None:
        """Let packets pass again."""
        self.conditions[process].cut = False
        for channel in self._of(process):
            channel.resumed()

    def crash_server(self, *, lose_unsynced_acks_s: float) -> None:
        """Kill the server: connections break, and nobody can connect until it is back."""
        self.up = False
        self.server.restart(lose_unsynced_acks_s=lose_unsynced_acks_s)
        for channel in list(self.channels):
            channel.reset("the server closed the connection")

    def start_server(self) -> None:
        """Let the server run again."""
        self.up = True
        self.server.advance()
        self.touch()

    def _died(self, process: Process) -> None:
        for channel in self._of(process):
            channel.abandon()

    def _of(self, process: Process) -> list[Channel]:
        return [channel for channel in self.channels if channel.process is process]

    # ── the server's own time ─────────────────────────────────────────────────────────────────────────────────

    def touch(self) -> None:
        """Something happened at the server: see when it wants to act by itself."""
        due_s = self.server.next_due_s() if self.up else None
        if due_s is not None and due_s < self._due_s:
            self._due_s = due_s
            self.loop.post(due_s, self._advance, OUTSIDE)

    def _advance(self) -> None:
        if self.loop.now_s < self._due_s:
            return  # An earlier entry was made meanwhile, and has done what was due.
        self._due_s = float("inf")
        if self.up:
            self.server.advance()
            self.touch()


class Channel:
    """One TCP connection: two queues of messages, each in order, and whether it still stands."""

    def __init__(self, network: Network, process: Process, on_delivery: Callable[[list[Delivery]], None]) -> None:
        self.process = process
        self.on_broken: Callable[[str], None] = lambda reason: None
        self.silent_after_s = float("inf")
        """The client gives up when nothing has come through for so long."""
        self._network = network
        self._loop = network.loop
        self._conditions = network.conditions[process]
        self._on_delivery = on_delivery
        self._model: ModelClient = network.server.connect(self._from_server)
        self._up: deque[tuple[float, Callable[..., None], Any]] = deque()
        self._down: deque[tuple[float, Delivery | Callable[[], None]]] = deque()
        self._up_timed = self._down_timed = False
        self._up_s = self._down_s = 0.0
        self._closing = self._reset = False
        self._swallow = b""
        self.open = True
        network.channels.append(self)

    # ── to the server ─────────────────────────────────────────────────────────────────────────────────────────

    def send(self, action: Callable[..., None], argument: Any) -> None:
        """Do something at the server when it gets there."""
        if self._reset:
            return
        self._up_s = max(self._up_s, self._loop.now_s + self._delay_s())
        self._up.append((self._up_s, action, argument))
        if not self._up_timed:
            self._time_up()

    def publish(self, messages: list[Sent]) -> None:
        """Publish these, in one packet."""
        self.send(self._publish, messages)

    def subscribe(self, subject: str, sid: bytes) -> None:
        """Subscribe."""
        self.send(self._subscribe, (subject, sid))

    def unsubscribe(self, sid: bytes) -> None:
        """End a subscription."""
        self.send(self._unsubscribe, sid)

    def ping(self, pong: Callable[[], None]) -> None:
        """Call back when the server has answered a ping."""
        self.send(self._pong, pong)

    def _delay_s(self) -> float:
        conditions = self._conditions
        return conditions.latency_s + (conditions.jitter_s * self._network.chance.random())

    def _time_up(self) -> None:
        self._up_timed = True
        self._loop.post(self._up[0][0], self._arrive_up, OUTSIDE)

    def _arrive_up(self) -> None:
        self._up_timed = False
        if self._conditions.cut and not self._closing:
            return  # `resumed` goes on
        up, now_s = self._up, self._loop.now_s
        while up and up[0][0] <= now_s:
            _, action, argument = up.popleft()
            action(argument)
        if up:
            self._time_up()
        self._network.touch()

    def _publish(self, messages: list[Sent]) -> None:
        network, model = self._network, self._model
        loss = self._conditions.loss
        for subject, payload, reply, header in messages:
            if network.leaderless and not subject.startswith("_INBOX"):
                continue
            if loss and network.chance.random() < loss:
                if network.chance.random() < 0.5:
                    continue
                self._swallow = reply.encode()
            model.publish(subject, payload, reply=reply, header=header)
            self._swallow = b""

    def _subscribe(self, argument: tuple[str, bytes]) -> None:
        self._model.subscribe(*argument)

    def _unsubscribe(self, sid: bytes) -> None:
        self._model.unsubscribe(sid)

    def _pong(self, pong: Callable[[], None]) -> None:
        self._push_down(pong)

    # ── to the client ─────────────────────────────────────────────────────────────────────────────────────────

    def _from_server(self, delivery: Delivery) -> None:
        if self._swallow and delivery.subject == self._swallow:
            return
        loss = self._conditions.loss
        if loss and self._network.chance.random() < loss / 4:
            return
        self._push_down(delivery)

    def _push_down(self, item: Delivery | Callable[[], None]) -> None:
        self._down_s = max(self._down_s, self._loop.now_s + self._delay_s())
        self._down.append((self._down_s, item))
        if not self._down_timed:
            self._time_down()

    def _time_down(self) -> None:
        self._down_timed = True
        self._loop.post(self._down[0][0], self._arrive_down, self.process.context)

    def _arrive_down(self) -> None:
        """Hand over what has come: in the context of the process, so that it waits while that is stopped."""
        self._down_timed = False
        if self._conditions.cut or not self.open:
            return
        down, now_s = self._down, self._loop.now_s
        come: list[Delivery] = []
        while down and down[0][0] <= now_s:
            item = down.popleft()[1]
            if isinstance(item, Delivery):
                come.append(item)
            else:
                item()
        if down:
            self._time_down()
        if come:
            self._on_delivery(come)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────

    def silenced(self) -> None:
        """No packet passes any more: the client gives up after a while, the server much later."""
        since_s = self._loop.now_s
        if self.silent_after_s < float("inf"):
            when = since_s + self.silent_after_s * self._network.chance.uniform(0.7, 1.0)
            self._loop.post(when, self._give_up, self.process.context)

    def _give_up(self) -> None:
        if self.open and self._conditions.cut:
            self.break_off("the server stopped answering pings")

    def resumed(self) -> None:
        """Packets pass again: what was held back arrives, late."""
        if self._closing:
            self._shut()
            return
        for queue, timed, time in (
            (self._up, self._up_timed, self._time_up),
            (self._down, self._down_timed, self._time_down),
        ):
            if queue and not timed:
                first = (self._loop.now_s + _BACKLOG_S, *queue.popleft()[1:])
                queue.appendleft(first)
                time()

    def reset(self, reason: str) -> None:
        """The server is gone; the client learns of it when the packet comes."""
        self._reset = True
        self._up.clear()
        if self.open:
            self._push_down(lambda: self.break_off(reason))
        else:
            self._shut()

    def break_off(self, reason: str) -> None:
        """The connection is over for the client."""
        if not self.open:
            return
        self.abandon()
        self.on_broken(reason)

    def abandon(self) -> None:
        """The client's end is closed: what it has sent arrives, then the server closes its own."""
        self.open = False
        self._down.clear()
        self._closing = True
        if self._reset:
            self._shut()
        elif not self._conditions.cut:
            self.send(lambda _: self._shut(), None)
        else:
            self._up.clear()  # Never leaves the machine; the server learns of it when packets pass again.

    def _shut(self) -> None:
        self._model.close()
        if self in self._network.channels:
            self._network.channels.remove(self)
        self._network.touch()
