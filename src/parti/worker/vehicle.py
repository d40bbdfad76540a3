"""One durable pull consumer on the server, with the pull engine on it and how far it has delivered.

A worker has one of these, or several (`consumer_shards`); what they carry, and where each has to go on, is decided in
`parti.worker.consumer`. RESET comes before a new filter, so that a crash in between leaves a consumer that starts too
early (its messages are recognised as finished) and never one that starts too late, whose server would take unfinished
messages for acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from parti.config import Settings
from parti.core.confirmed_floor import ConfirmedFloor
from parti.core.consumer_config import (
    PREFIX,
    SHARD,
    ConsumerTuning,
    build_config,
    consumer_metadata,
    consumer_name,
    fleet_metadata,
    is_foreign,
    owner_of,
)
from parti.core.filters import FilterSet
from parti.core.pin import PinChange
from parti.core.priority import PullOptions, group_of
from parti.core.retention import INTEREST, WORK_QUEUE, retention_named
from parti.errors import ApiError, ConfigError, NotFound, PartiError
from parti.jetstream.api import ConsumerInfo, JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection
from parti.jetstream.dialing import noticed_within_s
from parti.jetstream.fleet_marks import check_mark, tell_adopted
from parti.jetstream.priority import put_consumer, unpin
from parti.jetstream.pull import PullEngine, PullTuning
from parti.jetstream.pull_group import PullGroup
from parti.jetstream.wire import Wire
from parti.model.partition import Template
from parti.model.subjects import covers
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.telemetry.tasks import Supervised, supervise
from parti.worker.floors import Reached
from parti.worker.holds import Holds
from parti.worker.hot_mirror import HotMirror
from parti.worker.intake import ShardIntake
from parti.worker.lanes import Lanes
from parti.worker.standby import GROUP, can_be_pinned, group_for
from parti.worker.starts import Starts
from parti.worker.stateful import StatefulPartitions

_log = structlog.get_logger("parti.consumer")

NOTHING = FilterSet({}, 0)
_KEEP_ON_MIRROR_S = 300.0
_PIN_LOOK_S = 0.3
_UNPULLED_WAITS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_TAKEOVER_WAITS_S = _UNPULLED_WAITS_S[:6]
"""The pulls of a process that has died go with its connection, long before its lease is taken over."""


@dataclass(frozen=True, slots=True)
class ConsumerPorts:
    """What a worker's consumers work with."""

    api: JetStreamApi
    connection: Connection
    wire: Wire
    lanes: Lanes
    metrics: Metrics
    health: Health
    entitled: Callable[[], bool] = lambda: True
    """Whether this process still holds the worker id that the consumer belongs to."""
    on_new_stream: Callable[[StreamInfo], None] = lambda stream: None
    """Called when the stream was made anew."""
    safe_elsewhere: Callable[[Iterable[str]], Awaitable[set[str]]] | None = None
    """Tells which of these partitions are carried by the consumer of their owner."""
    wait_for_room: Callable[[Iterable[str]], Awaitable[set[str]]] | None = None
    """Tells which of these partitions nobody owns because nobody has room for them."""
    stateful: StatefulPartitions | None = None
    """Partitions have a state, which is restored before they begin and saved when they end."""
    durable: Callable[[], Awaitable[bool]] | None = None
    """Asked before the consumer is set back, which acknowledges: whether all that has to be stored before is."""
    hot: HotMirror | None = None
    """A copy of the stream in memory, and whether the consumer is to be there."""
    outpinned: Callable[[str], None] = lambda reason: None
    """Called when the server has pinned the consumer to another process that shares the worker id."""


class Vehicle:
    """The consumer `<prefix>-<workerID>` (number 1), or a further one with its number appended.

    `prepare` is asked, with the vehicle and a reason, before each session. `lock` is held while its filter or its
    place in the stream change. `alone`: the worker has no other.
    """

    def __init__(
        self,
        ports: ConsumerPorts,
        settings: Settings,
        template: Template,
        starts: Starts,
        prepare: Callable[[Vehicle, str], Awaitable[bool]],
        number: int = 1,
        *,
        alone: bool = True,
    ) -> None:
        assert settings.worker_id
        self.number = number
        self.name = consumer_name(settings.prefix, settings.worker_id, number)
        self.wide = ""
        """One filter that stands for all subjects; empty: each has its own."""
        self.carried = NOTHING
        """What the server has been told, incoming partitions included."""
        self.told: tuple[str, ...] = ()
        """The filter that the server was told last."""
        self.settled_on = ""
        """The stream, or its mirror, on which the consumer was put to the position last."""
        self.existed = False
        self.confirmed = ConfirmedFloor(noticed_within_s(settings.ping_interval_s))
        """Where a new session begins on streams that delete what is acknowledged."""
        self.lock = asyncio.Lock()
        self._ports = ports
        self._settings = settings
        self._template = template
        self._starts = starts
        self._retention = retention_named(starts.stream.retention)
        self._metadata = consumer_metadata(settings.prefix, settings.worker_id, number, fleet=settings.bucket)
        self.holds = Holds(
            ports.api,
            starts.stream.name,
            self.name,
            keep_s=settings.inactive_threshold_s,
            metadata=self._metadata,
        )
        # A worker's only consumer delivers straight into the lanes, which note how far it has got.
        shard = None if alone else ShardIntake(ports.lanes)
        self.group = group_for(settings) if can_be_pinned(settings, starts.stream) else None
        """The priority group of a consumer that several processes share."""
        self._pull_group = self._make_group() if self.group else None
        self._watching_pin: Supervised | None = None
        self.reached: Reached = shard or ports.lanes
        """How far it has got."""
        signal = "pull" if number == 1 else f"pull-{number}"
        self._paused = f"{signal}-paused"
        self.engine = PullEngine(
            ports.connection,
            ports.wire,
            shard or ports.lanes,
            _pull_tuning(settings),
            ports.metrics,
            ports.health,
            stream=starts.stream.name,
            consumer=self.name,
            prepare=partial(prepare, self),
            signal=signal,
            passed=shard.passed if shard else self._passed if ports.hot else None,
            group=self._pull_group,
        )

    # ── the pin ───────────────────────────────────────────────────────────────────────────────────────────────

    def _make_group(self) -> PullGroup:
        group = PullGroup(PullOptions(GROUP), self._ports.metrics, on_change=self._on_pin)
        group.adopt(self.group)
        return group

    def _on_pin(self, change: PinChange) -> None:
        if not change.taken and (self._watching_pin is None or self._watching_pin.done()):
            self._watching_pin = supervise(self._watch_pin, "pin", self._ports.health)

    async def _watch_pin(self) -> None:
        """Pinned no more: find out whether somebody else is, or this process again."""
        assert self._pull_group
        while self._pull_group.waiting and self._ports.entitled():
            try:
                info = await self.find()
            except PartiError:
                info = None
            if info and any(state.pinned_id for state in info.groups) and self._pull_group.waiting:
                self._ports.outpinned("the server has pinned the consumer to another process")
                return
            await asyncio.sleep(_PIN_LOOK_S)

    async def _take_pin(self, info: ConsumerInfo) -> None:
        """Have a pin lifted that a process left behind which holds the lease no more."""
        if self._pull_group and self._pull_group.waiting and any(state.pinned_id for state in info.groups):
            await unpin(self._ports.api, self._starts.stream.name, self.name, GROUP)

    @property
    def stream(self) -> str:
        """Where the consumer is: the stream, or its hot mirror."""
        hot = self._ports.hot
        return hot.name if hot and hot.inside else self._starts.stream.name

    def on_mirror(self, stream: str) -> bool:
        """Whether this is the hot mirror."""
        return self._ports.hot is not None and stream == self._ports.hot.name

    def begin_at(self, position: int) -> int:
        """The sequence at which a session has to begin whose messages below `position` are finished."""
        if self._retention.keeps:
            return position
        return self.confirmed.begin(1 if self._looks_for_leftovers else position)

    @property
    def _looks_for_leftovers(self) -> bool:
        """Whether this is the first session on a work-queue: acknowledgements of the process before may be lost.

        What is still stored below the position is delivered, recognised as finished and acknowledged. Only where a
        record calls it finished, and not with `start="new"`, by which older messages are passed over unhandled. On an
        interest stream RESET makes the server delete it, and what stays is for others.
        """
        first = not self.settled_on and self._retention is WORK_QUEUE
        return first and self._starts.recorded and self._settings.start != "new"

    def note_acknowledged(self, now_s: float) -> None:
        """The session still stands: what is acknowledged now is stored some time later."""
        if not self._retention.keeps and self.engine.healthy:
            self.confirmed.note(now_s, self._ports.lanes.floors.resume_of(self.reached))

    def _passed(self, seq: int) -> None:
        """Quiet partitions must not hold back the floor: the mirror is trimmed by it."""
        if self.on_mirror(self.settled_on):
            self._ports.lanes.passed(seq)

    def moves_to(self, stream: str) -> bool:
        """Whether it was elsewhere before."""
        return self.settled_on not in {"", stream}

    def filter_of(self, carried: FilterSet, stream: str) -> tuple[str, ...]:
        """What the server is told for these subjects, sorted."""
        if self.wide and not self.on_mirror(stream) and all(covers(self.wide, s) for s in carried.partitions):
            return (self.wide,)
        return carried.subjects or (self.placeholder(),)

    def placeholder(self) -> str:
        """A subject inside the stream that nobody publishes: an empty filter would mean every subject."""
        keys = dict.fromkeys(self._template.keys, f"_none_{self.name}")
        return self._template.partition(keys).subject

    # ── on the server ─────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, stream: str = "") -> ConsumerInfo | None:
        """The consumer as it is, where it is now or on a named stream; None when there is none."""
        try:
            return await self._ports.api.consumer_info(stream or self.stream, self.name)
        except NotFound:
            return None

    async def find_unpulled(self, stream: str) -> ConsumerInfo | None:
        """The consumer, once no pull of an earlier session stands at the server.

        Such a pull would run the cursor past the messages of an added subject between RESET and the new filter; where
        finished messages are deleted, these would be too. Raises when somebody else keeps pulling. But the worker id
        may have been taken over from a process that is stopped or cut off: `put_at` gets rid of its pulls.
        """
        takes_over = self._settings.standby and not self.settled_on
        info = await self.find(stream)
        for wait_s in _TAKEOVER_WAITS_S if takes_over else _UNPULLED_WAITS_S:
            if info is None or not info.waiting or self._retention.keeps:
                return info
            await asyncio.sleep(wait_s)
            info = await self.find(stream)
        if info and info.waiting and not takes_over:
            raise ApiError(
                0,
                f"{info.waiting} pulls of somebody else stand on consumer {self.name!r}; end the other process, or "
                f"give it another worker_id",
            )
        return info

    def is_ours(self, info: ConsumerInfo) -> bool:
        """Whether a consumer of this name is this one, and not another worker's (see `workers_of`)."""
        same = (info.config.get("metadata") or {}).get(SHARD) == self._metadata.get(SHARD)
        return same and not is_foreign(info.config, self._settings.bucket)

    def check_owner(self, info: ConsumerInfo) -> None:
        """Raise `ConfigError` when a consumer of this name is another worker's, fleet's or deployment's."""
        ours = self._settings.prefix
        prefix = (info.config.get("metadata") or {}).get(PREFIX, ours)
        if prefix != ours:
            raise ConfigError(
                f"consumer {self.name!r} belongs to the deployment with prefix {prefix!r}, and worker "
                f"{self._settings.worker_id!r} of prefix {ours!r} would have one of the same name; give this worker "
                f"another worker_id"
            )
        check_mark(info.config, self._starts.stream.name, prefix=ours, fleet=self._settings.bucket)
        if not self.is_ours(info):
            worker, number = owner_of(info.config, self._settings.prefix)
            raise ConfigError(
                f"consumer {self.name!r} would be number {self.number} of worker {self._settings.worker_id!r}, but "
                f"it is number {number} of worker {worker!r}; with consumer_shards, give no worker a worker_id that "
                f"is another's with a number appended"
            )
        tell_adopted(info.config, self._settings.bucket)

    async def refilter(self, carried: FilterSet) -> None:
        """Change the filter under standing pulls."""
        stream = self.stream
        info = await self.find(stream)
        if info is None:
            raise NotFound(10014, f"consumer {self.name!r} is gone")
        subjects = self.filter_of(carried, stream)
        self._check_mark(info)
        config = self._updated(info, subjects, stream)
        await self._ports.api.put_consumer(stream, config, action="update")
        self.told = subjects

    def _check_mark(self, info: ConsumerInfo) -> None:
        """Raise `ForeignConsumer` when another fleet has made a consumer of this name since."""
        if is_foreign(info.config, self._settings.bucket):
            check_mark(info.config, self.stream, prefix=self._settings.prefix, fleet=self._settings.bucket)

    def _updated(self, info: ConsumerInfo, subjects: Sequence[str], stream: str) -> dict[str, Any]:
        """The consumer as it is, with these subjects and the mark of this fleet."""
        mark = fleet_metadata(self._settings.prefix, self._settings.bucket)
        return build_config(self.name, subjects, self._tuning(stream), existing=info.config, metadata=mark)

    def was_changed(self, info: ConsumerInfo) -> bool:
        """Whether the server has something else than it was told last."""
        ours = build_config(self.name, self.told, self._tuning(self.settled_on))
        same = all(info.config.get(key) == ours[key] for key in ("ack_wait", "max_ack_pending") if key in ours)
        return info.subjects != tuple(sorted(self.told)) or not same

    def tell_paused(self, paused: bool) -> None:
        """Say that the server delivers nothing because somebody wants it so, or that it does again."""
        if paused:
            reason = f"consumer {self.name} is paused, and not by parti: nothing is delivered; resume it"
            self._ports.health.raise_signal(self._paused, reason)
        else:
            self._ports.health.clear(self._paused)

    async def put_at(
        self,
        target: int,
        stream: str,
        subjects: tuple[str, ...],
        info: ConsumerInfo | None,
        *,
        reason: str,
        unread: Collection[str] = (),
    ) -> None:
        """RESET to a sequence of the stream, or its mirror, then set the filter; one that is gone (`info`) is made.

        `unread` are subjects that stay in the filter although nothing of them is taken in.
        """
        api, metrics, held = self._ports.api, self._ports.metrics, False
        if info:
            self._check_mark(info)
        if info and not self._retention.keeps and set(info.subjects) - (set(subjects) - set(unread)):
            # A subject is in the filter that is not read here: its messages must not get below the ack floor.
            target = min(target, info.ack_floor + 1)
        if info and not self._fits(info):
            # Positions are what counts: a consumer can be made anew where the server cannot change one.
            if self._retention is INTEREST:
                await self.holds.take(info.subjects, min(target, info.ack_floor + 1))
                held = True
            await api.delete_consumer(stream, self.name)
            _log.info("consumer is made anew", consumer=self.name, pulls_of_others=info.waiting)
            info, self.existed = None, False
        if info is None:
            # With a mirror that is made anew, as each full one is, its consumers are gone.
            if self.existed and not self.moves_to(stream) and not self.on_mirror(stream):
                metrics.recreated.inc()
                _log.warning("consumer was gone and is made again", consumer=self.name, at=target, reason=reason)
            tuning = self._tuning(stream)
            config = build_config(self.name, subjects, tuning, metadata=self._metadata, group=self.group)
            info = await self._put(stream, config, action="create")
            self.existed = True
        if not held:
            await self._hold(info, subjects, target)
        await api.reset_consumer(stream, self.name, target)
        self.reached.cursor = target
        metrics.resets.inc("update" if reason == "update" else "session")
        config = self._updated(info, subjects, stream)
        refilters = info.subjects != tuple(sorted(subjects))
        if refilters or any(info.config.get(k) != v for k, v in config.items()):
            await api.put_consumer(stream, config, action="update")
        if refilters and reason != "update":
            # Under the old filter, a pull of somebody who has lost the worker id, and stands or arrives late, has run
            # the cursor past messages of added subjects. For an update none may stand (`find_unpulled`).
            await api.reset_consumer(stream, self.name, target)
        if self.holds.fresh:
            self.holds.settle(await self._starts.last_seq())
        if not self.settled_on:
            await self._take_pin(info)
        self.engine.aim(stream)
        self.settled_on, self.told = stream, subjects

    def _fits(self, info: ConsumerInfo) -> bool:
        """Whether a consumer has the priority group that it should have, be it none, and no pulls of others.

        Where it has a group, such pulls are refused with their pin.
        """
        return group_of(info.config) == self.group if self._retention.keeps else not info.waiting

    async def _put(self, stream: str, config: dict[str, Any], *, action: str) -> ConsumerInfo:
        if self.group:
            return await put_consumer(self._ports.connection, stream, config, action=action)
        return await self._ports.api.put_consumer(stream, config, action=action)

    async def _hold(self, info: ConsumerInfo, subjects: Sequence[str], seq: int) -> None:
        """Where needed, keep messages of added subjects that the consumer has told the server to need no more.

        What it has told cannot be seen: with nothing in flight it is how far the server has looked for it, up to the
        end of the stream, and neither its ack floor nor what it has delivered.
        """
        added = set(subjects) - set(info.subjects)
        if not self._retention.keeps and self._retention.overlap and added:
            await self.holds.take(sorted(added), seq)

    async def release_holds(self) -> None:
        """Give up holds that are no longer needed."""
        if self.holds.any and (info := await self.find()):
            await self.holds.release(info)

    def _tuning(self, stream: str) -> ConsumerTuning:
        s = self._settings
        if self.on_mirror(stream):
            # It cannot outlive the mirror, and whoever comes back later makes it anew.
            keep_s = min(s.inactive_threshold_s, _KEEP_ON_MIRROR_S)
            return ConsumerTuning(s.ack_wait_s, s.max_ack_pending, s.max_waiting, keep_s, acks=False)
        return ConsumerTuning(s.ack_wait_s, s.max_ack_pending, s.max_waiting, s.inactive_threshold_s)


def _pull_tuning(settings: Settings) -> PullTuning:
    return PullTuning(
        batch=settings.pull_batch,
        max_bytes=settings.pull_max_bytes,
        expires_s=settings.pull_expires_s,
        heartbeat_s=settings.pull_heartbeat_s,
        limit=max(1, int(settings.backpressure * settings.max_ack_pending)),
    )
