"""Feed: structured values out of the bytes that an engine makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fuzz.hostile import BYTES, TEXTS

_T = TypeVar("_T")


class Feed:
    """Bytes that are taken from the front; zeros when there are no more."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def __bool__(self) -> bool:
        return self._place < len(self._data)

    def take(self, count: int) -> bytes:
        """As many bytes as there are, up to `count`."""
        found = self._data[self._place : self._place + count]
        self._place += len(found)
        return found

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def byte(self) -> int:
        """One byte as a number."""
        found = self.take(1)
        return found[0] if found else 0

    def number(self) -> int:
        """A number of two bytes."""
        return self.byte() << 8 | self.byte()

    def flag(self) -> bool:
        """Yes or no."""
        return bool(self.byte() & 1)

    def pick(self, choices: Sequence[_T]) -> _T:
        """One of these."""
        return choices[self.byte() % len(choices)]

    def chunk(self) -> bytes:
        """Bytes: taken as they are, or well-known hostile ones."""
        kind = self.byte()
        if kind < 160:
            return self.take(kind % 64)
        if kind < 224:
            return self.pick(BYTES)
        return self.pick(BYTES) * (1 + self.byte())

    def text(self) -> str:
        """Text of any kind, also such that UTF-8 cannot write."""
        kind = self.byte() % 8
        if kind < 3:
            return self.pick(TEXTS)
        if kind == 3:
            return self.chunk().decode("utf-8", "surrogateescape")
        if kind == 4:
            return self.chunk().decode("latin-1")
        if kind == 5:
            return self.chunk().decode("utf-16-le", "replace") + chr(0xD800 + self.byte())
        if kind == 6:
            return self.pick(TEXTS) * (1 + self.number() % 2000)
        return self.chunk().decode("utf-8", "replace")

    def cuts(self, data: bytes) -> list[bytes]:
        """The same bytes in pieces."""
        places = sorted(self.number() % (len(data) + 1) for _ in range(self.byte() % 8))
        return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
