"""One watch over keys of a bucket: it tells what changed, soon, and decides nothing.

Whenever the chain of deliveries may be broken (a hole, missed heartbeats, a connection that broke, a bucket that went
away) the session is given up and a new one begins with the whole state again. The same happens every `resync_s`,
because a key that is removed without a marker is not announced to anybody.

Each session is a new consumer. nats-py's own watcher resumes its old one and was blind for 17 to 19 s after a restart
of the server; a new one sees the state as soon as JetStream answers. The consumer before is deleted first: a bucket
takes 1,000 consumers, and each process is to need one of them.

With `read_by = "requests"` there is no consumer: the bucket is looked at five times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

import structlog
from nats import errors as nats_errors

from parti.errors import ConfigError, ConnectionFailed, NotFound, OverlappingSubjects, PartiError
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.kv import Entry
from parti.jetstream.requested import PolledSession
from parti.jetstream.watch_session import WatchSession
from parti.model.subjects import first_overlap, tokens_of, within
from parti.telemetry.health import Health
from parti.telemetry.tasks import Supervised, supervise

_log = structlog.get_logger("parti.watch")

_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_MOMENT_S = 0.001
_SETTLED_S = 1.0
_DELETE_S = 1.0
_OPEN_S = 3.0
"""Longest wait for a new session: a cluster without a leader does not answer, and may have one a moment later."""
_BACKWARDS_S = 2.0
"""How long the bucket must be behind what was seen until it counts as restored, not as a leader still catching up."""
_READS_AT_ONCE = 256
_NO_MESSAGE = 10037
_POLLED_RESYNC = 6
"""Without a consumer each key is a request, so the whole state is read so many times less often."""


class _DoubtError(Exception):
    """The chain of deliveries may be broken."""


class Watch:
    """Watches key patterns of one bucket from `start` to `stop`, through everything.

    `on_entry(key, entry)`: a key has this value now. Never the same revision of a key twice, never an older one;
    values in between may be skipped. A key that was deleted or has expired gives an entry without value: with the
    revision of its marker, or, when it vanished without one, with revision 0, which is what a compare-and-set has to
    name then. A marker that ends is not reported.
    `on_synced()`: every key has been reported as it was a moment ago; after each whole state, changed or not.
    `on_reset(created)`: this is not the bucket that was read before (made anew, or restored from an older copy: then
    `created` is as before); nothing reported so far counts, and the entries of the new one follow.

    All are called on the event loop and must not block; what they raise is logged. A watch is a hint: a replica that
    lags may serve it, and a change may be seen late: some milliseconds after a reconnect, three heartbeats after the
    consumer was lost in any other way, `resync_s` after a removal without a marker.
    """

    def __init__(
        self,
        connection: Connection,
        api: JetStreamApi,
        bucket_name: str,
        keys: Sequence[str],
        on_entry: Callable[[str, Entry], None],
        *,
        on_synced: Callable[[], None] = lambda: None,
        on_reset: Callable[[str], None] = lambda created: None,
        resync_s: float = 10.0,
        heartbeat_s: float = 1.0,
        health: Health | None = None,
    ) -> None:
        """Describe a watch; ConfigError when `keys` is empty, malformed or overlaps itself."""
        self._connection = connection
        self._api = api
        self._bucket_name = bucket_name
        self._stream = f"KV_{bucket_name}"
        self._prefix = f"$KV.{bucket_name}."
        self._keys = _checked(keys)
        self._on_entry = on_entry
        self._on_synced = on_synced
        self._on_reset = on_reset
        self._health = health
        self._resync_s = resync_s * (_POLLED_RESYNC if connection.reads_by_requests else 1)
        self._heartbeat_s = heartbeat_s
        self._created = ""
        self._newest = 0
        self._backwards_since_s: float | None = None
        self._known: dict[str, Entry] = {}
        """What was last reported of each key."""
        self._session: WatchSession | PolledSession | None = None
        self._seen: set[str] = set()
        """Keys that came in this session before it was synced."""
        self._synced_s = 0.0
        """When this session's whole state had been reported; 0 before."""
        self._leftovers: list[str] = []
        self._asked: list[asyncio.Future[None]] = []
        """Who wants a whole state of a session that has not yet begun."""
        self._waiting: list[asyncio.Future[None]] = []
        """Who waits for the whole state of this session."""
        self._woken = asyncio.Event()
        self._task: Supervised | None = None
        self._remove_listener: Callable[[], None] = lambda: None
        self._started = self._healthy = False
        self._last_error = ""

    @property
    def healthy(self) -> bool:
        """Whether changes are being seen; still true while a whole state is fetched only to be sure."""
        return self._healthy and self._task is not None and not self._task.done()

    @property
    def last_error(self) -> str:
        """Why the last session was given up, or none could be opened; empty if that never happened."""
        return self._last_error

    async def start(self) -> None:
        """Begin to watch; returns when the first whole state has been reported.

        Waits for a bucket that is missing or cannot be reached; raises what only a person can mend (a denied
        permission, JetStream switched off). When it fails or is cancelled, nothing is left running.
        """
        self._remove_listener = self._connection.on_state(self._on_state)
        self._task = supervise(self._run, "watch", self._health)
        try:
            await self.resync()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop watching and delete the consumer; never raises."""
        self._remove_listener()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._close_session()
        if self._connection.state is ConnectionState.CONNECTED:
            await self._delete_leftovers()
        self._healthy = self._started = False
        self._fail_waiting(ConnectionFailed("the watch was stopped; start it again"))

    async def resync(self) -> None:
        """Ask for a whole state now; returns when it has been reported, however long the bucket takes to answer."""
        if self._task is None or self._task.done():
            raise ConnectionFailed("the watch is not running; start it first")
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._woken.set()
        await asked

    async def set_keys(self, keys: Sequence[str]) -> None:
        """Watch these patterns instead; returns when their whole state has been reported.

        Keys that are no longer watched are forgotten without a word. ConfigError, as in the constructor.
        """
        patterns = _checked(keys)
        if patterns == self._keys:
            return
        self._keys = patterns
        self._known = {key: entry for key, entry in self._known.items() if within(key, patterns)}
        if self._task is not None:
            await self.resync()

    # ── what is known ─────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, key: str, entry: Entry) -> None:
        """Report a delivery unless it is nothing new."""
        if not within(key, self._keys):
            return  # Of the session before `set_keys`.
        if not self._synced_s:
            self._seen.add(key)
        known = self._known.get(key)
        if known is None or entry.revision > known.revision:
            self._known[key] = entry
            self._newest = max(self._newest, entry.revision)
            _call(self._on_entry, key, entry)

    def _identify(self, info: StreamInfo) -> None:
        """Find out whether this is still the bucket that was read before."""
        if self._created == info.created and info.last_seq < self._newest:
            self._backwards_since_s = self._backwards_since_s or _now()
            if _now() - self._backwards_since_s < _BACKWARDS_S:
                raise _DoubtError(f"the bucket ends at revision {info.last_seq}, but {self._newest} was seen")
        elif self._created in {"", info.created}:
            self._created, self._backwards_since_s = info.created, None
            return
        _log.warning("the bucket is not the one that was watched before", stream=self._stream, created=info.created)
        self._created, self._backwards_since_s, self._newest = info.created, None, 0
        self._known.clear()
        _call(self._on_reset, info.created)

    # ── sessions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        if state is not ConnectionState.CONNECTED and self._session is not None:
            self._session.doubt(f"connection {state.value}: {reason}")
        self._woken.set()  # A connection that is back ends the pause that earlier failures brought about.

    async def _run(self) -> None:
        """Keep a session open for as long as the watch runs."""
        delay_s = 0.0
        self._healthy = False  # it may have died, and left a session behind
        await self._close_session()
        while True:
            try:
                await self._connection.wait_connected()
                await self._attend(await self._open_in_time())
            except Exception as error:
                if self._connection.closed:
                    self._fail_waiting(ConnectionFailed("the connection was closed, which ended the watch"))
                    return
                if isinstance(error, PartiError) and error.fatal and not self._started:
                    self._fail_waiting(error)
                    return
                if 0 < self._synced_s < _now() - _SETTLED_S:
                    delay_s = 0.0
                self._note(error)
                await self._close_session()
                self._woken.clear()
                await self._wait(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(max(_RETRY_MIN_S, 2 * delay_s), _RETRY_MAX_S)
            else:
                await self._close_session()

    def _note(self, error: Exception) -> None:
        reason = str(error) or repr(error)
        if not isinstance(error, (PartiError, _DoubtError, nats_errors.Error)):
            _log.exception("the watch met an error that it did not expect", stream=self._stream)
        elif self._healthy or reason != self._last_error:
            _log.warning("watch interrupted, will try again", stream=self._stream, reason=reason)
        self._healthy = False
        self._last_error = reason

    async def _open_in_time(self) -> WatchSession | PolledSession:
        try:
            async with asyncio.timeout(_OPEN_S):
                return await self._open_session()
        except TimeoutError:
            raise _DoubtError(f"no answer from the bucket within {_OPEN_S:g} s") from None

    async def _open_session(self) -> WatchSession | PolledSession:
        await self._delete_leftovers()
        before = await self._api.stream_info(self._stream)
        self._identify(before)
        session = self._session = self._new_session()
        self._seen = set()
        self._waiting, self._asked = self._waiting + self._asked, []
        await session.open()
        # Without this look a bucket made anew at this very moment would be taken for the old one.
        if (await self._api.stream_info(self._stream)).created != before.created:
            raise _DoubtError("the bucket was made anew meanwhile")
        session.confirm()
        return session

    def _new_session(self) -> WatchSession | PolledSession:
        name, keys, take, wake = self._bucket_name, self._keys, self._take, self._woken.set
        if self._connection.reads_by_requests:
            return PolledSession(self._api, name, keys, take, wake)
        return WatchSession(self._connection, self._api, name, keys, self._heartbeat_s, take, wake)

    async def _attend(self, session: WatchSession | PolledSession) -> None:
        """Return when it is time for a new session; raise when this one is in doubt."""
        resync_at_s = float("inf")
        while True:
            self._woken.clear()
            if session.trouble:
                raise _DoubtError(session.trouble)
            if session.complete and not self._synced_s:
                await self._finish_state(session)
                # Not all processes of a fleet at the same moment.
                resync_at_s = _now() + self._resync_s * random.uniform(0.75, 1.0)
                continue
            if self._synced_s and (self._asked or _now() >= resync_at_s):
                return
            if _now() >= session.silent_at_s:
                raise _DoubtError("the consumer is silent: its heartbeats are missing")
            # A moment longer: a timer that rounding lets end too early would be set again and again.
            await self._wait(min(session.silent_at_s, resync_at_s) - _now() + _MOMENT_S)

    async def _finish_state(self, session: WatchSession | PolledSession) -> None:
        """Report what is gone, and that the whole state is known."""
        absent = [key for key, entry in self._known.items() if entry.value and key not in self._seen]
        there = await self._still_there(absent)
        if session.trouble:
            return
        for key in [key for key in self._known if key not in self._seen and key not in there]:
            if self._known.pop(key).value:
                _call(self._on_entry, key, Entry(b"", 0))
        self._synced_s, self._seen = _now(), set()
        if self._started and not self._healthy:
            _log.info("watching again", stream=self._stream, keys=len(self._known))
        self._healthy = self._started = True
        _call(self._on_synced)
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _still_there(self, keys: Sequence[str]) -> set[str]:
        """Which of the keys the leader has; the replica that serves the consumer may lag behind what was seen."""

        async def has(key: str) -> bool:
            try:
                await self._api.call(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": self._prefix + key})
            except NotFound as error:
                if error.code != _NO_MESSAGE:
                    raise
                return False
            return True

        found: set[str] = set()
        for begin in range(0, len(keys), _READS_AT_ONCE):
            chunk = keys[begin : begin + _READS_AT_ONCE]
            answers = await asyncio.gather(*map(has, chunk))
            found |= {key for key, there in zip(chunk, answers, strict=True) if there}
        return found

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        self._synced_s = 0.0
        if session is not None:
            if session.consumer:
                self._leftovers.append(session.consumer)
            await session.close()

    async def _delete_leftovers(self) -> None:
        """Delete the consumers of earlier sessions; what cannot be deleted ends by its inactivity."""
        leftovers, self._leftovers = self._leftovers, []
        for consumer in leftovers:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_DELETE_S):
                    await self._api.delete_consumer(self._stream, consumer)

    async def _wait(self, seconds: float) -> None:
        """Wait until woken, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()

    def _fail_waiting(self, error: Exception) -> None:
        waiting, self._waiting, self._asked = self._waiting + self._asked, [], []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)


def _checked(keys: Sequence[str]) -> tuple[str, ...]:
    patterns = tuple(dict.fromkeys(keys))
    if not patterns:
        # The server reads an empty filter as "everything".
        raise ConfigError("no keys to watch; expected at least one key or pattern")
    for pattern in patterns:
        tokens_of(pattern)
    if pair := first_overlap(patterns):
        raise OverlappingSubjects(f"key patterns {pair[0]!r} and {pair[1]!r} overlap; watch the wider one only")
    return patterns


def _call(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        _log.exception("a callback of the watch failed", callback=repr(callback))


def _now() -> float:
    return asyncio.get_running_loop().time()
