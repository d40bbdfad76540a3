"""When a worker enters and leaves the hot mirror, where it may begin, and what may be trimmed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.core.hot_mirror import (
    AUTO,
    ON,
    Bounds,
    Chooser,
    Keeper,
    Look,
    MirrorState,
    Move,
    Readers,
    Upkeep,
    mirror_config,
    mirror_name,
    trim_to,
    why_not,
)

BOUNDS = Bounds(max_bytes=1_000_000, max_age_s=60.0)
MIRROR = MirrorState(
    first_seq=1_001, last_seq=2_000, messages=1_000, size=100_000, age_s=1.0, origin_created="now", consumers=1
)
LOOK = Look(
    now_s=100.0,
    last_seq=2_000,
    subjects=1_000,
    created="now",
    filters=80,
    reached=2_001,
    waiting=False,
    need=2_001,
    mirror=None,
)
BEHIND = replace(LOOK, reached=500, waiting=True, need=500)


def test_names_tell_fleets_and_single_workers_apart() -> None:
    assert mirror_name("parti", "DC") == "parti-hot-DC"
    assert mirror_name("parti", "DC", "worker-0") == "parti-worker-0-hot-DC"


def test_a_full_mirror_stops_instead_of_dropping_what_nobody_was_given() -> None:
    config = mirror_config("m", "DC", "now", start=0, max_bytes=5, replicas=3)
    assert (config["discard"], config["storage"], config["max_bytes"], config["num_replicas"]) == (
        "new",
        "memory",
        5,
        3,
    )
    assert config["mirror"] == {"name": "DC", "opt_start_seq": 1}


@pytest.mark.parametrize(
    ("retention", "storage", "options", "reason"),
    [
        ("limits", "file", {}, ""),
        ("workqueue", "file", {}, "workqueue retention"),
        ("interest", "file", {}, "interest retention"),
        ("limits", "memory", {}, "in memory already"),
        ("limits", "file", {"ordered": False}, "out of order"),
        ("limits", "file", {"one_filter": True}, "one wildcard"),
    ],
)
def test_it_says_why_a_stream_cannot_be_mirrored(
    retention: str, storage: str, options: dict[str, bool], reason: str
) -> None:
    found = why_not(retention, storage, **{"ordered": True, **options})
    assert (reason in found) if reason else not found


# ── where to begin, what to trim ──────────────────────────────────────────────────────────────────────────────────


def test_a_mirror_that_is_still_empty_begins_where_copying_began() -> None:
    empty = MirrorState(first_seq=0, last_seq=0, messages=0, size=0, age_s=0.0, origin_created="now", start=700)
    assert empty.begins == 700


def test_trimming_goes_to_the_lowest_floor_and_only_when_it_is_worth_it() -> None:
    full = replace(MIRROR, size=900_000)
    assert trim_to(full, [1_900, 1_600, 1_700], BOUNDS) == 1_600
    assert trim_to(full, [1_050], BOUNDS) == 0, "hardly anything to gain"
    assert trim_to(full, [900], BOUNDS) == 0
    assert trim_to(full, [], BOUNDS) == 2_001, "nobody reads from it"
    assert trim_to(replace(full, messages=0), [1_500], BOUNDS) == 0


# ── keeping it ────────────────────────────────────────────────────────────────────────────────────────────────────

FULL = replace(MIRROR, size=990_000, consumers=10)
FILLING = replace(MIRROR, size=850_000)


def follows(mirror: MirrorState, needs: list[int], keeper: Keeper, now_s: float) -> Upkeep:
    assert not keeper.stands_still(mirror, mirror.last_seq, now_s)
    return keeper.follows(mirror, Readers(needs), now_s)


def stopped(readers: Readers, keeper: Keeper, now_s: float, mirror: MirrorState = FULL) -> Upkeep:
    return keeper.has_stopped(mirror, readers, now_s)


def test_a_mirror_that_follows_its_stream_is_only_trimmed() -> None:
    assert follows(replace(MIRROR, size=700_000), [1_900] * 10, Keeper(BOUNDS), 0.0) == Upkeep(trim=1_900)


@pytest.mark.parametrize("mirror", [FILLING, replace(MIRROR, age_s=61.0)], ids=["too large", "too old"])
def test_one_that_holds_back_all_others_for_long_is_asked_to_make_room(mirror: MirrorState) -> None:
    keeper, needs = Keeper(BOUNDS), [1_010, *[1_900] * 9]
    assert follows(mirror, needs, keeper, 0.0) == Upkeep()
    assert follows(mirror, needs, keeper, 4.0) == Upkeep(), "it may just have woken up"
    assert follows(mirror, needs, keeper, 5.0) == Upkeep(room=1_900)


def test_nobody_makes_room_where_there_is_enough() -> None:
    keeper = Keeper(BOUNDS)
    for second in range(20):
        assert not follows(MIRROR, [1_010, *[1_900] * 9], keeper, second).room


@pytest.mark.parametrize("needs", [[1_010] * 10, [1_010] * 3 + [1_900] * 7, [1_010]])
def test_a_whole_fleet_that_lags_is_not_asked_to_make_room(needs: list[int]) -> None:
    """It would have to read what it skips subject by subject, all of it, and would never catch up."""
    keeper = Keeper(BOUNDS)
    for second in range(20):
        assert follows(FILLING, needs, keeper, second) == Upkeep()


def test_a_full_mirror_has_stopped_at_once_and_another_one_after_a_while() -> None:
    full, other = Keeper(BOUNDS), Keeper(BOUNDS)
    assert not full.stands_still(FULL, 2_500, 0.0), "it may have come this far just now"
    assert full.stands_still(FULL, 2_600, 0.25)
    assert not other.stands_still(FILLING, 2_500, 0.0)
    assert not other.stands_still(FILLING, 2_600, 0.25)
    assert other.stands_still(FILLING, 2_700, 2.5)
    assert not other.stands_still(FILLING, 2_000, 3.0), "it has all there is"


def test_a_full_mirror_is_read_to_its_end_and_made_anew_from_there() -> None:
    keeper = Keeper(BOUNDS)
    assert stopped(Readers([1_500] * 10, unread=[400] * 10), keeper, 1.0) == Upkeep()
    assert stopped(Readers([1_990] * 10, unread=[0] * 7 + [4] * 3), keeper, 2.0) == Upkeep()
    assert stopped(Readers([1_980, *[1_990] * 9], unread=[0] * 10), keeper, 3.0) == Upkeep(remake=1_980)
    assert stopped(Readers([2_001] * 10, unread=[0] * 10), keeper, 3.0) == Upkeep(remake=2_001)


def test_a_fifth_of_the_workers_is_waited_for_but_not_for_long() -> None:
    keeper, readers = Keeper(BOUNDS), Readers([1_100, 1_200, *[1_980] * 8], unread=[400, 300, *[0] * 8])
    assert stopped(readers, keeper, 1.0) == Upkeep()
    assert stopped(readers, keeper, 5.0) == Upkeep()
    assert stopped(readers, keeper, 6.0) == Upkeep(remake=1_980)


def test_half_of_the_workers_is_waited_for_twice_as_long() -> None:
    keeper, half = Keeper(BOUNDS), Readers([1_100, 2_001], unread=[300, 0])
    assert stopped(half, keeper, 1.0) == Upkeep()
    assert stopped(half, keeper, 10.0) == Upkeep()
    assert stopped(half, keeper, 11.0) == Upkeep(remake=2_001)


def test_the_next_window_gets_further_than_the_last_one() -> None:
    """Workers that were given everything have not told yet how far they are: to begin there would lead nowhere."""
    keeper, untold = Keeper(BOUNDS), Readers([1_002] * 10, unread=[0] * 10)
    assert stopped(untold, keeper, 1.0) == Upkeep()
    assert stopped(untold, keeper, 11.0) == Upkeep(remake=2_001)


def test_one_that_stands_still_and_is_read_by_nobody_is_dropped() -> None:
    assert stopped(Readers([1_500]), Keeper(BOUNDS), 1.0, replace(FULL, consumers=0)) == Upkeep(drop=True)


def test_reading_begins_when_there_is_something_to_read() -> None:
    assert not BOUNDS.filled(MIRROR, 9_000)
    assert BOUNDS.filled(replace(MIRROR, size=510_000), 9_000)
    assert BOUNDS.filled(MIRROR, 2_500)


# ── entering ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_means_at_once_as_soon_as_the_copy_is_there() -> None:
    chooser = Chooser(ON)
    assert chooser.advise(LOOK, inside=False).move is Move.MAKE
    late = replace(MIRROR, last_seq=900)
    assert chooser.advise(replace(LOOK, now_s=101, mirror=late), inside=False).move is Move.STAY
    assert chooser.advise(replace(LOOK, now_s=102, mirror=MIRROR), inside=False).move is Move.ENTER


def test_auto_waits_for_a_lag_that_lasts_and_says_why() -> None:
    chooser = Chooser(AUTO)
    assert chooser.advise(LOOK, inside=False).move is Move.STAY
    assert chooser.advise(replace(BEHIND, now_s=101), inside=False).move is Move.STAY
    advice = chooser.advise(replace(BEHIND, now_s=102.5), inside=False)
    assert advice.move is Move.MAKE
    assert advice.reason.startswith("1501 messages behind with 80 filters on a file stream of 1000 subjects")


@pytest.mark.parametrize(
    "harmless",
    [
        {"subjects": 100},
        {"filters": 1},
        {"waiting": False},
        {"reached": 1_500},
    ],
    ids=["few subjects", "one filter", "nothing waits", "small lag"],
)
def test_auto_stays_where_the_search_is_cheap(harmless: dict[str, int]) -> None:
    chooser = Chooser(AUTO)
    for second in range(10):
        look = replace(BEHIND, now_s=100.0 + second, **harmless)  # type: ignore[arg-type]
        assert chooser.advise(look, inside=False).move is Move.STAY


def test_a_copy_that_is_far_ahead_of_the_worker_is_entered_although_the_stream_goes_on_behind_it() -> None:
    """A long backlog is read one window after the other."""
    chooser = Chooser(ON)
    window = replace(MIRROR, first_seq=500, last_seq=40_000, messages=39_500)
    look = replace(BEHIND, last_seq=9_000_000, mirror=window)
    assert chooser.advise(look, inside=False).move is Move.ENTER
    read = replace(look, now_s=101, reached=39_000)
    assert chooser.advise(read, inside=False).move is Move.STAY, "hardly anything in it"


def test_auto_follows_others_of_its_fleet() -> None:
    advice = Chooser(AUTO).advise(replace(LOOK, mirror=MIRROR), inside=False)
    assert (advice.move, advice.reason) == (Move.ENTER, "others of this fleet read from it")


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_leaves_a_mirror_that_is_gone_or_copies_another_stream() -> None:
    chooser = Chooser(ON)
    assert chooser.advise(LOOK, inside=True).move is Move.LEAVE
    assert chooser.advise(replace(LOOK, mirror=MIRROR, created="later"), inside=True).move is Move.REBUILD


def test_a_mirror_that_nobody_makes_go_on_is_rebuilt_by_whoever_notices() -> None:
    chooser = Chooser(ON)
    moves = [
        chooser.advise(replace(LOOK, now_s=100 + n, last_seq=2_000 + 100 * n, mirror=MIRROR), inside=True).move
        for n in range(17)
    ]
    assert moves == [Move.STAY] * 16 + [Move.REBUILD]


def test_one_that_is_being_made_anew_is_waited_for() -> None:
    chooser = Chooser(ON)
    assert chooser.advise(replace(LOOK, mirror=MIRROR), inside=True).move is Move.STAY
    remaking = replace(LOOK, now_s=101, remaking=True)
    assert chooser.advise(remaking, inside=True).move is Move.STAY
    assert chooser.advise(replace(remaking, now_s=106), inside=True).move is Move.LEAVE, "but not without end"


def test_a_mirror_that_stands_still_with_its_stream_is_fine() -> None:
    chooser = Chooser(ON)
    for n in range(10):
        assert chooser.advise(replace(LOOK, now_s=100 + n, mirror=MIRROR), inside=True).move is Move.STAY


def test_after_leaving_it_waits_before_it_comes_back() -> None:
    chooser = Chooser(ON)
    assert chooser.advise(LOOK, inside=True).move is Move.LEAVE
    assert chooser.advise(replace(LOOK, now_s=101), inside=False).move is Move.STAY
    assert chooser.advise(replace(LOOK, now_s=103), inside=False).move is Move.MAKE


def test_who_is_far_behind_the_others_makes_room_when_asked_to() -> None:
    chooser = Chooser(ON)
    asked = replace(LOOK, mirror=MIRROR, room=1_800)
    assert chooser.advise(asked, inside=True).move is Move.STAY, "it has caught up"
    assert chooser.advise(replace(asked, now_s=101, need=1_200), inside=True).move is Move.MAKE_ROOM


def test_auto_gives_the_memory_back_when_little_has_come_for_long_and_on_keeps_it() -> None:
    auto, on = Chooser(AUTO), Chooser(ON)
    for minute in range(10):
        look = replace(LOOK, now_s=100 + 60 * minute, mirror=MIRROR)
        assert auto.advise(look, inside=True).move is Move.STAY
        assert on.advise(look, inside=True).move is Move.STAY
    late = replace(LOOK, now_s=100 + 60 * 11, mirror=MIRROR)
    assert auto.advise(late, inside=True).move is Move.LEAVE
    assert on.advise(late, inside=True).move is Move.STAY
