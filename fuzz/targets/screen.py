"""A screen: what commands print, as bytes, with what a terminal must never get."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fuzz.target import WrongError

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, colours, or turns text around. Tabs and ends of lines do no harm."""


@contextmanager
def screen() -> Iterator[io.TextIOWrapper]:
    """Take the place of stdout; what was printed must be UTF-8 and free of control characters."""
    before, taken = sys.stdout, io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    sys.stdout = taken
    try:
        yield taken
    finally:
        sys.stdout = before
    taken.flush()
    buffer = taken.buffer
    assert isinstance(buffer, io.BytesIO)
    check_clean(buffer.getvalue().decode("utf-8"), "on the screen")


def check_clean(text: str, where: str) -> None:
    """Raise for text that a terminal or a log must not get."""
    found = _CONTROL.search(text)
    if found:
        raise WrongError(f"a control character is {where}")
