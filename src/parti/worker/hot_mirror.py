"""A worker's use of the hot mirror: when its consumer moves there, where it may begin, and when it comes back.

The consumer asks `inside` where it is to be and `entrance` where it may begin; the loop in `run` looks at stream and
mirror, lets `parti.core.hot_mirror.Chooser` decide, and has a new session begun. Changing over is nothing but that:
sequences are the same on both, and positions say what is finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from parti.config import Settings
from parti.core.hot_mirror import Advice, Chooser, Look, MirrorState, Move, mirror_config
from parti.errors import ApiError, DecodeError, NotFound, PartiError, PermissionDenied, RequestTimeout
from parti.jetstream.api import JetStreamApi
from parti.jetstream.mirror import Mirror
from parti.model.fleet import MirrorRecord, decode
from parti.telemetry.health import Health
from parti.telemetry.metrics import Metrics
from parti.worker.progress import ProgressStore

_log = structlog.get_logger("parti.mirror")

KEY = "mirror"
_LOOK_S, _LOOK_INSIDE_S = 1.0, 0.5
_AFTER_REFUSAL_S = 30.0
_REMADE_S, _REMADE_LOOK_S = 5.0, 0.1
_WORTH_GOING_BACK = 1_000
"""Messages that the server needs a quarter of a second to find in the stream."""
_SIGNAL = "hot-mirror"


@dataclass(frozen=True, slots=True)
class Reading:
    """What the mirror needs of whoever reads."""

    stream: str
    consumers: Callable[[], Sequence[str]]
    """Names of the consumers: one, or the shards of the worker. All of them are on the mirror, or none."""
    reached: Callable[[], int]
    """One past the last message that was delivered."""
    need: Callable[[], int]
    """The lowest sequence that a new session would have to bring."""
    filters: Callable[[], int]
    store: Callable[[], Awaitable[bool]]
    """Stores the positions."""
    begin_anew: Callable[[str], None]
    silence: Callable[[bool], None]
    """Sends no acknowledgements from now on, or sends them again."""


class HotMirror:
    """Keeps one worker where it reads best; `run` until cancelled, then `leave`.

    What goes wrong costs speed, never a message: the worker reads the stream itself meanwhile.
    """

    def __init__(
        self,
        api: JetStreamApi,
        store: Callable[[], ProgressStore],
        settings: Settings,
        name: str,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self.inside = False
        """The consumer is to be on the mirror."""
        self.name = name
        self._api = api
        self._store = store
        self._mirror = Mirror(api, name)
        self._settings = settings
        self._chooser = Chooser(settings.hot_mirror)
        self._metrics = metrics
        self._health = health
        self._reading: Reading | None = None
        self._brings = 0
        """The lowest sequence that the mirror can bring, as far as is known; 0 when there is none."""
        self._subjects = 0
        self._created = ""
        self._refused_until_s = 0.0

    @property
    def refused(self) -> bool:
        """The server has refused to make it, not long ago."""
        return time.monotonic() < self._refused_until_s

    def serve(self, reading: Reading) -> None:
        """Say whose mirror it is, before `run` and `entrance`."""
        self._reading = reading

    def worth_going_back(self, spans: Sequence[tuple[int, int]]) -> int:
        """Whether partitions that begin behind (position, and up to where) should be brought by the mirror.

        Returns the lowest sequence that it can bring, or 0: they are few messages, or it is not read.
        """
        if not self.inside or not self._subjects:
            return 0
        messages = sum(max(0, bound + 1 - position) for position, bound in spans) / self._subjects
        return self._brings if messages > _WORTH_GOING_BACK else 0

    async def entrance(self, created: str) -> int:
        """The lowest sequence at which a session on the mirror of the stream made at that time may begin.

        The order matters: first it is stored what this worker needs, then it is read how far trimming may go (see
        `parti.core.hot_mirror`). Raises when that is not known, or the mirror is gone; the stream is read then.
        """
        reading = self._reading
        assert reading
        if not await reading.store():
            raise RequestTimeout("positions cannot be stored at present, and the mirror is not read before they are")
        need, record = reading.need(), await self._settled_record()
        state = await self._mirror.state()
        if state is None or not state.origin_created == self._created == created:
            # Whoever asks begins anew by itself, but further consumers of this worker have to be told.
            reason = "the mirror is gone, or the stream that it copies"
            self._go(Advice(Move.LEAVE, reason), begin=len(reading.consumers()) > 1)
            raise NotFound(10059, f"the hot mirror {self.name!r} is of no use now; the stream itself is read instead")
        return max(need, record.trim, record.room, state.begins)

    async def _settled_record(self) -> MirrorRecord:
        """What the keeper has written down; while it makes the mirror anew it is waited for."""
        record = await self._record()
        deadline_s = time.monotonic() + _REMADE_S
        while record.remaking and time.monotonic() < deadline_s:
            await asyncio.sleep(_REMADE_LOOK_S)
            record = await self._record()
        return record

    async def _record(self) -> MirrorRecord:
        """What the keeper has written down."""
        entry = await self._store().get(KEY)
        try:
            record = decode(entry.value, MirrorRecord) if entry and entry.value else None
        except DecodeError as error:
            self._metrics.refusals.note(KEY, entry.revision if entry else 0, error, "the stream itself is read")
            raise
        return (
            record if record and record.stream_created == self._created else MirrorRecord(stream_created="", trim=0)
        )

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Look, decide and change over until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INSIDE_S if self.inside else _LOOK_S)
            try:
                await self._look()
            except PartiError as error:
                _log.debug("the mirror cannot be looked at, will try again", error=str(error))

    async def _look(self) -> None:
        reading = self._reading
        assert reading
        reached = reading.reached()
        stream, mirror, record = await asyncio.gather(
            self._api.stream_info(reading.stream), self._mirror.state(), self._record()
        )
        waiting = False
        if not self.inside and stream.last_seq >= reached:
            pending = [n for name in reading.consumers() if (n := await self._pending(name)) is not None]
            if not pending:
                return  # it is being made
            waiting = any(pending)
        look = Look(
            now_s=time.monotonic(),
            last_seq=stream.last_seq,
            subjects=stream.num_subjects,
            created=stream.created,
            filters=reading.filters(),
            reached=reached,
            waiting=waiting,
            need=reading.need(),
            mirror=mirror,
            room=record.room,
            remaking=record.remaking,
        )
        self._brings = max(mirror.begins, record.trim, record.room) if mirror else 0
        self._subjects = stream.num_subjects
        self._created = stream.created if not self.inside else self._created
        advice = self._chooser.advise(look, inside=self.inside)
        self._metrics.mirror_bytes.value = mirror.size if mirror else 0
        if advice.move is Move.MAKE:
            await self._make(stream.first_seq, stream.last_seq)
        elif advice.move is not Move.STAY:
            await self._follow(advice, mirror)

    async def _pending(self, consumer: str) -> int | None:
        """How many messages a consumer on the stream has not delivered; None when it is not there."""
        assert self._reading
        try:
            return (await self._api.consumer_info(self._reading.stream, consumer)).pending
        except NotFound:
            return None

    async def _make(self, first_seq: int, last_seq: int) -> None:
        """Make the mirror, beginning with what this worker still needs, if that is not too much."""
        if self.refused:
            return
        reading, settings = self._reading, self._settings
        assert reading
        start = max(first_seq, reading.need())
        config = mirror_config(
            self.name,
            reading.stream,
            self._created,
            start=min(start, last_seq + 1),
            max_bytes=settings.hot_mirror_max_bytes,
            replicas=settings.replicas,
        )
        try:
            await self._mirror.make(config)
        except PermissionDenied as error:
            # Nothing is wrong with this worker: one that may make it, a leader, will.
            self._refused_until_s = time.monotonic() + _AFTER_REFUSAL_S
            _log.warning("this user may not make the hot mirror; reading the stream itself", error=str(error))
            return
        except ApiError as error:
            self._refused_until_s = time.monotonic() + _AFTER_REFUSAL_S
            self._health.raise_signal(_SIGNAL, f"the hot mirror cannot be made: {error}")
            _log.warning("hot mirror refused by the server; reading the stream itself", error=str(error))
            return
        self._health.clear(_SIGNAL)
        _log.info("hot mirror made", mirror=self.name, start=config["mirror"]["opt_start_seq"])

    async def _follow(self, advice: Advice, mirror: MirrorState | None) -> None:
        reading = self._reading
        assert reading
        self._go(advice)
        left = reading.stream if self.inside else self.name
        if advice.move is Move.REBUILD:
            await self._mirror.delete()
        elif advice.move is not Move.MAKE_ROOM and (self.inside or mirror):
            await self._leave_behind(left)

    def _go(self, advice: Advice, *, begin: bool = True) -> None:
        """Be inside or outside from the next session on."""
        reading = self._reading
        assert reading
        self.inside = advice.move in {Move.ENTER, Move.MAKE_ROOM}
        reading.silence(self.inside)
        self._metrics.mirror_inside.value = int(self.inside)
        self._metrics.mirror_moves.inc(advice.move.value)
        _log.info(
            "reads from the hot mirror" if self.inside else "reads from the stream itself",
            mirror=self.name,
            reason=advice.reason,
        )
        if begin:
            reading.begin_anew(f"hot mirror: {advice.move.value}")

    async def _leave_behind(self, stream: str) -> None:
        """Delete the consumers that are read no longer."""
        assert self._reading
        for consumer in self._reading.consumers():
            try:
                if stream == self.name:
                    await self._mirror.leave(consumer)
                else:
                    await self._api.delete_consumer(stream, consumer)
            except NotFound:
                continue

    async def leave(self) -> None:
        """The worker stops: take its consumer off the mirror, and the mirror with it if nobody else reads it."""
        if not self.inside:
            return
        assert self._reading
        try:
            await self._leave_behind(self.name)
        except PartiError as error:
            _log.info("the hot mirror is left as it is", error=str(error))
