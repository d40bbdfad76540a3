"""A migration's decisions: whose turn it is, what an old consumer has finished, how it comes back, and parity."""

from __future__ import annotations

from typing import Any

import pytest

from parti.core.fleet_view import FleetView
from parti.core.migration import ACTIONS, TABLE, ConsumerState, is_reset, next_phase, restored_config
from parti.core.orders import obey
from parti.core.parity import Row, Side, Slo, Watchman, Window, compare, side_of
from parti.errors import ConfigError
from parti.model.fleet import Orders
from parti.model.migration import Action, Phase


def state(**fields: Any) -> ConsumerState:
    known: dict[str, Any] = {"config": {}, "subjects": ("s.p",), "ack_floor": 10, "delivered": 10}
    return ConsumerState(**{"name": "old-p", "ack_pending": 0, "pending": 0, **known, **fields})


# ── phases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_phases_lead_from_planned_to_cleaned_and_back_from_everywhere() -> None:
    phase: Phase = "planned"
    for action in ("shadow", "validate", "switch", "cleanup"):
        phase = next_phase(phase, "", action)
    assert phase == "cleaned"
    assert {next_phase(each, "", "rollback") for each in TABLE} == {"planned"}


def test_a_migration_can_be_abandoned_from_everywhere_and_begun_again() -> None:
    assert {next_phase(each, "", "abandon") for each in TABLE} == {"abandoned"}
    assert next_phase("validated", "switch", "abandon") == "abandoned"
    assert next_phase("abandoned", "", "shadow") == "shadow"
    with pytest.raises(ConfigError, match="'parti migrate run --abandon'"):
        next_phase("shadow", "abandon", "validate")


@pytest.mark.parametrize("phase", TABLE)
@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_not_in_the_table_is_refused_with_what_is_expected(phase: Phase, action: Action) -> None:
    if action in TABLE[phase]:
        assert next_phase(phase, "", action) == TABLE[phase][action]
        return
    with pytest.raises(ConfigError, match="it is not the time for") as refused:
        next_phase(phase, "", action)
    assert "parti migrate run --phase" in str(refused.value)


def test_what_was_begun_has_to_be_ended_or_taken_back() -> None:
    assert next_phase("validated", "switch", "switch") == "switched"
    assert next_phase("validated", "switch", "rollback") == "planned"
    with pytest.raises(ConfigError, match="'switch' was begun and has not ended"):
        next_phase("validated", "switch", "validate")


# ── old consumers ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("found", "position"),
    [
        (state(ack_floor=10, delivered=10), 11),
        (state(ack_floor=7, delivered=10, ack_pending=2), None),
        (state(ack_floor=0, delivered=0), 1),
        # max_deliver was reached: nothing is in flight, and the floor stays behind (measured on 2.15.1).
        (state(ack_floor=0, delivered=6), 7),
    ],
)
def test_a_position_is_known_when_nothing_is_in_flight(found: ConsumerState, position: int | None) -> None:
    assert found.position == position


def test_a_consumer_comes_back_as_it_was_except_where_the_server_knows_no_way_to_a_position() -> None:
    config = {
        "durable_name": "old-p",
        "deliver_policy": "all",
        "ack_wait": 5,
        "pause_until": "2200-01-01T00:00:00Z",
        "metadata": {"team": "x", "_nats.ver": "2.15.1"},
    }
    assert restored_config(config, 42) == {
        "name": "old-p",
        "durable_name": "old-p",
        "deliver_policy": "all",
        "ack_wait": 5,
        "metadata": {"team": "x"},
    }
    new = restored_config({**config, "deliver_policy": "new"}, 42)
    assert (new["deliver_policy"], new["opt_start_seq"]) == ("by_start_sequence", 42)
    assert is_reset(new)


def test_withheld_partitions_are_not_wanted() -> None:
    view = FleetView(0.0, {}, ("a", "b", "c"), {}, orders=Orders(paused=("a",), withheld=("b",)))
    assert obey(view).partitions == ("c",)


# ── parity ────────────────────────────────────────────────────────────────────────────────────────────────────────


def window(*rows: Row, **fields: Any) -> Window:
    return Window(1, 1.0, 1, 10, rows, **fields)


def test_a_comparison_names_who_is_missing_and_who_is_there_twice() -> None:
    rows = compare(
        ["a", "b", "c", "d"],
        stored={"a": [1, 5], "b": [2, 6], "c": [3], "d": [4]},
        given={"a": [1, 5, 9], "b": [2, 6, 2, 6], "d": []},
        readers={"a": ["w0"], "b": ["w0", "w1"], "d": ["w1"]},
        before={"a": state(deliveries=3)},
        after={"a": state(deliveries=5, pending=4, ack_pending=1)},
        lags={},
    )
    found = window(*rows)
    assert (found.unassigned, found.duplicated, found.incomplete) == (("c",), ("b",), ("d",))
    assert not found.same
    a = rows[0]
    assert (a.stored, a.seen, a.old_deliveries, a.old_lag_msgs, a.missing) == (2, 2, 2, 5, 0)
    assert window(a).same


def test_windows_that_break_the_slo_in_a_row_call_for_the_way_back() -> None:
    slo = Slo(lag_msgs=10, redelivery_ratio=0.1, breaches=2)
    good, late, again = (
        window(new=Side(100, 0, 10)),
        window(new=Side(100, 0, 11)),
        window(new=Side(100, 11, 0)),
    )
    assert (good.breaches(slo), len(late.breaches(slo)), len(again.breaches(slo))) == ((), 1, 1)
    watchman = Watchman(slo)
    assert [watchman.look(w) for w in (late, good, again, late)] == [False, False, False, True]


def test_a_consumer_that_was_reset_between_two_looks_counts_from_zero() -> None:
    before = {"x": state(deliveries=100), "y": state(deliveries=5)}
    after = {"x": state(deliveries=7), "y": state(deliveries=9, redelivered=2, pending=3)}
    assert side_of(before, after) == Side(deliveries=11, redelivered=2, lag_msgs=3)


def test_repeats_that_came_before_a_window_are_not_repeats_of_it() -> None:
    """A message that waits for its next attempt, in a stream where nothing else happens, breaks no SLO."""
    before = {"x": state(deliveries=40, redelivered=1)}
    waits = side_of(before, {"x": state(deliveries=40, redelivered=1)})
    again = side_of(before, {"x": state(deliveries=41, redelivered=1)})
    assert (waits.redelivered, waits.redelivery_ratio) == (0, 0.0)
    assert (again.redelivered, again.redelivery_ratio) == (1, 1.0)
    assert not Watchman(Slo(breaches=1)).look(Window(1, 10.0, 1, 0, (), new=waits))
