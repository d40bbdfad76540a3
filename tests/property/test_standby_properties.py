"""Whoever stands by never takes a worker id from a holder that may still act, however late anything is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.lease import LeaseTerms
from parti.core.standby import Seen, Step, Understudy
from parti.core.worker_ids import Applicant
from parti.model.fleet import MemberRecord

TTLS_S = st.sampled_from([1.0, 1.5, 2.0, 5.0, 30.0])
SHARES = st.floats(0.0, 1.0)
"""Parts of a lease: gaps between renewals, and how long things take on their way."""
BRIEF = st.one_of(st.just(0.0), st.floats(0.0, 0.05), SHARES)


@dataclass(frozen=True)
class Renewal:
    """A write of the holder that the server stored."""

    sent_s: float
    stored_s: float
    revision: int


@st.composite
def holdings(draw: st.DrawFn, ttl_s: float) -> list[Renewal]:
    """What a holder sends until it dies, is stopped or cut off; each arrives later than it was sent."""
    renewals, sent_s, revision = [], 0.0, 0
    for gap, way in draw(st.lists(st.tuples(SHARES, BRIEF), min_size=1, max_size=12)):
        stored_s = sent_s + way * ttl_s
        revision += draw(st.integers(1, 5))
        renewals.append(Renewal(sent_s, stored_s, revision))
        # One at a time: the next is sent when this one has been answered, or given up.
        sent_s = stored_s + gap * ttl_s
        if sent_s >= stored_s + ttl_s:
            break  # it has ended at the server
    return renewals


@dataclass(frozen=True)
class Bucket:
    """The lease at the server, which lets it end so long after the last write."""

    renewals: list[Renewal]
    ttl_s: float

    def read(self, now_s: float) -> Seen:
        stored = [each for each in self.renewals if each.stored_s <= now_s]
        if not stored:
            return Seen(0, None)
        last = stored[-1]
        if now_s >= last.stored_s + math.ceil(self.ttl_s):
            return Seen(last.revision + 1, None)
        record = MemberRecord(
            token="theirs",
            incarnation=7,
            started_at=datetime.fromtimestamp(0, UTC),
            ttl_seconds=self.ttl_s,
        )
        return Seen(last.revision, record)


@settings(max_examples=examples_of(400))
@given(st.data(), TTLS_S, st.integers(0, 9))
def test_a_lease_is_never_taken_while_its_holder_may_act(data: st.DataObject, ttl_s: float, rank: int) -> None:
    terms = LeaseTerms(ttl_s, 1 / 3)
    bucket = Bucket(data.draw(holdings(ttl_s)), ttl_s)
    decide = Understudy(Applicant("me", fixed="both"), terms, rank=rank)
    now_s = bucket.renewals[0].stored_s + data.draw(SHARES) * ttl_s
    looks = data.draw(st.lists(st.tuples(BRIEF, BRIEF, BRIEF), max_size=40))
    while True:
        pause, answer, write = looks.pop() if looks else (0.01, 0.0, 0.0)
        read_s = now_s + pause * ttl_s
        seen, told_s = bucket.read(read_s), read_s + answer * ttl_s
        now_s = told_s
        if decide.look(seen, told_s) is not Step.TAKE:
            continue
        now_s = written_s = told_s + write * ttl_s
        if bucket.read(written_s).revision == seen.revision:
            break  # compare-and-set: nothing was stored since the look
    # What arrives later is refused, so these are all the renewals that the holder can have taken for successful.
    may_act_until_s = max(terms.ends_at(each.sent_s) for each in bucket.renewals if each.stored_s <= written_s)
    assert written_s >= may_act_until_s


@settings(max_examples=examples_of(200))
@given(st.data(), TTLS_S)
def test_a_lease_that_is_renewed_in_time_is_never_taken(data: st.DataObject, ttl_s: float) -> None:
    terms = LeaseTerms(ttl_s, 1 / 3)
    decide = Understudy(Applicant("me", fixed="both"), terms)
    now_s, revision = 0.0, 1
    record = MemberRecord(token="theirs", incarnation=7, started_at=datetime.fromtimestamp(0, UTC), ttl_seconds=ttl_s)
    for gap in data.draw(st.lists(st.floats(0.0, 0.9), max_size=60)):
        assert decide.look(Seen(revision, record), now_s) is Step.WAIT
        # Renewed in between, and seen before the silence has lasted too long.
        now_s, revision = now_s + gap * terms.silent_until(0.0), revision + 1
