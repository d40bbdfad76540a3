"""The control plane's key-value bucket: leader reads, compare-and-set writes, and atomic batches of them.

Reads go to the stream's leader (`STREAM.MSG.GET`), because a replica may answer with an old value. Whoever needs
to be sure decides on the result of a write, not on a read.

A batch takes effect as a whole or not at all, and each write in it is a compare-and-set. That is how a lease fences
everything its holder writes: the batch begins with the renewal of the lease.
"""

from __future__ import annotations

import asyncio
import base64
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from parti.errors import ConfigError, JetStreamUnavailable, NoResponders, NotFound, WrongRevision
from parti.jetstream.api import JetStreamApi, StreamInfo
from parti.model.headers import parse_headers

MARKER_TTL_S = 60
"""How long an expired or deleted key leaves a marker behind, for watches to see."""
MAX_BATCH = 1000
"""Most writes in one batch; the server's limit."""
MIN_TTL_S = 1.0
"""Shortest life of a key; the server's limit."""
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_IN_FLIGHT = 10164
"""On a replicated bucket: another write that names the same key has not taken effect yet. It says nothing about the
key's revision, so it is tried again."""
_IN_FLIGHT_WAITS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_BLANK = b" "
"""Stands for an empty body that is no marker: no record reads so, and it does not say that a key is gone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the revision that a compare-and-set has to name; without a value, the key is gone."""

    value: bytes
    revision: int

    @classmethod
    def of(cls, body: bytes, revision: int, headers: Mapping[str, str]) -> Entry:
        """The entry that a message of the bucket makes.

        Only a marker says that a key is gone. The server answers many requests with an empty body, and a client that
        has the answer sent to a key must not delete the key by it.
        """
        if headers.get("KV-Operation") in {"DEL", "PURGE"} or "Nats-Marker-Reason" in headers:
            return cls(b"", revision)
        return cls(body or _BLANK, revision)


@dataclass(frozen=True, slots=True)
class Write:
    """One compare-and-set: `revision` must be the key's last one (0: it must not exist)."""

    key: str
    value: bytes
    revision: int
    ttl_s: float | None = None
    """The key expires so long after this write; None: never."""
    deletes: bool = False
    """Leave a marker instead of a value."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Another key whose last revision must still be this one for a write to take effect: a lease, held by the writer.

    The server would take 0 for "there is no such key", also after it has expired, so it is refused here.
    """

    key: str
    revision: int

    def __post_init__(self) -> None:
        if self.revision <= 0:
            raise ValueError("a guard needs the revision of a key that exists")


class Bucket:
    """One key-value bucket."""

    def __init__(self, api: JetStreamApi, name: str) -> None:
        self._api = api
        self.name = name
        self.stream = f"KV_{name}"

    @classmethod
    async def open(cls, api: JetStreamApi, name: str, *, replicas: int) -> Bucket:
        """Open a bucket, creating it with history 1 when it is missing.

        One that lacks what parti needs (expiry of single keys, markers, atomic batches) is given it.
        """
        needed = {"allow_msg_ttl": True, "subject_delete_marker_ttl": MARKER_TTL_S * 10**9, "allow_atomic": True}
        config = {
            "name": f"KV_{name}",
            "subjects": [f"$KV.{name}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "num_replicas": replicas,
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            **needed,
        }
        await api.ensure_stream(config)
        found = await api.stream_config(f"KV_{name}")
        if found.get("max_msgs_per_subject") != 1:
            # With history an old value comes back to life when the newest one expires.
            raise ConfigError(
                f"bucket {name!r} keeps a history of {found.get('max_msgs_per_subject')} values, but parti needs "
                f"history 1; name another bucket, or delete this one"
            )
        if any(found.get(option) != value for option, value in needed.items()):
            await api.call(f"STREAM.UPDATE.KV_{name}", {**found, **needed})
        return cls(api, name)

    async def info(self) -> StreamInfo:
        """State of the bucket's stream; raises `NotFound` when there is none any more."""
        return await self._api.stream_info(self.stream)

    async def get(self, key: str) -> Entry | None:
        """Read a key from the leader; None when it never existed.

        A key that was deleted or has expired leaves a marker: an entry without value, whose revision the next
        compare-and-set has to name.
        """
        try:
            answer = await self._api.call(f"STREAM.MSG.GET.{self.stream}", {"last_by_subj": self._subject(key)})
        except NotFound:
            return None
        message = answer["message"]
        headers = parse_headers(base64.b64decode(message.get("hdrs", "")))
        return Entry.of(base64.b64decode(message.get("data", "")), int(message["seq"]), headers)

    async def put(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Write a key if its revision is still `revision` (0: it must not exist); returns the new revision.

        Raises `WrongRevision` when another writer came first, `RequestTimeout` when the outcome is unknown,
        `NotFound` when the bucket is gone.
        """
        return (await self.write([Write(key, value, revision, ttl_s)]))[0]

    async def put_guarded(self, key: str, value: bytes, guard: Guard, *, timeout_s: float = 5.0) -> int:
        """Write a key if another one still has its revision; returns the new revision. Raises as `put` does."""
        headers = {
            _EXPECTED: str(guard.revision),
            f"{_EXPECTED}-Subject": self._subject(guard.key),
        }
        return await self._publish(key, value, headers, timeout_s)

    async def delete(self, key: str, *, revision: int) -> int:
        """Leave a marker in place of a key if its revision is still `revision`; returns the marker's revision."""
        return (await self.write([Write(key, b"", revision, MARKER_TTL_S, deletes=True)]))[0]

    async def write(self, writes: Sequence[Write], *, timeout_s: float = 5.0) -> list[int]:
        """Do all of these writes or none of them; returns the new revisions.

        Raises as `put` does. The server takes at most `MAX_BATCH` writes at once.
        """
        if not writes:
            return []
        if len(writes) > MAX_BATCH:
            raise ConfigError(f"{len(writes)} writes in one batch; at most {MAX_BATCH} are possible; split them")
        for wait_s in _IN_FLIGHT_WAITS_S:
            try:
                return await self._write(writes, timeout_s)
            except WrongRevision as error:
                if error.code != _IN_FLIGHT:
                    raise
                await asyncio.sleep(wait_s)
        return await self._write(writes, timeout_s)

    async def _write(self, writes: Sequence[Write], timeout_s: float) -> list[int]:
        headers = [_headers(write) for write in writes]
        if len(writes) > 1:
            batch = uuid.uuid4().hex
            for number, header in enumerate(headers, 1):
                header |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            headers[-1]["Nats-Batch-Commit"] = "1"
            for write, header in zip(writes[:-1], headers, strict=False):
                await self._api.send(self._subject(write.key), write.value, headers=header)
        last = writes[-1]
        seq = await self._publish(last.key, last.value, headers[-1], timeout_s)
        return list(range(seq - len(writes) + 1, seq + 1))

    async def _publish(self, key: str, value: bytes, headers: dict[str, str], timeout_s: float) -> int:
        try:
            return await self._api.publish(self._subject(key), value, headers=headers, timeout_s=timeout_s)
        except (NoResponders, JetStreamUnavailable) as error:
            raise NotFound(10059, f"bucket {self.name!r} is gone or JetStream is off: {error}") from None

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"


def _headers(write: Write) -> dict[str, str]:
    headers = {_EXPECTED: str(write.revision)}
    if write.ttl_s is not None:
        # The server cuts it to whole seconds; a key must not end before its writer expects it to.
        headers["Nats-TTL"] = f"{max(MIN_TTL_S, math.ceil(write.ttl_s)):.0f}s"
    if write.deletes:
        headers["KV-Operation"] = "DEL"
    return headers


def epoch_base(created: str) -> int:
    """Microseconds since 1970 at which the bucket was made: what epochs are counted from.

    An epoch is this plus a sequence of the bucket. A bucket that was deleted and made anew begins with low sequences
    again, but more microseconds than writes have passed, so epochs go on growing.
    """
    whole, _, fraction = created.rstrip("Z").partition(".")
    start = datetime.fromisoformat(f"{whole}+00:00")
    return int(start.timestamp()) * 1_000_000 + int(fraction[:6].ljust(6, "0") or 0)
