"""Partitions and the template that names them.

A partition is the unit of order and of ownership. Its id is the values of the template's keys joined by dots:
with the template `dc.{tool}.{chamber}.completion`, the partition `etch1.c3` is the subject
`dc.etch1.c3.completion`. A key value may be `*`; such a partition spans several subjects and keeps one order
over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from types import MappingProxyType
from typing import TypeAlias

from parti.errors import SubjectMismatch
from parti.model.subjects import tokens_of

PartitionLike: TypeAlias = "Partition | str | Sequence[str] | Mapping[str, str]"


@dataclass(frozen=True, slots=True)
class Partition:
    """One unit of order: its id, its subject and the named key values it came from."""

    id: str
    subject: str
    keys: Mapping[str, str] = field(compare=False, hash=False)

    def __str__(self) -> str:
        return self.id


class Template:
    """A subject with named tokens, such as `dc.{tool}.{chamber}.completion`.

    Every placeholder takes exactly one whole token, so that the way from a subject back to its keys is unique.
    Raises `SubjectMismatch` for anything else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.keys: tuple[str, ...]
        self._tokens: list[str] = tokens_of(text)
        self._key_at: dict[int, str] = {}
        for index, token in enumerate(self._tokens):
            if token in {"*", ">"}:
                raise SubjectMismatch(
                    f"template {text!r} contains the wildcard {token!r}; name it instead, for example {{key}}"
                )
            if "{" in token or "}" in token:
                self._key_at[index] = self._key_name(token)
        names = list(self._key_at.values())
        if len(set(names)) != len(names):
            raise SubjectMismatch(f"template {text!r} names a key twice; give every key its own name")
        self.keys = tuple(names)
        self.pattern = ".".join("*" if i in self._key_at else t for i, t in enumerate(self._tokens))

    @property
    def places(self) -> tuple[tuple[str | None, str | None], ...]:
        """For each token of a subject the literal that must stand there, or the key that it gives."""
        return tuple((None, self._key_at[i]) if i in self._key_at else (t, None) for i, t in enumerate(self._tokens))

    def _key_name(self, token: str) -> str:
        name = token[1:-1]
        whole = token.startswith("{") and token.endswith("}") and name.isidentifier()
        if not whole or next(iter(Formatter().parse(token)))[1] != name:
            raise SubjectMismatch(
                f"template {self.text!r} has the token {token!r}; a key must be a whole token such as {{tool}}"
            )
        return name

    def partition(self, values: PartitionLike) -> Partition:
        """Build a partition from key values: a mapping, a sequence, an id such as `etch1.c3`, or a partition.

        Raises `SubjectMismatch` when number or names of the values do not fit the template.
        """
        if isinstance(values, Partition):
            return self.partition(values.keys if self.keys else values.subject)
        if isinstance(values, Mapping):
            missing = [k for k in self.keys if k not in values]
            extra = [k for k in values if k not in self.keys]
            if missing or extra:
                raise SubjectMismatch(
                    f"partition {dict(values)!r} does not fit template {self.text!r}: expected the keys "
                    f"{', '.join(self.keys) or '(none)'}"
                )
            parts = [str(values[k]) for k in self.keys]
        elif isinstance(values, str):
            parts = values.split(".") if self.keys else []
            if not self.keys and values != self.text:
                raise SubjectMismatch(
                    f"partition {values!r} does not fit template {self.text!r}: without keys the only partition "
                    f"is the subject itself"
                )
        else:
            parts = [str(v) for v in values]
        return self._build(parts)

    def _build(self, parts: Sequence[str]) -> Partition:
        if len(parts) != len(self.keys):
            raise SubjectMismatch(
                f"partition {'.'.join(parts)!r} has {len(parts)} values but template {self.text!r} has "
                f"{len(self.keys)} keys ({', '.join(self.keys)}); give one value for each"
            )
        for key, value in zip(self.keys, parts, strict=True):
            if not value or "." in value or value == ">" or any(c.isspace() for c in value):
                raise SubjectMismatch(
                    f"value {value!r} for key {key!r} of template {self.text!r} is not one subject token; "
                    f"use a word without dots or white space, or '*'"
                )
        return self._made_of(parts)

    def _made_of(self, parts: Sequence[str]) -> Partition:
        values = iter(parts)
        subject = ".".join(next(values) if i in self._key_at else t for i, t in enumerate(self._tokens))
        keys = MappingProxyType(dict(zip(self.keys, parts, strict=True)))
        return Partition(".".join(parts) or subject, subject, keys)

    def partitions(self, values: Iterable[PartitionLike]) -> list[Partition]:
        """Build many partitions, keeping their order and any repetition."""
        return [self.partition(v) for v in values]

    def parse(self, subject: str) -> Partition:
        """Find the partition that a literal subject belongs to; raises `SubjectMismatch` when it does not fit."""
        tokens = subject.split(".")
        if len(tokens) != len(self._tokens) or any(
            i not in self._key_at and t != tokens[i] for i, t in enumerate(self._tokens)
        ):
            raise SubjectMismatch(f"subject {subject!r} does not match template {self.text!r}")
        return self._build([tokens[i] for i in self._key_at])

    def parse_any(self, subject: str) -> Partition:
        """As `parse`, also for values that no configuration may have, but a publisher has used in a subject."""
        try:
            return self.parse(subject)
        except SubjectMismatch:
            tokens = subject.split(".")
            if len(tokens) != len(self._tokens):
                raise
            return self._made_of([tokens[i] for i in self._key_at])

    def find(self, partition_id: str) -> Partition | None:
        """The partition with this id; None when none can have it."""
        try:
            return self.partition(partition_id)
        except SubjectMismatch:
            return None

    def of_id(self, partition_id: str) -> Partition:
        """The partition with an id that `parse_any` has found."""
        try:
            return self.partition(partition_id)
        except SubjectMismatch:
            parts = partition_id.split(".")
            if len(parts) != len(self.keys):
                raise
            return self._made_of(parts)

    def __repr__(self) -> str:
        return f"Template({self.text!r})"
