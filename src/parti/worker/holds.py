"""Holds: consumers that nobody reads, which keep messages of an interest stream until their partition is safe.

A consumer that has acknowledged up to some sequence tells the server, in its own memory and for good, that it needs
nothing below; setting it back does not take that back. So when it is given a partition with older unfinished
messages, the server may delete them as soon as the last owner drops the subject, although they are still to be
handled. A new consumer on those subjects has told nothing yet: it is made before the subject is added, and removed
when everything up to the end of the stream at that time has been acknowledged.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

import structlog

from parti.core.consumer_config import HOLD, NANOSECONDS
from parti.errors import NotFound
from parti.jetstream.api import ConsumerInfo, JetStreamApi

UNOWNED = "parti.unowned"
"""Metadata of a hold: nobody owns its partitions."""
_log = structlog.get_logger("parti.holds")


class Holds:
    """The holds of one worker's consumer."""

    def __init__(
        self, api: JetStreamApi, stream: str, consumer: str, *, keep_s: float, metadata: Mapping[str, str]
    ) -> None:
        """`keep_s`: a hold whose worker never comes back is removed by the server after so long."""
        self._api = api
        self._stream = stream
        self._consumer = consumer
        self._keep_s = keep_s
        self._metadata = dict(metadata)
        self._until: dict[str, int | None] = {}
        """Up to where all has to be acknowledged; None: what it was taken for has not been done yet."""
        self.kept: dict[str, tuple[str, ...]] = {}
        """Holds of partitions that nobody owns, and their subjects: kept until somebody carries them."""

    @property
    def any(self) -> bool:
        """Whether there are holds."""
        return bool(self._until)

    async def find(self, last_seq: int) -> None:
        """Take up what an earlier process has left."""
        mine = f"{self._consumer}{HOLD}"
        for name in await self._api.consumer_names(self._stream):
            if not name.startswith(mine):
                continue
            try:
                info = await self._api.consumer_info(self._stream, name)
            except NotFound:
                continue
            if UNOWNED in (info.config.get("metadata") or {}):
                self.kept[name] = info.subjects
            else:
                self._until.setdefault(name, last_seq)

    async def keep(self, subjects: Sequence[str], seq: int) -> None:
        """Hold on to everything on these subjects from a sequence on, for whoever is going to own them."""
        name = await self.take(subjects, seq, **{UNOWNED: "true"})
        del self._until[name]
        self.kept[name] = tuple(sorted(subjects))
        _log.info("keeps the messages of partitions that nobody owns", hold=name, subjects=sorted(subjects)[:20])

    async def give_up(self, name: str) -> None:
        """Others carry what was kept."""
        await self._remove(name)
        self.kept.pop(name, None)

    def own(self, name: str, last_seq: int) -> None:
        """This worker carries what was kept: the hold is needed until all of it is acknowledged."""
        self.kept.pop(name, None)
        self._until[name] = last_seq

    async def take(self, subjects: Sequence[str], seq: int, **said: str) -> str:
        """Hold on to everything on these subjects from a sequence on; returns the name of the hold."""
        name = f"{self._consumer}{HOLD}{uuid.uuid4().hex[:8]}"
        config = {
            "name": name,
            "durable_name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(1, seq),
            "ack_policy": "explicit",
            "filter_subjects": sorted(subjects),
            "inactive_threshold": int(self._keep_s * NANOSECONDS),
            "num_replicas": 0,
            "metadata": {**self._metadata, **said},
        }
        self._until[name] = None
        await self._api.put_consumer(self._stream, config, action="create")
        return name

    @property
    def fresh(self) -> bool:
        """Whether there are holds of which it is not known how long they are needed."""
        return None in self._until.values()

    def settle(self, last_seq: int) -> None:
        """The consumer carries what they were taken for, attempts that failed before included.

        They are needed until everything up to this sequence has been acknowledged.
        """
        self._until = {name: last_seq if until is None else until for name, until in self._until.items()}

    async def release(self, info: ConsumerInfo) -> None:
        """Remove the holds that the state of the worker's consumer makes needless."""
        all_done = not info.ack_pending and not info.pending
        for name, until in list(self._until.items()):
            if until is not None and (all_done or info.ack_floor >= until):
                await self._remove(name)
                del self._until[name]
                _log.debug("a hold is released", hold=name)

    async def _remove(self, name: str) -> None:
        """Set it to the end first: the server looks for what is left over when it moves, not when it goes."""
        try:
            last_seq = (await self._api.stream_info(self._stream)).last_seq
            await self._api.consumer_info(self._stream, name)
            await self._api.reset_consumer(self._stream, name, last_seq + 1)
            await self._api.delete_consumer(self._stream, name)
        except NotFound:
            pass
