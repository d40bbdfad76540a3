"""The history of partitions: one record for each change of owner, kept for a while in a stream of its own.

The claims say who owns what now; this says how it came to be. Nothing is decided by it, and a record that gets lost
changes nothing: `parti explain` tells that one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from parti.model.fleet import key_of
from parti.model.records import TAG, Count, Moment, Real, check_time

KEEP_S = 7 * 86_400
"""How long a record is kept."""
KEEP_RECORDS = 20
"""How many are kept of one partition."""

Step = Literal["given", "freed", "kept"]
"""`given`: somebody got it, with a new fence token. `freed`: nobody owns it any more. `kept`: a move that had begun
was called off, and the owner, who had never stopped, keeps it."""


class HistoryRecord(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, tag_field=TAG, tag="history"
):
    """One change of a partition's owner."""

    partition: str
    step: Step
    source: str = msgspec.field(default="", name="from")
    """Who had it; empty for nobody."""
    target: str = msgspec.field(default="", name="to")
    """Who has it from now on; empty for nobody."""
    cause: str = ""
    """The planner's reason in a word (`parti.core.causes`)."""
    why: str = ""
    """The same in the planner's own words."""
    position: Count = 0
    """Where the next owner begins: every message below is finished."""
    fence_token: Count = 0
    term: Count = 0
    """Of the rebalancer that decided it."""
    by: str = ""
    """The worker that was the rebalancer."""
    took_s: Real = 0.0
    """From the decision to move it until the next owner had it; 0: not a planned move, or not known."""
    at: Moment

    def __post_init__(self) -> None:
        check_time(self.at)


def history_stream(bucket: str) -> str:
    """The stream that keeps the history of a bucket's fleet."""
    return f"{bucket}-history"


def history_pattern(bucket: str) -> str:
    """What all subjects of that stream match."""
    return f"{history_stream(bucket)}.>"


def history_subject(bucket: str, partition: str) -> str:
    """Where the records of one partition are."""
    # The stream's own name comes first: `<bucket>.…` may well be where the messages of the app are.
    return f"{bucket}-{key_of('history', partition)}"


def missing_before(records: Sequence[HistoryRecord]) -> set[int]:
    """Which of these records, oldest first, follow one that is not there."""
    return {number for number, (one, other) in enumerate(pairwise(records), start=1) if other.source != one.target}
