"""Filters that the server or the range spares us: on seq, timestamp and subject.

A filter on `seq` is answered exactly by the range. Those on `timestamp` and `subject` only narrow what is read, and
Spark evaluates them again: clocks of servers differ, and a prefix need not end with a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

_MANY = 20
"""More subjects than this are not worth a filter each."""


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What filters say about the rows that are wanted; bounds are inclusive."""

    first: int = 1
    last: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    subjects: tuple[str, ...] = ()

    def take(self, kind: str, attribute: tuple[str, ...], value: Any) -> tuple[Narrowing, bool]:
        """Narrow by one filter; returns the result, and whether it needs no second look."""
        if attribute == ("seq",) and isinstance(value, int):
            return self._by_seq(kind, value)
        if attribute == ("timestamp",) and isinstance(value, datetime):
            return self._by_time(kind, value), False
        if attribute == ("subject",):
            return self._by_subject(kind, value), False
        return self, False

    def _by_seq(self, kind: str, value: int) -> tuple[Narrowing, bool]:
        first, last = {
            "EqualTo": (value, value),
            "GreaterThan": (value + 1, None),
            "GreaterThanOrEqual": (value, None),
            "LessThan": (None, value - 1),
            "LessThanOrEqual": (None, value),
        }.get(kind, (None, None))
        if first is None and last is None:
            return self, False
        found = self
        if first is not None:
            found = replace(found, first=max(found.first, first))
        if last is not None:
            found = replace(found, last=last if found.last is None else min(found.last, last))
        return found, True

    def _by_time(self, kind: str, value: datetime) -> Narrowing:
        found = self
        if kind in {"EqualTo", "GreaterThan", "GreaterThanOrEqual"}:
            found = replace(found, since=value if found.since is None else max(found.since, value))
        if kind in {"EqualTo", "LessThan", "LessThanOrEqual"}:
            found = replace(found, until=value if found.until is None else min(found.until, value))
        return found

    def _by_subject(self, kind: str, value: Any) -> Narrowing:
        if self.subjects:
            return self  # Two conditions on the subject: the first one narrows, Spark does the rest.
        if kind == "EqualTo" and _literal(value):
            return replace(self, subjects=(value,))
        if kind == "In" and len(value) <= _MANY and all(_literal(one) for one in value):
            return replace(self, subjects=tuple(dict.fromkeys(value)))
        if kind == "StringStartsWith" and isinstance(value, str):
            tokens = value.split(".")[:-1]
            if tokens and all(_literal(token) for token in tokens):
                return replace(self, subjects=(".".join([*tokens, ">"]),))
        return self


def _literal(value: object) -> bool:
    """Whether a value is a subject that can be asked for as it is."""
    return (
        isinstance(value, str)
        and bool(value)
        and not any(c.isspace() for c in value)
        and all(token and token not in {"*", ">"} for token in value.split("."))
    )
