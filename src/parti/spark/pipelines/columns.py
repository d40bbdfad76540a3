"""Declared columns of a payload, as `name = "type"` or as one line of DDL, checked before Spark is started.

    lot = "string not null"
    measurements = "struct<temperature_c: double, particles: int>"

Types are those of Spark SQL that a JSON document can hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parti.errors import ConfigError

_PRIMITIVES = {
    "string": "string",
    "boolean": "boolean",
    "tinyint": "tinyint",
    "byte": "tinyint",
    "smallint": "smallint",
    "short": "smallint",
    "int": "int",
    "integer": "int",
    "bigint": "bigint",
    "long": "bigint",
    "float": "float",
    "real": "float",
    "double": "double",
    "date": "date",
    "timestamp": "timestamp",
    "binary": "binary",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_-]*|\d+|[<>(),:])")
_EXPECTED = "string, boolean, int, bigint, float, double, decimal(10,2), date, timestamp, array<…>, map<…>, struct<…>"
_MOST_DIGITS = 38


@dataclass(frozen=True, slots=True)
class Column:
    """One declared column: its type in Spark's words, and whether a payload without it is refused."""

    name: str
    type: str
    required: bool = False

    @property
    def ddl(self) -> str:
        """The column as Spark reads it in a schema."""
        return f"`{self.name}` {self.type}"


def parse_columns(declared: str | Mapping[str, object]) -> tuple[Column, ...]:
    """Read a declaration: a table of `name = "type"`, or the same as one line with commas between.

    Raises ConfigError that names the column and what was expected of it.
    """
    if isinstance(declared, str):
        columns = _Reader(declared, "schema").columns()
    else:
        columns = tuple(_column(name, kind) for name, kind in declared.items())
    names = [column.name.lower() for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"schema: column {name!r} is declared twice; small and capital letters count as the same"
            )
    return columns


def _column(name: str, kind: object) -> Column:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"schema: {name!r} is no name of a column; expected letters, digits, '_' and '-'")
    if not isinstance(kind, str):
        raise ConfigError(f'schema: column {name!r} needs a type in quotes, such as {name} = "string not null"')
    reader = _Reader(kind, f"schema: column {name!r}")
    column = Column(name, reader.type(), reader.not_null())
    reader.end()
    return column


class _Reader:
    """Reads types from left to right."""

    def __init__(self, text: str, place: str) -> None:
        self._text = text
        self._place = place
        self._at = 0

    def columns(self) -> tuple[Column, ...]:
        found = []
        while True:
            name = self._next("a name of a column")
            if not _NAME.fullmatch(name):
                raise self._error(f"{name!r} is no name of a column")
            self._place = f"schema: column {name!r}"
            if self._peek() == ":":
                self._next("")
            found.append(Column(name, self.type(), self.not_null()))
            if self._peek() != ",":
                break
            self._next("")
        self.end()
        return tuple(found)

    def type(self) -> str:
        word = self._next("a type").lower()
        if word in {"decimal", "dec", "numeric"}:
            return self._decimal()
        if word == "array":
            self._take("<")
            inner = self.type()
            self._take(">")
            return f"array<{inner}>"
        if word == "map":
            self._take("<")
            key = self.type()
            if key != "string":
                raise self._error("keys of a map must be strings, as they are in JSON")
            self._take(",")
            value = self.type()
            self._take(">")
            return f"map<string,{value}>"
        if word == "struct":
            return self._struct()
        if word not in _PRIMITIVES:
            raise self._error(f"unknown type {word!r}; expected one of {_EXPECTED}")
        return _PRIMITIVES[word]

    def not_null(self) -> bool:
        if self._peek().lower() != "not":
            return False
        self._next("")
        if self._next("'null'").lower() != "null":
            raise self._error("expected 'not null'")
        return True

    def end(self) -> None:
        if left := self._text[self._at :].strip():
            raise self._error(f"did not expect {left!r} here")

    def _decimal(self) -> str:
        precision, scale = 10, 0
        if self._peek() == "(":
            self._next("")
            precision = self._number()
            if self._peek() == ",":
                self._next("")
                scale = self._number()
            self._take(")")
        if not 1 <= precision <= _MOST_DIGITS or scale > precision:
            raise self._error(f"decimal({precision},{scale}) is no type; expected at most decimal({_MOST_DIGITS},…)")
        return f"decimal({precision},{scale})"

    def _struct(self) -> str:
        self._take("<")
        fields: dict[str, str] = {}
        while True:
            name = self._next("a name of a field")
            if not _NAME.fullmatch(name) or name in fields:
                raise self._error(f"{name!r} is no name of a field, or there twice")
            if self._peek() == ":":
                self._next("")
            fields[name] = self.type()
            if self._peek() != ",":
                break
            self._next("")
        self._take(">")
        return f"struct<{','.join(f'`{name}`:{kind}' for name, kind in fields.items())}>"

    def _number(self) -> int:
        word = self._next("a number")
        if not word.isdecimal():
            raise self._error(f"expected a number, not {word!r}")
        return int(word)

    def _take(self, sign: str) -> None:
        found = self._next(f"'{sign}'")
        if found != sign:
            raise self._error(f"expected '{sign}', not {found!r}")

    def _peek(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        return found[1] if found else ""

    def _next(self, expected: str) -> str:
        found = _TOKEN.match(self._text, self._at)
        if not found:
            raise self._error(f"expected {expected} after {self._text[: self._at].strip()!r}")
        self._at = found.end()
        return found[1]

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self._place}: {text}")
