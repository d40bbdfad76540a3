"""The one builder of consumer configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.core.consumer_config import IMMUTABLE_FIELDS, ConsumerTuning, build_config, consumer_name

TUNING = ConsumerTuning(ack_wait_s=30, max_ack_pending=500, max_waiting=256, inactive_threshold_s=3600)
MINE = {"filter_subject", "filter_subjects", "ack_wait", "max_ack_pending", "max_deliver", "inactive_threshold"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
field_names = st.sampled_from(sorted(IMMUTABLE_FIELDS | MINE | {"metadata", "priority_groups", "pause_until"}))
configs = st.dictionaries(field_names | st.text(min_size=1, max_size=12), json_values, max_size=25)


@settings(deadline=None, max_examples=200)
@given(existing=configs, subjects=st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_an_update_leaves_every_field_alone_that_is_not_parti_s_to_change(
    existing: dict[str, Any], subjects: list[str]
) -> None:
    before = json.dumps(existing, sort_keys=True)
    updated = build_config("parti-w0", subjects, TUNING, existing=existing)
    assert json.dumps(existing, sort_keys=True) == before
    untouched = {k: v for k, v in updated.items() if k not in MINE}
    assert untouched == {k: v for k, v in existing.items() if k not in MINE}
    assert untouched.keys() >= IMMUTABLE_FIELDS & existing.keys()
    assert updated["filter_subjects"] == subjects
    # Both forms together: the server refuses them (error 10136).
    assert "filter_subject" not in updated


def test_no_field_that_parti_changes_is_immutable() -> None:
    assert not MINE & IMMUTABLE_FIELDS
    fresh = build_config("parti-w0", ["a"], TUNING)
    other = ConsumerTuning(ack_wait_s=1, max_ack_pending=2, max_waiting=3, inactive_threshold_s=4)
    changed = build_config("another", ["b"], other, existing=fresh)
    assert {k for k in fresh if fresh[k] != changed[k]} <= MINE
    assert changed["max_waiting"] == 256


@pytest.mark.parametrize("existing", [None, {}, {"name": "parti-w0", "filter_subjects": ["a"]}])
@pytest.mark.parametrize("subjects", [[], ()])
def test_an_empty_list_of_subjects_never_becomes_a_configuration(subjects: Any, existing: Any) -> None:
    with pytest.raises(ValueError, match="every message"):
        build_config("parti-w0", subjects, TUNING, existing=existing)


def test_a_new_consumer() -> None:
    assert build_config("parti-w0", ("a", "b"), TUNING) == {
        "name": "parti-w0",
        "durable_name": "parti-w0",
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "filter_subjects": ["a", "b"],
        "ack_wait": 30_000_000_000,
        "max_ack_pending": 500,
        "max_deliver": -1,
        "max_waiting": 256,
        "inactive_threshold": 3_600_000_000_000,
        "num_replicas": 0,
    }


def test_an_update_without_changes_is_equal_to_what_exists() -> None:
    fresh = build_config("parti-w0", ["a"], TUNING)
    assert build_config("parti-w0", ["a"], TUNING, existing=fresh) == fresh


def test_the_name() -> None:
    assert consumer_name("parti", "w-7") == "parti-w-7"
