"""A pinned consumer and those who wait for it: how the server, and with it an operator, chooses who works.

The consumer of a worker id that several processes share is pinned to the one that holds the id's lease. Whoever
stands by has a pull waiting, so that the server can pin somebody else: that is what `parti priority unpin` asks for,
and the one that is pinned no more steps down in good order. A pin is no fence. What was delivered to a process that
has not the lease is never handled there: the lease alone decides who acts.

Only on streams with limits retention: elsewhere a waiting pull could run the cursor past messages that are needed.
"""

from __future__ import annotations

import asyncio

import structlog

from parti.config import Settings
from parti.core.consumer_config import consumer_name
from parti.core.priority import Policy, PriorityGroup
from parti.core.retention import LIMITS
from parti.errors import PartiError
from parti.jetstream.api import StreamInfo
from parti.jetstream.connection import Connection, ConnectionState
from parti.jetstream.pull_client import PullClient
from parti.telemetry.tasks import owned

_log = structlog.get_logger("parti.standby")

GROUP = "lease"
_RETRY_S = 0.5
_OPEN_S = 0.5
"""A connection that takes longer waits for a server that is away."""
_SETTLE_TTLS = 2.0


def can_be_pinned(settings: Settings, stream: StreamInfo) -> bool:
    """Whether the consumers of this worker have a group whose pin goes with the lease."""
    return settings.standby and stream.retention == LIMITS.name


def group_for(settings: Settings) -> PriorityGroup:
    """The group: who has not pulled for the length of a lease has lost that, too."""
    # In milliseconds: what the server is told in nanoseconds must read back as the same number.
    return PriorityGroup(GROUP, Policy.PINNED, round(settings.lease_ttl_s, 3))


class WaitingPull:
    """A pull that waits on somebody else's consumer, on a connection of its own, while it is told to `stand`.

    It takes at most one message and answers none: what it was given is given back when it stops. A server that was
    away has forgotten whom it had pinned, so after a lost connection whoever works gets time to be the first to pull.
    """

    def __init__(self, settings: Settings, stream: str, worker_id: str) -> None:
        self._settings = settings
        self._stream = stream
        self._consumer = consumer_name(settings.prefix, worker_id)
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = float("-inf")

    def stand(self, wanted: bool) -> None:
        """Wait from now on, or no more; as often as one likes."""
        # One that was told to end before it had begun is done, and has taken no notice of that.
        idle = self._task is None or self._task.done()
        if wanted and idle and asyncio.get_running_loop().time() >= self._not_before_s:
            self._task = owned(self._run(), "waiting-pull", signals=False)
        elif not wanted:
            self._end()

    def _end(self) -> None:
        """Once only: a second time would cut short how it gives back what it has."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    async def stop(self) -> None:
        """Wait no more; returns when nothing waits."""
        self._end()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._wait()
        except TimeoutError:
            self._pause(_SETTLE_TTLS * self._settings.lease_ttl_s)
        except PartiError as error:
            _log.debug("cannot wait on the consumer, will try again", error=str(error))
            self._pause(_RETRY_S)
        except Exception:
            # The next `stand` begins another one; not at once, or it would fail as often as it is told to.
            self._pause(_SETTLE_TTLS * self._settings.lease_ttl_s)
            raise
        finally:
            self._task = None

    def _pause(self, seconds: float) -> None:
        self._not_before_s = asyncio.get_running_loop().time() + seconds

    def _on_state(self, state: ConnectionState, reason: str) -> None:
        if state is not ConnectionState.CONNECTED:
            self._pause(_SETTLE_TTLS * self._settings.lease_ttl_s)
            self._end()

    async def _wait(self) -> None:
        async with asyncio.timeout(_OPEN_S):
            connection = await Connection.open(self._settings, name=f"{self._consumer}-standby")
        remove_listener = connection.on_state(self._on_state)
        client = PullClient(
            connection,
            stream=self._stream,
            consumer=self._consumer,
            group=GROUP,
            limit=1,
            on_pinned=lambda pin: _log.info("the server has pinned this process", consumer=self._consumer),
        )
        try:
            async with client:
                # The first one fills its hands; that it came is all there is to know.
                await anext(client)
                await asyncio.Event().wait()
        finally:
            remove_listener()
            await connection.close()
