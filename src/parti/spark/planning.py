"""From what was asked for to sequence ranges: where a read begins and ends, what is gone, how it is split.

Everything that needs the server takes a client; the arithmetic is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from parti.errors import DataLost, NotFound
from parti.jetstream.blocking import BlockingClient
from parti.jetstream.ranges import Range
from parti.spark.options import Offset

_DETAILS_BELOW = 1_000_000
"""Most deleted messages whose numbers are asked for: the server lists them one by one."""
_SHOWN = 5


def resolve(client: BlockingClient, stream: str, info: Mapping[str, Any], offset: Offset) -> int:
    """The sequence that an offset stands for: the first one at or behind it."""
    first, last = bounds(info)
    if offset == "earliest":
        return first
    if offset == "latest":
        return last + 1
    if isinstance(offset, int):
        return offset
    return at_time(client, stream, first, last, offset)


def bounds(info: Mapping[str, Any]) -> tuple[int, int]:
    """First and last sequence of a stream; of an empty one, the first is one behind the last."""
    state = info["state"]
    first, last = int(state["first_seq"]), int(state["last_seq"])
    return (first, last) if state["messages"] else (last + 1, last)


def at_time(client: BlockingClient, stream: str, first: int, last: int, moment: datetime) -> int:
    """The first sequence stored at or after a moment, by bisection; one behind the last if there is none."""
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        try:
            found = client.api(f"STREAM.MSG.GET.{stream}", {"seq": middle, "next_by_subj": ">"})["message"]
        except NotFound:
            high = middle
            continue
        if datetime.fromisoformat(found["time"]) >= moment:
            high = middle
        else:
            low = int(found["seq"]) + 1
    return low


def thins_by_design(config: Mapping[str, Any]) -> bool:
    """Whether messages leave the middle of the stream in normal operation, so that a gap is no loss."""
    return (
        config.get("retention", "limits") != "limits"
        or int(config.get("max_msgs_per_subject", -1)) > 0
        or bool(config.get("allow_msg_ttl"))
    )


def missing_in(client: BlockingClient, stream: str, info: Mapping[str, Any], start: int, end: int) -> list[Range]:
    """Which sequences of `[start, end)` the stream no longer holds."""
    first, last = bounds(info)
    missing = [(start, min(first, end))] if start < min(first, end) else []
    deleted = int(info["state"].get("num_deleted", 0))
    if 0 < deleted <= _DETAILS_BELOW and start <= last:
        details = client.stream_info(stream, deleted_details=True)
        gone = (int(seq) for seq in details["state"].get("deleted") or ())
        missing += ranges_of(seq for seq in gone if max(start, first) <= seq < end)
    return missing


def ranges_of(sequences: Iterable[int]) -> list[Range]:
    """Sequences, ascending, as ranges."""
    found: list[Range] = []
    for seq in sequences:
        if found and found[-1][1] == seq:
            found[-1] = (found[-1][0], seq + 1)
        else:
            found.append((seq, seq + 1))
    return found


def count(ranges: Sequence[Range]) -> int:
    """How many sequences ranges hold."""
    return sum(end - start for start, end in ranges)


def lost(stream: str, missing: Sequence[Range], *, filtered: bool) -> DataLost:
    """The error for messages that are gone."""
    shown = ", ".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in missing[:_SHOWN])
    more = f" and {len(missing) - _SHOWN} more ranges" if len(missing) > _SHOWN else ""
    perhaps = "; some may be of subjects that were not asked for" if filtered else ""
    return DataLost(
        f"{count(missing)} messages of stream {stream!r} are gone (purged, deleted or expired): "
        f"{shown}{more}{perhaps}; set failOnDataLoss=false to go on without them"
    )


def split(start: int, end: int, *, parts: int, most: int) -> list[Range]:
    """Cut a range into about equal pieces: at least `parts` where there is that much, none above `most`."""
    size = end - start
    if size <= 0:
        return []
    pieces = min(size, max(parts, math.ceil(size / most)))
    return [(start + size * i // pieces, start + size * (i + 1) // pieces) for i in range(pieces)]


def earlier(moment: datetime, margin_s: float) -> datetime:
    """A little before (or, with a negative margin, after) a moment; clocks of servers differ."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return aware - timedelta(seconds=margin_s)
