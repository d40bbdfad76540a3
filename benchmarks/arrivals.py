"""What can be told from when messages were sent and when they came. Pure: numbers in, figures out."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

_WINDOW_NS = 500_000_000
_GOOD_WINDOWS = 3
"""So many half seconds in a row must look as before until a stall counts as over."""
_CURVE_NS = 200_000_000


class Arrivals:
    """Messages of one phase: `at_ns` when each came, in the order of coming, and `age_ns` how old it was then.

    `samples` holds moments and how many messages had been sent, and stored by a stream, until then.
    """

    def __init__(self, at_ns: array[int], age_ns: array[int], samples: Sequence[tuple[int, int, int]]) -> None:
        self._at_ns = at_ns
        self._age_ns = age_ns
        self._samples = samples

    def came_until(self, ns: int) -> int:
        """How many had come by then."""
        return bisect_right(self._at_ns, ns)

    def _sample(self, ns: int) -> tuple[int, int, int]:
        place = bisect_right(self._samples, ns, key=lambda sample: sample[0])
        return self._samples[place - 1] if place else (ns, 0, 0)

    def sent_per_s(self, began_ns: int, ended_ns: int) -> int:
        """What was sent in this time, as far as the samples tell."""
        first, last = self._sample(began_ns), self._sample(ended_ns)
        return round((last[1] - first[1]) * 1e9 / max(1, last[0] - first[0]))

    def backlog(self, ns: int) -> int:
        """Stored and not come by then. What waits to be stored is not in it."""
        return max(0, self._sample(ns)[2] - self.came_until(ns))

    def percentile_ms(self, share: float, began_ns: int, ended_ns: int) -> float | None:
        """The age that so large a share of the messages that came in this time did not exceed."""
        ages = sorted(self._age_ns[bisect_left(self._at_ns, began_ns) : bisect_left(self._at_ns, ended_ns)])
        return round(ages[min(len(ages) - 1, math.ceil(share * len(ages)) - 1)] / 1e6, 2) if ages else None

    def span(self, began_ns: int) -> tuple[int, float]:
        """How many have come, and the seconds from a moment until the last of them."""
        return len(self._at_ns), (self._at_ns[-1] - began_ns) / 1e9 if self._at_ns else 0.0

    def steady(self, rate: int, began_ns: int, ended_ns: int) -> dict[str, Any]:
        """Figures of a time under a steady load.

        `collapsed`: at the end more than a fifth of a second's load had not come, and in the second half less than
        95 % of what was stored had come.
        """
        seconds = (ended_ns - began_ns) / 1e9
        middle_ns, end = (began_ns + ended_ns) // 2, self.backlog(ended_ns)
        stored = self._sample(ended_ns)[2] - self._sample(middle_ns)[2]
        return {
            "sent_per_s": self.sent_per_s(began_ns, ended_ns),
            "delivered_per_s": round((self.came_until(ended_ns) - self.came_until(began_ns)) / seconds),
            "p50_ms": self.percentile_ms(0.50, began_ns, ended_ns),
            "p99_ms": self.percentile_ms(0.99, began_ns, ended_ns),
            "backlog_msgs": end,
            "collapsed": end > rate / 5 and end - self.backlog(middle_ns) > stored / 20,
        }

    def recovery(self, rate: int, stalled_ns: int, resumed_ns: int, ended_ns: int) -> dict[str, Any]:
        """Figures of a stall: what was before, when the backlog was gone, when messages were young again.

        Gone is a backlog of less than a tenth of a second's load; young is a p99 of at most three times what it was
        before the stall, or 20 ms more.
        """
        before_ms = self.percentile_ms(0.99, stalled_ns - 2 * 10**9, stalled_ns)
        first_ns = stalled_ns - 10**9
        curve = [self.backlog(ns) for ns in range(first_ns, ended_ns, _CURVE_NS)]
        return {
            "sent_before_per_s": self.sent_per_s(stalled_ns - 2 * 10**9, stalled_ns),
            "sent_after_per_s": self.sent_per_s(resumed_ns, ended_ns),
            "p99_before_ms": before_ms,
            "collapsed_before": self.backlog(stalled_ns) > rate / 2,
            "backlog_at_resume": self.backlog(resumed_ns),
            "backlog_most": max(self.backlog(resumed_ns), *curve),
            "backlog_at_end": self.backlog(ended_ns),
            "watched_s": round((ended_ns - resumed_ns) / 1e9, 1),
            "backlog_gone_s": self._gone_s(rate / 10, resumed_ns, ended_ns),
            "p99_back_s": None if before_ms is None else self._young_s(before_ms, resumed_ns, ended_ns),
            "curve": {
                "first_s": round((first_ns - resumed_ns) / 1e9, 2),
                "step_s": _CURVE_NS / 1e9,
                "backlog_msgs": curve,
            },
        }

    def _gone_s(self, small: float, resumed_ns: int, ended_ns: int) -> float | None:
        """Seconds until the backlog was small and stayed so; None if it did not."""
        step_ns = 20_000_000
        last_large = max(
            (ns for ns in range(resumed_ns, ended_ns, step_ns) if self.backlog(ns) >= small), default=None
        )
        if last_large is None:
            return 0.0
        return None if last_large + 10 * step_ns > ended_ns else round((last_large + step_ns - resumed_ns) / 1e9, 2)

    def _young_s(self, before_ms: float, resumed_ns: int, ended_ns: int) -> float | None:
        """Seconds until some windows in a row looked as before; None if they never did."""
        limit_ms, good = max(3 * before_ms, before_ms + 20), 0
        for start_ns in range(resumed_ns, ended_ns - _WINDOW_NS, _WINDOW_NS):
            p99_ms = self.percentile_ms(0.99, start_ns, start_ns + _WINDOW_NS)
            good = good + 1 if p99_ms is not None and p99_ms <= limit_ms else 0
            if good == _GOOD_WINDOWS:
                return round((start_ns - (_GOOD_WINDOWS - 1) * _WINDOW_NS - resumed_ns) / 1e9, 2)
        return None
