"""When a worker enters and leaves the hot mirror, where it may begin, and what may be trimmed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.core.hot_mirror import (
    AUTO,
    ON,
    Bounds,
    Chooser,
    Look,
    MirrorState,
    Move,
    mirror_config,
    mirror_name,
    safe_start,
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
    floor=2_001,
    mirror=None,
)
BEHIND = replace(LOOK, reached=500, waiting=True, floor=500)


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


def test_with_room_a_session_begins_anywhere_in_the_mirror_and_under_pressure_behind_its_oldest_quarter() -> None:
    assert safe_start(MIRROR, BOUNDS) == 1_001
    assert safe_start(replace(MIRROR, size=790_000), BOUNDS) == 1_001
    assert safe_start(replace(MIRROR, size=810_000), BOUNDS) == 1_251
    assert safe_start(replace(MIRROR, age_s=61.0), BOUNDS) == 1_251


def test_a_mirror_that_is_still_empty_begins_where_copying_began() -> None:
    empty = MirrorState(first_seq=0, last_seq=0, messages=0, size=0, age_s=0.0, origin_created="now", start=700)
    assert empty.begins == 700
    assert safe_start(empty, BOUNDS) == 700


def test_trimming_goes_to_the_lowest_floor_and_only_when_it_is_worth_it() -> None:
    full = replace(MIRROR, size=900_000)
    assert trim_to(full, [1_900, 1_600, 1_700], BOUNDS) == 1_600
    assert trim_to(full, [1_050], BOUNDS) == 0, "hardly anything to gain"
    assert trim_to(full, [900], BOUNDS) == 0
    assert trim_to(full, [], BOUNDS) == 2_001, "nobody reads from it"
    assert trim_to(replace(full, messages=0), [1_500], BOUNDS) == 0


# ── entering ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_means_at_once_as_soon_as_the_copy_is_there() -> None:
    chooser = Chooser(ON, BOUNDS)
    assert chooser.advise(LOOK, inside=False).move is Move.MAKE
    late = replace(MIRROR, last_seq=900)
    assert chooser.advise(replace(LOOK, now_s=101, mirror=late), inside=False).move is Move.STAY
    assert chooser.advise(replace(LOOK, now_s=102, mirror=MIRROR), inside=False).move is Move.ENTER


def test_auto_waits_for_a_lag_that_lasts_and_says_why() -> None:
    chooser = Chooser(AUTO, BOUNDS)
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
    chooser = Chooser(AUTO, BOUNDS)
    for second in range(10):
        look = replace(BEHIND, now_s=100.0 + second, **harmless)  # type: ignore[arg-type]
        assert chooser.advise(look, inside=False).move is Move.STAY


def test_auto_follows_others_of_its_fleet() -> None:
    advice = Chooser(AUTO, BOUNDS).advise(replace(LOOK, mirror=MIRROR), inside=False)
    assert (advice.move, advice.reason) == (Move.ENTER, "others of this fleet read from it")


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_leaves_a_mirror_that_is_gone_or_copies_another_stream() -> None:
    chooser = Chooser(ON, BOUNDS)
    assert chooser.advise(LOOK, inside=True).move is Move.LEAVE
    assert chooser.advise(replace(LOOK, mirror=MIRROR, created="later"), inside=True).move is Move.REBUILD


def test_a_mirror_that_stands_still_while_its_stream_goes_on_is_rebuilt() -> None:
    chooser = Chooser(ON, BOUNDS)
    moves = [
        chooser.advise(replace(LOOK, now_s=100 + n, last_seq=2_000 + 100 * n, mirror=MIRROR), inside=True).move
        for n in range(4)
    ]
    assert moves == [Move.STAY, Move.STAY, Move.STAY, Move.REBUILD]


def test_a_mirror_that_stands_still_with_its_stream_is_fine() -> None:
    chooser = Chooser(ON, BOUNDS)
    for n in range(10):
        assert chooser.advise(replace(LOOK, now_s=100 + n, mirror=MIRROR), inside=True).move is Move.STAY


def test_after_leaving_it_waits_before_it_comes_back() -> None:
    chooser = Chooser(ON, BOUNDS)
    assert chooser.advise(LOOK, inside=True).move is Move.LEAVE
    assert chooser.advise(replace(LOOK, now_s=101), inside=False).move is Move.STAY
    assert chooser.advise(replace(LOOK, now_s=103), inside=False).move is Move.MAKE


def test_who_is_far_behind_makes_room_when_the_mirror_fills_up() -> None:
    chooser, filling = Chooser(ON, BOUNDS), replace(MIRROR, size=850_000)
    assert chooser.advise(replace(LOOK, mirror=filling), inside=True).move is Move.STAY, "it has caught up"
    assert chooser.advise(replace(LOOK, now_s=101, floor=1_200, mirror=filling), inside=True).move is Move.MAKE_ROOM


def test_auto_gives_the_memory_back_when_little_has_come_for_long_and_on_keeps_it() -> None:
    auto, on = Chooser(AUTO, BOUNDS), Chooser(ON, BOUNDS)
    for minute in range(10):
        look = replace(LOOK, now_s=100 + 60 * minute, mirror=MIRROR)
        assert auto.advise(look, inside=True).move is Move.STAY
        assert on.advise(look, inside=True).move is Move.STAY
    late = replace(LOOK, now_s=100 + 60 * 11, mirror=MIRROR)
    assert auto.advise(late, inside=True).move is Move.LEAVE
    assert on.advise(late, inside=True).move is Move.STAY
