"""The arithmetic of leases: the holder stops before the server lets somebody else in, and epochs only grow."""

from __future__ import annotations

import pytest

from parti.coordination import election, worker_ids
from parti.core.lease import NEVER_S, LeaseTerms, epoch
from parti.jetstream.kv import MIN_TTL_S, epoch_base

RENEW_SHARE = election.RENEW_SHARE
SHARES = [election.RENEW_SHARE, worker_ids.RENEW_SHARE]
TTLS_S = [MIN_TTL_S, 2.0, 5.0, 30.0, 300.0]


@pytest.mark.parametrize("ttl_s", TTLS_S)
@pytest.mark.parametrize("answer_took_s", [0.0, 0.5, 4.0])
def test_the_holder_stops_before_the_lease_can_have_ended(ttl_s: float, answer_took_s: float) -> None:
    terms, sent_s = LeaseTerms(ttl_s, RENEW_SHARE), 100.0
    # The server stores the write at the earliest when it was sent, however late the holder hears of it.
    earliest_end_s = sent_s + ttl_s
    assert terms.ends_at(sent_s) <= earliest_end_s - 0.2
    assert terms.ends_at(sent_s) <= earliest_end_s - 0.1 * ttl_s
    assert terms.ends_at(sent_s) < sent_s + answer_took_s + ttl_s


@pytest.mark.parametrize("ttl_s", TTLS_S)
@pytest.mark.parametrize("renew_share", SHARES)
def test_a_renewal_is_due_while_the_lease_is_held(ttl_s: float, renew_share: float) -> None:
    terms = LeaseTerms(ttl_s, renew_share)
    assert 100.0 < terms.renew_at(100.0) < terms.ends_at(100.0)


def test_a_leader_renews_at_three_quarters() -> None:
    assert LeaseTerms(8.0, election.RENEW_SHARE).renew_at(10.0) == 16.0


@pytest.mark.parametrize("ttl_s", TTLS_S[1:])
@pytest.mark.parametrize("renew_share", SHARES)
def test_several_tries_fit_into_what_is_left_after_a_failed_renewal(ttl_s: float, renew_share: float) -> None:
    terms = LeaseTerms(ttl_s, renew_share)
    now_s, tries = terms.renew_at(0.0), 0
    while now_s < terms.ends_at(0.0):
        now_s += terms.retry_after(now_s, terms.ends_at(0.0))
        tries += 1
    assert 4 <= tries <= ttl_s + 20


def test_retries_are_neither_a_storm_nor_rare() -> None:
    terms = LeaseTerms(300.0, RENEW_SHARE)
    assert terms.retry_after(0.0, 270.0) == 1.0
    assert terms.retry_after(269.99, 270.0) == 0.05
    assert terms.retry_after(280.0, 270.0) == 0.05


def test_a_lease_that_is_not_held_has_ended_at_any_time() -> None:
    assert LeaseTerms(5.0, RENEW_SHARE).retry_after(0.0, NEVER_S) == 0.05
    assert NEVER_S < -1e18


def test_an_epoch_is_larger_than_that_of_whoever_wrote_before() -> None:
    base = epoch_base("2026-11-16T02:00:00Z")
    first = epoch(base, 0)
    # The first holder's own write has sequence 1; whoever takes over reads at least that.
    assert epoch(base, 1) > first
    assert epoch(base, 2_000_000) > epoch(base, 1_999_999)


def test_epochs_go_on_growing_in_a_bucket_that_was_made_anew() -> None:
    before = epoch(epoch_base("2026-11-16T02:00:00.5Z"), 900_000)
    assert epoch(epoch_base("2026-11-16T02:00:01.500000001Z"), 0) > before


@pytest.mark.parametrize(
    ("created", "micros"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T00:00:01.5Z", 1_500_000),
        ("1970-01-01T00:00:01.000002999Z", 1_000_002),
        ("1970-01-01T00:00:01.123456789Z", 1_123_456),
    ],
)
def test_epochs_are_counted_from_the_microsecond_at_which_the_bucket_was_made(created: str, micros: int) -> None:
    assert epoch_base(created) == micros
