"""When a process that stands by takes the worker id over, and when it does not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from parti.core.lease import LeaseTerms
from parti.core.standby import Seen, Step, Understudy
from parti.core.worker_ids import Applicant
from parti.model.fleet import MemberRecord, MemberState

TERMS = LeaseTerms(5.0, 1 / 3)
SILENT_S = 5.0 - 0.25
"""How long after a renewal was seen its holder has stopped for sure."""
NOBODY = Seen(0, None)
ME = Applicant("me", fixed="both")


def held(
    revision: int, *, incarnation: int = 7, state: MemberState = "active", token: str = "theirs", identity: str = ""
) -> Seen:
    record = MemberRecord(
        token=token,
        incarnation=incarnation,
        state=state,
        identity=identity,
        started_at=datetime.fromtimestamp(0, UTC),
        ttl_seconds=TERMS.ttl_s,
    )
    return Seen(revision, record)


def wait(decide: Understudy, found: Seen, from_s: float, to_s: float) -> None:
    """Look all the time, and find no reason to take it before `to_s`, but one then."""
    now_s = from_s
    while now_s < to_s - 0.001:
        assert decide.look(found, now_s) is Step.WAIT, f"at {now_s}"
        now_s += 0.05
    assert decide.look(found, to_s - 0.001) is Step.WAIT
    assert decide.look(found, to_s) is Step.TAKE


def hold(decide: Understudy, from_s: float, to_s: float, *, incarnation: int = 7) -> Seen:
    """Somebody holds the id and renews it every second, at full seconds; returns what is there in the end."""
    now_s, found = from_s, held(int(from_s), incarnation=incarnation)
    while now_s < to_s:
        found = held(int(now_s), incarnation=incarnation)
        assert decide.look(found, now_s) is Step.WAIT
        now_s += 0.5
    return found


def understudy(*, rank: int = 0, yields_until_s: float = float("-inf"), applicant: Applicant = ME) -> Understudy:
    return Understudy(applicant, TERMS, rank=rank, yields_until_s=yields_until_s)


# ── what is free ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(NOBODY, id="nobody ever had it"),
        pytest.param(Seen(12, None), id="its lease has ended"),
        pytest.param(held(12, state="left"), id="its holder has left"),
        pytest.param(held(12, state="away"), id="its holder has given it away"),
        pytest.param(held(12, state="away", identity="host-3"), id="also one that was expected back"),
        pytest.param(held(12, token="me"), id="it was this very process"),
    ],
)
def test_what_is_free_is_taken_at_once(found: Seen) -> None:
    assert understudy().look(found, 100.0) is Step.TAKE


@pytest.mark.parametrize("state", ["active", "draining"])
def test_what_somebody_holds_is_not(state: MemberState) -> None:
    assert understudy().look(held(12, state=state), 100.0) is Step.WAIT


def test_it_is_taken_as_soon_as_it_is_given_away() -> None:
    decide = understudy()
    assert decide.look(held(12), 100.0) is Step.WAIT
    assert decide.look(held(13, state="away"), 100.05) is Step.TAKE


# ── silence ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_silent_lease_is_taken_when_its_holder_has_stopped_and_before_the_server_lets_it_end() -> None:
    wait(understudy(), held(12), 100.0, 100.0 + SILENT_S)
    assert TERMS.ends_at(100.0) < 100.0 + SILENT_S < 100.0 + TERMS.ttl_s


def test_silence_is_counted_from_the_last_renewal_that_was_seen() -> None:
    decide = understudy()
    found = hold(decide, 100.0, 200.0)
    wait(decide, found, 200.0, 199.0 + SILENT_S)


def test_a_revision_that_went_back_is_news_too() -> None:
    """The bucket was restored from a copy: whoever holds the lease in it may be alive."""
    decide = understudy()
    hold(decide, 1_200.0, 1_204.0)
    wait(decide, held(30), 1_204.0, 1_204.0 + SILENT_S)


def test_a_new_holder_is_waited_for_like_the_one_before() -> None:
    decide = understudy()
    hold(decide, 100.0, 103.5)
    wait(decide, held(140, incarnation=8), 104.0, 104.0 + SILENT_S)


# ── after an outage ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("found", [Seen(200, None), held(105)])
def test_who_could_not_look_for_long_leaves_the_lease_to_the_last_holder_for_a_while(found: Seen) -> None:
    decide = understudy()
    hold(decide, 100.0, 105.5)
    wait(decide, found, 120.0, 125.0 if found.record is None else 120.0 + SILENT_S)


def test_the_last_holder_need_not_wait_after_an_outage() -> None:
    decide = understudy(applicant=Applicant("me", fixed="both", preferred="both"))
    decide.look(held(12, token="me"), 100.0)
    assert not decide.replaced
    assert decide.look(Seen(13, None), 120.0) is Step.TAKE


def test_who_has_been_replaced_waits_like_everybody_else() -> None:
    decide = understudy(applicant=Applicant("me", fixed="both", preferred="both"))
    hold(decide, 100.0, 103.5)
    assert decide.replaced
    wait(decide, Seen(130, None), 120.0, 125.0)


def test_a_short_time_without_looks_is_no_outage() -> None:
    decide = understudy()
    hold(decide, 100.0, 102.5)
    assert decide.look(Seen(130, None), 104.4) is Step.TAKE


# ── who goes first ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("found", [held(13, state="away"), Seen(13, None)])
def test_larger_ranks_wait_a_little_longer_for_what_is_free(found: Seen) -> None:
    assert understudy(rank=0).look(found, 100.0) is Step.TAKE
    wait(understudy(rank=2), found, 100.0, 100.5)


def test_larger_ranks_wait_a_little_longer_after_silence() -> None:
    wait(understudy(rank=1), held(12), 100.0, 100.0 + SILENT_S + 0.25)


def test_the_wait_of_a_rank_does_not_begin_anew_when_the_lease_ends_meanwhile() -> None:
    decide, silent_s = understudy(rank=2), 100.0 + SILENT_S
    found = held(12)
    for n in range(int((SILENT_S + 0.25) / 0.05)):
        assert decide.look(found, 100.0 + n * 0.05) is Step.WAIT
    wait(decide, Seen(13, None), silent_s + 0.25, silent_s + 0.5)


def test_the_wait_of_a_rank_begins_anew_when_somebody_has_had_it_in_between() -> None:
    decide = understudy(rank=1)
    decide.look(held(12, state="away"), 99.9)
    hold(decide, 100.0, 130.0, incarnation=8)
    wait(decide, held(200, incarnation=8, state="away"), 130.0, 130.25)


def test_whoever_has_given_it_away_lets_others_have_it_first() -> None:
    wait(understudy(yields_until_s=105.0), held(12, state="away"), 100.0, 105.0)


def test_yielding_is_no_reason_to_leave_a_silent_lease_alone() -> None:
    wait(understudy(yields_until_s=1_000.0), held(12), 100.0, 100.0 + SILENT_S)


# ── whether whoever is pinned is needed ───────────────────────────────────────────────────────────────────────────


def test_a_holder_lives_when_it_has_held_the_id_for_two_leases_and_renews_it() -> None:
    decide = understudy()
    assert not decide.holder_lives(100.0), "nothing is known yet"
    now_s = 100.0
    while now_s < 109.9:
        decide.look(held(int(now_s)), now_s)
        assert not decide.holder_lives(now_s), "it has only just taken the id"
        now_s += 1.0
    decide.look(held(110), 110.0)
    assert decide.holder_lives(110.0)
    assert decide.holder_lives(112.9)
    assert not decide.holder_lives(113.1), "it should have renewed its lease by now"


def test_nobody_is_no_holder() -> None:
    decide = understudy(rank=9)
    for n in range(20):
        decide.look(NOBODY, 100.0 + n)
        assert not decide.holder_lives(100.0 + n)


def test_who_has_left_lives_no_more() -> None:
    decide = understudy(rank=9)
    hold(decide, 100.0, 111.5)
    assert decide.holder_lives(111.0)
    decide.look(held(200, state="left"), 111.1)
    assert not decide.holder_lives(111.1)


def test_a_new_holder_has_to_settle_first() -> None:
    decide = understudy()
    hold(decide, 100.0, 111.5)
    hold(decide, 112.0, 121.5, incarnation=8)
    assert not decide.holder_lives(121.0)
    decide.look(held(122, incarnation=8), 122.0)
    assert decide.holder_lives(122.0)


def test_after_an_outage_a_holder_has_to_settle_again() -> None:
    """The server has forgotten whom it had pinned, and the one that works should be the first to pull."""
    decide = understudy()
    hold(decide, 100.0, 111.5)
    assert decide.holder_lives(111.0)
    hold(decide, 115.0, 124.5)
    assert not decide.holder_lives(124.0)
    decide.look(held(125), 125.0)
    assert decide.holder_lives(125.0)
