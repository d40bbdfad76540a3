"""What a consumer has delivered and nobody has acknowledged can be found out, exactly, on the real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.aio.msg import Msg
from tests.integration.conftest import eventually
from tests.integration.priority.kit import GROUP, GroupKit, RawPull

from parti.core.priority import Policy, PriorityGroup
from parti.jetstream.unacknowledged import Delivered, find_unacknowledged

PINNED = PriorityGroup(GROUP, Policy.PINNED, timeout_s=30.0)
SUBJECTS = ("a", "b", "c")


async def delivered(
    group: GroupKit, count: int, *, pinned: bool = True, most: int = 5_000
) -> tuple[RawPull, list[int]]:
    """A consumer of whose messages so many are in flight with a client; returns its pull and all sequences."""
    await group.kit.create_stream()
    await group.make(PINNED if pinned else None, max_ack_pending=most)
    sent = await group.kit.publish(SUBJECTS, -(-count // len(SUBJECTS)))
    fields: dict[str, Any] = {"group": GROUP} if pinned else {}
    pull = await (await group.raw()).pull(batch=count, **fields)
    await pull.message(count)
    return pull, sorted(seq for seqs in sent.values() for seq in seqs)


async def acknowledge(group: GroupKit, messages: list[Msg], left: int) -> None:
    """Acknowledge them, and wait until the server knows."""
    await asyncio.gather(*(message.ack() for message in messages))

    async def known() -> bool:
        return (await group.info()).ack_pending == left

    await eventually(known)


async def ask(group: GroupKit) -> Delivered | None:
    return await find_unacknowledged(group.kit.connection, group.stream, await group.info())


@pytest.mark.parametrize("pinned", [True, False])
async def test_holes_above_the_floor_are_told_from_what_is_open(group: GroupKit, pinned: bool) -> None:
    """Of 30 in three subjects, a is open from its third message on, b is acknowledged, of c the last one is open."""
    pull, seqs = await delivered(group, 30, pinned=pinned)
    a, b, c = ([m for m in pull.messages if m.subject == group.kit.subject(s)] for s in SUBJECTS)
    await acknowledge(group, [*a[:2], *b, *c[:9]], left=9)
    later = await group.publish(3)
    found = await ask(group)
    assert found is not None
    assert found.last_seq == seqs[-1] < min(later)
    assert found.open_from == {
        group.kit.subject("a"): a[2].metadata.sequence.stream,
        group.kit.subject("c"): seqs[-1],
    }
    assert found.position(group.kit.subject("b")) == seqs[-1] + 1
    assert found.position(group.kit.subject("a")) == a[2].metadata.sequence.stream


async def test_more_than_one_pull_brings(group: GroupKit) -> None:
    pull, seqs = await delivered(group, 2_400)
    await acknowledge(group, pull.messages[1:100] + pull.messages[101:], left=2)
    found = await ask(group)
    assert found == Delivered(seqs[-1], {group.kit.subject("a"): seqs[0], group.kit.subject("b"): seqs[100]})


async def test_many_in_flight_are_all_found(group: GroupKit) -> None:
    pull, seqs = await delivered(group, 2_400)
    await acknowledge(group, pull.messages[:300], left=2_100)
    found = await ask(group)
    assert found is not None
    assert sorted(found.open_from.values()) == seqs[300:303]


async def test_whoever_was_pinned_is_not_and_whoever_pulls_next_is(group: GroupKit) -> None:
    pull, _ = await delivered(group, 3)
    before = await group.pinned_id()
    assert await ask(group) is not None
    assert await group.pinned_id() == ""
    await group.kit.api.reset_consumer(group.stream, group.consumer, 1)
    again = await (await group.raw()).pull(group=GROUP)
    await again.message()
    assert await group.pinned_id() not in {"", before}
    assert len(pull.messages) == 3


async def test_somebody_else_who_pulls_may_keep_the_answer_away_but_never_falsifies_it(group: GroupKit) -> None:
    """Without a pin, what is open is shared between them, each time that it is delivered."""
    pull, seqs = await delivered(group, 30, pinned=False)
    await acknowledge(group, pull.messages[:27], left=3)
    other = await (await group.raw()).pull(batch=1_000)
    await group.standing(1)
    found = await ask(group)
    assert found is None or sorted(found.open_from.values()) == seqs[27:]
    assert other.messages


async def test_with_nothing_in_flight_all_is_acknowledged(group: GroupKit) -> None:
    pull, seqs = await delivered(group, 3)
    await acknowledge(group, pull.messages, left=0)
    found = await ask(group)
    assert found == Delivered(seqs[-1], {})


async def test_an_acknowledgement_that_comes_late_leaves_its_message_open_or_the_question_unanswered(
    group: GroupKit,
) -> None:
    """Never is a message taken for acknowledged that is not."""
    pull, seqs = await delivered(group, 30)
    await acknowledge(group, pull.messages[:10], left=20)
    asked = asyncio.create_task(ask(group))
    for message in pull.messages[10:20]:
        await message.ack()
        await asyncio.sleep(0.01)
    found = await asked
    for at in seqs[20:] if found else ():
        assert found
        subject = next(m.subject for m in pull.messages if m.metadata.sequence.stream == at)
        assert found.position(subject) <= at
