"""The promises that an audit checks: their names, the rule of each in plain English, and what was found against it.

Needs no Spark, so that whoever judges a run by other means can tell the result in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from parti.core.invariants import Invariant

POSITIONS_WITHIN_DATA: Final = "PositionsWithinData"
"""No position lies beyond the end of the stream."""
LEDGER_WHOLE: Final = "LedgerWhole"
"""No batch of the ledger is missing, and all can be read."""
TITLES: Final[Mapping[str, str]] = {
    Invariant.NO_LOSS.value: "lost",
    Invariant.NO_REPEAT_ON_PLANNED_MOVE.value: "repeated",
    Invariant.BOUNDED_REPEAT_ON_CRASH.value: "repeated beyond what a crash excuses",
    Invariant.ORDER.value: "out of order",
    Invariant.ONE_OWNER.value: "overlapping owners",
    Invariant.EPOCH_GROWS.value: "fence going back",
    POSITIONS_WITHIN_DATA: "positions ahead of the data",
    LEDGER_WHOLE: "ledger batches missing or damaged",
}
"""What is counted under each name."""
RULES: Final[Mapping[str, str]] = {
    Invariant.NO_LOSS.value: "Every message that the stream has stored is finished, or still waits for its turn.",
    Invariant.NO_REPEAT_ON_PLANNED_MOVE.value: "Joins, drains and orderly stops repeat nothing.",
    Invariant.BOUNDED_REPEAT_ON_CRASH.value: (
        "After a crash only messages are handled again whose end the dead worker had not stored yet."
    ),
    Invariant.ORDER.value: "Messages of one partition are started in the order in which they were stored.",
    Invariant.ONE_OWNER.value: "No two workers handle a partition at the same time.",
    Invariant.EPOCH_GROWS.value: "Each new owner of a partition has a higher fence token than all before it.",
    POSITIONS_WITHIN_DATA: "No stored position is ahead of what the stream has.",
    LEDGER_WHOLE: "The record that all this is told from has no hole and no damage.",
}
"""What each name promises."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and what was found against it."""

    name: str
    count: int
    consequences: int = 0
    """Further violations that only follow from those that are counted, here or under another name."""
    examples: tuple[Mapping[str, Any], ...] = ()

    @property
    def title(self) -> str:
        """What is counted."""
        return TITLES[self.name]

    @property
    def rule(self) -> str:
        """What is promised."""
        return RULES[self.name]

    @property
    def held(self) -> bool:
        """Whether nothing was found."""
        return self.count == 0
