"""A limit for log lines that somebody outside can provoke: one in a while, and then how many there were."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
_MOST_KEYS = 256


class LogRate:
    """Lets one line per key pass in each interval and counts the others. Thread-safe."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def passes(self, key: str) -> int | None:
        """Return how many lines were left out since the last one that passed; None: leave out this one, too."""
        now = self._clock()
        with self._lock:
            before = self._seen.get(key)
            if before is not None and now < before[0] + self._every_s:
                self._seen[key] = (before[0], before[1] + 1)
                return None
            if len(self._seen) >= _MOST_KEYS:
                self._seen.clear()
            self._seen[key] = (now, 0)
            return before[1] if before else 0


class _Filter(logging.Filter):
    """The same for lines of libraries; their text, without its arguments, is the key."""

    def __init__(self, rate: LogRate) -> None:
        super().__init__()
        self._rate = rate

    def filter(self, record: logging.LogRecord) -> bool:
        left_out = self._rate.passes(str(record.msg).partition("\n")[0])
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like this)", None
        return left_out is not None


@contextmanager
def limited_loggers(*names: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Limit the lines of these loggers of libraries for the length of the block."""
    limit = _Filter(LogRate(every_s))
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)
