"""Arithmetic on NATS subjects: validity, wildcards, containment and overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parti.errors import SubjectMismatch


def tokens_of(subject: str) -> list[str]:
    """Split a subject or pattern into tokens, refusing what a server would refuse."""
    tokens = subject.split(".")
    for index, token in enumerate(tokens):
        if not token:
            raise SubjectMismatch(f"subject {subject!r} has an empty token; expected words separated by single dots")
        if any(c.isspace() for c in token):
            raise SubjectMismatch(f"subject {subject!r} contains white space; remove it")
        if token == ">" and index != len(tokens) - 1:
            raise SubjectMismatch(f"subject {subject!r} has '>' before its end; '>' may only be the last token")
    return tokens


def has_wildcard(subject: str) -> bool:
    """Tell whether a pattern matches more than one subject."""
    return any(token in {"*", ">"} for token in subject.split("."))


def covers(pattern: str, subject: str) -> bool:
    """Tell whether every subject matched by `subject` (itself maybe a pattern) is matched by `pattern`."""
    wide, narrow = pattern.split("."), subject.split(".")
    for index, token in enumerate(wide):
        if token == ">":
            return len(narrow) > index
        if index >= len(narrow) or narrow[index] == ">":
            return False
        if token != "*" and token != narrow[index]:
            return False
    return len(wide) == len(narrow)


def overlap(left: str, right: str) -> bool:
    """Tell whether some subject is matched by both patterns."""
    a, b = left.split("."), right.split(".")
    for x, y in zip(a, b, strict=False):
        if ">" in (x, y):
            return True
        if x != y and "*" not in (x, y):
            return False
    return len(a) == len(b)


def first_overlap(subjects: Sequence[str]) -> tuple[str, str] | None:
    """Return two different entries that match a common subject, or None.

    Only pairs with a wildcard are compared, so a long list of literal subjects costs nothing.
    """
    wild = [s for s in subjects if has_wildcard(s)]
    for pattern in wild:
        for other in subjects:
            if other != pattern and overlap(pattern, other):
                return (other, pattern) if subjects.index(other) < subjects.index(pattern) else (pattern, other)
    return None


def within(subject: str, patterns: Iterable[str]) -> bool:
    """Tell whether one of a stream's patterns takes in everything that `subject` matches."""
    return any(covers(pattern, subject) for pattern in patterns)
