"""The cliff, and the way around it where no hot mirror may be used: one wide filter, with the rest thrown away here.

A consumer with several filters that lags on a file stream costs the server a search for each message, and the search
grows with the subjects in the stream. One wildcard filter costs no search, but brings everybody's messages. Which of
the two is cheaper follows from how many of the messages are ours. Measured with `make bench-cliff` (2 cores,
nats-server 2.15.1, 256 B): searching takes about 15 us and 0.22 us for each subject; a message that is not ours takes
18 us of server and worker together.

At the end of the stream there is nothing to search, so a worker that has caught up goes back to its own filters.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_SEARCH_US, _SEARCH_US_PER_SUBJECT = 15.0, 0.22
_PASSED_OVER_US = 18.0
_WORTH = 1.5
"""How much cheaper the other way must be: both figures belong to one machine."""
_MANY_SUBJECTS = 100
"""With fewer, filters are cheap whatever happens."""
_LASTS_S = 1.0
_CAUGHT_UP_S = 2.0


def cover(subjects: Collection[str]) -> str:
    """The narrowest single pattern that matches all of these.

    >>> cover(["dc.t1.a", "dc.t1.b"]), cover(["dc.t1.a", "dc.t2.a"]), cover(["dc.a", "dc.b.c"])
    ('dc.t1.*', 'dc.*.a', 'dc.>')
    """
    if not subjects:
        raise ValueError("nothing to cover")
    rows = [subject.split(".") for subject in subjects]
    length = min(map(len, rows))
    same_length = all(len(row) == length for row in rows) and all(row[-1] != ">" for row in rows)
    # A tail wildcard stands for at least one token.
    whole = length if same_length else min(length - 1, *(row.index(">") for row in rows if ">" in row), length - 1)
    tokens = []
    for at in range(whole):
        column = {row[at] for row in rows}
        tokens.append(column.pop() if len(column) == 1 else "*")
    return ".".join(tokens if same_length else [*tokens, ">"])


def search_us(subjects: int) -> float:
    """What the server spends on one message of a consumer that lags, with several filters, on a file stream."""
    return _SEARCH_US + _SEARCH_US_PER_SUBJECT * subjects


@dataclass(frozen=True, slots=True)
class Lag:
    """How far one worker is behind, at one moment."""

    now_s: float
    behind: int
    """Messages of the whole stream that came after the last one delivered here."""
    pending: int
    """How many of them are this worker's."""
    subjects: int
    """In the stream."""
    filters: int
    """This worker's partitions."""
    alone: bool = False
    """All subjects under the wide filter are this worker's: nothing would be thrown away."""


class Guard:
    """Decides whether a worker reads through its own filters or through one wide filter."""

    def __init__(self) -> None:
        self._lagging_since_s: float | None = None
        self._caught_up_since_s: float | None = None

    def widen(self, lag: Lag, *, wide: bool) -> tuple[bool, str]:
        """Whether to read wide from now on, and why; `wide`: it does already."""
        if lag.filters <= 1:
            return False, "one filter needs no search"
        if lag.alone and lag.subjects >= _MANY_SUBJECTS:
            return True, "all subjects that one wildcard matches are this worker's"
        if wide:
            return self._stay_wide(lag)
        self._caught_up_since_s = None
        saved = lag.pending * search_us(lag.subjects) / max(1.0, lag.behind * _PASSED_OVER_US)
        if lag.pending <= 0 or lag.behind <= lag.subjects or saved < _WORTH:
            self._lagging_since_s = None
            return False, "its own filters are cheap enough"
        if self._lagging_since_s is None:
            self._lagging_since_s = lag.now_s
        if lag.now_s - self._lagging_since_s < _LASTS_S:
            return False, "it may be over in a moment"
        return True, (
            f"{lag.behind} messages behind on a file stream of {lag.subjects} subjects, {lag.pending} of them for "
            f"this worker: reading all of them is {saved:.1f} times cheaper than having them searched"
        )

    def _stay_wide(self, lag: Lag) -> tuple[bool, str]:
        self._lagging_since_s = None
        if lag.behind * 2 > lag.subjects:
            self._caught_up_since_s = None
        elif self._caught_up_since_s is None:
            self._caught_up_since_s = lag.now_s
        since_s = self._caught_up_since_s
        if since_s is not None and lag.now_s - since_s >= _CAUGHT_UP_S:
            return False, "it has caught up"
        return True, "it is still behind"
