"""Service level objectives and advice: what counts as bad, what an error budget is, and the arithmetic of advice.

Knows numbers only: the gold tables count in Spark and ask here what it means. Latencies come as counts of buckets
that grow by 1/32 of a doubling, so counts of different windows can be added, a percentile is at most 2.2 % too large,
and twice a bucket's bound is the bound of another bucket.

The objectives, each a share of good messages:

    latency           99 % are handled in less than twice the p95 of handler latency
    redelivery        less than 3 % are delivered more than once
    consumer_updates  99.9 % of the updates of consumers succeed
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

BUCKETS_PER_DOUBLING: Final = 32
LATENCY_FACTOR: Final = 2
"""Handled in less than so many times the p95 is in time."""
ACK_WAIT_FACTOR: Final = 3
LEAST_ACK_WAIT_S: Final = 1.0
"""Acknowledgements travel, and a server under load is late: shorter waits deliver again what is being handled."""
PENDING_HEADROOM: Final = 2
LEAST_PENDING: Final = 16
HOT_FACTOR: Final = 3.0
"""A partition with more than so many times the even share of the work is hot."""
MOST_HOT: Final = 20
"""Hot partitions that are named."""
BUSY_FACTOR, IDLE_FACTOR = 1.5, 0.5
"""Workers outside these multiples of the even share are out of balance."""


class Verdict(enum.StrEnum):
    """Whether an objective was reached; `UNKNOWN` where nothing was counted."""

    MET = "met"
    MISSED = "missed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of all messages (or updates) that must be good."""

    name: str
    target: float
    sentence: str
    strict: bool = False
    """Exactly the allowed number of bad ones is too many."""


LATENCY: Final = Objective("latency", 0.99, "99 % of messages are handled in less than 2 x p95 handler latency")
REDELIVERY: Final = Objective(
    "redelivery", 0.97, "less than 3 % of messages are delivered more than once", strict=True
)
UPDATES: Final = Objective("consumer_updates", 0.999, "99.9 % of consumer updates succeed")
OBJECTIVES: Final = (LATENCY, REDELIVERY, UPDATES)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How an objective stood over a period, and what is left of its error budget."""

    objective: Objective
    total: int
    bad: int
    value: float | None
    """Share of good ones; None where nothing was counted."""
    verdict: Verdict
    allowed: float
    """Bad ones that the target leaves room for: the error budget."""
    remaining: float
    """What is left of the budget; negative when it is overdrawn."""
    burn_rate: float | None
    """Bad share over allowed share: above 1 the budget does not last for the period."""
    recent_burn_rate: float | None
    """The same over the newest part of the period."""


def evaluate(objective: Objective, total: int, bad: int, *, recent: tuple[int, int] = (0, 0)) -> Evaluation:
    """Judge `bad` of `total`; `recent` are total and bad of the newest part of the period.

    Raises ValueError for counts that cannot be.
    """
    for counted, wrong in ((total, bad), recent):
        if not 0 <= wrong <= counted:
            raise ValueError(f"{wrong} bad of {counted}: expected 0 <= bad <= total")
    allowed = (1 - objective.target) * total
    # A target such as 0.97 is no exact binary number: without the grain, 3 of 100 would not be 3 %.
    grain = 1e-9 * max(1, total)
    if not total:
        verdict = Verdict.UNKNOWN
    elif objective.strict:
        verdict = Verdict.MET if bad < allowed - grain else Verdict.MISSED
    else:
        verdict = Verdict.MET if bad <= allowed + grain else Verdict.MISSED
    return Evaluation(
        objective,
        total,
        bad,
        1 - bad / total if total else None,
        verdict,
        allowed,
        allowed - bad,
        burn_rate(objective, total, bad),
        burn_rate(objective, *recent),
    )


def burn_rate(objective: Objective, total: int, bad: int) -> float | None:
    """How many times faster than allowed the budget is used; None where nothing was counted."""
    return bad / total / (1 - objective.target) if total else None


# ── latencies in buckets ──────────────────────────────────────────────────────────────────────────────────────────


def bucket_of(latency_s: float) -> int:
    """The bucket of a latency; everything up to a microsecond is in bucket 0."""
    return max(0, math.ceil(BUCKETS_PER_DOUBLING * math.log2(latency_s * 1e6))) if latency_s > 0 else 0


def upper_bound_s(bucket: int) -> float:
    """The largest latency of a bucket."""
    return float(2 ** (bucket / BUCKETS_PER_DOUBLING)) / 1e6


def quantile_bucket(counts: Mapping[int, int], share: float) -> int | None:
    """The first bucket up to which at least `share` of all lies (nearest rank); None where nothing was counted."""
    left = math.ceil(share * sum(counts.values()) - 1e-9)
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0 < counts[bucket]:
            return bucket
    return None


def evaluate_latency(
    counts: Mapping[int, int], recent: Mapping[int, int], *, reference_p95_s: float | None = None
) -> tuple[Evaluation, float | None]:
    """Judge the latency objective; also returns the limit, in seconds, from which a message counts as slow.

    The p95 is that of `counts`, unless a reference is given: one that is measured along follows a general slowdown,
    and only tells how long the tail is.
    """
    bucket = bucket_of(reference_p95_s) if reference_p95_s else quantile_bucket(counts, 0.95)
    if bucket is None:
        return evaluate(LATENCY, 0, 0), None
    limit = bucket + round(BUCKETS_PER_DOUBLING * math.log2(LATENCY_FACTOR))
    total, slow = _count_above(counts, limit)
    return evaluate(LATENCY, total, slow, recent=_count_above(recent, limit)), upper_bound_s(limit)


def _count_above(counts: Mapping[int, int], limit: int) -> tuple[int, int]:
    return sum(counts.values()), sum(n for bucket, n in counts.items() if bucket > limit)


# ── advice ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change or to look at, with the reason in a sentence."""

    topic: str
    """ack_wait, max_ack_pending, hot_partition or worker_balance."""
    about: str
    """The partition or worker; empty where it is about the whole stream."""
    setting: str
    """Name of the setting to change; empty where it is none."""
    value: float
    """The advised value, or the share of the work."""
    reason: str


def advise_ack_wait(p95_s: float) -> Advice:
    """AckWait from the p95 of handler latency."""
    wanted_s = ACK_WAIT_FACTOR * p95_s
    value_s = max(LEAST_ACK_WAIT_S, wanted_s)
    floor = f", but at least {LEAST_ACK_WAIT_S:g} s" if value_s > wanted_s else ""
    reason = (
        f"{ACK_WAIT_FACTOR} x p95 handler latency of {p95_s:.3g} s is {wanted_s:.3g} s{floor}: long enough for "
        f"what is slow, short enough to notice what is gone"
    )
    return Advice("ack_wait", "", "ack_wait_s", round(value_s, 3), reason)


def advise_max_ack_pending(worker: str, peak_rate: float, p95_s: float) -> Advice:
    """MaxAckPending by Little's law from the busiest window of a worker: messages in flight are rate x time."""
    in_flight = peak_rate * p95_s
    value = max(LEAST_PENDING, math.ceil(PENDING_HEADROOM * in_flight))
    floor = f", but at least {LEAST_PENDING}" if value > PENDING_HEADROOM * in_flight + 1 else ""
    reason = (
        f"at its peak worker {worker} finished {_plain(peak_rate)} messages a second, each within {p95_s:.3g} s "
        f"(p95): {_plain(in_flight)} in flight by Little's law, times {PENDING_HEADROOM} for bursts{floor}"
    )
    return Advice("max_ack_pending", worker, "max_ack_pending", value, reason)


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def advise_partitions(busy_s: Mapping[str, float]) -> list[Advice]:
    """Partitions that have far more than their share of the handling time, the hottest first."""
    total, count = sum(busy_s.values()), len(busy_s)
    hot = sorted((-spent_s, name) for name, spent_s in busy_s.items() if spent_s * count > HOT_FACTOR * total)
    found = []
    for spent_s, partition in hot[:MOST_HOT]:
        share = -spent_s / total
        reason = (
            f"it takes {share:.1%} of the handling time, {share * count:.1f} times the even share of {count} "
            f"partitions, and has one owner at a time: split its key, or give it a weight"
        )
        found.append(Advice("hot_partition", partition, "", round(share, 4), reason))
    return found


def advise_workers(busy_s: Mapping[str, float]) -> list[Advice]:
    """Workers that are out of balance, by their handling time over the period."""
    total, count = sum(busy_s.values()), len(busy_s)
    found = []
    for worker, spent_s in sorted(busy_s.items()):
        times = spent_s / total * count if total else 1.0
        if not IDLE_FACTOR <= times <= BUSY_FACTOR:
            reason = (
                f"it spent {spent_s:.3g} s in handlers, {times:.2f} times the even share of {count} workers: move "
                f"partitions, or use the strategy weighted, so that it gets {'less' if times > 1 else 'more'}"
            )
            found.append(Advice("worker_balance", worker, "", round(spent_s / total, 4), reason))
    return found
