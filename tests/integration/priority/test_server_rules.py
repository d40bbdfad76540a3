"""What the server really does with groups and pulls: every rule of the design, and those that it does not keep.

A test here that fails after an upgrade of nats-server means that a fact has changed on which code and guide rest.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.integration.conftest import eventually, open_kit
from tests.integration.priority.kit import GROUP, LONG_S, SHORT_S, GroupKit, pin_of, seq_of

from parti.core.priority import Policy, PriorityGroup
from parti.embedded import Cluster
from parti.errors import ConfigError, PriorityRefused
from parti.jetstream.priority import put_consumer, unpin
from parti.jetstream.switches import Switches
from parti.model.headers import split_pin

OVERFLOW = PriorityGroup(GROUP, Policy.OVERFLOW)
PRIORITIZED = PriorityGroup(GROUP, Policy.PRIORITIZED)


def pinned(timeout_s: float = 60.0) -> PriorityGroup:
    return PriorityGroup(GROUP, Policy.PINNED, timeout_s=timeout_s)


# ── overflow ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pull_with_min_pending_stands_idle_below_it_and_is_served_from_it_on(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    remote = await group.raw()
    await group.publish(2)
    below = await remote.pull(group=GROUP, min_pending=3, idle_heartbeat=100_000_000, seconds=SHORT_S)
    await below.brings_nothing()
    assert below.heartbeats
    standing = await remote.pull(group=GROUP, min_pending=3, batch=10)
    await group.publish(1)
    await standing.message(1)
    # The first of three left two: that is below again.
    await (await remote.pull(group=GROUP, min_pending=3, seconds=SHORT_S)).brings_nothing()
    assert len(standing.messages) == 1


async def test_a_pull_with_min_ack_pending_is_served_while_others_have_that_many_in_hand(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    local, remote = await group.raw(), await group.raw()
    sent = await group.publish(5)
    held = await local.pull(group=GROUP, batch=2)
    await held.message(2)
    served = await remote.pull(group=GROUP, min_ack_pending=2)
    assert seq_of(await served.message()) == sent[2]
    await (await remote.pull(group=GROUP, min_ack_pending=4, seconds=SHORT_S)).brings_nothing()


@pytest.mark.parametrize(
    ("min_pending", "min_ack_pending", "served"), [(3, 9, True), (9, 2, True), (3, 2, True), (9, 9, False)]
)
async def test_of_two_conditions_either_is_enough(
    group: GroupKit, min_pending: int, min_ack_pending: int, served: bool
) -> None:
    await group.make(OVERFLOW)
    local, remote = await group.raw(), await group.raw()
    await group.publish(5)
    await (await local.pull(group=GROUP, batch=2)).message(2)
    seconds = LONG_S if served else SHORT_S
    pull = await remote.pull(group=GROUP, min_pending=min_pending, min_ack_pending=min_ack_pending, seconds=seconds)
    if served:
        await pull.message()
    else:
        await pull.brings_nothing()


async def test_pulls_without_conditions_are_served_whatever_is_pending(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    local, remote = await group.raw(), await group.raw()
    conditional = await remote.pull(group=GROUP, min_pending=2, seconds=1.0)
    plain = await local.pull(group=GROUP)
    await group.standing(2)
    await group.publish(1)
    await plain.message()
    await conditional.brings_nothing()


async def test_the_server_does_not_put_pulls_without_conditions_first(group: GroupKit) -> None:
    # The design wants min_pending=1 to be served only while no other pull waits, when max_ack_pending is 1. The
    # server goes by the order in which the pulls came. Whoever needs that rule uses `prioritized`, as the next test.
    await group.make(OVERFLOW, max_ack_pending=1)
    local, remote = await group.raw(), await group.raw()
    conditional = await remote.pull(group=GROUP, min_pending=1)
    await group.standing(1)
    plain = await local.pull(group=GROUP, seconds=1.0)
    await group.standing(2)
    await group.publish(1)
    await conditional.message()
    await plain.brings_nothing()


async def test_with_prioritized_and_max_ack_pending_1_who_is_preferred_comes_first(group: GroupKit) -> None:
    await group.make(PRIORITIZED, max_ack_pending=1)
    local, remote = await group.raw(), await group.raw()
    for _ in range(5):
        second = await remote.pull(group=GROUP, priority=1)
        first = await local.pull(group=GROUP)
        await group.standing(2)
        await group.publish(1)
        message = await first.message()
        await local.client.publish(message.reply, b"+ACK")
        await group.publish(1)
        message = await second.message()
        await remote.client.publish(message.reply, b"+ACK")
        await eventually(group.all_acked)


# ── prioritized ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_smaller_numbers_are_served_first_whoever_asked_first(group: GroupKit) -> None:
    await group.make(PRIORITIZED)
    first, second, third = [await group.raw() for _ in range(3)]
    last = await third.pull(group=GROUP, priority=9, batch=10)
    middle = await second.pull(group=GROUP, priority=1, batch=2)
    plain = await first.pull(group=GROUP, batch=2)
    await group.standing(3)
    sent = await group.publish(5)
    await plain.message(2)
    await middle.message(2)
    await last.message()
    assert [seq_of(m) for m in plain.messages] == sorted(sent)[:2]
    assert [seq_of(m) for m in middle.messages] == sorted(sent)[2:4]
    assert [seq_of(m) for m in last.messages] == sorted(sent)[4:]


# ── pinned client ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_first_to_be_served_is_pinned_and_all_its_messages_say_so(group: GroupKit) -> None:
    await group.make(pinned())
    first, second = await group.raw(), await group.raw()
    before = (await group.info()).groups
    assert [(state.name, state.pinned_id, state.pinned_since) for state in before] == [(GROUP, "", None)]
    pull = await first.pull(group=GROUP, batch=2)
    await group.publish(2)
    other = await second.pull(group=GROUP, idle_heartbeat=100_000_000, seconds=SHORT_S)
    ids = {pin_of(await pull.message(n)) for n in (1, 2)}
    await group.publish(1)
    await other.brings_nothing()
    assert other.heartbeats
    (state,) = (await group.info()).groups
    assert ids == {state.pinned_id}
    assert state.pinned_since
    again = await first.pull(group=GROUP, id=state.pinned_id)
    assert pin_of(await again.message()) == state.pinned_id


async def test_the_id_stands_behind_the_publishers_headers_among_which_may_be_one_too(
    group: GroupKit,
) -> None:
    await group.make(pinned())
    headers: list[bytes | None] = []
    async with group.client() as client:
        await group.publish(1, headers={"Nats-Pin-Id": "forged", "X": "y"})
        message = await anext(client)
        headers.append(message.header)
        assert message.headers == {"Nats-Pin-Id": "forged", "X": "y"}  # the publisher's
        assert message.pin_id == client.pin_id == await group.pinned_id()
        message.ack()
    assert headers[0] is not None
    assert headers[0].count(b"Nats-Pin-Id") == 2
    assert split_pin(headers[0])[1] != "forged"


async def test_a_pull_with_another_id_is_answered_with_423(group: GroupKit) -> None:
    await group.make(pinned())
    first, second = await group.raw(), await group.raw()
    pull = await first.pull(group=GROUP)
    await group.publish(1)
    await pull.message()
    assert await (await second.pull(group=GROUP, id="stale")).ended() == (423, "Nats-Pin-Id mismatch")


async def test_unpin_hands_the_next_message_to_whoever_waits_and_tells_the_old_one(group: GroupKit) -> None:
    await group.make(pinned())
    first, second = await group.raw(), await group.raw()
    pull = await first.pull(group=GROUP)
    await group.publish(1)
    old = pin_of(await pull.message())
    standing = [await first.pull(group=GROUP, id=old, batch=5) for _ in range(2)]
    waiting = await second.pull(group=GROUP, batch=5)
    await group.standing(3)
    async with Switches(group.kit.connection, stream=group.stream, consumer=group.consumer) as switches:
        await unpin(group.kit.api, group.stream, group.consumer, GROUP)
        assert await group.pinned_id() == ""
        unpinned = await anext(switches)
        assert (unpinned.pinned, unpinned.pin_id, unpinned.reason) == (False, "", "admin")
        await group.publish(2)
        new = pin_of(await waiting.message(2))
        assert new != old
        # Pulls that stood with the old id hear of it at the next message, not before.
        assert [await each.ended() for each in standing] == [(423, "Nats-Wrong-Pin-Id")] * 2
        switch = await anext(switches)
        assert (switch.pinned, switch.pin_id, switch.group) == (True, new, GROUP)
        assert (switch.stream, switch.consumer) == (group.stream, group.consumer)
    assert await group.pinned_id() == new


async def test_a_pin_ends_with_its_timeout_although_a_pull_stands_and_messages_flow(group: GroupKit) -> None:
    # Only a pull that is sent counts. This is why parti's client sends some that can bring nothing.
    await group.make(pinned(0.5), max_ack_pending=100_000)
    first, second = await group.raw(), await group.raw()
    async with Switches(group.kit.connection, stream=group.stream, consumer=group.consumer) as switches:
        long = await first.pull(group=GROUP, batch=100_000)
        await group.standing(1)
        waiting = await second.pull(group=GROUP, batch=100_000)
        while not waiting.messages:
            await group.publish(1)
        events = [await anext(switches) for _ in range(3)]
    assert [(event.pinned, event.reason) for event in events] == [(True, ""), (False, "timeout"), (True, "")]
    assert 0.45 <= (events[1].at - events[0].at).total_seconds() <= 2.0
    await group.publish(1)
    assert (await long.ended())[0] == 423


async def test_reset_and_an_update_leave_the_pin_and_a_new_timeout_is_kept(group: GroupKit) -> None:
    await group.make(pinned())
    client = await group.raw()
    (sent, *_) = await group.publish(3)
    pin = pin_of(await (await client.pull(group=GROUP)).message())
    await group.kit.api.reset_consumer(group.stream, group.consumer, sent)
    await group.make(pinned(), filter_subjects=[group.kit.subject("p")], ack_wait=5_000_000_000)
    await group.make(pinned(7.0))
    info = await group.info()
    assert info.config["priority_timeout"] == 7_000_000_000
    assert info.groups[0].pinned_id == pin
    assert seq_of(await (await client.pull(group=GROUP, id=pin)).message()) == sent


async def test_the_next_client_gets_newer_messages_first_and_older_ones_after_ack_wait(
    group: GroupKit,
) -> None:
    # The design wants messages in flight to be completed before the switch; the server does not wait.
    await group.make(pinned(), ack_wait=500_000_000)
    first, second = await group.raw(), await group.raw()
    sent = sorted(await group.publish(4))
    await (await first.pull(group=GROUP, batch=2)).message(2)
    await unpin(group.kit.api, group.stream, group.consumer, GROUP)
    waiting = await second.pull(group=GROUP, batch=4)
    await waiting.message(4)
    assert [seq_of(m) for m in waiting.messages] == [*sent[2:], *sent[:2]]


async def test_a_leader_change_drops_the_pin_and_the_client_goes_on_with_another(nats_cluster: Cluster) -> None:
    kit = await open_kit(nats_cluster.servers[0], "LED")
    group = GroupKit(kit)
    changes: list[str] = []
    try:
        await kit.create_stream(num_replicas=3)
        await group.make(pinned())
        client = group.client(
            on_pinned=changes.append,
            on_unpinned=lambda reason: changes.append("unpinned"),
            heartbeat_s=0.5,
            expires_s=5.0,
        )
        async with client:
            await group.publish(1)
            message = await anext(client)
            old = message.pin_id
            message.ack()
            await kit.api.call(f"CONSUMER.LEADER.STEPDOWN.{group.stream}.{group.consumer}")
            sent = await group.publish(1)
            async with asyncio.timeout(20):
                while message.seq != sent[0]:
                    message = await anext(client)
                    message.ack()
            assert changes == [old, "unpinned", message.pin_id]
            assert message.pin_id != old
    finally:
        await kit.connection.close()


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────

BAD_REQUEST = "Bad Request - "


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        (OVERFLOW, {}, "Priority Group missing"),
        (OVERFLOW, {"group": "h"}, "Invalid Priority Group"),
        (OVERFLOW, {"group": GROUP, "id": "x"}, "Not a Pinned Client Priority consumer"),
        (PRIORITIZED, {"group": GROUP, "priority": 10}, "Priority must be between 0 and 9"),
        (PRIORITIZED, {"group": GROUP, "priority": -1}, "Priority must be between 0 and 9"),
        (PRIORITIZED, {"group": GROUP, "min_pending": 1}, "Not a Overflow Priority consumer"),
        (pinned(), {"group": GROUP, "min_ack_pending": 1}, "Not a Overflow Priority consumer"),
        (pinned(), {}, "Priority Group missing"),
        (None, {"min_pending": 1}, "Not a Overflow Priority consumer"),
        (None, {"id": "x"}, "Not a Pinned Client Priority consumer"),
    ],
)
async def test_pulls_that_the_server_refuses(
    group: GroupKit, made: PriorityGroup | None, asked: dict[str, Any], said: str
) -> None:
    await group.make(made)
    assert await (await (await group.raw()).pull(**asked)).ended() == (400, BAD_REQUEST + said)


@pytest.mark.parametrize(
    ("made", "asked"),
    [(OVERFLOW, {"group": GROUP, "priority": 3}), (None, {"group": GROUP}), (None, {"priority": 3})],
)
async def test_pulls_that_the_server_serves_although_they_ask_for_what_does_nothing(
    group: GroupKit, made: PriorityGroup | None, asked: dict[str, Any]
) -> None:
    await group.make(made)
    await group.publish(1)
    await (await (await group.raw()).pull(**asked)).message()


async def test_a_pull_with_an_empty_body_passes_by_the_group(group: GroupKit) -> None:
    await group.make(OVERFLOW)
    await group.publish(1)
    await (await (await group.raw()).pull(b"")).message()


REFUSED = [
    (10159, "policy-without-group", {"priority_policy": "overflow"}),
    (10161, "empty-group-name", {"priority_policy": "overflow", "priority_groups": [""]}),
    (10162, "bad-group-name", {"priority_policy": "overflow", "priority_groups": ["a b"]}),
    (10162, "bad-group-name", {"priority_policy": "overflow", "priority_groups": ["a" * 17]}),
    (10178, "push-consumer", {"priority_policy": "overflow", "priority_groups": ["g"], "deliver_subject": "x"}),
    (10196, "group-without-policy", {"priority_groups": ["g"]}),
    (10197, "timeout-without-policy", {"priority_timeout": 1_000_000_000}),
    (10025, "unknown-policy", {"priority_policy": "nonsense", "priority_groups": ["g"]}),
]


@pytest.mark.parametrize(("code", "name", "config"), REFUSED)
async def test_what_the_server_refuses_parti_refuses_before_and_knows_by_name(
    group: GroupKit, monkeypatch: pytest.MonkeyPatch, code: int, name: str, config: dict[str, Any]
) -> None:
    assert (await group.put(**config))["error"]["err_code"] == code
    whole = {"name": group.consumer, "ack_policy": "explicit", **config}
    with pytest.raises(ConfigError):
        await put_consumer(group.kit.connection, group.stream, whole, action="create")
    monkeypatch.setattr("parti.jetstream.priority.check_config", lambda config: None)
    with pytest.raises(PriorityRefused) as caught:
        await put_consumer(group.kit.connection, group.stream, whole, action="create")
    assert (caught.value.code, caught.value.name) == (code, name)


@pytest.mark.parametrize(
    "config",
    [
        {"priority_policy": "overflow", "priority_groups": ["g", "h"]},
        {"priority_policy": "overflow", "priority_groups": ["g"], "ack_policy": "none"},
        {"priority_policy": "overflow", "priority_groups": ["g"], "ack_policy": "all"},
        {"priority_policy": "overflow", "priority_groups": ["g"], "priority_timeout": 1_000_000_000},
        {"priority_policy": "pinned_client", "priority_groups": ["g"], "priority_timeout": -1},
    ],
)
async def test_what_the_server_takes_against_the_design_is_refused_here(
    group: GroupKit, config: dict[str, Any]
) -> None:
    assert "error" not in await group.put(**config)
    whole = {"name": "another", "ack_policy": "explicit", **config}
    with pytest.raises(ConfigError):
        await put_consumer(group.kit.connection, group.stream, whole, action="create")


SWITCHES: list[tuple[PriorityGroup | None, PriorityGroup | None]] = [
    (OVERFLOW, None),
    (None, OVERFLOW),
    (pinned(), OVERFLOW),
    (OVERFLOW, PRIORITIZED),
    (OVERFLOW, PriorityGroup("h", Policy.OVERFLOW)),
]


@pytest.mark.parametrize(("before", "after"), SWITCHES)
async def test_an_update_that_switches_is_refused_by_parti_alone(
    group: GroupKit, before: PriorityGroup | None, after: PriorityGroup | None
) -> None:
    made = await group.make(before)
    with pytest.raises(ConfigError, match="cannot be changed from"):
        await group.make(after)
    assert (await group.info()).config == made.config
    # The server itself would do it, and strand whoever pulls.
    assert "error" not in await group.put("update", **(after.fields() if after else {}))


async def test_unpin_of_what_is_not_there_is_refused_by_name(group: GroupKit) -> None:
    await group.make(pinned())
    for name, code in (("h", "no-such-group"), ("a b", "bad-group-name")):
        with pytest.raises(PriorityRefused) as caught:
            await unpin(group.kit.api, group.stream, group.consumer, name)
        assert caught.value.name == code
