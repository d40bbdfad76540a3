"""Reads the fleet once for all browsers, and tells the hub what has changed.

One watch of the fleet's bucket brings claims, leases and heartbeats as they are written. What no watch tells (lags of
consumers, new records of the history, new dead letters) is asked for every `look_s`, and sooner after a claim has
changed. Browsers ask for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import structlog

from parti.config import Settings
from parti.console.hub import Hub
from parti.console.picture import Colours, Difference, Picture, Reading, difference, draw, totals
from parti.console.tails import Tail
from parti.coordination.control_plane import ControlPlane
from parti.coordination.lags import Lags
from parti.coordination.orders import Situation, watch_situation
from parti.core.dead_letter import Letter, is_original
from parti.errors import ConfigError, DecodeError, PartiError
from parti.jetstream.connection import ConnectionState
from parti.jetstream.kv import Entry
from parti.jetstream.scan import Scanned
from parti.jetstream.watch import Watch
from parti.jobs.desk import JobDesk, Line
from parti.model.fleet import decode
from parti.model.history import HistoryRecord, history_stream
from parti.model.records import number_in
from parti.model.safe_text import strip_userinfo
from parti.telemetry.tasks import supervise
from parti.version import __version__

_log = structlog.get_logger("parti.console")

_QUIET_S = 0.2
"""Least time between two events: what changes meanwhile goes together."""
LOOK_S = 2.0
_CHECK_S = 0.5
_SOON_S = 0.3
"""The record of a move is written right after its claim."""
_POINTS = 300
_MOVES = 300
_LETTERS = 100
_JOBS = 100
_JOBS_S = 5.0
_KEPT = 32
"""Last events, for browsers that were away for a moment, and for pages that were just drawn."""


class Watcher:
    """The fleet as browsers are to see it; `running` reads it for the length of a block."""

    def __init__(self, plane: ControlPlane, settings: Settings, hub: Hub, look_s: float = LOOK_S) -> None:
        self._plane = plane
        self._hub = hub
        self._look_s = look_s
        servers = ", ".join(strip_userinfo(url) for url in settings.nats)
        self._reading = Reading(bucket=settings.bucket, servers=servers, letters_stream=settings.dead_letter_stream)
        self._prefix = settings.prefix
        self._lags = Lags(plane.api)
        self._points: deque[tuple[int, tuple[float, int | None]]] = deque(maxlen=_POINTS)
        self._moves = Tail(
            plane.connection, plane.api, history_stream(settings.bucket), _record, most=_MOVES, payload=True
        )
        self._letters = Tail(
            plane.connection, plane.api, settings.dead_letter_stream, _letter, most=_LETTERS, exact=True
        )
        self._jobs = _Jobs(plane)
        self._colours = Colours()
        self._picture: Picture = {}
        self._encoded = b""
        """The picture as it is sent, for all browsers that come before it changes."""
        self._run = secrets.token_hex(4)
        """What tells changes of this console from those of one before it."""
        self._number = 0
        self._kept: deque[bytes] = deque(maxlen=_KEPT)
        self._dirty, self._claims_changed = asyncio.Event(), asyncio.Event()
        self._reading_moves = asyncio.Lock()
        self._watch: Watch | None = None
        self._down_since: float | None = None
        self._why_down = ""
        self._notes: dict[str, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read for the length of the block; it begins when the fleet's whole state is known.

        Raises what only a person can mend: a denied permission, JetStream switched off.
        """
        self._watch = watch_situation(self._plane, self._take, self._reset, self._synced)
        remove = self._plane.connection.on_state(self._on_state)
        tasks: list[asyncio.Future[None]] = []
        try:
            await self._watch.start()
            await self._look()
            steps = (self._publish_soon, self._look_later, self._follow_moves, self._check_later)
            tasks += [supervise(partial(_keep, step), f"console{step.__name__}") for step in steps]
            yield
        finally:
            remove()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._jobs.stop()
            await self._watch.stop()

    # ── what browsers get ─────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> bytes:
        """Everything that is known, as JSON; the events that the hub gets from now on begin here."""
        self.publish()
        if not self._encoded:
            self._encoded = msgspec.json.encode(self._picture)
        about = {"now": _now_ms(), "at": self._at, "version": __version__}
        return msgspec.json.encode({**about, "picture": msgspec.Raw(self._encoded)})

    def since(self, at: str) -> bytes | None:
        """The events after a change; None: they are no longer kept, or that change was another console's."""
        self.publish()
        run, _, number = at.partition("-")
        known = number_in(number)
        if run != self._run or not (known or number == "0"):
            return None
        missed = self._number - known
        if not 0 <= missed <= len(self._kept):
            return None
        return b"".join(islice(self._kept, len(self._kept) - missed, None))

    @property
    def _at(self) -> str:
        return f"{self._run}-{self._number}"

    def publish(self) -> None:
        """Draw the picture anew and give the hub what has changed."""
        picture = draw(self._reading, self._colours, datetime.now(UTC))
        changes: Difference = difference(self._picture, picture)
        if changes:
            self._picture, self._encoded = picture, b""
            self._number += 1
            event = _delta(self._at, changes)
            self._kept.append(event)
            self._hub.publish(event)

    async def _publish_soon(self) -> None:
        await self._dirty.wait()
        self._dirty.clear()
        if len(self._hub):
            self.publish()
        await asyncio.sleep(_QUIET_S)

    # ── what the watch tells ──────────────────────────────────────────────────────────────────────────────────

    def _take(self, key: str, entry: Entry) -> None:
        self._reading.situation.take(key, entry)
        self._dirty.set()
        if key.startswith("claims."):
            self._claims_changed.set()

    def _reset(self, created: str) -> None:
        self._reading.situation = Situation()
        self._dirty.set()

    def _synced(self) -> None:
        self._check_link()

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        if state is not ConnectionState.CONNECTED:
            self._note_down(reason)
        self._check_link()

    def _note_down(self, reason: str) -> None:
        if self._down_since is None:
            self._down_since = time.time()
        self._why_down = strip_userinfo(reason)

    def _check_link(self) -> None:
        """Whether what is shown is what is: the server answers and the watch is whole."""
        connected = self._plane.connection.state is ConnectionState.CONNECTED
        watching = self._watch is not None and self._watch.healthy
        if connected and watching:
            self._down_since, self._why_down = None, ""
        elif connected and self._watch:
            self._note_down(self._watch.last_error or "the fleet's records are being read again")
        elif self._down_since is None:
            self._note_down("there is no connection")
        link = {
            "up": self._down_since is None,
            "connected": connected,
            "since": None if self._down_since is None else int(self._down_since * 1000),
            "reason": self._why_down,
        }
        if link != self._reading.link:
            self._reading.link = link
            self._dirty.set()

    async def _check_later(self) -> None:
        await asyncio.sleep(_CHECK_S)
        self._check_link()

    # ── what has to be asked for ──────────────────────────────────────────────────────────────────────────────

    async def _look_later(self) -> None:
        await asyncio.sleep(self._look_s)
        if self._plane.connection.state is ConnectionState.CONNECTED:
            await self._look()

    async def _follow_moves(self) -> None:
        await self._claims_changed.wait()
        await asyncio.sleep(_SOON_S)
        self._claims_changed.clear()
        if self._plane.connection.state is ConnectionState.CONNECTED:
            await self._ask("moves", self._read_moves)

    async def _look(self) -> None:
        reading = self._reading
        await self._lags.read(reading.situation)
        self._note("lag", self._lags.trouble)
        reading.lags = self._lags.by_worker
        self._points.append((int(time.time() * 1000), totals(reading)))
        reading.points = dict(self._points)
        await self._ask("moves", self._read_moves)
        await self._ask("letters", self._read_letters)
        if len(self._hub):
            await self._ask("jobs", self._read_jobs)
        self._check_link()
        self._dirty.set()

    async def _ask(self, what: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Read something; trouble is a note on the page and changes nothing else."""
        try:
            await read()
        except PartiError as error:
            self._note(what, str(error))

    def _note(self, what: str, text: str) -> None:
        notes = {**self._notes, what: strip_userinfo(text)}
        self._notes = {about: said for about, said in notes.items() if said}
        self._reading.notes = self._notes

    async def _read_moves(self) -> None:
        async with self._reading_moves:
            if await self._moves.refresh():
                self._reading.moves = self._moves.newest
                self._dirty.set()
        missing = f"no history is kept: there is no stream {self._moves.stream} (setting history)"
        self._note("moves", missing if self._moves.missing else "")

    async def _read_letters(self) -> None:
        if await self._letters.refresh():
            self._reading.letters, self._reading.letters_total = self._letters.newest, self._letters.total
            self._dirty.set()
        missing = f"there is no dead-letter stream {self._letters.stream}"
        self._note("letters", missing if self._letters.missing else "")

    async def _read_jobs(self) -> None:
        fleet = self._reading.situation.fleet
        if not await self._jobs.find(fleet.prefix if fleet else self._prefix):
            return
        reading = self._reading
        reading.jobs, reading.job_counts, reading.queues = await self._jobs.look()
        self._note("jobs", "")


class _Jobs:
    """The records of jobs, watched once there are any."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._desk: JobDesk | None = None
        self._watch: Watch | None = None
        self._entries: dict[str, Entry] = {}

    async def find(self, prefix: str) -> bool:
        """Whether jobs have ever run here."""
        if self._desk is not None:
            return True
        desk = JobDesk(self._plane.connection, prefix)
        try:
            await desk.check()
        except ConfigError:
            return False
        watch = desk.watch(self._entries, asyncio.Event())
        try:
            async with asyncio.timeout(_JOBS_S):
                await watch.start()
        except TimeoutError:
            return False  # it has just gone, or the server is slow: the next look tells
        self._desk, self._watch = desk, watch
        return True

    async def look(self) -> tuple[dict[str, Line], dict[str, int], tuple[Any, ...]]:
        """The jobs to show, how many there are of each state, and their queues."""
        assert self._desk
        for key in [key for key, entry in self._entries.items() if not entry.value]:
            del self._entries[key]
        picture = await self._desk.picture(self._entries)
        return {line.id: line for line in picture.lines[:_JOBS]}, dict(picture.counts), tuple(picture.queues)

    async def stop(self) -> None:
        """Watch no more."""
        if self._watch:
            await self._watch.stop()


async def _keep(step: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do a step again and again; what nobody has foreseen is logged and ends nothing."""
    while True:
        try:
            await step()
        except Exception:
            _log.exception("the console met an error that it did not expect", step=step.__name__)
            await asyncio.sleep(LOOK_S)


def _record(message: Scanned) -> HistoryRecord | None:
    with contextlib.suppress(DecodeError):
        return decode(message.data, HistoryRecord)
    return None  # of another version


def _letter(message: Scanned) -> Letter | None:
    if is_original(message.subject):
        return None
    return Letter(message.seq, message.stored_at, message.headers)


def _delta(at: str, changes: Difference) -> bytes:
    data = msgspec.json.encode({"now": _now_ms(), "changes": changes})
    return b"event: delta\nid: %b\ndata: %b\n\n" % (at.encode(), data)


def _now_ms() -> int:
    return int(time.time() * 1000)
