"""Notes of stalls in the bucket, so that people see what has become of a worker whose process is stuck, or gone.

Written in threads, on connections and event loops of their own: those of the worker may be what is stuck, and the
watchdog must go on watching while the bucket does not answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import structlog

from parti.config import Settings
from parti.core.stall import Stall
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection
from parti.jetstream.kv import Bucket
from parti.model.fleet import StallRecord, encode, key_of

_log = structlog.get_logger("parti.watchdog")
_KEPT_S = 900.0
_WITHIN_S = 5.0


class StallNotes:
    """Writes what the watchdog of one worker has found; a note that cannot be written is logged and left out."""

    def __init__(self, settings: Settings, worker_id: Callable[[], str]) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._began, self._key = datetime.now(UTC), ""
        self._newest: threading.Thread | None = None

    def write(self, stall: Stall, reason: str, ended: Literal["", "recovered", "left"] = "") -> None:
        """Begin to write, or to bring up to date, the note of a stall; notes are stored in their order."""
        if not ended:
            # What stood still for longer than its lease may have another id when it has recovered.
            self._began, self._key = datetime.now(UTC), key_of("stalls", self._worker_id())
        record = StallRecord(
            stall=stall.kind.value,
            reason=reason,
            host=socket.gethostname(),
            pid=os.getpid(),
            at=self._began,
            ended=ended,
        )
        note = threading.Thread(
            target=self._store, args=(self._key, record, self._newest), name="parti-stall-note", daemon=True
        )
        note.start()
        self._newest = note

    def _store(self, key: str, record: StallRecord, before: threading.Thread | None) -> None:
        if before:
            before.join()
        try:
            asyncio.run(asyncio.wait_for(self._put(key, record), _WITHIN_S))
        except Exception as error:
            _log.warning("the stall could not be noted in the bucket", error=repr(error))

    async def _put(self, key: str, record: StallRecord) -> None:
        connection = await Connection.open(self._settings, name="parti-watchdog")
        try:
            bucket = Bucket(JetStreamApi(connection), self._settings.bucket)
            found = await bucket.get(key)
            revision = found.revision if found else 0
            await bucket.put(key, encode(record), revision=revision, ttl_s=_KEPT_S)
        finally:
            await connection.close()
