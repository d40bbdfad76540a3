"""A pinned group of real clients: who works, who waits, how a pin is kept, given up and lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.conftest import eventually
from tests.integration.priority.kit import GROUP, GroupKit, seq_of
from tests.integration.processes import EXIT_S, environment, whole_lines
from tests.pace import unhindered_s

from parti.core.pin import PinState
from parti.core.priority import Policy, PriorityGroup
from parti.jetstream.priority import find_groups, unpin
from parti.jetstream.pull_client import PullClient
from parti.jetstream.switches import Switches
from parti.telemetry.metrics import Metrics


def pinned(timeout_s: float = 60.0) -> PriorityGroup:
    return PriorityGroup(GROUP, Policy.PINNED, timeout_s=timeout_s)


class Member:
    """A client that acknowledges everything and remembers what happened to it."""

    def __init__(self, group: GroupKit, **options: object) -> None:
        self.seqs: list[int] = []
        self.events: list[str] = []
        self.client = group.client(
            on_pinned=lambda pin_id: self.events.append("pinned"),
            on_unpinned=lambda reason: self.events.append("unpinned"),
            **options,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Member:
        await self.client.start()
        self._task = asyncio.create_task(self._work())
        return self

    async def _work(self) -> None:
        async for message in self.client:
            assert message.pin_id
            self.seqs.append(message.seq)
            message.ack()

    async def __aexit__(self, *_: object) -> None:
        await self.client.stop()
        assert self._task
        await self._task


async def test_one_works_and_the_others_wait_until_it_leaves(group: GroupKit) -> None:
    await group.make(pinned(60.0))
    metrics = Metrics("watcher")
    watched = Switches(group.kit.connection, stream=group.stream, consumer=group.consumer, metrics=metrics)
    async with watched, Member(group) as second, Member(group) as first:
        await group.publish(1)
        await eventually(lambda: len(first.seqs) + len(second.seqs) == 1)
        active, waiting = (first, second) if first.seqs else (second, first)
        await group.publish(100)
        await eventually(lambda: len(active.seqs) == 101)
        assert waiting.seqs == []
        assert (active.client.pin, waiting.client.pin) == (PinState.PINNED, PinState.UNPINNED)
        assert active.client.pin_id == await group.pinned_id()
        state = await waiting.client.group_state()
        assert state
        assert state.pinned_id == active.client.pin_id
        began = unhindered_s()
        await active.client.stop()
        await group.publish(1)
        await eventually(lambda: len(waiting.seqs) == 1)
        assert unhindered_s() - began < 10, "who leaves gives its pin up: nobody waits for the timeout"
        assert active.events == ["pinned", "unpinned"]
        assert waiting.events == ["pinned"]
        counted = active.client.metrics
        assert (counted.pins_taken.value, counted.pins_lost.value, counted.pinned.value) == (1, 1, 0)
        assert waiting.client.metrics.pinned.value == 1
        await eventually(lambda: metrics.pin_switches.value == 2)


@pytest.mark.parametrize("busy", [False, True], ids=["a quiet stream", "full hands"])
async def test_a_client_that_lives_keeps_its_pin_through(group: GroupKit, busy: bool) -> None:
    await group.make(pinned(0.5))
    async with group.client(limit=1) as client:
        await group.publish(2)
        message = await anext(client)
        if not busy:
            message.ack()
            message = await anext(client)
            message.ack()
        pin = client.pin_id
        # The clock of this test is a pull that would be served as soon as the pin was gone.
        rival = await (await group.raw()).pull(group=GROUP, seconds=1.5)
        assert (await rival.ended())[0] == 408
        if busy:
            message.ack()
            message = await anext(client)
        else:
            await group.publish(1)
            message = await anext(client)
        assert rival.messages == []
        assert (message.pin_id, client.pin_id) == (pin, pin)
        assert client.metrics.pins_lost.value == 0

        async def one_is_open() -> bool:
            return (await group.info()).ack_pending == 1

        await eventually(one_is_open)  # the server takes acknowledgements and pulls in on different ways


async def test_who_is_unpinned_gives_back_what_it_has_not_begun_and_pulls_on(group: GroupKit) -> None:
    await group.make(pinned(60.0))
    async with group.client(limit=50) as first:
        sent = sorted(await group.publish(40))
        begun = await anext(first)
        await eventually(lambda: first.held == 40)
        async with Member(group) as second:
            await group.standing(2)
            await unpin(group.kit.api, group.stream, group.consumer, GROUP)
            sent += await group.publish(1)
            await eventually(lambda: len(second.seqs) == 40)
            begun.ack()  # what is in hand is still its own to finish
            await eventually(group.all_acked)
            assert sorted(second.seqs) == sent[1:]
            assert (first.pin, first.held) == (PinState.UNPINNED, 0)
        await group.publish(1)
        async with asyncio.timeout(10):
            message = await anext(first)
        message.ack()
        assert first.pin is PinState.PINNED


async def test_the_state_of_all_groups_is_found(group: GroupKit) -> None:
    await group.make(pinned(5.0))
    async with Member(group) as member:
        await group.publish(1)
        await eventually(lambda: member.client.pin is PinState.PINNED)
        (found,) = await find_groups(group.kit.api, group.stream)
        assert (found.consumer, found.group, found.state.pinned_id) == (
            group.consumer,
            pinned(5.0),
            member.client.pin_id,
        )
        everywhere = await find_groups(group.kit.api)
        assert [(each.stream, each.consumer) for each in everywhere].count((group.stream, group.consumer)) == 1


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import asyncio, os, sys
from parti.jetstream.pull_client import PullClient

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

async def main(url, stream, consumer):
    client = PullClient(url, stream=stream, consumer=consumer, group="g", limit=10,
                        on_pinned=lambda pin: say("pinned", pin), on_unpinned=lambda reason: say("unpinned", reason))
    async with client:
        async for message in client:
            say("message", message.seq)
            message.ack()

asyncio.run(main(*sys.argv[1:]))
"""


class Process:
    """A client in a process of its own; what it says goes to a file."""

    def __init__(self, group: GroupKit, said: Path) -> None:
        self._said = said
        with said.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, group.kit.url, group.stream, group.consumer],
                stdout=out,
                env=environment(),
            )

    @property
    def words(self) -> list[list[str]]:
        return [line.split() for line in whole_lines(self._said)]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(EXIT_S)

    def says(self, word: str) -> bool:
        return any(words[0] == word for words in self.words)


async def publish_until(group: GroupKit, condition: Callable[[], bool]) -> None:
    """Publish, slowly, until it holds: what is sent before goes to the client that is pinned."""

    async def one_more() -> bool:
        await group.publish(1)
        return condition()

    await eventually(one_more)


async def test_after_a_kill_the_next_client_is_pinned_within_the_timeout(group: GroupKit, tmp_path: Path) -> None:
    await group.make(pinned(1.0))
    with Process(group, tmp_path / "said") as victim:
        await group.publish(1)
        await eventually(lambda: victim.says("message"), 20)
        async with Member(group) as heir:
            await group.standing(2)
            victim.process.send_signal(signal.SIGKILL)
            victim.process.wait(EXIT_S)
            killed = unhindered_s()
            sent = await group.publish(5)
            await eventually(lambda: heir.client.pin is PinState.PINNED)
            assert unhindered_s() - killed <= 4.0
            await eventually(lambda: set(heir.seqs) == set(sent))


async def test_a_client_that_was_stopped_finds_its_pin_gone(group: GroupKit, tmp_path: Path) -> None:
    await group.make(pinned(1.0))
    with Process(group, tmp_path / "said") as sleeper:
        await group.publish(1)
        await eventually(lambda: sleeper.says("message"), 20)
        async with Member(group) as heir:
            await group.standing(2)
            os.kill(sleeper.process.pid, signal.SIGSTOP)
            await publish_until(group, lambda: heir.client.pin is PinState.PINNED)
            os.kill(sleeper.process.pid, signal.SIGCONT)
            await publish_until(group, lambda: sleeper.says("unpinned"))
            assert heir.seqs


async def test_a_raw_puller_and_a_client_agree_on_who_is_pinned(group: GroupKit) -> None:
    await group.make(pinned(60.0))
    raw = await group.raw()
    pull = await raw.pull(group=GROUP)
    sent = await group.publish(1)
    assert seq_of(await pull.message()) == sent[0]
    async with Member(group) as member:
        await group.standing(1)
        assert isinstance(member.client, PullClient)
        await unpin(group.kit.api, group.stream, group.consumer, GROUP)
        sent = await group.publish(1)
        await eventually(lambda: member.seqs == sent)
