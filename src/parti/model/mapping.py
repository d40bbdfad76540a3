"""Server-side subject mapping: a stream that stores each message under a hashed slot of its subject.

With the source `orders.*` and the destination `orders.{{wildcard(1)}}.{{partition(16,1)}}` a message published on
`orders.ada` is stored as `orders.ada.<slot>`, and the sixteen slots are parti's partitions: the template is
`orders.{w1}.{slot}`, the partitions are `*.0` to `*.15`. Any number of keys thus shares a fixed number of
partitions, and all messages of a key stay in one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from parti.errors import ConfigError, SubjectMismatch
from parti.model.partition import Partition, Template
from parti.model.subjects import covers, overlap, tokens_of

MAX_PARTITIONS = 1_000_000
"""Beyond what a fleet can share out; the server itself would take 2**31 - 1."""

_SPACED = re.compile(r"\{\{[^{}]*\}\}")
_CALL = re.compile(r"\{\{(?P<name>\w*)\((?P<arguments>.*)\)\}\}")
_SHORT = re.compile(r"\$(?P<index>[+-]?[0-9]+)")
_ONE_TOKEN = frozenset({"wildcard", "partition", "left", "right", "random"})


@dataclass(frozen=True, slots=True)
class _Wildcard:
    index: int


@dataclass(frozen=True, slots=True)
class _Slot:
    count: int
    indexes: tuple[int, ...]
    """The wildcards whose values are hashed; none: the whole subject is."""


_Token: TypeAlias = "str | _Wildcard | _Slot"


@dataclass(frozen=True, slots=True)
class SubjectMapping:
    """A subject transform of a stream, computed as the server computes it.

    The destination may hold `{{wildcard(n)}}` (or `$n`), the n-th `*` of the source, and exactly one
    `{{partition(count, n, ...)}}`, the slot that those wildcards hash to (all of the subject, when none is named).
    Two mappings are equal when they do the same, however they are spelled. Raises `ConfigError` for anything
    else, also for what the server accepts without meaning it: `partition(0,1)`, `wildcard(0)`, `x{{wildcard(1)}}`.

    Example:
        mapping = SubjectMapping("orders.*", "orders.{{wildcard(1)}}.{{partition(16,1)}}")
        mapping.apply("orders.ada")  # "orders.ada.7"
        mapping.template  # "orders.{w1}.{slot}"
    """

    source: str
    destination: str = field(compare=False)
    _source: tuple[str, ...] = field(init=False, repr=False)
    _destination: tuple[_Token, ...] = field(init=False, repr=False)
    _wildcards: tuple[int, ...] = field(init=False, repr=False)
    """Where in the source its wildcards are."""
    _slot: _Slot = field(init=False, repr=False)

    def __post_init__(self) -> None:
        source = tokens_of(self.source)
        if ">" in source or "*" not in source:
            raise self._error("the source must have at least one '*' and no '>'; write one '*' for each token")
        if "{{" in self.source:
            raise self._error("the source calls a function; functions belong into the destination")
        wildcards = tuple(i for i, token in enumerate(source) if token == "*")
        destination = tuple(self._parse(t, len(wildcards)) for t in tokens_of(_without_spaces(self.destination)))
        slots = [token for token in destination if isinstance(token, _Slot)]
        if len(slots) != 1:
            raise self._error(f"the destination has {len(slots)} partition() functions, expected exactly one")
        object.__setattr__(self, "_source", tuple(source))
        object.__setattr__(self, "_destination", destination)
        object.__setattr__(self, "_wildcards", wildcards)
        object.__setattr__(self, "_slot", slots[0])

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"mapping from {self.source!r} to {self.destination!r}: {problem}")

    def _parse(self, token: str, wildcards: int) -> _Token:
        if short := _SHORT.fullmatch(token):
            return _Wildcard(self._index(short["index"], token, wildcards))
        call = _CALL.fullmatch(token)
        if call is None:
            if token in {"*", ">"}:
                raise self._error(f"the destination has the wildcard {token!r}; use {{{{wildcard(n)}}}} instead")
            if "{" in token or "}" in token:
                raise self._error(f"token {token!r} is not one function such as {{{{partition(16,1)}}}}, nor a word")
            return token
        arguments = call["arguments"].split(",")
        if call["name"] in {"wildcard", "Wildcard"}:
            if len(arguments) != 1:
                raise self._error(f"{token!r} has {len(arguments)} arguments, expected the number of one wildcard")
            return _Wildcard(self._index(arguments[0], token, wildcards))
        if call["name"] in {"partition", "Partition"}:
            count = self._number(arguments[0], token)
            if not 1 <= count <= MAX_PARTITIONS:
                raise self._error(f"{token!r} asks for {count} partitions, expected 1 to {MAX_PARTITIONS}")
            return _Slot(count, tuple(self._index(a, token, wildcards) for a in arguments[1:]))
        raise self._error(f"{token!r} calls an unknown function; use wildcard(n) or partition(count, n, ...)")

    def _number(self, text: str, token: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,10}", text):
            raise self._error(f"{token!r} has the argument {text!r}, expected a number")
        return int(text)

    def _index(self, text: str, token: str, wildcards: int) -> int:
        index = self._number(text, token)
        if not 1 <= index <= wildcards:
            raise self._error(f"{token!r} names wildcard {index}, but the source has 1 to {wildcards}")
        return index

    # ── what the server does to a subject ─────────────────────────────────────────────────────────────────────

    @property
    def partition_count(self) -> int:
        """Number of slots."""
        return self._slot.count

    def apply(self, subject: str) -> str | None:
        """The subject under which the server stores a message published on `subject`; None if it is not mapped."""
        tokens = self._match(subject)
        if tokens is None:
            return None
        values = []
        for token in self._destination:
            if isinstance(token, _Wildcard):
                values.append(tokens[self._wildcards[token.index - 1]])
            else:
                values.append(token if isinstance(token, str) else str(self._hash(tokens)))
        return ".".join(values)

    def undo(self, stored: str) -> str | None:
        """The subject whose messages are stored under `stored`; None when that cannot be told, or there is none."""
        tokens = stored.split(".")
        if len(tokens) != len(self._destination):
            return None
        published = list(self._source)
        for token, value in zip(self._destination, tokens, strict=True):
            if isinstance(token, _Wildcard):
                published[self._wildcards[token.index - 1]] = value
        subject = ".".join(published)
        return subject if self.apply(subject) == stored else None

    def partition_of(self, subject: str) -> int:
        """The slot of a published subject; raises `SubjectMismatch` when the source does not match it."""
        tokens = self._match(subject)
        if tokens is None:
            raise SubjectMismatch(f"subject {subject!r} does not match the mapping's source {self.source!r}")
        return self._hash(tokens)

    def _match(self, subject: str) -> list[str] | None:
        tokens = subject.split(".")
        if len(tokens) != len(self._source):
            return None
        for token, expected in zip(tokens, self._source, strict=True):
            # The server stores a message that was published on a wildcard as it is.
            if token in {"", "*", ">"} or expected not in {"*", token}:
                return None
        return tokens

    def _hash(self, tokens: list[str]) -> int:
        indexes = self._slot.indexes
        text = "".join(tokens[self._wildcards[i - 1]] for i in indexes) if indexes else ".".join(tokens)
        return _fnv1a_32(text.encode()) % self._slot.count

    # ── the slots as partitions ───────────────────────────────────────────────────────────────────────────────

    @property
    def pattern(self) -> str:
        """What all stored subjects match."""
        return ".".join(token if isinstance(token, str) else "*" for token in self._destination)

    @property
    def template(self) -> str:
        """A template for the stored subjects, with the keys `slot` and `w1`, `w2`, ... for the wildcards.

        A template of your own fits as well if its keys are at the same places.
        """
        return ".".join(self._named_tokens())

    def _named_tokens(self) -> Iterator[str]:
        used: dict[int, int] = {}
        for token in self._destination:
            if isinstance(token, _Wildcard):
                again = used[token.index] = used.get(token.index, 0) + 1
                yield f"{{w{token.index}}}" if again == 1 else f"{{w{token.index}_{again}}}"
            else:
                yield token if isinstance(token, str) else "{slot}"

    def partitions(self, template: Template | None = None) -> list[Partition]:
        """One partition for each slot, in order; raises `SubjectMismatch` when the template does not fit."""
        template = template or Template(self.template)
        if template.pattern != self.pattern:
            raise SubjectMismatch(
                f"template {template.text!r} does not fit the mapping to {self.destination!r}; "
                f"expected {self.template!r}, the keys named as you like"
            )
        placed = [token for token in self._destination if not isinstance(token, str)]
        return [
            template.partition([str(slot) if isinstance(token, _Slot) else "*" for token in placed])
            for slot in range(self.partition_count)
        ]


def stored_subjects(subjects: Iterable[str], source: str, destination: str) -> tuple[str, ...]:
    """The patterns that cover what a stream stores: its subjects after a transform, of whatever functions."""
    if not destination:
        return tuple(subjects)  # The server keeps a transform without destination and does nothing.
    source, stored = source or ">", _pattern(destination)
    patterns: dict[str, None] = {}
    for subject in subjects:
        mapped = overlap(source, subject)
        if mapped:
            patterns[stored] = None
        if not mapped or not covers(source, subject):
            patterns[subject] = None
    return tuple(patterns)


def _pattern(destination: str) -> str:
    tokens: list[str] = []
    for token in _without_spaces(destination).split("."):
        call = _CALL.fullmatch(token)
        if call and call["name"].lower() not in _ONE_TOKEN:
            return ".".join([*tokens, ">"])  # split and its kin make several tokens of one
        tokens.append("*" if call or _SHORT.fullmatch(token) else token)
    return ".".join(tokens)


def _without_spaces(destination: str) -> str:
    """The server takes spaces inside the braces, though nowhere else in a subject."""
    return _SPACED.sub(lambda call: "".join(call[0].split()), destination)


def _fnv1a_32(data: bytes) -> int:
    value = 0x811C9DC5
    for byte in data:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value
