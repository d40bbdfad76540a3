"""Priority groups: what the design of NATS demands of configurations, updates and pulls, refused beforehand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.core.consumer_config import ConsumerTuning, build_config
from parti.core.priority import (
    NEEDS,
    SERVER_ERRORS,
    Policy,
    PriorityGroup,
    PullOptions,
    check_config,
    check_name,
    check_pull,
    check_server,
    check_taken,
    check_update,
    group_of,
    named,
    with_group,
)
from parti.errors import ApiError, ConfigError, PriorityRefused, ServerTooOld

PINNED = PriorityGroup("g", Policy.PINNED, timeout_s=5.0)
OVERFLOW = PriorityGroup("g", Policy.OVERFLOW)
PRIORITIZED = PriorityGroup("g", Policy.PRIORITIZED)


def config(**fields: Any) -> dict[str, Any]:
    return {"name": "c", "ack_policy": "explicit", "priority_groups": ["g"], "priority_policy": "overflow", **fields}


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ── names and configurations ──────────────────────────────────────────────────────────────────────────────────────


@given(st.from_regex(r"[A-Za-z0-9/_=-]{1,16}", fullmatch=True))
def test_every_name_of_the_allowed_form_is_taken(name: str) -> None:
    check_name(name)
    assert check_config(config(priority_groups=[name])) == PriorityGroup(name, Policy.OVERFLOW)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "+a", "a)", "a" * 17, "a\n", None, 7])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="1 to 16 characters"):
        check_config(config(priority_groups=[name]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"priority_groups": []}, "has no group"),
        ({"priority_groups": None}, "has no group"),
        ({"priority_groups": ["a", "b"]}, "a, b: a consumer may have one today"),
        ({"priority_policy": None}, "has no policy"),
        ({"priority_policy": "none"}, "has no policy"),
        ({"priority_policy": "strict"}, "'strict' is unknown; expected one of overflow, pinned_client, prioritized"),
        ({"deliver_subject": "x"}, "is on a push consumer"),
        ({"ack_policy": "none"}, "ack_policy 'none'; expected 'explicit'"),
        ({"ack_policy": "all"}, "ack_policy 'all'; expected 'explicit'"),
        ({"ack_policy": None}, "ack_policy 'none'; expected 'explicit'"),
        ({"priority_timeout": 1}, "is for the policy pinned_client, but the policy is overflow"),
        ({"priority_policy": "prioritized", "priority_timeout": 1}, "but the policy is prioritized"),
        ({"priority_policy": "pinned_client", "priority_timeout": -1}, "not positive"),
        ({"priority_policy": None, "priority_groups": None, "priority_timeout": 5}, "but there is no policy"),
    ],
)
def test_a_configuration_that_breaks_a_rule_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config(**fields))
    assert said in one_line(caught)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="not positive"):
        PriorityGroup("g", Policy.PINNED, timeout_s=timeout_s)


@pytest.mark.parametrize("group", [PINNED, OVERFLOW, PRIORITIZED, PriorityGroup("a/b=_-", Policy.PINNED)])
def test_what_a_group_writes_is_what_is_read(group: PriorityGroup) -> None:
    made = build_config("c", ["s"], ConsumerTuning(30, 500, 256, 3600), group=group)
    assert check_config(made) == group
    assert group_of(made) == group


def test_a_consumer_without_a_group_has_none() -> None:
    assert check_config({"name": "c", "ack_policy": "none"}) is None
    assert group_of({"priority_policy": "none", "priority_groups": None}) is None
    assert (
        not {"priority_groups", "priority_policy", "priority_timeout"}
        & build_config("c", ["s"], ConsumerTuning(30, 500, 256, 3600)).keys()
    )


def test_what_a_server_took_against_the_rules_can_still_be_read() -> None:
    assert group_of(config(priority_groups=["a", "b"])) == PriorityGroup("a", Policy.OVERFLOW)
    assert group_of(config(priority_timeout=5)) == PriorityGroup("g", Policy.OVERFLOW)
    with pytest.raises(ConfigError, match="unknown"):
        group_of(config(priority_policy="of tomorrow"))


# ── updates ───────────────────────────────────────────────────────────────────────────────────────────────────────

GROUPS = [None, PINNED, OVERFLOW, PRIORITIZED, PriorityGroup("other", Policy.PINNED, timeout_s=5.0)]


@pytest.mark.parametrize("before", GROUPS)
@pytest.mark.parametrize("after", GROUPS)
def test_an_update_may_not_switch_the_policy_or_the_group_on_or_off(
    before: PriorityGroup | None, after: PriorityGroup | None
) -> None:
    old = with_group({"name": "c", "ack_policy": "explicit"}, before)
    new = with_group({"name": "c", "ack_policy": "explicit"}, after)
    if before == after:
        check_update(old, {**new, "ack_wait": 7})
        return
    with pytest.raises(ConfigError) as caught:
        check_update(old, new)
    assert "of consumer 'c' cannot be changed from" in one_line(caught)


def test_an_update_may_change_the_timeout_and_keeps_it_when_nothing_is_said() -> None:
    old = with_group({"name": "c", "ack_policy": "explicit"}, PINNED)
    new = with_group(old, PriorityGroup("g", Policy.PINNED, timeout_s=9.0))
    check_update(old, new)
    assert new["priority_timeout"] == 9_000_000_000
    assert with_group(old, PriorityGroup("g", Policy.PINNED)) == old


# ── pulls ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("group", "options", "fields"),
    [
        (None, PullOptions(), {}),
        (OVERFLOW, PullOptions("g"), {"group": "g"}),
        (OVERFLOW, PullOptions("g", min_pending=3), {"group": "g", "min_pending": 3}),
        (
            OVERFLOW,
            PullOptions("g", min_pending=3, min_ack_pending=4),
            {"group": "g", "min_pending": 3, "min_ack_pending": 4},
        ),
        (PRIORITIZED, PullOptions("g", priority=0), {"group": "g"}),
        (PRIORITIZED, PullOptions("g", priority=9), {"group": "g", "priority": 9}),
        (PINNED, PullOptions("g"), {"group": "g"}),
    ],
)
def test_pulls_that_a_policy_allows(
    group: PriorityGroup | None, options: PullOptions, fields: dict[str, Any]
) -> None:
    check_pull(options, group)
    assert options.fields() == fields
    assert options.fields("xyz") == {**fields, "id": "xyz"}


@pytest.mark.parametrize(
    ("group", "options", "said"),
    [
        (None, PullOptions("g"), "the consumer has no priority group, but pulls ask for group=g"),
        (None, PullOptions(min_pending=3), "min_pending=3"),
        (None, PullOptions(priority=0), "priority=0"),
        (OVERFLOW, PullOptions(), "pulls without a group are refused by this consumer; expected its priority group"),
        (OVERFLOW, PullOptions("h"), "pulls for group 'h' are refused"),
        (OVERFLOW, PullOptions("g", min_pending=-1), "min_pending=-1 is negative"),
        (OVERFLOW, PullOptions("g", min_ack_pending=-1), "min_ack_pending=-1 is negative"),
        (OVERFLOW, PullOptions("g", priority=0), "the consumer's policy is overflow"),
        (PRIORITIZED, PullOptions("g", priority=10), "priority=10 is outside 0 (served first) to 9"),
        (PRIORITIZED, PullOptions("g", priority=-1), "priority=-1 is outside"),
        (PRIORITIZED, PullOptions("g", min_pending=1), "the consumer's policy is prioritized"),
        (PINNED, PullOptions("g", min_ack_pending=1), "the consumer's policy is pinned_client"),
        (PINNED, PullOptions("g", priority=1), "the consumer's policy is pinned_client"),
    ],
)
def test_pulls_that_a_policy_does_not_allow(group: PriorityGroup | None, options: PullOptions, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_pull(options, group)
    assert said in one_line(caught)


# ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", Policy)
def test_a_server_that_is_too_old_is_refused_by_its_version(policy: Policy) -> None:
    major, minor, _ = NEEDS[policy]
    check_server((major, minor, 0), policy)
    check_server((3, 0, 0), policy)
    with pytest.raises(ServerTooOld) as caught:
        check_server((major, minor - 1, 99), policy)
    assert f"2.{minor - 1}.99, but priority policy {policy.value} needs 2.{minor}.0" in one_line(caught)


def test_prioritized_came_later_than_the_others() -> None:
    assert NEEDS == {Policy.OVERFLOW: (2, 11, 0), Policy.PINNED: (2, 11, 0), Policy.PRIORITIZED: (2, 12, 0)}


@pytest.mark.parametrize("answered", [{}, {"priority_policy": "overflow"}, config(priority_policy="pinned_client")])
def test_a_server_that_left_the_group_out_is_noticed(answered: dict[str, Any]) -> None:
    check_taken(OVERFLOW, config())
    with pytest.raises(ServerTooOld, match=r"needs nats-server 2\.11\.0 or newer everywhere"):
        check_taken(OVERFLOW, answered)


@pytest.mark.parametrize("code", sorted(SERVER_ERRORS))
def test_the_servers_refusals_have_names(code: int) -> None:
    error = named(ApiError(code, "invalid JSON: unknown priority policy: x", status=400))
    assert isinstance(error, PriorityRefused)
    assert (error.code, error.name, error.status) == (code, SERVER_ERRORS[code][0], 400)
    assert "\n" not in str(error)


def test_other_refusals_are_passed_on_as_they_are() -> None:
    for other in (ApiError(10025, "invalid JSON: unexpected end"), ApiError(10100, "not unique")):
        assert named(other) is other
