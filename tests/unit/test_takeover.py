"""What the next owner of a partition is told of the last one: position, whether to be careful, and of what."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from parti.coordination.takeover import Estate, Estates
from parti.core.progress import Progress
from parti.jetstream.api import StreamInfo
from parti.model.fleet import Claim, FleetRecord
from parti.model.migration import OLD_CONSUMERS
from parti.model.partition import Template

TEMPLATE = Template("dc.{p}")
CREATED = "2026-11-16T05:00:00Z"
LAST = 100
STREAM = StreamInfo(
    name="DC",
    subjects=("dc.*",),
    retention="limits",
    storage="file",
    created=CREATED,
    first_seq=1,
    last_seq=LAST,
    messages=LAST,
    allow_direct=True,
)


def claim(**fields: Any) -> Claim:
    known: dict[str, Any] = {"owner": "w1", "incarnation": 7, "position": 40, "stream_created": CREATED}
    return Claim(claimed_at=datetime.now(UTC), ttl_seconds=5, term=1, **{**known, **fields})


def record(**fields: Any) -> Progress:
    """What w1 wrote while it owned p: it stands at 60."""
    known: dict[str, Any] = {"floor": 50, "covered": ("dc.p", "dc.q"), "ahead": {"p": 60}, "incarnation": 7}
    return Progress(stream="DC", stream_created=CREATED, **{**known, **fields})


def estates(found: Claim | None, records: Mapping[str, Progress], *, first: int = 1) -> Estates:
    fleet = FleetRecord(prefix="x", stream="DC", template="dc.{p}", stream_created=CREATED, first_seq=first)
    return Estates(STREAM, TEMPLATE, fleet, {"p": found}, records)


def after(found: Claim | None, *, planned: bool = False, **records: Progress) -> Estate:
    return estates(found, records).of("p", planned=planned)


# ── positions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_partition_that_nobody_ever_had_begins_where_the_fleet_did() -> None:
    assert estates(None, {}, first=30).of("p", planned=False) == Estate(30, CREATED)


def test_a_partition_without_a_claim_begins_where_any_record_says() -> None:
    assert after(None, w1=record(), w2=record(ahead={"p": 75})).position == 75


def test_the_owners_record_counts_and_nobody_elses() -> None:
    assert after(claim(), w1=record(), w2=record(ahead={"p": 75})).position == 60


def test_without_a_record_the_position_of_the_claim_counts() -> None:
    assert after(claim()).position == 40


@pytest.mark.parametrize("other", [{"stream_created": "2020-01-01T00:00:00Z"}, {"stream": "OTHER"}])
def test_a_record_of_another_stream_means_nothing(other: dict[str, str]) -> None:
    assert after(claim(), w1=msgspec.structs.replace(record(), **other)).position == 40


def test_a_stream_made_anew_has_neither_positions_nor_suspects() -> None:
    old = claim(stream_created="2020-01-01T00:00:00Z", position=80, careful_to=90, suspect=85, deaths=5)
    assert after(old, planned=True) == Estate(1, CREATED)
    assert after(old) == Estate(1, CREATED, careful_to=LAST)


# ── whether the owner died ────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_planned_move_nobody_is_careful() -> None:
    assert after(claim(state="moving"), planned=True, w1=record()) == Estate(60, CREATED)


def test_after_a_stop_in_good_order_nobody_is_careful() -> None:
    assert after(claim(), w1=record(closed=True)) == Estate(60, CREATED)


def test_after_a_death_all_that_was_there_is_started_with_care() -> None:
    assert after(claim(), w1=record()) == Estate(60, CREATED, careful_to=LAST)


def test_an_owner_that_never_wrote_anything_died() -> None:
    assert after(claim()).careful_to == LAST


def test_an_earlier_holder_of_the_id_that_stopped_in_order_says_nothing_of_the_last_one() -> None:
    assert after(claim(incarnation=8), w1=record(closed=True)).careful_to == LAST


def test_what_nobody_owned_needs_no_care() -> None:
    assert after(claim(owner="", state="free")) == Estate(40, CREATED)


# ── messages that fail ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("planned", [True, False])
def test_the_next_owner_is_told_how_often_a_message_has_failed(planned: bool) -> None:
    estate = after(claim(state="moving"), planned=planned, w1=record(failed={"p": (62, 2), "q": (70, 1)}))
    assert (estate.failed, estate.attempts) == (62, 2)


def test_attempts_of_a_message_that_the_last_owner_did_not_start_are_kept() -> None:
    estate = after(claim(failed=62, attempts=2), planned=True, w1=record())
    assert (estate.failed, estate.attempts) == (62, 2)


def test_the_last_owner_knows_better_how_often_a_message_has_failed() -> None:
    estate = after(claim(failed=62, attempts=1), planned=True, w1=record(failed={"p": (62, 2)}))
    assert (estate.failed, estate.attempts) == (62, 2)
    estate = after(claim(failed=62, attempts=2), planned=True, w1=record(failed={"p": (64, 1)}))
    assert (estate.failed, estate.attempts) == (64, 1)


def test_attempts_of_a_message_that_is_finished_are_forgotten() -> None:
    found = claim(failed=55, attempts=2)
    assert after(found, planned=True, w1=record(failed={"p": (59, 2)})) == Estate(60, CREATED)


def test_attempts_in_a_stream_made_anew_are_forgotten() -> None:
    old = claim(stream_created="2020-01-01T00:00:00Z", failed=62, attempts=2)
    assert after(old, planned=True) == Estate(1, CREATED)


# ── messages that kill ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_noted_is_suspected() -> None:
    assert after(claim(), w1=record(trying={"p": 62})) == Estate(60, CREATED, LAST, suspect=62, deaths=1)


def test_deaths_over_the_same_message_add_up() -> None:
    estate = after(claim(careful_to=90, suspect=62, deaths=1), w1=record(trying={"p": 62}))
    assert (estate.suspect, estate.deaths) == (62, 2)


def test_a_death_over_another_message_is_the_first_one() -> None:
    estate = after(claim(careful_to=90, suspect=62, deaths=1), w1=record(ahead={"p": 63}, trying={"p": 64}))
    assert (estate.suspect, estate.deaths) == (64, 1)


def test_what_was_noted_of_other_partitions_does_not_count() -> None:
    assert after(claim(), w1=record(trying={"q": 62})) == Estate(60, CREATED, LAST)


def test_a_death_that_left_no_note_changes_nothing() -> None:
    suspected = claim(careful_to=90, suspect=62, deaths=1)
    for found in (None, record(ahead={}, floor=41), record(incarnation=6, trying={"p": 62})):
        estate = estates(suspected, {"w1": found} if found else {}).of("p", planned=False)
        assert (estate.suspect, estate.deaths) == (62, 1)


def test_a_message_that_somebody_got_past_is_not_suspected_any_more() -> None:
    for planned in (False, True):
        estate = after(claim(careful_to=90, suspect=55, deaths=1), planned=planned, w1=record())
        assert (estate.suspect, estate.deaths) == (0, 0)


@pytest.mark.parametrize("how", ["planned", "closed", "free"])
def test_suspicion_outlives_a_change_of_owner_in_good_order(how: str) -> None:
    """Otherwise a fleet that rebalances after each death would never find the message out."""
    owner = "" if how == "free" else "w1"
    found = claim(owner=owner, careful_to=90, suspect=62, deaths=1)
    estate = after(found, planned=how == "planned", w1=record(closed=how == "closed"))
    assert (estate.careful_to, estate.suspect, estate.deaths) == (90, 62, 1)


def test_care_ends_with_the_messages_that_needed_it() -> None:
    assert after(claim(careful_to=55), planned=True, w1=record()).careful_to == 0


def test_a_message_may_kill_below_the_position_where_a_state_is_brought_up_to_date() -> None:
    """The owner restored a state of 45 although the partition had got to 80, and died over 50."""
    found = claim(position=80)
    first = after(found, w1=record(floor=45, ahead={}, behind={"p": 50}, trying={"p": 50}))
    assert first == Estate(80, CREATED, LAST, suspect=50, deaths=1)
    found = claim(position=80, careful_to=LAST, suspect=50, deaths=1)
    assert after(found, w1=record(floor=45, ahead={}, behind={"p": 50}, trying={"p": 50})).deaths == 2


# ── after an old consumer ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("found", "position"),
    [
        (None, 70),  # never claimed
        (claim(owner="", state="free", position=40), 70),  # the fleet had it before, and it went back in between
        (claim(owner="", state="free", position=80), 80),
        (claim(owner="w1"), 60),  # whoever owns it knows best
    ],
)
def test_the_fleet_goes_on_where_an_old_consumer_stopped(found: Claim | None, position: int) -> None:
    old = Progress(stream="DC", stream_created=CREATED, behind={"p": 70})
    assert estates(found, {OLD_CONSUMERS: old, "w1": record()}).position("p") == position


def test_where_the_fleet_began_does_not_count_for_what_an_old_consumer_had() -> None:
    old = Progress(stream="DC", stream_created=CREATED, behind={"p": 20})
    assert estates(None, {OLD_CONSUMERS: old}, first=90).position("p") == 20
