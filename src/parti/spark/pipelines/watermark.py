"""Event time: which event comes too late, decided from the batches before it and nothing else.

The watermark of a batch is the newest event time of all earlier batches minus the allowed lateness. So it does not
depend on how many batches are worked on together, and a batch that is worked on again is judged as before. Times are
microseconds since 1970, None where there is none yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def watermarks(newest: Mapping[int, int | None], before_us: int | None, lateness_us: int) -> dict[int, int | None]:
    """The watermark of each batch, from the newest event time in each and the newest one before all of them."""
    found: dict[int, int | None] = {}
    for batch in sorted(newest):
        found[batch] = watermark(before_us, lateness_us)
        before_us = later(before_us, newest[batch])
    return found


def watermark(newest_us: int | None, lateness_us: int) -> int | None:
    """Events older than this are late."""
    return None if newest_us is None else newest_us - lateness_us


def later(left_us: int | None, right_us: int | None) -> int | None:
    """The later of two times, either of which may be missing."""
    if left_us is None or right_us is None:
        return left_us if right_us is None else right_us
    return max(left_us, right_us)


def moment(time_us: int | None) -> str | None:
    """A time for people: UTC, whole milliseconds; as a number where the calendar ends."""
    if time_us is None:
        return None
    try:
        at = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} us"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
