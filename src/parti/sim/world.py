"""One run: a fleet of real workers in virtual time, what happens to it, and whether the invariants hold.

First comes the safety phase, in which faults strike; then the liveness phase, in which none does: within a bounded
time everything that was published must be finished and every partition owned by exactly one worker.
"""

from __future__ import annotations

import asyncio
import json
import random
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from parti.app.worker import Job
from parti.coordination.orders import KEY as ORDERS_KEY
from parti.coordination.sources import Static
from parti.model.fleet import ROLES, Orders, encode
from parti.model.headers import parse_headers
from parti.model.message import Message
from parti.model.partition import Template
from parti.sim.client import networks
from parti.sim.faults import Faults
from parti.sim.history import History, Outcome
from parti.sim.loop import StandstillError, VirtualLoop
from parti.sim.member import AGAIN_S, BUCKET, DEAD_LETTERS, Member, make_settings
from parti.sim.network import OUTSIDE, Conditions, Network
from parti.sim.patches import clocks_of
from parti.sim.process import Process, current_process
from parti.sim.scenario import SAFETY_S, Scenario
from parti.sim.server import Delivery, ModelServer
from parti.sim.substitution import stand_for
from parti.strategies import strategy_named

_STREAM = "WORK"
_TEMPLATE = Template("work.{key}")
_LOOK_S = 0.25
_CALM_S = 0.7
"""How long the fleet is watched after it has settled."""


class World:
    """Runs one scenario, once, inside `simulation()`."""

    def __init__(self, scenario: Scenario, *, keep_timeline: bool = False) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.history = History(scenario.seed, lambda: self.loop.now_s, keep_timeline=keep_timeline)
        self.server = ModelServer(lambda: self.loop.now_s, chance=random.Random(f"server-{scenario.seed}"))
        self.network = Network(self.loop, self.server, random.Random(f"network-{scenario.seed}"))
        self.members: list[Member] = []
        """Every worker there ever was."""
        self.settings = make_settings(scenario)
        self.job = Job(_STREAM, _TEMPLATE, Static(scenario.partitions), self._handle, strategy_named("sticky"))
        self._chance = random.Random(f"world-{scenario.seed}")
        self._slots: dict[int, Member] = {}
        self._answers: list[dict[str, Any]] = []
        self._killed: dict[int, int] = {}
        self.listen()

    def run(self) -> Outcome:
        """Live through the scenario and judge it."""
        random.seed(f"chance-{self.scenario.seed}")
        stand_for(ROLES if self.scenario.all_roles else ("rebalancer",))
        outcome = self.history.outcome
        with clocks_of(self.loop):
            try:
                self.loop.run_until_complete(self.loop.create_task(self._live(), context=OUTSIDE))
            except StandstillError as error:
                outcome.trouble.append(f"the run does not get on: {error}")
            finally:
                self.history.judge()
                outcome.trouble += [f"nobody caught: {_describe(error)}" for error in self.loop.errors]
                self._dispose()
        return outcome

    def _dispose(self) -> None:
        for member in self.members:
            member.process.crash()
            networks.pop(member.process, None)
        self.loop.dispose()

    # ── phases ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _live(self) -> None:
        self._create_stream()
        for slot in range(self.scenario.slots):
            self.start_worker(slot)
        faults = Faults(self)
        publishing = self._outside(self._publish())
        striking = [self._outside(faults.strike(fault)) for fault in self.scenario.faults]
        await asyncio.gather(publishing, *striking)
        self.history.note("no more faults from here on")
        liveness_s = self.scenario.liveness_s
        deadline_s = self.loop.now_s + liveness_s
        while unsettled := self._unsettled():
            if self.loop.now_s > deadline_s:
                self.history.outcome.trouble.append(f"not settled after {liveness_s:g} s without faults: {unsettled}")
                return
            await asyncio.sleep(_LOOK_S)
        self.history.note("settled")
        await asyncio.sleep(_CALM_S)

    def _outside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.loop.create_task(work, context=OUTSIDE)

    def _unsettled(self) -> str:
        """Why the fleet is not at rest yet; empty when it is."""
        if self.history.unfinished:
            return f"messages {list(self.history.unfinished)[:5]} are not finished"
        idle = [member.name for member in self._slots.values() if not member.process.gone and member.worker is None]
        wrong = self._ill_owned()
        return f"{idle} have not started" if idle else f"not owned by exactly one worker: {wrong}" if wrong else ""

    def _ill_owned(self) -> dict[str, list[str]]:
        """Partitions that have no owner, or several."""
        owners: dict[str, list[str]] = {partition: [] for partition in self.scenario.partitions}
        for member in self._slots.values():
            for partition in member.owned:
                owners[partition].append(member.name)
        return {partition: who for partition, who in owners.items() if len(who) != 1}

    # ── traffic ───────────────────────────────────────────────────────────────────────────────────────────────

    def _create_stream(self) -> None:
        config = {
            "name": _STREAM,
            "subjects": [_TEMPLATE.pattern],
            "retention": self.scenario.retention,
            "storage": "file",
            "num_replicas": 1,
            "allow_direct": True,
        }
        self._ask(f"$JS.API.STREAM.CREATE.{_STREAM}", json.dumps(config).encode())

    def listen(self) -> None:
        """Connect to the server, past the network; to be repeated when it was restarted."""
        self._client = self.server.connect(self._on_delivery)
        self._client.subscribe("_INBOX.world", b"1")
        self._client.subscribe(f"{DEAD_LETTERS}.>", b"2")

    def _ask(self, subject: str, payload: bytes) -> dict[str, Any]:
        """Ask the server and return its answer."""
        self._client.publish(subject, payload, reply="_INBOX.world")
        self.network.touch()
        return self._answers.pop()

    def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.sid == b"1":
            self._answers.append(json.loads(delivery.payload or b"{}"))
        else:
            letter = parse_headers(delivery.header or b"")
            self.history.dead_lettered(int(letter["Parti-Sequence"]), letter["Parti-Worker"])

    async def _publish(self) -> None:
        if self.scenario.retention == "interest":
            # Nothing is kept on a subject that no consumer carries yet.
            while self._ill_owned():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
        for publish in self.scenario.publishes:
            await asyncio.sleep(max(0.0, publish.at_s - self.loop.now_s))
            await self._server_ready()
            seq = self._ask(f"work.{publish.partition}", b"")["seq"]
            self.history.stored(seq, publish)
        await asyncio.sleep(max(0.0, SAFETY_S - self.loop.now_s))

    async def _server_ready(self) -> None:
        while not self.network.up or self.network.leaderless:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def give_orders(self, wanted: Callable[[], Orders]) -> Orders:
        """Write what operators want of the fleet, by the time the server takes it: later orders are not undone."""
        while True:
            await self._server_ready()
            orders = wanted()
            if "seq" in self._ask(f"$KV.{BUCKET}.{ORDERS_KEY}", encode(orders)):
                return orders
            await asyncio.sleep(_LOOK_S)  # There is no bucket yet.

    async def _handle(self, message: Message) -> None:
        """The application of this fleet: it takes its time, sometimes fails, and leaves a record."""
        publish = self.history.publishes[message.seq]
        start = self.history.started(
            message.partition.id, message.seq, message.worker_id, message.fence, current_process().name
        )
        if publish.kills > self._killed.get(message.seq, 0):
            self._killed[message.seq] = self._killed.get(message.seq, 0) + 1
            self._take_down(next(m for m in self.members if m.process is current_process()))
            await asyncio.Event().wait()
        try:
            if publish.takes_s:
                await asyncio.sleep(publish.takes_s)
            if message.attempt <= publish.fails:
                raise RuntimeError("this message cannot be handled")
        except (RuntimeError, asyncio.CancelledError) as error:
            self.history.aborted(start, repr(error))
            raise
        self.history.finished(start)

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────

    def member(self, slot: int) -> Member | None:
        """Who is in a slot and is to stay there."""
        member = self._slots.get(slot)
        return member if member and not member.process.gone and not member.leaving else None

    def new_slot(self) -> int:
        """A slot that was never used."""
        return len(self._slots)

    def kill_worker(self, member: Member) -> None:
        """End a process at once."""
        self.history.note("is killed", member.name)
        member.process.crash()
        self.history.died(member.name)

    def _take_down(self, member: Member) -> None:
        """A message has killed the process that handled it: its supervisor starts another."""
        self.kill_worker(member)
        if not member.leaving:
            self._outside(self._start_again(member))

    async def _start_again(self, member: Member) -> None:
        await asyncio.sleep(AGAIN_S)
        if self._slots[member.slot] is member:
            self.start_worker(member.slot)

    def start_worker(self, slot: int) -> Member:
        """Start a process in a slot that is empty."""
        if found := self.member(slot):
            return found
        process = Process(
            self.loop,
            f"proc-{len(self.members)}",
            rate=self._chance.choice((1.0, 1.0, 0.995, 1.005)),
            offset_s=self._chance.uniform(0.0, 1000.0),
        )
        latency_s = self.scenario.latency_s
        self.network.join(process, Conditions(latency_s * self._chance.uniform(0.5, 2.0), latency_s))
        networks[process] = self.network
        member = self._slots[slot] = Member(self, process, slot)
        self.members.append(member)
        self.history.note(f"starts in slot {slot}", member.name)
        process.spawn(member.live()).add_done_callback(self._watch)
        return member

    def _watch(self, task: asyncio.Task[None]) -> None:
        """A worker may fail with an error of parti's own, and with no other."""
        if not task.cancelled() and (error := task.exception()):
            trace = "".join(traceback.format_exception(error)[-5:])
            self.history.outcome.trouble.append(f"a worker failed: {error!r}: {trace}")

    async def stop_worker(self, member: Member) -> None:
        """Let a worker leave in order; returns when its process has ended, in whatever way."""
        if member.leaving or member.process.gone:
            return
        member.leaving = True
        self.history.note("is asked to leave", member.name)
        ended = asyncio.Event()
        member.process.on_death.append(ended.set)
        member.process.spawn(member.leave()).add_done_callback(self._watch)
        await ended.wait()


def _describe(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message')}: {error!r}" if error else str(context.get("message"))
