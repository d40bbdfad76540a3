"""The fleet of a test as its records tell it, and waiting until they tell something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from parti.coordination.control_plane import ControlPlane
from parti.coordination.records import Records
from parti.core.progress import Progress, decode_progress
from parti.jetstream.kv import Entry
from parti.jetstream.watch import Watch
from parti.model.fleet import Claim, name_of
from parti.model.partition import Template
from parti.model.subjects import covers

PATIENCE_S = 15.0
_WATCHED = ("ids.>", "leader.*", "claims.>", "progress.>", "health.>")


class Lookout:
    """Sees every record of a fleet as it changes."""

    def __init__(self, template: Template) -> None:
        self.records = Records()
        self._template = template
        self._progress: dict[str, Progress] = {}
        self._changed = asyncio.Event()
        self._watch: Watch | None = None

    async def start(self, plane: ControlPlane) -> None:
        """Begin to look."""
        self._watch = Watch(plane.connection, plane.api, plane.bucket.name, _WATCHED, self._on_entry)
        await self._watch.start()

    async def stop(self) -> None:
        """Look no more."""
        if self._watch:
            await self._watch.stop()

    def _on_entry(self, key: str, entry: Entry) -> None:
        if not key.startswith("progress."):
            self.records.take(key, entry)
        elif entry.value:
            self._progress[name_of(key)] = decode_progress(entry.value)
        self._changed.set()

    def stir(self) -> None:
        """Something else has changed that somebody may wait for."""
        self._changed.set()

    async def until(
        self, holds: Callable[[], bool], missing: Callable[[], str], timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until it holds, looking whenever something has changed; AssertionError with what is missing."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{missing()} (after {timeout_s:g} s)") from None

    def claim(self, partition: str) -> Claim:
        """Who owns a partition; AssertionError when there is no such partition."""
        claim = self.records.claims.get(partition)
        if claim is None:
            known = ", ".join(sorted(self.records.claims)) or "none yet"
            raise AssertionError(f"there is no partition {partition!r}; there are: {known}")
        return claim

    def position(self, partition: str) -> int:
        """How far a partition is, by the claim and by what its owner has stored since."""
        claim = self.records.claims.get(partition)
        if claim is None:
            return 0
        progress = self._progress.get(claim.owner)
        if progress is None or progress.incarnation != claim.incarnation:
            return claim.position
        subject = self._template.partition(partition).subject
        return max(claim.position, progress.position(partition, subject))

    def partition_of(self, subject: str) -> str | None:
        """The partition that a subject belongs to; None when nobody owns it yet."""
        for partition in self.records.claims:
            pattern = self._template.partition(partition).subject
            if pattern == subject or covers(pattern, subject):
                return partition
        return None

    def has_reached(self, subject: str, seq: int) -> bool:
        """Whether the message of a subject with this sequence is finished."""
        partition = self.partition_of(subject)
        return partition is not None and self.position(partition) > seq
