"""What a step of the pipeline tells while it runs, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Step:
    """One batch that one table took in."""

    table: str
    batch: int
    """The last batch that it covers."""
    rows: int
    """Rows that were read for it."""
    seconds: float
    lag: int | None = None
    """What is still waiting: messages of the stream, or rows of the table before; None if unknown."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What became of the rows, by name."""

    @property
    def rows_per_s(self) -> float:
        """Rate of this batch."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


Report: TypeAlias = Callable[[Step], None]


def say_nothing(step: Step) -> None:
    """A report that nobody reads."""
