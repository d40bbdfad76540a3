"""Pulling jobs: one pull at a time, for no more than the worker may still hold.

A job waits on the server, where any worker can get it, until somebody has room for it. A message that is sent to a
worker that does not listen any more would be missing for the whole of ack_wait; so a pull that ends early is ended
with the server's knowledge (`stop`), and what still arrives is given back.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from parti.core.batch import pull_size
from parti.core.priority import PullOptions
from parti.core.pull_status import PullStep, next_step
from parti.errors import ConnectionFailed, PartiError
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.wire import Wire, pub
from parti.model.headers import status_of
from parti.telemetry.health import Health
from parti.telemetry.metrics import PULL_STATUS, Metrics
from parti.telemetry.tasks import Supervised, supervise

_log = structlog.get_logger("parti.jobs.pull")

_SIGNAL = "pull"
_GRACE_S = 2.0
"""A pull that has not been answered so long after its end is given up, with its session."""
_ROOM_WAIT_S = 0.25
_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 2.0


class JobPull:
    """Pulls from `start` to `stop`, through everything.

    `deliver(subject, reply, header, payload)` takes each job, on the event loop. `held()` says how many it has.
    `prepare()` makes sure that the consumer is there; its errors are retried with backoff.
    """

    def __init__(
        self,
        connection: Connection,
        wire: Wire,
        metrics: Metrics,
        health: Health,
        *,
        stream: str,
        consumer: str,
        batch: int,
        limit: int,
        timeout_s: float,
        options: PullOptions,
        held: Callable[[], int],
        deliver: Callable[[bytes, bytes, bytes | None, bytes], None],
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._metrics = metrics
        self._health = health
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode()
        self._consumer = consumer
        self._batch = batch
        self._limit = limit
        self._timeout_s = timeout_s
        self._options = options.fields()
        self._held = held
        self._deliver = deliver
        self._prepare = prepare
        self._changed = asyncio.Event()
        self._credit = 0
        """Jobs that the server may still send on the standing pull."""
        self._pulls = 0
        self._signs = 0
        self._inbox = ""
        self._sid = b""
        self._broken = ""
        """Why this session has to end."""
        self._wait_for_room = False
        self._prepared = True
        """The consumer is there, as far as is known."""
        self._stopping = False
        self._task: Supervised | None = None
        self._remove_listener: Callable[[], None] = lambda: None

    def start(self) -> Supervised:
        """Begin; the consumer is there already."""
        self._remove_listener = self._connection.on_state(self._on_state)
        self._task = supervise(self._run, "job-pull", self._health)
        return self._task

    def revive(self) -> None:
        """Replace the task, whatever has become of it, and begin a new session."""
        if self._task and not self._stopping:
            self._task.cancel()
            self._close()
            self._task = supervise(self._run, "job-pull", self._health)

    @property
    def sign(self) -> int | None:
        """A number that grows with every answer or refusal of the server; None while no pull is wanted."""
        size = pull_size(self._batch, limit=self._limit, inflight=self._held(), credit=self._credit)
        if self._stopping or self._connection.state is not ConnectionState.CONNECTED or not (size or self._credit):
            return None
        return self._signs

    def room_changed(self) -> None:
        """A job has ended: there may be room for the next."""
        self._changed.set()

    def doubt(self, reason: str) -> None:
        """The consumer may be gone: look, and make it again. While a pull stands, the server says so itself."""
        if not self._credit:
            self._broken = self._broken or reason
            self._changed.set()

    @property
    def credit(self) -> int:
        """Jobs that may still come on the standing pull."""
        return self._credit

    async def stop(self) -> None:
        """Pull no more; returns when nothing can arrive any more. What does until then goes to `deliver`."""
        self._stopping = True
        self._changed.set()
        self._remove_listener()
        if self._sid and self._wire.write(b"UNSUB %b\r\n" % self._sid):
            # The server drops a pull that nobody listens to; what it sent before comes before its answer.
            with suppress(PartiError):
                await self._connection.flush(2.0)
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._close()

    # ── sessions ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        delay_s = _RETRY_MIN_S
        while not self._stopping:
            try:
                await self._connection.wait_connected()
                if not self._prepared:
                    await self._prepare()
                # Whatever ends the session: the consumer may be gone.
                self._prepared = False
                self._health.clear(_SIGNAL)
                reason = await self._session()
                delay_s = _RETRY_MIN_S
                if not self._stopping:
                    _log.info("pulling anew", consumer=self._consumer, reason=reason)
            except ConnectionFailed:
                if self._connection.closed:
                    return
            except PartiError as error:
                self._health.raise_signal(_SIGNAL, f"consumer {self._consumer} cannot be read: {error}")
                _log.warning("consumer not ready, will try again", consumer=self._consumer, error=str(error))
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
                self._signs += 1  # a refusal is an answer; that the consumer is there says nothing of pulls
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _session(self) -> str:
        """Pull on one subscription until it has to end; returns why."""
        self._broken = ""
        self._inbox = self._wire.new_inbox()
        self._sid = self._wire.subscribe(f"{self._inbox}.*", self._sink)
        try:
            while not self._stopping and not self._broken:
                self._changed.clear()
                size = pull_size(self._batch, limit=self._limit, inflight=self._held(), credit=self._credit)
                if self._credit:
                    await self._wait(self._timeout_s + _GRACE_S, silence="the server does not answer a pull")
                elif self._wait_for_room:
                    self._wait_for_room = False
                    await asyncio.sleep(_ROOM_WAIT_S)
                elif size:
                    self._request(size)
                else:
                    await self._changed.wait()
            return self._broken
        finally:
            if not self._stopping:
                self._close()

    def _close(self) -> None:
        if self._sid:
            self._wire.unsubscribe(self._sid)
        self._sid, self._credit = b"", 0

    def _request(self, size: int) -> None:
        self._pulls += 1
        body = json.dumps({"batch": size, "expires": int(self._timeout_s * 1e9), **self._options}).encode()
        if not self._wire.write(pub(self._subject, body, f"{self._inbox}.{self._pulls}".encode())):
            self._broken = "no connection"
            return
        self._credit = size
        self._metrics.pull_requests.inc()

    async def _wait(self, seconds: float, silence: str) -> None:
        pull = self._pulls
        deadline_s = asyncio.get_running_loop().time() + seconds
        while self._credit and self._pulls == pull and not self._broken and not self._stopping:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                self._metrics.pull_missed_heartbeats.inc()
                self._broken = silence
                return

    def _sink(self, subject: bytes, reply: bytes, header: bytes | None, payload: bytes) -> None:
        self._signs += 1
        if reply:
            self._credit = max(0, self._credit - 1)
            if not self._credit:
                self._changed.set()
            self._metrics.messages.inc()
            self._deliver(subject, reply, header, payload)
            return
        code, text = status_of(header or b"")
        self._metrics.pull_status.inc(PULL_STATUS.get(code, "other"))
        step = next_step(code, text)
        if step is PullStep.ALIVE or not subject.endswith(b".%d" % self._pulls):
            return  # of a pull that is over
        self._credit = 0
        if step is PullStep.WAIT_FOR_ROOM:
            self._wait_for_room = True
        elif step in {PullStep.NEW_SESSION, PullStep.RECREATE, PullStep.REFUSED, PullStep.UNPINNED}:
            self._broken = f"{code} {text}".strip()
        self._changed.set()

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        # Also on the way back up: the subscriptions of the old connection are gone.
        self._broken = f"connection {state.value}: {reason}"
        self._changed.set()
