"""An app that runs inside a test: a server, workers in the test's own process, and what a test asks of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from parti.app.app import App
from parti.app.worker import Job
from parti.config import Settings
from parti.coordination.control_plane import ControlPlane
from parti.coordination.hooks import Hooks
from parti.coordination.orders import change_orders
from parti.coordination.sources import Discovered, Mapped
from parti.embedded import Server
from parti.errors import NotFound, WrongRevision
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.letters import Letters
from parti.jetstream.streams import list_subjects
from parti.model.fleet import Orders, key_of
from parti.model.message import Message
from parti.testing.link import Link
from parti.testing.lookout import PATIENCE_S, Lookout
from parti.testing.member import Call, Member
from parti.testing.steps import Point

Action: TypeAlias = Literal["move", "pause", "kill"]
ACTIONS: tuple[Action, ...] = ("move", "pause", "kill")
AppLike: TypeAlias = App | Callable[[], App]

# What a fleet in production waits for, to be sure that the others are there too, a test does not.
_QUICK: Mapping[str, Any] = {
    "fleet": True,
    "cold_start_window_s": 0.05,
    "scale_window_s": 0.05,
    "min_rebalance_interval_s": 0.0,
    "progress_interval_s": 0.02,
    "update_min_interval_s": 0.0,
    "reconnect_wait_s": 0.05,
    "backoff_s": (0.02,),
    "drain_timeout_s": 5.0,
    "hot_mirror": "off",
    "history": False,
    "takeover_on_disconnect": False,
}
_OF_OTHERS = (
    *("user", "password", "token", "nkey_seed_file", "credentials_file"),
    *("tls_ca", "tls_cert", "tls_key", "tls_hostname"),
    *("system_user", "system_password", "system_credentials_file"),
    *("metrics_port", "worker_id", "identity", "owner_token"),
)
"""Settings that are meant for another server, or for one process only."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the worker that handles a message, and at which point of its handler; once."""

    action: Action
    at: Point

    def __str__(self) -> str:
        return f"{self.action} at {self.at}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up."""

    partition: str
    seq: int
    subject: str
    error: str
    attempts: int
    data: bytes


class Run:
    """A running app; see `Runner`. What waits here in vain raises an AssertionError that says what is missing."""

    def __init__(
        self,
        app: AppLike,
        settings: Mapping[str, Any],
        fault: Fault | None,
        graveyard: list[Coroutine[Any, Any, Any]],
    ) -> None:
        self.calls: list[Call] = []
        """Every call of the handler, in the order in which they began."""
        self.points: list[Point] = []
        """Every point that a handler has come to, of each message the first time."""
        self.happened = False
        """Whether the fault has happened."""
        self._make: Callable[[], App] = (lambda: app) if isinstance(app, App) else app
        self._overrides = {**_QUICK, **settings}
        self._fault = fault
        self._seen: set[tuple[int, int]] = set()
        self._graveyard = graveyard
        self._members: list[Member] = []
        self._keeper: Member | None = None
        self._aftermath: asyncio.Task[None] | None = None
        self._server: Server
        self._api: JetStreamApi
        self._plane: ControlPlane
        self._settings, self._job = self._described(self._make())
        self._lookout = Lookout(self._job.template)

    def _described(self, app: App) -> tuple[Settings, Job]:
        settings, job = app.job(**self._overrides)
        if isinstance(job.source, Discovered):
            job = replace(job, source=Discovered(refresh_s=0.05))
        return settings.model_copy(update=dict.fromkeys(_OF_OTHERS)), job

    @asynccontextmanager
    async def _open(self, workers: int, stream: Mapping[str, Any]) -> AsyncIterator[Run]:
        async with AsyncExitStack() as stack:
            self._server = await stack.enter_async_context(Server())
            connection = await Connection.open(
                self._settings.model_copy(update={"nats": (self._server.url,)}), name="test"
            )
            stack.push_async_callback(connection.close)
            self._api = JetStreamApi(connection)
            await self._create_stream(stream)
            self._plane = await ControlPlane.open(connection, self._api, self._settings.bucket, replicas=1)
            await self._lookout.start(self._plane)
            stack.push_async_callback(self._lookout.stop)
            stack.push_async_callback(self._stop)
            await self._appoint()
            await asyncio.gather(*(self._add() for _ in range(workers)))
            await asyncio.gather(*(member.worker.wait_assigned() for member in self._members))
            yield self

    async def _create_stream(self, further: Mapping[str, Any]) -> None:
        if isinstance(self._job.source, Mapped):
            return  # the first worker makes it
        config = {
            "name": self._job.stream,
            "subjects": [self._job.template.pattern],
            "storage": "memory",
            "allow_direct": True,
            **further,
        }
        await self._api.call(f"STREAM.CREATE.{self._job.stream}", config)

    async def _appoint(self) -> None:
        """Start a worker that owns nothing and is the rebalancer, whatever happens to the others.

        Who becomes the rebalancer when the last one has died cannot know who died with it, and waits for as long as a
        lease. A test would wait for that at every second kill.
        """
        self._keeper = keeper = Member(
            await Link.open(self._server.port), [], [], lambda *_: None, self._lookout.stir
        )
        await keeper.start(self._settings.model_copy(update={"capacity": 0}), self._job, Hooks())
        await self._lookout.until(
            lambda: "rebalancer" in self._lookout.records.leaders, lambda: "nobody became the rebalancer"
        )

    async def _add(self) -> Member:
        app = self._make()
        settings, job = self._described(app)
        member = Member(await Link.open(self._server.port), self.calls, self._graveyard, self._at, self._lookout.stir)
        self._members.append(member)
        await member.start(settings, job, app.hooks)
        return member

    async def _stop(self) -> None:
        if self._aftermath and not self._aftermath.done():
            self._aftermath.cancel()
            await asyncio.gather(self._aftermath, return_exceptions=True)
        await asyncio.gather(*(member.stop() for member in self._members))
        if self._keeper:
            await self._keeper.stop()

    # ── what a test does ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def url(self) -> str:
        """The server, for a client of the test's own."""
        return self._server.url

    async def publish(self, subject: str, data: bytes = b"", *, headers: Mapping[str, str] | None = None) -> int:
        """Publish a message; returns its sequence in the stream, once it is stored."""
        return await self._api.publish(subject, data, headers=headers)

    async def handled(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all that is in the stream now is finished, and no handler runs.

        Finished means what it means to the fleet: the position of the partition is past the message, and stored. So
        nothing of it will be handled again. A fault that is under way is waited for too.
        """
        owed = await self._owed()
        await self._lookout.until(lambda: self._paid(owed), lambda: self._missing(owed), timeout_s)
        if self._aftermath and self._aftermath.done():
            self._aftermath.result()

    @property
    def positions(self) -> dict[str, int]:
        """By partition: all messages with a lower sequence are finished, as the fleet has it in its records."""
        return {partition: self._lookout.position(partition) for partition in self._lookout.records.claims}

    @property
    def owners(self) -> dict[str, str]:
        """By partition: the worker that owns it."""
        return {partition: claim.owner for partition, claim in self._lookout.records.claims.items() if claim.owner}

    async def dead_letters(self) -> list[DeadLetter]:
        """The messages that were given up, oldest first."""
        letters = await Letters.open(self._plane.connection, self._api, self._settings.dead_letter_stream)
        found = []
        async for letter in letters.all():
            full = await letters.get(letter.seq)
            data = full[1] if full else b""
            found.append(
                DeadLetter(letter.partition, letter.origin_seq, letter.subject, letter.error, letter.attempts, data)
            )
        return found

    async def move(self, partition: str) -> None:
        """Move a partition to another worker, as `parti move` does; returns when that one owns it."""
        to = await self._other(self._owner_of(partition))
        await self._order_move(partition, to)
        await self._moved(partition, to)

    async def kill(self, partition: str) -> None:
        """Kill the worker that owns a partition, as SIGKILL does; returns when another one owns it."""
        owner = self._owner_of(partition)
        await self._other(owner)
        owner.kill()
        await self._lost(owner)

    async def pause(self, partition: str) -> Callable[[], None]:
        """Stop the worker that owns a partition, as SIGSTOP does, until another one owns it.

        Returns the function that lets it go on: what ran on it then is an owner that has been replaced.
        """
        owner = self._owner_of(partition)
        await self._other(owner)
        owner.pause()
        await self._lost(owner)
        return owner.resume

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────

    def _at(self, member: Member, message: Message, point: Point) -> Coroutine[Any, Any, None] | None:
        if (point.seq, point.number) in self._seen:
            return None
        self._seen.add((point.seq, point.number))
        self.points.append(point)
        fault = self._fault
        if fault is None or (fault.at.seq, fault.at.number) != (point.seq, point.number):
            return None
        self._fault = None
        self.happened = True
        return self._inflict(fault.action, member, message)

    async def _inflict(self, action: Action, member: Member, message: Message) -> None:
        """Let it happen; the handler goes on when this returns, unless it is dead."""
        partition = message.partition.id
        other = await self._other(member)
        if action == "move":
            await self._order_move(partition, other)
            # The owner has been told to let go, so it waits for this very handler.
            await self._lookout.until(
                lambda: (
                    self._lookout.claim(partition).state == "moving"
                    or self._lookout.claim(partition).owner != member.id
                ),
                lambda: f"partition {partition} did not begin to move",
            )
            self._follow(self._moved(partition, other))
        elif action == "kill":
            member.kill()
            self._follow(self._lost(member))
        else:
            member.pause()
            self._follow(self._wake(member, message))

    def _follow(self, aftermath: Coroutine[Any, Any, None]) -> None:
        self._aftermath = asyncio.ensure_future(aftermath)
        self._aftermath.add_done_callback(lambda _: self._lookout.stir())

    async def _wake(self, member: Member, message: Message) -> None:
        """Let a paused worker go on when another one has handled what it stopped in."""
        try:
            await self._lost(member)
            await self._lookout.until(
                lambda: self._lookout.position(message.partition.id) > message.seq,
                lambda: f"message {message.seq} was not handled while its first owner was paused",
            )
        finally:
            member.resume()

    async def _order_move(self, partition: str, to: Member) -> None:
        def place(orders: Orders) -> Orders:
            return msgspec.structs.replace(orders, placed={**orders.placed, partition: to.id})

        await change_orders(self._plane.bucket, place)

    async def _moved(self, partition: str, to: Member) -> None:
        await self._lookout.until(
            lambda: (self._lookout.claim(partition).owner, self._lookout.claim(partition).state) == (to.id, "owned"),
            lambda: f"partition {partition} has not moved to {to.id}",
        )

    async def _lost(self, member: Member) -> None:
        """End the lease of a worker that cannot renew it any more; return when it owns nothing."""
        worker, claims = member.id, self._lookout.records.claims
        owned = {partition: claim.fence_token for partition, claim in claims.items() if claim.owner == worker}
        await self._end_lease(key_of("ids", worker))
        await self._lookout.until(
            lambda: all(claims[p].state == "owned" and claims[p].fence_token > fence for p, fence in owned.items()),
            lambda: f"what {worker} owned has no other owner",
        )

    async def _end_lease(self, key: str) -> None:
        """What the server does by itself when a lease has not been renewed; a test need not wait for that."""
        while (entry := await self._plane.bucket.get(key)) and entry.value:
            try:
                await self._plane.bucket.delete(key, revision=entry.revision)
            except WrongRevision:
                continue  # its last renewal was on its way

    async def _other(self, than: Member) -> Member:
        """Somebody else who can take over; a new worker, if there is nobody."""
        for member in self._members:
            if member is not than and not member.dead and not member.paused:
                return member
        member = await self._add()
        await member.worker.wait_assigned()
        return member

    # ── what the fleet has agreed on ──────────────────────────────────────────────────────────────────────────

    def _owner_of(self, partition: str) -> Member:
        claim = self._lookout.claim(partition)
        for member in self._members:
            if member.id == claim.owner and not member.dead:
                return member
        raise AssertionError(f"nobody owns partition {partition!r} now")

    async def _owed(self) -> dict[str, int]:
        """The last sequence of each subject that somebody has to handle."""
        listed = await list_subjects(self._api, self._job.stream, self._job.template.pattern)
        owed = {}
        for subject in listed.subjects:
            if not isinstance(self._job.source, Discovered) and self._lookout.partition_of(subject) is None:
                continue
            body = {"last_by_subj": subject}
            try:
                answer = await self._api.call(f"STREAM.MSG.GET.{self._job.stream}", body)
            except NotFound:
                continue  # a work queue: it is finished
            owed[subject] = int(answer["message"]["seq"])
        return owed

    def _paid(self, owed: Mapping[str, int]) -> bool:
        if self._aftermath and self._aftermath.done() and self._aftermath.exception():
            return True  # the caller raises it
        return (
            all(self._lookout.has_reached(subject, seq) for subject, seq in owed.items())
            and not any(member.busy for member in self._members)
            and (self._aftermath is None or self._aftermath.done())
        )

    def _missing(self, owed: Mapping[str, int]) -> str:
        late = [
            f"{subject} up to {seq}" for subject, seq in owed.items() if not self._lookout.has_reached(subject, seq)
        ]
        running = [f"message {c.seq} on {c.worker}" for c in self.calls if c.outcome == "running"]
        errors = [f"{c.error!r} in message {c.seq}" for c in self.calls if c.error]
        said = [f"not finished: {', '.join(late)}"] if late else []
        said += [f"still running: {', '.join(running)}"] if running else []
        said += [f"last error of the handler: {errors[-1]}"] if errors else []
        return "; ".join(said) or "the fleet has not settled"
