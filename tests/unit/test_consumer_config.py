"""The one builder of consumer configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trials import examples_of

from parti.core.consumer_config import (
    IMMUTABLE_FIELDS,
    ConsumerTuning,
    build_config,
    consumer_metadata,
    consumer_name,
    fleet_metadata,
    fleet_of,
    is_foreign,
    owner_of,
    shard_metadata,
    why_not_adopted,
    workers_of,
)

TUNING = ConsumerTuning(ack_wait_s=30, max_ack_pending=500, max_waiting=256, inactive_threshold_s=3600)
MINE = {"filter_subject", "filter_subjects", "ack_wait", "max_ack_pending", "max_deliver", "inactive_threshold"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
field_names = st.sampled_from(sorted(IMMUTABLE_FIELDS | MINE | {"metadata", "priority_groups", "pause_until"}))
configs = st.dictionaries(field_names | st.text(min_size=1, max_size=12), json_values, max_size=25)


@settings(deadline=None, max_examples=examples_of(200))
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
    assert consumer_name("parti", "w-7", 3) == "parti-w-7-3"


@pytest.mark.parametrize(
    ("consumer", "workers"),
    [
        ("parti-w-7", ("w-7", "w")),
        ("parti-w-7-3", ("w-7-3", "w-7")),
        ("parti-w-7-3-hold-1a2b", ("w-7-3", "w-7")),
        ("parti-w-1", ("w-1",)),
        ("parti-w-65", ("w-65",)),
        ("parti-w-03", ("w-03",)),
        ("parti--2", ("-2",)),
        ("other-w-7", ()),
    ],
)
def test_whose_a_consumer_can_be(consumer: str, workers: tuple[str, ...]) -> None:
    assert workers_of(consumer, "parti") == workers


def test_a_shard_says_whose_it_is() -> None:
    config = build_config("parti-w-7-3", ["a"], TUNING, metadata=shard_metadata("w-7", 3))
    assert owner_of(config, "parti") == ("w-7", 3)
    assert owner_of(build_config("parti-w-7-3", ["a"], TUNING), "parti") == ("w-7-3", 1)
    assert build_config("parti-w-7-3", ["a"], TUNING, existing=config)["metadata"] == config["metadata"]


def test_every_consumer_says_its_fleet_and_an_update_adds_that_to_what_it_says() -> None:
    mark = fleet_metadata("orders", "bucket-a")
    made = build_config("orders-w0", ["a"], TUNING, metadata=consumer_metadata("orders", "w0", 1, fleet="bucket-a"))
    assert made["metadata"] == mark
    assert (fleet_of(made), is_foreign(made, "bucket-a"), is_foreign(made, "bucket-b")) == ("bucket-a", False, True)
    unmarked = {**build_config("orders-w0", ["a"], TUNING), "metadata": {"team": "x"}}
    assert not is_foreign(unmarked, "bucket-a")
    adopted = build_config("orders-w0", ["a"], TUNING, existing=unmarked, metadata=mark)
    assert adopted["metadata"] == {"team": "x", **mark}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"ack_policy": "explicit", "deliver_policy": "all"}, ""),
        ({"ack_policy": "none", "deliver_policy": "all", "metadata": {"parti.prefix": "p"}}, ""),
        ({"ack_policy": "none", "deliver_policy": "all"}, "its ack_policy is none, not explicit"),
        ({"ack_policy": "explicit", "deliver_policy": "last"}, "its deliver_policy is last, not all"),
        ({"ack_policy": "explicit", "deliver_policy": "all", "deliver_subject": "x"}, "it is a push consumer"),
    ],
)
def test_an_unmarked_consumer_is_adopted_only_if_a_worker_could_have_made_it(
    config: dict[str, object], why: str
) -> None:
    assert why_not_adopted(config) == why
