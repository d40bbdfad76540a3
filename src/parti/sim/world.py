"""One run: a fleet of real workers in virtual time, what happens to it, and whether the invariants hold.

First comes the safety phase, in which faults strike; then the liveness phase, in which none does: within a bounded
time everything that was published must be finished and every partition owned by exactly one worker.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from zlib import crc32

from parti.app import worker as worker_module
from parti.app.worker import Job, Worker
from parti.config import Settings
from parti.coordination import candidacy as candidacy_module
from parti.coordination.orders import KEY as ORDERS_KEY
from parti.coordination.sources import Static
from parti.core.lane import Lane
from parti.errors import PartiError
from parti.jetstream import connection as connection_module
from parti.jetstream import pull as pull_module
from parti.model.fleet import ROLES, Orders, Role, encode
from parti.model.message import Message, parse_headers
from parti.model.partition import Template
from parti.sim.client import SimClient, SimWire, networks
from parti.sim.faults import Faults
from parti.sim.history import History, Outcome
from parti.sim.loop import StandstillError, VirtualLoop
from parti.sim.network import OUTSIDE, Conditions, Network
from parti.sim.patches import Patches, clocks_of, simulated
from parti.sim.process import Process, current_process
from parti.sim.scenario import LIVENESS_S, SAFETY_S, Scenario
from parti.sim.server import Delivery, ModelServer
from parti.strategies import strategy_named
from parti.worker import parking as parking_module
from parti.worker import runners as runners_module

_STREAM, _BUCKET, _DEAD = "WORK", "fleet", "dead"
_TEMPLATE = Template("work.{key}")
_ATTEMPTS = 2
_LOOK_S = 0.25
_CALM_S = 0.7
"""How long the fleet is watched after it has settled."""
_AGAIN_S = 0.5
"""After so long a supervisor starts a worker again that could not start."""


@contextmanager
def simulation(logger: object | None = None) -> Iterator[Patches]:
    """Everything that is needed to run worlds, as many as one likes, one after the other."""
    with simulated(logger) as patches:
        patches.set(connection_module, "MendedClient", SimClient)
        patches.set(worker_module, "Wire", SimWire)
        patches.set(worker_module, "MicroService", _NoService)
        patches.set(candidacy_module, "ROLES", _roles)
        patches.set(runners_module, "_Runner", _NumberedRunner)
        patches.set(Lane, "__hash__", lambda lane: crc32(lane.ownership.partition.id.encode()))
        patches.set(pull_module, "_ADAPT_INTERVAL_S", 0.25)
        patches.set(parking_module, "_LOOK_INTERVAL_S", 0.5)
        enabled = gc.isenabled()
        # A collection at a moment that no seed decides would run the `finally` blocks of dead processes.
        gc.disable()
        try:
            yield patches
        finally:
            if enabled:
                gc.enable()


_roles: list[Role] = []
"""The roles that workers stand for in this run. The lesser ones decide nothing and cost a third of its time."""


class _NumberedRunner(runners_module._Runner):
    """A runner whose place in a set does not depend on its address; lanes get the same by their partition."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._number = loop.callbacks

    def __hash__(self) -> int:
        return self._number


class _NoService:
    """In place of the micro service: nobody asks it, and each worker would make nine subscriptions."""

    id = "none"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def start(self) -> None:
        """Answer nothing."""

    async def stop(self) -> None:
        """There is nothing to stop."""


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
        self._client = self.server.connect(self._on_delivery)
        self._client.connected = False

    def run(self) -> Outcome:
        """Live through the scenario and judge it."""
        random.seed(f"chance-{self.scenario.seed}")
        _roles[:] = ROLES if self.scenario.all_roles else ("rebalancer",)
        outcome = self.history.outcome
        with clocks_of(self.loop):
            try:
                self.loop.run_until_complete(self.loop.create_task(self._live(), context=OUTSIDE))
            except StandstillError as error:
                outcome.trouble.append(f"the run stood still: {error}")
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
        deadline_s = self.loop.now_s + LIVENESS_S
        while unsettled := self._unsettled():
            if self.loop.now_s > deadline_s:
                self.history.outcome.trouble.append(f"not settled after {LIVENESS_S:g} s without faults: {unsettled}")
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

    def _ask(self, subject: str, payload: bytes) -> dict[str, Any]:
        """Ask the server, past the network."""
        if not self._client.connected:
            self._client = self.server.connect(self._on_delivery)
            self._client.subscribe("_INBOX.world", b"1")
            self._client.subscribe(f"{_DEAD}.>", b"2")
        self._client.publish(subject, payload, reply="_INBOX.world")
        self.network.touch()
        return self._answers.pop()

    def _on_delivery(self, delivery: Delivery) -> None:
        if delivery.sid == b"1":
            self._answers.append(json.loads(delivery.payload or b"{}"))
        else:
            self.history.dead_lettered(int(parse_headers(delivery.header or b"")["Parti-Sequence"]))

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

    async def give_orders(self, orders: Orders) -> None:
        """Write what an operator wants of the fleet."""
        while True:
            await self._server_ready()
            if "seq" in self._ask(f"$KV.{_BUCKET}.{ORDERS_KEY}", encode(orders)):
                return
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
        await asyncio.sleep(_AGAIN_S)
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
            trace = "".join(traceback.format_exception(error)[-3:])
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


class Member:
    """One process of the fleet and the worker in it."""

    def __init__(self, world: World, process: Process, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.worker: Worker | None = None
        """None until it has started."""
        self.leaving = False
        self._world = world
        self._settings = world.settings
        if world.scenario.timing.identities:
            self._settings = world.settings.model_copy(update={"identity": f"slot-{slot}"})
        self._started = asyncio.Event()

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.process.name

    @property
    def owned(self) -> list[str]:
        """The partitions that its worker owns; none when the process is gone."""
        if self.process.gone or self.worker is None:
            return []
        return [partition.id for partition in self.worker.partitions]

    async def live(self) -> None:
        """Start the worker; what cannot start is started again by its supervisor."""
        while self.worker is None:
            worker = Worker(self._settings, self._world.job)
            try:
                await worker.start()
                self.worker = worker
            except PartiError as error:
                self._world.history.note(f"cannot start: {error}", self.name)
                await asyncio.sleep(_AGAIN_S)
        self._started.set()

    async def leave(self) -> None:
        """Stop the worker in order and end the process."""
        await self._started.wait()
        assert self.worker
        clean = await self.worker.stop()
        self._world.history.note("has left" if clean else "has left, but could not store everything", self.name)
        if not clean:
            self._world.history.died(self.name)
        self.process.crash()


def make_settings(scenario: Scenario) -> Settings:
    """The settings of every worker of a run: as in production, but with short times."""
    timing = scenario.timing
    return _base_settings().model_copy(
        update={
            "lease_ttl_s": timing.lease_ttl_s,
            "leader_ttl_s": timing.leader_ttl_s,
            "scale_window_s": timing.scale_window_s,
            "cold_start_window_s": timing.cold_start_window_s,
            "min_rebalance_interval_s": timing.min_rebalance_interval_s,
            "progress_interval_s": timing.progress_interval_s,
            "update_min_interval_s": timing.update_min_interval_s,
            "ack_wait_s": timing.ack_wait_s,
            "pull_batch": timing.pull_batch,
            "max_ack_pending": timing.max_ack_pending,
            "rejoin_s": timing.rejoin_s,
        }
    )


@cache
def _base_settings() -> Settings:
    return Settings.model_construct(
        bucket=_BUCKET,
        prefix="sim",
        attempts=_ATTEMPTS,
        backoff_s=(0.1,),
        dead_letter_stream="DEAD",
        dead_letter_subject=_DEAD,
        ping_interval_s=0.4,
        reconnect_wait_s=0.1,
        lost_after_s=2.0,
        connect_timeout_s=5.0,
        pull_heartbeat_s=0.5,
        pull_expires_s=5.0,
        drain_timeout_s=3.0,
    )


def _describe(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message')}: {error!r}" if error else str(context.get("message"))
