"""A clock for tests that say how quickly something happens, on machines that have other things to do.

CI gives two processors to Java, servers, browsers and many workers. A bound on the wall clock then fails for what the
machine did to the product, not for what the product did; a wider bound would no longer catch a product that dawdles.
So the bounds stay as narrow as they are meant, and the time in which somebody waited for a processor does not count;
neither does the time in which the host of a virtual machine gave its processors to others. On a machine with nothing
else to do both clocks agree, and a bound is as strict as one on the wall clock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
_STAT = Path("/proc/stat")
_STOLEN = 8
"""Which word of the first line tells how long the host has given a processor to others, in ticks."""


def unhindered_s() -> float:
    """Seconds that stand still while any process waits for a processor; only their differences mean something.

    For upper bounds alone: as a lower bound it would fail on a busy machine. Where the kernel does not tell how long
    processes waited, it is the wall clock.
    """
    return time.monotonic() - _waited_s() - _stolen_s()


def _waited_s() -> float:
    try:
        some = _PRESSURE.read_text().splitlines()[0]
    except (OSError, IndexError):
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


def _stolen_s() -> float:
    """How long a processor was away, on average."""
    try:
        words = _STAT.read_text().split(maxsplit=_STOLEN + 1)
        return int(words[_STOLEN]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, IndexError, ValueError):
        return 0.0
