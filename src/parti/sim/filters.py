"""Sets of subjects, as streams and consumers name them, with answers that are remembered."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from parti.model.subjects import covers, has_wildcard, overlap


class Filter:
    """What one list of subjects and patterns matches; an empty list matches everything."""

    __slots__ = ("_known", "literal", "patterns")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self.literal = bool(patterns) and not any(map(has_wildcard, patterns))
        """Whether it is a list of plain subjects."""
        self._known: dict[str, bool] = {}

    def matches(self, subject: str) -> bool:
        """Whether a subject (not a pattern) is one of these."""
        known = self._known.get(subject)
        if known is None:
            known = self._known[subject] = not self.patterns or any(covers(p, subject) for p in self.patterns)
        return known

    def covers(self, pattern: str) -> bool:
        """Whether everything that `pattern` matches is one of these."""
        return not self.patterns or any(covers(p, pattern) for p in self.patterns)

    def within(self, pattern: str) -> bool:
        """Whether all of these lie within `pattern`."""
        return bool(self.patterns) and all(covers(pattern, p) for p in self.patterns)

    def collides(self, patterns: Iterable[str]) -> bool:
        """Whether some subject is one of these and of those."""
        return not self.patterns or any(overlap(p, q) for p in self.patterns for q in patterns)


@lru_cache(maxsize=4096)
def filter_of(patterns: tuple[str, ...]) -> Filter:
    """The filter with these patterns."""
    return Filter(patterns)
