"""Matching old consumers to partitions, and what is said of those that may go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from parti.core.migration import ConsumerState
from parti.core.migration_plan import Listed, Pattern, Plan, Surroundings, make_plan
from parti.errors import ConfigError
from parti.model.partition import Template

TEMPLATE = Template("orders.{region}.{customer}")
PARTITIONS = tuple(TEMPLATE.partitions(["eu.ada", "eu.bob", "us.cy"]))
HOUR_NS = 3600 * 10**9


def consumer(name: str, *subjects: str, **fields: Any) -> ConsumerState:
    config = {"durable_name": name, "ack_policy": "explicit", "deliver_policy": "all", **fields.pop("config", {})}
    known: dict[str, Any] = {"ack_floor": 5, "delivered": 5, "ack_pending": 0, "pending": 0}
    return ConsumerState(**{"name": name, "config": config, "subjects": subjects, **known, **fields})


ALL = (
    consumer("o-eu-ada", "orders.eu.ada"),
    consumer("o-eu-bob", "orders.eu.bob"),
    consumer("o-us-cy", "orders.us.cy"),
)


def plan(*consumers: ConsumerState, pattern: str = "o-{partition}", **around: Any) -> Plan:
    known: dict[str, Any] = {"retention": "limits", "workers": 2, "capacity": 500, "partitions": PARTITIONS}
    return make_plan(Pattern(pattern), Surroundings(consumers=consumers, **{**known, **around}))


def test_consumers_are_matched_by_their_filter_whatever_stands_for_the_dots_in_their_names() -> None:
    found = plan(*ALL, consumer("audit", "orders.>"))
    assert {m.partition.id: m.consumer.name for m in found.matches} == {
        "eu.ada": "o-eu-ada",
        "eu.bob": "o-eu-bob",
        "us.cy": "o-us-cy",
    }
    assert (found.before, found.after, found.others) == (4, 3, ("audit",))
    assert found.risks == ()


def test_what_cannot_be_matched_blocks() -> None:
    found = plan(
        *ALL[:2],
        consumer("o-all", "orders.>"),
        consumer("o-unfiltered"),
        consumer("o-strange", "other.x"),
        consumer("o-two", "orders.eu.ada", "orders.us.cy"),
        consumer("o-again", "orders.eu.bob"),
    )
    assert set(found.unmatched) == {"o-all", "o-unfiltered", "o-strange", "o-two"}
    assert found.overlapping == {"eu.bob": ("o-eu-bob", "o-again")}
    assert [p.id for p in found.uncovered] == ["us.cy"]
    assert len(found.blocked) == 2


@pytest.mark.parametrize(
    ("fields", "around", "level", "said"),
    [
        ({"config": {"ack_policy": "none"}}, {}, "note", "ack policy none"),
        ({"config": {"ack_policy": "all"}}, {}, "note", "ack policy all"),
        ({"config": {"max_deliver": 5}}, {}, "note", "max_deliver is set"),
        ({"config": {"max_deliver": 5}, "delivered": 9}, {}, "note", "max_deliver was reached"),
        ({"config": {"deliver_subject": "push"}}, {}, "note", "push consumers"),
        ({"config": {"deliver_policy": "new"}}, {}, "note", "no way back to a position"),
        ({"config": {"inactive_threshold": HOUR_NS // 2}}, {}, "note", "inactive_threshold"),
        ({"config": {"durable_name": ""}}, {}, "note", "not durable"),
        ({"ack_pending": 3, "delivered": 9}, {}, "note", "3 messages are in flight"),
        ({"paused": True}, {}, "blocks", "paused by somebody"),
        ({}, {"retention": "workqueue"}, "note", "work-queue retention"),
        ({}, {"retention": "interest"}, "note", "interest retention"),
        ({}, {"claimed": {"eu.ada"}}, "blocks", "both handle them"),
        ({}, {"most_consumers": 6}, "blocks", "up to 7 consumers are there at a time, more than max_consumers 6"),
        ({}, {"workers": 600}, "blocks", "more than the server's limit of 1,000"),
        ({}, {"workers": 1, "capacity": 2}, "blocks", "1 workers take 2 of 3 partitions"),
    ],
)
def test_risks(fields: dict[str, Any], around: dict[str, Any], level: str, said: str) -> None:
    found = plan(consumer("o-eu-ada", "orders.eu.ada", **fields), *ALL[1:], **around)
    assert [(risk.level, said in risk.text) for risk in found.risks] == [(level, True)]


def test_once_it_has_begun_what_it_did_itself_is_no_risk() -> None:
    paused = consumer("o-eu-ada", "orders.eu.ada", paused=True)
    assert not plan(paused, *ALL[1:], claimed={"eu.ada"}, begun=True).blocked


def test_a_name_that_means_another_partition_is_noted_and_the_filter_counts() -> None:
    swapped = plan(consumer("o-eu-bob", "orders.eu.ada"), consumer("o-eu-ada", "orders.eu.bob"), ALL[2])
    assert swapped.matches[0].consumer.name == "o-eu-bob"
    assert [risk.about for risk in swapped.risks] == [("o-eu-bob", "o-eu-ada")]


def test_nothing_to_migrate_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no consumer fits 'x-\{partition\}'; the stream has 3, such as o-eu-ada"):
        plan(*ALL, pattern="x-{partition}")
    with pytest.raises(ConfigError, match="the stream has none"):
        plan(pattern="x-{partition}")


@pytest.mark.parametrize(
    "text", ["", "orders", "{partition}{partition}", "a.{partition}", "o-{other}", "o {partition}"]
)
def test_patterns_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a name with"):
        Pattern(text)


def test_a_list_names_consumers_and_their_partitions() -> None:
    listed = Listed("list", "# ours\no-eu-ada eu.ada\n\no-us-cy # the last\n")
    assert listed.listed == ("o-eu-ada", "o-us-cy")
    assert (listed.means("o-eu-ada"), listed.means("o-eu-bob")) == (True, False)
    assert (listed.said("o-eu-ada"), listed.said("o-us-cy")) == ("eu.ada", "")
    around = Surroundings(retention="limits", workers=2, capacity=9, partitions=PARTITIONS, consumers=ALL[:1])
    assert make_plan(listed, around).missing == ("o-us-cy",)
