"""What shadow consumers were given, as a ledger: batches as workers write them, so that an audit can judge them.

Each shadow consumer is a process of its own whose handlers took no time. A partition that nobody has is lost then, by
the audit's definitions, and one that two have is repeated.
"""

from __future__ import annotations

import uuid
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence

from parti.app.migration.site import Site
from parti.errors import ConfigError
from parti.jetstream.taking import Taken
from parti.model.ledger import HANDLED, LedgerBatch, encode_batch, ledger_subject

_ROWS = 20_000


class ShadowLedger:
    """Gathers deliveries, and publishes them when all is seen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._taken: dict[str, list[Taken]] = defaultdict(list)

    def note(self, consumer: str, taken: Sequence[Taken]) -> None:
        """A consumer was given these."""
        self._taken[consumer] += taken

    async def check(self, site: Site) -> None:
        """Make the stream; raises `ConfigError` when there is one that is no ledger of the migration."""
        subject = self._subject(site, "*")
        if self.name == site.stream:
            raise ConfigError(f"--ledger {self.name} is the stream that is migrated; name another one")
        config = {"name": self.name, "subjects": [subject], "storage": "file", "allow_direct": True}
        info = await site.api.ensure_stream(config)
        if subject not in info.subjects:
            raise ConfigError(f"--ledger {self.name}: there is such a stream, for other things; name another one")

    async def publish(self, site: Site, partition_of: Mapping[str, str]) -> int:
        """Store what was noted; returns how many rows."""
        rows = 0
        for consumer, taken in self._taken.items():
            process = f"{consumer}-{uuid.uuid4().hex[:8]}"
            portions = [taken[begin : begin + _ROWS] for begin in range(0, len(taken), _ROWS)] or [[]]
            for number, portion in enumerate(portions):
                closed = number == len(portions) - 1
                batch = _batch(site, consumer, process, number, portion, partition_of, closed=closed)
                headers = {"Nats-Msg-Id": batch.message_id}
                await site.api.publish(self._subject(site, consumer), encode_batch(batch), headers=headers)
            rows += len(taken)
        self._taken.clear()
        return rows

    def _subject(self, site: Site, worker: str) -> str:
        # Not the subject of the fleet's own ledger: what shadows saw was handled by nobody.
        return ledger_subject(f"shadow-{site.desk.migration.prefix}", site.stream, worker)


def _batch(
    site: Site,
    consumer: str,
    process: str,
    number: int,
    taken: Sequence[Taken],
    partition_of: Mapping[str, str],
    *,
    closed: bool,
) -> LedgerBatch:
    names = sorted({partition_of[each.subject] for each in taken})
    index = {name: n for n, name in enumerate(names)}
    at_us = array("q", [int(each.at_s * 1e6) for each in taken])
    return LedgerBatch(
        stream=site.stream,
        stream_created=site.desk.migration.stream_created,
        worker=consumer,
        process=process,
        number=number,
        closed=closed,
        partitions=tuple(names),
        fences=(1,) * len(names),
        partition_index=array("I", [index[partition_of[each.subject]] for each in taken]),
        seq=array("q", [each.seq for each in taken]),
        attempt=array("I", [1] * len(taken)),
        outcome=array("B", [HANDLED] * len(taken)),
        received_us=at_us,
        started_us=at_us,
        finished_us=at_us,
    )
