"""One connection to NATS that says honestly what happened to it and to each request.

States and what moves between them (`lost_after_s` is a setting):

    CONNECTED --connection breaks--> SUSPENDED --lost_after_s without one--> LOST
        ^-----------reconnected----------'                                    |
        ^-----------reconnected (parti keeps trying)--------------------------'
    any --close()--> LOST, with `closed` true, for good

Nothing but `close()` ends the attempts to come back: refused or revoked credentials, expired certificates and a
damaged key file may all be mended while the process waits, so they are only reasons, logged with LOST.

Invariant guarded here: a request or publish that was reported as failed with ConnectionFailed, NoResponders or
PermissionDenied had no effect and is never sent later. RequestTimeout alone means "unknown".
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from nats import errors as nats_errors

from parti.errors import ConfigError, ConnectionFailed, NoResponders, PermissionDenied, RequestTimeout
from parti.jetstream.client import MendedClient
from parti.jetstream.dialing import Attempts, Dial, describe, plan_dial, refused_credentials

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from parti.config import Settings

log = structlog.get_logger("parti.connection")

CLOSE_S = 2.0
"""Longest wait in close() until the server has taken what was written."""
WRITE_HIGH_WATER = 1 << 20
"""Bytes waiting to be written above which publish() waits for the socket."""
WRITE_STALL_S = 5.0
REFUSED_WAIT_FACTOR = 10
"""Slower attempts while the server refuses the credentials: it logs each one."""
PERMISSION_ERRORS_KEPT = 100

_MOST_LINE = 4_096
"""Bytes of one line of the protocol, as servers have it by default."""
_MOST_NAMES = _MOST_LINE - 32
"""Bytes of subject and reply in such a line."""
_STATUS_HEADERS = {"Status", "Description", "Nats-Subject"}
_T = TypeVar("_T")


class ConnectionState(enum.StrEnum):
    """Whether the server can be used now."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request; `status` is the NATS status of its headers (404, 408, ...), 0 if it has none."""

    data: bytes
    headers: Mapping[str, str]
    status: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    subject: str
    answer: asyncio.Future[Reply]


class Connection:
    """A NATS connection with states, honest requests and bounded waits; made by `await Connection.open(...)`.

    Example:
        connection = await Connection.open(settings, name="parti-worker-0")
        reply = await connection.request("$JS.API.INFO")
        await connection.close()
    """

    def __init__(self, settings: Settings, dial: Dial) -> None:
        self._settings = settings
        self._dial = dial
        self._client = MendedClient(dial, on_down=self._down, on_denied=self._denied)
        if settings.protocol_reader != "plain":
            self._client.read_leanly()
        self._attempts: Attempts | None = None
        self._state = ConnectionState.SUSPENDED
        self._closed = False
        self._last_failure = "never connected"
        self._info: Mapping[str, Any] = {}
        self._up = asyncio.Event()
        self._lost_timer: asyncio.TimerHandle | None = None
        self._inbox = self._client.new_inbox()
        self._inbox_denied = False
        self._tokens = itertools.count(1)
        self._in_flight: dict[str, _InFlight] = {}
        self._state_callbacks: list[Callable[[ConnectionState, str], None]] = []
        self._denied_callbacks: list[Callable[[PermissionDenied], None]] = []
        self.permission_errors: deque[PermissionDenied] = deque(maxlen=PERMISSION_ERRORS_KEPT)
        """The newest denials that no request could be told about."""

    def __repr__(self) -> str:
        return f"<Connection {self._state} to {', '.join(self._dial.servers)}>"

    @classmethod
    async def open(cls, settings: Settings, *, name: str) -> Connection:
        """Connect within `connect_timeout_s`, or raise.

        AuthenticationFailed as soon as each server was tried and one refused the credentials; ConnectionFailed as
        soon as all refuse TLS, else when the time is over; ConfigError for unusable key and certificate files.
        """
        connection = cls(settings, plan_dial(settings, name=name))
        attempts = connection._attempts = Attempts(connection._dial)
        try:
            await _within(connection._connect(), settings.connect_timeout_s)
        except BaseException as error:
            connection._closed = True
            await connection._client.discard()
            if isinstance(error, (TimeoutError, OSError, nats_errors.Error)):
                raise attempts.failure() from None
            raise
        connection._reconnected("opened")
        return connection

    @property
    def client(self) -> Client:
        """The raw nats-py client, for the pull engine; it refuses to publish while disconnected."""
        return self._client

    @property
    def reads_by_requests(self) -> bool:
        """Whether records are read without consumers, which this user may not make (setting `read_by`)."""
        return self._settings.read_by == "requests"

    @property
    def state(self) -> ConnectionState:
        """The current state."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether this connection was closed and will never come back."""
        return self._closed

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the server of the current (or last) connection said about itself."""
        return self._info

    @property
    def server_version(self) -> tuple[int, int, int]:
        """Version of that server; (0, 0, 0) if it did not say."""
        match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(self._info.get("version", "")))
        return (int(match[1]), int(match[2]), int(match[3])) if match else (0, 0, 0)

    @property
    def max_payload(self) -> int:
        """Most bytes of one message, headers included, that the server takes."""
        return self._client.max_payload

    def on_state(self, callback: Callable[[ConnectionState, str], None]) -> Callable[[], None]:
        """Call back on the loop at each change with the new state and its reason; returns the remover."""
        return _add(self._state_callbacks, callback)

    def on_permission_denied(self, callback: Callable[[PermissionDenied], None]) -> Callable[[], None]:
        """Call back for each denied publish or subscription that no request() can report; returns the remover."""
        return _add(self._denied_callbacks, callback)

    async def wait_connected(self, timeout_s: float | None = None) -> None:
        """Return once connected; ConnectionFailed when the time is over or the connection is closed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._usable() and not self._closed:
                    self._up.clear()
                    await self._up.wait()
        except TimeoutError:
            pass
        if not self._usable():
            raise self._not_connected()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Reply:
        """Send a request and return its answer within `timeout_s`, which includes waiting for a reconnect.

        ConnectionFailed, NoResponders, PermissionDenied: no effect. RequestTimeout: sent, outcome unknown; raised
        early when the connection breaks, because the server drops answers to connections that are gone.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        if not self._usable():
            await self.wait_connected(timeout_s)
        if self._inbox_denied:
            raise PermissionDenied("subscribe to", f"{self._inbox}.*")
        token = str(next(self._tokens))
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._in_flight[token] = _InFlight(subject, answer)
        try:
            await self._send(subject, payload, f"{self._inbox}.{token}", headers)
            async with asyncio.timeout_at(deadline):
                return await answer
        except TimeoutError:
            raise RequestTimeout(
                f"no answer on {subject!r} within {timeout_s:g} s: the outcome is unknown; "
                f"read back before you repeat it"
            ) from None
        finally:
            del self._in_flight[token]

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Write a message to the connection; ConnectionFailed at once while there is none.

        At most once, like any core publish: it is lost if the connection breaks before the server has read it. A
        denial arrives later, through on_permission_denied.
        """
        if not self._usable():
            raise self._not_connected()
        await self._send(subject, payload, reply, headers)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return once the server has processed all that was written before; RequestTimeout if it does not say so."""
        if not self._usable():
            raise self._not_connected()
        try:
            await self._client.barrier(timeout_s)
        except TimeoutError:
            raise RequestTimeout(
                f"the server did not confirm within {timeout_s:g} s what was written; outcome unknown"
            ) from None
        except ConnectionError:
            raise RequestTimeout("the connection broke before the server confirmed what was written") from None

    async def close(self) -> None:
        """Flush what was written, within about two seconds, and close for good; never raises on a dead connection."""
        if self._closed:
            return
        self._closed = True
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, OSError, nats_errors.Error):
                await self._client.barrier(CLOSE_S)
        await self._client.discard()
        self._lose("closed by this process")

    async def _connect(self) -> None:
        await self._client.connect(
            **self._dial.options,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )
        self._attempts = None  # From here on errors are reasons, not verdicts on the opening.
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        while True:
            try:
                await self._client.barrier(self._settings.connect_timeout_s)
                return
            except ConnectionError:
                # It broke as soon as it stood, and nats-py connects anew, subscription and all.
                await self.wait_connected()

    def _usable(self) -> bool:
        return self._state is ConnectionState.CONNECTED and self._client.is_connected and not self._closed

    def _not_connected(self) -> ConnectionFailed:
        if self._closed:
            return ConnectionFailed("the connection is closed; nothing was sent; open a new one")
        return ConnectionFailed(
            f"not connected to {', '.join(self._dial.servers)} ({self._last_failure}); nothing was sent; "
            f"parti keeps trying to reconnect, try again later"
        )

    async def _send(self, subject: str, payload: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        # nats-py checks the payload alone, but the server counts the headers too and closes the connection.
        size = len(payload) + (sum(len(k) + len(v.encode()) + 4 for k, v in headers.items()) + 12 if headers else 0)
        if size > self.max_payload:
            raise ConfigError(
                f"message of {size} bytes for {subject!r} is larger than the server's max_payload of "
                f"{self.max_payload}; nothing was sent; send less, or raise max_payload on the server"
            )
        # A longer line makes the server close the connection.
        if len(subject.encode()) + len(reply) > _MOST_NAMES:
            raise ConfigError(
                f"a subject of {len(subject.encode()):,} bytes, {subject[:40]!r}…, is too long for the server's "
                f"control line of {_MOST_LINE:,} bytes; nothing was sent; use shorter subjects"
            )
        try:
            if self._client.pending_data_size > WRITE_HIGH_WATER:
                await self._client.drain_writes(WRITE_STALL_S)
            await self._client.publish(subject, payload, reply, dict(headers) if headers else None)
        except (nats_errors.BadSubjectError, nats_errors.BadHeaderError) as error:
            raise ConfigError(f"cannot send to {subject!r}: {describe(error)}; nothing was sent") from None
        except TimeoutError:
            self._last_failure = f"the server took no data for {WRITE_STALL_S:g} s"
            raise self._not_connected() from None
        except (ConnectionError, nats_errors.Error):
            raise self._not_connected() from None

    async def _on_reply(self, msg: Msg) -> None:
        flight = self._in_flight.get(msg.subject[len(self._inbox) + 1 :])
        if flight is None or flight.answer.done():
            return
        headers = msg.headers or {}
        # A stored message may carry a header of its own named Status, but then the server adds others to it.
        status = "" if "Nats-Sequence" in headers else headers.get("Status", "")
        if status == "503" and not msg.data and headers.keys() <= _STATUS_HEADERS:
            flight.answer.set_exception(
                NoResponders(f"nobody listens on {flight.subject!r}; the request had no effect; is JetStream on?")
            )
        else:
            flight.answer.set_result(
                Reply(msg.data, headers, int(status) if status.isascii() and status.isdigit() else 0)
            )

    def _denied(self, operation: str, subject: str) -> None:
        """Tell the request that was denied, or, when there is none, the log and the callbacks."""
        if operation == "subscribe to" and subject.lower().startswith(self._inbox.lower()):
            self._inbox_denied = True
            self._fail_in_flight(lambda _: PermissionDenied(operation, f"{self._inbox}.*"))
            return
        # nats-py lowercases what servers say; the exact spelling wins if the session could recover it.
        waiting = [f for f in self._in_flight.values() if not f.answer.done()]
        for matches in (lambda f: f.subject == subject, lambda f: f.subject.lower() == subject.lower()):
            for flight in filter(matches, waiting):
                flight.answer.set_exception(PermissionDenied(operation, flight.subject))
                return
        denial = PermissionDenied(operation, subject)
        self.permission_errors.append(denial)
        log.error("permission denied", operation=operation, subject=subject)
        _call_all(self._denied_callbacks, denial)

    async def _on_error(self, error: Exception) -> None:
        """Every error that nats-py meets ends up here; while opening, raising from here is what ends connect()."""
        factor = REFUSED_WAIT_FACTOR if refused_credentials(error) else 1
        if self._attempts is not None:
            self._attempts.record(self._client.dialled, error, self._client.info)
            if self._attempts.hopeless(self._client.pool):
                raise self._attempts.failure()
            factor = 1
        # nats-py has no jitter of its own, but reads this option again before each wait.
        self._client.options["reconnect_time_wait"] = (
            self._settings.reconnect_wait_s * factor * random.uniform(0.5, 1.5)
        )
        self._last_failure = describe(error)
        if isinstance(error, nats_errors.SlowConsumerError):
            log.error("messages dropped: a subscription's buffer is full", subject=error.subject)
        else:
            log.debug("connection error", reason=self._last_failure, server=self._client.dialled)

    def _down(self, reason: str) -> None:
        self._last_failure = reason
        self._fail_in_flight(
            lambda subject: RequestTimeout(
                f"the connection broke while {subject!r} was waiting for its answer ({reason}): "
                f"the outcome is unknown; read back before you repeat it"
            )
        )
        if self._state is ConnectionState.CONNECTED and not self._closed:
            self._up.clear()
            loop = asyncio.get_running_loop()
            self._lost_timer = loop.call_later(self._settings.lost_after_s, self._lost_for_long)
            self._change(ConnectionState.SUSPENDED, reason)

    def _lost_for_long(self) -> None:
        self._change(
            ConnectionState.LOST,
            f"no connection for {self._settings.lost_after_s:g} s, still trying ({self._last_failure})",
        )

    def _lose(self, reason: str) -> None:
        self._fail_in_flight(
            lambda subject: RequestTimeout(f"closed while {subject!r} waited for its answer: outcome unknown")
        )
        if self._lost_timer is not None:
            self._lost_timer.cancel()
        self._change(ConnectionState.LOST, reason)
        self._up.set()  # Wakes wait_connected(), which then sees that this is the end.

    def _reconnected(self, reason: str) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
        self._info = MappingProxyType(dict(self._client.info))
        self._last_failure = "disconnected"
        self._change(ConnectionState.CONNECTED, reason)
        self._up.set()

    async def _on_disconnected(self) -> None:
        self._inbox_denied = False  # The next connection may belong to a user with other permissions.
        self._down(self._last_failure)

    async def _on_reconnected(self) -> None:
        if not self._closed:
            self._reconnected(f"reconnected to {self._client.dialled}")

    async def _on_closed(self) -> None:
        if not self._closed:
            self._closed = True
            self._lose(f"closed for good by nats-py ({self._last_failure})")

    def _fail_in_flight(self, error: Callable[[str], Exception]) -> None:
        for flight in self._in_flight.values():
            if not flight.answer.done():
                flight.answer.set_exception(error(flight.subject))

    def _change(self, state: ConnectionState, reason: str) -> None:
        if state is self._state:
            return
        self._state = state
        say = log.info if state is ConnectionState.CONNECTED or self._closed else log.warning
        say(f"connection {state}", reason=reason, server=self._client.dialled)
        _call_all(self._state_callbacks, state, reason)


async def _within(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run until done, or raise TimeoutError.

    `asyncio.timeout` cancels once, and in Python 3.11 the `wait_for` inside nats-py swallows a cancellation that
    comes in the same turn of the loop as its own result: the attempts would go on for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        task.result()
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.1)


def _add(callbacks: list[_T], callback: _T) -> Callable[[], None]:
    callbacks.append(callback)

    def remove() -> None:
        with contextlib.suppress(ValueError):
            callbacks.remove(callback)

    return remove


def _call_all(callbacks: list[Callable[..., None]], *arguments: object) -> None:
    for callback in list(callbacks):
        try:
            callback(*arguments)
        except Exception as error:
            log.error("a connection callback failed", callback=repr(callback), error=repr(error))
