"""Where objects lie: what a store can do, and the object stores of NATS. `s3` has another one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import nats.errors
from nats.js import JetStreamContext
from nats.js.errors import APIError, BucketNotFoundError, NotFoundError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

import parti
from parti.errors import PartiError
from parti.jetstream.connection import Connection

STALL_S = 30.0
"""A transfer that has not moved for this long has failed."""
_BUCKET = re.compile(r"[A-Za-z0-9_-]+")


class StoreFailed(Exception):  # noqa: N818 - named for what happened
    """The store could not be reached or did not do it; the same may work later."""


class Gone(parti.Reject):
    """The object does not exist, or does so no more."""

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(f"there is no object {key!r} in bucket {bucket!r} (any more)")


class Sink(Protocol):
    """What a download is written to."""

    def write(self, data: bytes, /) -> int:
        """Take the next bytes; what it raises ends the download."""
        ...


class Store(Protocol):
    """Objects in buckets. An object is there completely or not at all. All methods may raise `StoreFailed`."""

    async def size(self, bucket: str, key: str) -> int | None:
        """Bytes of an object, None when there is none."""

    async def download(self, bucket: str, key: str, into: Sink) -> None:
        """Write the object's bytes into something; raises `Gone`."""

    async def upload(self, bucket: str, key: str, path: Path, content_type: str) -> None:
        """Store a file as an object, in place of one that has this key."""
        ...


class NatsStore:
    """The object stores of a NATS server, through nats-py.

    An upload that is cut off leaves chunks in the bucket's stream that belong to no object.
    """

    def __init__(self, connection: Connection, settings: parti.Settings) -> None:
        self._connection = connection
        self._context: JetStreamContext = connection.client.jetstream()
        self._settings = settings

    @classmethod
    @asynccontextmanager
    async def connected(cls, settings: parti.Settings) -> AsyncIterator[NatsStore]:
        """A store on a connection of its own."""
        connection = await Connection.open(settings, name="transcode-store")
        try:
            yield cls(connection, settings)
        finally:
            await connection.close()

    async def size(self, bucket: str, key: str) -> int | None:
        """Bytes of an object, None when there is none."""
        async with _honest("look at", bucket, key):
            try:
                return (await (await _open(self._context, bucket)).get_info(key)).size or 0
            except (BucketNotFoundError, NotFoundError):
                return None

    async def download(self, bucket: str, key: str, into: Sink) -> None:
        """Write the object's bytes into something; raises `Gone`."""
        sink, context = _Counted(into), _Downloading(self._connection.client)
        async with _honest("read", bucket, key):
            try:
                store = await _open(context, bucket)
                # It would wait for ever for chunks that were removed meanwhile.
                await _while_it_moves(asyncio.ensure_future(store.get(key, writeinto=sink)), sink)  # type: ignore[arg-type]
            except (BucketNotFoundError, ObjectNotFoundError):
                raise Gone(bucket, key) from None
            finally:
                await context.end()

    async def upload(self, bucket: str, key: str, path: Path, content_type: str) -> None:
        """Store a file as an object; the bucket is made if it does not exist."""
        async with _honest("write", bucket, key):
            with path.open("rb") as file:
                store = await _open(self._context, bucket, replicas=self._settings.replicas)
                await store.put(key, file)


class _Downloading(JetStreamContext):
    """Ends the subscriptions of a download; nats-py keeps those of one that was cut off."""

    _subscriptions: list[JetStreamContext.PushSubscription]

    async def subscribe(self, *args: Any, **kwargs: Any) -> JetStreamContext.PushSubscription:
        subscription = await super().subscribe(*args, **kwargs)
        self._subscriptions = [*getattr(self, "_subscriptions", ()), subscription]
        return subscription

    async def end(self) -> None:
        for subscription in getattr(self, "_subscriptions", ()):
            with suppress(nats.errors.Error):  # most have ended by themselves
                await subscription.unsubscribe()


class _Counted:
    """A sink that knows whether anything has come."""

    def __init__(self, into: Sink) -> None:
        self._into = into
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        return self._into.write(data)


async def _open(context: JetStreamContext, bucket: str, *, replicas: int = 0) -> ObjectStore:
    """The bucket; with `replicas` it is made with so many if it does not exist."""
    if not _BUCKET.fullmatch(bucket):
        raise parti.Reject(f"bucket {bucket!r} cannot be one of NATS: use letters, digits, '-' and '_'")
    try:
        return await context.object_store(bucket)
    except BucketNotFoundError:
        if not replicas:
            raise
    try:
        return await context.create_object_store(bucket, replicas=replicas)
    except APIError:
        return await context.object_store(bucket)  # another worker was faster


async def _while_it_moves(transfer: asyncio.Future[object], sink: _Counted) -> None:
    try:
        seen = -1
        while sink.bytes != seen:
            seen = sink.bytes
            if (await asyncio.wait({transfer}, timeout=STALL_S))[0]:
                transfer.result()
                return
        raise StoreFailed(f"nothing has come for {STALL_S:g} s")
    finally:
        transfer.cancel()


@asynccontextmanager
async def _honest(what: str, bucket: str, key: str) -> AsyncIterator[None]:
    """Turn the client's errors into one that says what could not be done."""
    try:
        yield
    except (nats.errors.Error, JetStreamError, PartiError, OSError, TimeoutError, StoreFailed) as error:
        reason = str(error) or type(error).__name__
        raise StoreFailed(f"cannot {what} object {key!r} of bucket {bucket!r}: {reason}") from error
