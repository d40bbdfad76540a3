"""A parti worker as an instance of a NATS micro service, so that `nats micro list`, `info` and `stats` show it.

Speaks the service protocol (NATS ADR-32) on the worker's own connection: requests on `$SRV.PING`, `$SRV.INFO` and
`$SRV.STATS`, each also with `.<name>` and `.<name>.<id>`, are answered by every instance.

nats-py's `nats.micro` is not used: its endpoints are request handlers, which it subscribes to their subject and
counts by itself. Our one endpoint stands for the partition handler, which a consumer feeds: a subscription to its
subject would get each message a second time, and the counts would have to be written into private fields. It also
calls `datetime.utcnow`, deprecated since Python 3.12.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import structlog
from nats import errors as nats_errors

from parti.errors import ConfigError, ConnectionFailed, PartiError
from parti.jetstream.connection import Connection

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

_log = structlog.get_logger("parti.micro")

ENDPOINT = "messages"
"""Name of the one endpoint."""

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_NUMBER = r"(?:0|[1-9]\d*)"
_WORD = r"(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
_SEMVER = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-{_WORD}(?:\.{_WORD})*)?(?:\+[0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*)?"
)
_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 22


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """What the endpoint has done since the service started."""

    finished: int = 0
    errors: int = 0
    last_error: str = ""
    processing_time_s: float = 0.0
    """Time spent in the handler, all calls together."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Anything that JSON can hold: partitions, assignment version, state."""


class MicroService:
    """One instance of the service, from `start` to `stop`; it goes on after a reconnect.

    `subject` is the pattern of subjects that the endpoint handles, `queue_group` who shares them. `metadata` and
    `stats` are called for each request, on the event loop: they must be quick. What they raise is logged and the
    request left without an answer.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        version: str,
        description: str,
        subject: str,
        metadata: Callable[[], Mapping[str, str]],
        stats: Callable[[], ServiceStats],
        name: str = "parti",
        queue_group: str = "",
    ) -> None:
        """Describe an instance; ConfigError for a name or version that the protocol does not allow."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"service name {name!r} is not valid; expected letters, digits, '-' and '_' only")
        if not _SEMVER.fullmatch(version):
            raise ConfigError(f"service version {version!r} is not valid; expected a semantic version such as 1.2.3")
        self.name = name
        self.id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
        """Tells this instance from all others."""
        self._connection = connection
        self._version = version
        self._description = description
        self._endpoint = {"name": ENDPOINT, "subject": subject, "queue_group": queue_group}
        self._metadata = metadata
        self._stats = stats
        self._started = datetime.now(UTC)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Answer from now on; ConnectionFailed or RequestTimeout when the server did not take the subscriptions."""
        self._started = datetime.now(UTC)
        answers = {"PING": self._ping, "INFO": self._info, "STATS": self._statistics}
        try:
            for verb, answer in answers.items():
                for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{self.name}", f"$SRV.{verb}.{self.name}.{self.id}"):
                    subscription = await self._connection.client.subscribe(subject, cb=self._answering(answer))
                    self._subscriptions.append(subscription)
            await self._connection.flush()
        except nats_errors.Error as error:
            await self.stop()
            raise ConnectionFailed(f"the micro service could not subscribe: {error}; connect first") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Answer no more; never raises."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            with contextlib.suppress(nats_errors.Error, OSError):
                await subscription.unsubscribe()

    def _answering(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Msg], Any]:
        async def respond(msg: Msg) -> None:
            if not msg.reply:
                return
            try:
                await self._connection.publish(msg.reply, json.dumps(answer()).encode())
            except PartiError as error:
                _log.debug("a service request was not answered", subject=msg.subject, reason=str(error))
            except Exception:
                _log.exception("a service request could not be answered", subject=msg.subject)

        return respond

    def _identity(self, kind: str) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{kind}_response",
            "name": self.name,
            "id": self.id,
            "version": self._version,
            "metadata": dict(self._metadata()),
        }

    def _ping(self) -> dict[str, Any]:
        return self._identity("ping")

    def _info(self) -> dict[str, Any]:
        endpoint = {**self._endpoint, "metadata": {}}
        return {**self._identity("info"), "description": self._description, "endpoints": [endpoint]}

    def _statistics(self) -> dict[str, Any]:
        stats = self._stats()
        processing_ns = int(stats.processing_time_s * 1e9)
        endpoint = {
            **self._endpoint,
            "num_requests": stats.finished,
            "num_errors": stats.errors,
            "last_error": stats.last_error,
            "processing_time": processing_ns,
            "average_processing_time": processing_ns // stats.finished if stats.finished else 0,
            "data": dict(stats.data),
        }
        started = self._started.isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {**self._identity("stats"), "started": started, "endpoints": [endpoint]}
