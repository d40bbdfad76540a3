"""Arithmetic on NATS subjects: validity, wildcards, containment and overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

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

    Entries with wildcards at the same places overlap only when they are equal. For two different sets of places the
    tokens where neither has a wildcard decide: one dictionary for each pair of sets, not a comparison of all pairs.
    """
    shapes: dict[tuple[int, ...], list[tuple[list[str], str]]] = {}
    tails = [s for s in subjects if s.split(".")[-1] == ">"]
    for subject in subjects:
        tokens = subject.split(".")
        if tokens[-1] != ">":
            places = (len(tokens), *(i for i, token in enumerate(tokens) if token == "*"))
            shapes.setdefault(places, []).append((tokens, subject))
    for left, right in combinations(shapes, 2):
        if left[0] != right[0]:
            continue
        common = [i for i in range(left[0]) if i not in left[1:] and i not in right[1:]]
        seen = {tuple(tokens[i] for i in common): subject for tokens, subject in shapes[left]}
        for tokens, subject in shapes[right]:
            other = seen.get(tuple(tokens[i] for i in common))
            if other is not None:
                return _in_order(subjects, other, subject)
    for tail in tails:
        for other in subjects:
            if other != tail and overlap(tail, other):
                return _in_order(subjects, other, tail)
    return None


def _in_order(subjects: Sequence[str], one: str, other: str) -> tuple[str, str]:
    return (one, other) if subjects.index(one) < subjects.index(other) else (other, one)


def within(subject: str, patterns: Iterable[str]) -> bool:
    """Tell whether one of a stream's patterns takes in everything that `subject` matches."""
    return any(covers(pattern, subject) for pattern in patterns)
