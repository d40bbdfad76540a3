"""The control bucket: leader reads and compare-and-set writes.

Reads go to the stream's leader (`STREAM.MSG.GET`), because a replica may answer with an old value. Whoever needs
to be sure decides on the result of a write, not on a read.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from parti.errors import NotFound
from parti.jetstream.api import JetStreamApi


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the revision that a compare-and-set has to name."""

    value: bytes
    revision: int


class Bucket:
    """One key-value bucket."""

    def __init__(self, api: JetStreamApi, name: str) -> None:
        self._api = api
        self.name = name
        self._stream = f"KV_{name}"

    @classmethod
    async def open(cls, api: JetStreamApi, name: str, *, replicas: int) -> Bucket:
        """Open a bucket, creating it with history 1 when it is missing."""
        await api.ensure_stream(
            {
                "name": f"KV_{name}",
                "subjects": [f"$KV.{name}.>"],
                "retention": "limits",
                "storage": "file",
                "discard": "new",
                "max_msgs_per_subject": 1,
                "num_replicas": replicas,
                "allow_direct": True,
                "allow_rollup_hdrs": True,
                "allow_msg_ttl": True,
                "deny_delete": True,
            }
        )
        return cls(api, name)

    async def get(self, key: str) -> Entry | None:
        """Read a key from the leader; None when it never existed.

        A key that was deleted or has expired leaves a marker: an entry without value, whose revision the next
        compare-and-set has to name.
        """
        try:
            answer = await self._api.call(
                f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": f"$KV.{self.name}.{key}"}
            )
        except NotFound:
            return None
        message = answer["message"]
        return Entry(base64.b64decode(message.get("data", "")), int(message["seq"]))

    async def put(self, key: str, value: bytes, *, revision: int) -> int:
        """Write a key if its revision is still `revision` (0: it must not exist); returns the new revision.

        Raises `WrongRevision` when another writer came first, `RequestTimeout` when the outcome is unknown.
        """
        return await self._api.publish(
            f"$KV.{self.name}.{key}", value, headers={"Nats-Expected-Last-Subject-Sequence": str(revision)}
        )
