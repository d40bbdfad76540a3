"""Records of a migration from one consumer per partition to one per worker, as they lie in the fleet's bucket.

    migration              MigrationRecord  what is migrated, which phase it is in, who did what and when
    migration.<partition>  OldConsumer      the consumer that had the partition before, and who has it now
    migrator               MigratorLease    of the one process that may change any of this
    progress.old.consumers Progress         positions of partitions that old consumers have given up

Nobody but `parti migrate` writes them. The rebalancer reads the last one, as it reads the record of any owner that is
gone; no worker id has a dot, so that it can never be a worker's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parti.model.records import TAG, Count, Moment, check_time

OLD_CONSUMERS = "old.consumers"
"""In the place of a worker id: who finished what is below the positions of switched partitions."""

Phase = Literal["planned", "shadow", "validated", "switched", "cleaned", "abandoned"]
Action = Literal["shadow", "validate", "switch", "cleanup", "rollback", "abandon"]
Holder = Literal["old", "both", "fleet"]
"""Who handles a partition: the consumer of its own, the fleet, or, in dual mode, both."""


class PhaseNote(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One thing that somebody did."""

    action: Action
    at: Moment
    by: str
    """User and host."""
    phase: Phase
    """Where the migration stood afterwards."""
    text: str
    """What came of it, in a sentence."""

    def __post_init__(self) -> None:
        check_time(self.at)


class MigrationRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="migration"
):
    """The migration of a stream's old consumers."""

    stream: str
    stream_created: str
    retention: str
    template: str
    prefix: str
    consumers: str
    """The pattern, or the list, that names the old consumers."""
    workers: Count
    """How many workers the shadow run pretends to have."""
    shares: dict[str, tuple[str, ...]] = {}
    """What each of them would own."""
    phase: Phase = "planned"
    doing: Action | Literal[""] = ""
    """What was begun and has not ended: done again, it goes on where it stopped."""
    notes: tuple[PhaseNote, ...] = ()


class MigratorLease(msgspec.Struct, frozen=True, kw_only=True, tag_field=TAG, tag="migrator"):
    """Who migrates at this moment."""

    token: str
    by: str


class OldConsumer(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="old-consumer"
):
    """The consumer that had a partition before the fleet, as it was found."""

    partition: str
    subject: str
    consumer: str = ""
    """Empty: nobody read this partition."""
    config: dict[str, Any] = {}
    """As the server had it, for the way back."""
    holder: Holder = "old"
    position: Count = 0
    """The old consumer has finished everything below: by its ack floor in the shadow phase, then where the fleet
    began; 0 where nobody needs to know."""
    removed: bool = False
    """The old consumer is deleted."""
    at: Moment | None = None
    """When the holder last changed."""

    def __post_init__(self) -> None:
        check_time(self.at)
