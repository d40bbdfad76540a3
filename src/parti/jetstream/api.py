"""JetStream's request API, with its errors as our errors."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from parti.errors import ApiError, JetStreamUnavailable, NoResponders, NotFound, WrongRevision
from parti.jetstream.direct import Stored
from parti.model.mapping import stored_subjects

_NOT_FOUND = frozenset({10014, 10037, 10059})
_NO_MESSAGE = 10037
_WRONG_REVISION = frozenset({10071, 10164})
_NOT_ENABLED = frozenset({10039, 10076})


class Reply(Protocol):
    """An answer to a request."""

    @property
    def data(self) -> bytes:
        """The payload."""


class Requester(Protocol):
    """What the API needs of a connection."""

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Reply:
        """Send a request and wait for its answer."""
        ...

    async def publish(self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Write a message without waiting for anything."""
        ...


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What parti needs to know of a stream."""

    name: str
    subjects: tuple[str, ...]
    retention: str
    storage: str
    created: str
    first_seq: int
    last_seq: int
    messages: int
    allow_direct: bool
    num_subjects: int = 0
    transform: tuple[str, str] | None = None
    """Source and destination of the stream's subject transform."""

    @property
    def stored_subjects(self) -> tuple[str, ...]:
        """What its messages lie under, and consumers filter on: `subjects` after the transform."""
        return stored_subjects(self.subjects, *self.transform) if self.transform else self.subjects


@dataclass(frozen=True, slots=True)
class GroupState:
    """What the server knows of a priority group now."""

    name: str
    pinned_id: str
    """The client that is pinned; empty: none, or the policy pins nobody."""
    pinned_since: datetime | None


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """What parti needs to know of a consumer."""

    config: Mapping[str, Any]
    ack_floor: int
    """Every matching message up to this sequence is acknowledged."""
    delivered: int
    ack_pending: int
    pending: int
    waiting: int = 0
    """Pulls that stand."""
    groups: tuple[GroupState, ...] = ()
    """State of its priority groups."""
    deliveries: int = 0
    """How often it has delivered a message, repeats included."""
    redelivered: int = 0
    """Messages in flight that it has delivered more than once."""
    paused: bool = False

    @property
    def name(self) -> str:
        """The name, which is the durable name of a consumer that has one."""
        return str(self.config.get("name") or self.config.get("durable_name") or "")

    @property
    def subjects(self) -> tuple[str, ...]:
        """The filter, in either of the two forms that the server uses."""
        one = self.config.get("filter_subject")
        return (one,) if one else tuple(sorted(self.config.get("filter_subjects") or ()))


class JetStreamApi:
    """Calls `$JS.API.…` on one connection.

    Raises `ApiError` (or a subclass) when the server says no, `RequestTimeout` when it does not answer, and
    `JetStreamUnavailable` when JetStream is off for the account.
    """

    def __init__(self, connection: Requester, *, timeout_s: float = 5.0) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def call(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one API request and return its answer."""
        payload = json.dumps(body).encode() if body is not None else b""
        try:
            reply = await self._connection.request(f"$JS.API.{verb}", payload, timeout_s=self._timeout_s)
        except NoResponders as error:
            raise JetStreamUnavailable(
                "the server answers, but JetStream is not enabled there; start nats-server with JetStream (-js) or "
                "enable it for this account"
            ) from error
        return _answer(reply.data)

    async def account_info(self) -> dict[str, Any]:
        """Limits and usage of the account; the cheapest proof that JetStream is there."""
        return await self.call("INFO")

    async def stream_names(self) -> list[str]:
        """Names of the streams that this account may see (the first page)."""
        return sorted((await self.call("STREAM.NAMES")).get("streams") or [])

    async def stream_info(self, name: str) -> StreamInfo:
        """State and configuration of a stream; raises `NotFound`."""
        return _stream_info(await self.call(f"STREAM.INFO.{name}"))

    async def stream_config(self, name: str) -> dict[str, Any]:
        """The whole configuration of a stream, as the server has it; raises `NotFound`."""
        return dict((await self.call(f"STREAM.INFO.{name}"))["config"])

    async def ensure_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        """Return the stream, creating it when it is missing; an existing one is left as it is."""
        name = config["name"]
        try:
            return await self.stream_info(name)
        except NotFound:
            return _stream_info(await self.call(f"STREAM.CREATE.{name}", config))

    async def consumer_names(self, stream: str) -> list[str]:
        """Names of all consumers of a stream; raises `NotFound`."""
        names: list[str] = []
        while True:
            page = await self.call(f"CONSUMER.NAMES.{stream}", {"offset": len(names)})
            names += page.get("consumers") or []
            if not page.get("consumers") or len(names) >= page["total"]:
                return names

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        """State and configuration of all consumers of a stream; raises `NotFound`."""
        found: list[ConsumerInfo] = []
        while True:
            page = await self.call(f"CONSUMER.LIST.{stream}", {"offset": len(found)})
            found += [_consumer_info(each) for each in page.get("consumers") or []]
            if not page.get("consumers") or len(found) >= page["total"]:
                return found

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        """State and configuration of a consumer; raises `NotFound`."""
        return _consumer_info(await self.call(f"CONSUMER.INFO.{stream}.{name}"))

    async def put_consumer(self, stream: str, config: Mapping[str, Any], *, action: str) -> ConsumerInfo:
        """Create (`action="create"`) or change (`action="update"`) a consumer, and nothing else."""
        body = {"stream_name": stream, "config": dict(config), "action": action}
        return _consumer_info(await self.call(f"CONSUMER.CREATE.{stream}.{config['name']}", body))

    async def reset_consumer(self, stream: str, name: str, seq: int) -> None:
        """Make `seq` the next message to deliver and forget what was in flight.

        A missing consumer does not answer: make sure that it exists first.
        """
        await self.call(f"CONSUMER.RESET.{stream}.{name}", {"seq": max(1, seq)})

    async def pause_consumer(self, stream: str, name: str, until: datetime | None) -> None:
        """Let a consumer deliver nothing until then (None: go on); acknowledgements still count.

        Raises `NotFound`. Nothing is delivered once this has returned.
        """
        body = {"pause_until": until.astimezone(UTC).isoformat().replace("+00:00", "Z")} if until else {}
        await self.call(f"CONSUMER.PAUSE.{stream}.{name}", body)

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer; raises `NotFound`."""
        await self.call(f"CONSUMER.DELETE.{stream}.{name}")

    async def next_on_subject(self, stream: str, subject: str, seq: int) -> Stored | None:
        """The first message at or after `seq` that matches `subject`, read from the leader; None at the end.

        Raises `NotFound` when there is no such stream.
        """
        try:
            answer = await self.call(f"STREAM.MSG.GET.{stream}", {"seq": max(1, seq), "next_by_subj": subject})
        except NotFound as error:
            if error.code == _NO_MESSAGE:
                return None
            raise
        return _stored(answer["message"])

    async def send(self, subject: str, payload: bytes, *, headers: Mapping[str, str]) -> None:
        """Publish without waiting for an answer: one of the earlier messages of a batch."""
        await self._connection.publish(subject, payload, headers=headers)

    async def publish(
        self, subject: str, payload: bytes, *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0
    ) -> int:
        """Publish to a stream and return the sequence once the server has stored the message."""
        reply = await self._connection.request(subject, payload, headers=headers, timeout_s=timeout_s)
        return int(_answer(reply.data).get("seq", 0))


def _answer(data: bytes) -> dict[str, Any]:
    """Decode an answer; an error in it, or anything that is not an answer, is raised."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ApiError(0, "the answer does not come from JetStream: something else listens on this subject")
    error = answer.get("error")
    if not error:
        return answer
    code, text = int(error.get("err_code", 0)), str(error.get("description", "unknown error"))
    if code in _NOT_ENABLED:
        raise JetStreamUnavailable(f"{text}; enable JetStream for this account on the server")
    kind = NotFound if code in _NOT_FOUND else WrongRevision if code in _WRONG_REVISION else ApiError
    raise kind(code, text, status=int(error.get("code", 0)))


def _stream_info(answer: Mapping[str, Any]) -> StreamInfo:
    config, state = answer["config"], answer["state"]
    transform = config.get("subject_transform")
    return StreamInfo(
        name=config["name"],
        subjects=tuple(config.get("subjects") or ()),
        retention=config["retention"],
        storage=config["storage"],
        created=answer["created"],
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        messages=state["messages"],
        allow_direct=bool(config.get("allow_direct")),
        num_subjects=state.get("num_subjects", 0),
        transform=(transform.get("src", ""), transform.get("dest", "")) if transform else None,
    )


def _stored(message: Mapping[str, Any]) -> Stored:
    header = message.get("hdrs")
    return Stored(
        seq=int(message["seq"]),
        subject=message["subject"],
        data=base64.b64decode(message.get("data", "")),
        header=base64.b64decode(header) if header else None,
        stored_at=_moment(message["time"]),
    )


def _moment(stamp: str) -> datetime:
    # The server writes nanoseconds; datetime keeps microseconds.
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", stamp))


def _group_state(answer: Mapping[str, Any]) -> GroupState:
    pinned_id = str(answer.get("pinned_client_id", ""))
    # Without a pin the time is that of the year 1.
    return GroupState(str(answer["group"]), pinned_id, _moment(answer["pinned_ts"]) if pinned_id else None)


def _consumer_info(answer: Mapping[str, Any]) -> ConsumerInfo:
    return ConsumerInfo(
        config=answer["config"],
        ack_floor=answer["ack_floor"]["stream_seq"],
        delivered=answer["delivered"]["stream_seq"],
        ack_pending=answer["num_ack_pending"],
        pending=answer["num_pending"],
        waiting=answer.get("num_waiting", 0),
        groups=tuple(_group_state(each) for each in answer.get("priority_groups") or ()),
        deliveries=answer["delivered"]["consumer_seq"],
        redelivered=answer.get("num_redelivered", 0),
        paused=bool(answer.get("paused")),
    )
