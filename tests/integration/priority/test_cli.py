"""`parti priority`: what an operator sees of groups, and what is refused in one line."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.integration.commands import type_command
from tests.integration.conftest import eventually
from tests.integration.priority.kit import GROUP, GroupKit
from tests.integration.processes import EXIT_S, command, environment

from parti.cli.main import main
from parti.core.priority import Policy, PriorityGroup
from parti.jetstream.priority import ensure_consumer

PINNED = PriorityGroup(GROUP, Policy.PINNED, timeout_s=90.0)


class Operator:
    """Types commands about the server of a kit."""

    def __init__(self, group: GroupKit, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = group.kit.url
        self._capsys = capsys

    async def type(self, *arguments: str) -> tuple[int, str]:
        """Run a command in this process; returns its exit code and what it printed (code 2: on stderr)."""
        said = await type_command(self._capsys, "priority", *arguments, "--nats", self._url)
        if said.code == 2:
            assert (said.out, len(said.err.splitlines())) == ("", 1)
            return said.code, said.err
        return said.code, said.out

    async def ask(self, *arguments: str) -> dict[str, Any]:
        code, text = await self.type(*arguments, "--json")
        assert code == 0
        answer: dict[str, Any] = json.loads(text)
        return answer


@pytest.fixture
def operator(group: GroupKit, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(group, capsys)


async def test_status_shows_who_is_pinned_and_what_waits(group: GroupKit, operator: Operator) -> None:
    await group.make(PINNED)
    overflow = PriorityGroup("eu", Policy.OVERFLOW)
    await ensure_consumer(group.kit.connection, group.stream, "regions", overflow)
    await ensure_consumer(group.kit.connection, group.stream, "plain", None)
    await group.publish(3)
    async with group.client(limit=1) as client:
        await anext(client)
        (pinned,) = (await operator.ask("status", group.stream, group.consumer))["groups"]
        assert pinned["pinned_since"]
        assert {key: value for key, value in pinned.items() if key not in {"pinned_since", "waiting_pulls"}} == {
            "stream": group.stream,
            "consumer": group.consumer,
            "group": GROUP,
            "policy": "pinned_client",
            "timeout_s": 90.0,
            "pinned": client.pin_id,
            "pending": 2,
            "ack_pending": 1,
        }
        both = (await operator.ask("status", group.stream))["groups"]
        assert {each["consumer"]: each["pinned"] for each in both} == {"shared": client.pin_id, "regions": None}
        code, text = await operator.type("status", group.stream)
        assert code == 0
        assert f"stream {group.stream}: 2 priority groups" in text
        assert client.pin_id in text
        assert "plain" not in text
    everywhere = (await operator.ask("status"))["groups"]
    assert {each["consumer"] for each in everywhere if each["stream"] == group.stream} == {"shared", "regions"}


async def test_unpin_hands_over_to_another_client(group: GroupKit, operator: Operator) -> None:
    await group.make(PINNED)
    assert await operator.ask("unpin", group.stream, group.consumer) == {
        "stream": group.stream,
        "consumer": group.consumer,
        "group": GROUP,
        "unpinned": None,
    }
    async with group.client() as first:
        await group.publish(1)
        (await anext(first)).ack()
        old = first.pin_id
        async with group.client() as second:
            await group.standing(3)
            code, text = await operator.type("unpin", group.stream, group.consumer, "--group", GROUP)
            assert (code, text) == (0, f"Group g of consumer shared: {old} is pinned no more.\n")
            await group.publish(1)
            (await anext(second)).ack()
            assert second.pin_id not in {"", old}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "NONE"), "stream 'NONE' does not exist; streams here:"),
        (("status", "{stream}", "none"), "consumer 'none' does not exist; consumers here: plain, regions, shared"),
        (("status", "a.b"), "stream name 'a.b' is not valid"),
        (("status", "{stream}", ">"), "consumer name '>' is not valid"),
        (("watch", "NONE"), "stream 'NONE' does not exist"),
        (("unpin", "{stream}", "none"), "consumer 'none' does not exist"),
        (("unpin", "{stream}", "plain"), "has no priority group, so nobody can be pinned"),
        (("unpin", "{stream}", "regions"), "has the policy overflow, which pins nobody"),
        (("unpin", "{stream}", "shared", "--group", "h"), "has no group 'h'; its group is 'g'"),
        (("unpin", "{stream}", "shared", "--group", "a b"), "1 to 16 characters"),
        (("unpin", "{stream}"), "Missing argument 'CONSUMER'"),
        (("pin",), "No such command 'pin'"),
    ],
)
async def test_what_cannot_be_done_is_one_line_and_code_2(
    group: GroupKit, operator: Operator, arguments: tuple[str, ...], said: str
) -> None:
    await group.make(PINNED)
    await ensure_consumer(group.kit.connection, group.stream, "regions", PriorityGroup("eu", Policy.OVERFLOW))
    await ensure_consumer(group.kit.connection, group.stream, "plain", None)
    code, text = await operator.type(*(each.format(stream=group.stream) for each in arguments))
    assert code == 2
    assert said in text


async def test_without_a_server_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_settings_of_this_machine: None
) -> None:
    monkeypatch.setenv("PARTI_CONNECT_TIMEOUT_S", "0.3")
    assert await asyncio.to_thread(main, ["priority", "status", "--nats", "nats://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def start_watch(group: GroupKit, said: Path, *options: str) -> subprocess.Popen[bytes]:
    with said.open("wb") as out:
        return subprocess.Popen(
            command("priority", "watch", group.stream, group.consumer, "--nats", group.kit.url, *options),
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )


@pytest.mark.parametrize("as_json", [True, False])
async def test_watch_tells_who_is_pinned_and_every_switch_until_it_is_interrupted(
    group: GroupKit, operator: Operator, tmp_path: Path, as_json: bool
) -> None:
    await group.make(PINNED)
    said = tmp_path / "said"
    watch = start_watch(group, said, *(["--json"] if as_json else []))
    try:
        await eventually(lambda: len(said.read_text().splitlines()) == 1, 20)
        async with group.client() as client:
            await group.publish(1)
            (await anext(client)).ack()
            pin = client.pin_id
            await eventually(lambda: len(said.read_text().splitlines()) == 2)
            await operator.type("unpin", group.stream, group.consumer)
            await eventually(lambda: len(said.read_text().splitlines()) == 3)
        watch.send_signal(signal.SIGINT)
        assert watch.wait(EXIT_S) == 0
    finally:
        watch.kill()
        watch.wait(EXIT_S)
    now, pinned, unpinned = said.read_text().splitlines()[:3]
    if not as_json:
        assert now.endswith(f"{group.stream} shared g: nobody is pinned")
        assert pinned.endswith(f"{group.stream} shared g: {pin} is pinned")
        assert unpinned.endswith(f"{group.stream} shared g: unpinned (admin)")
        return
    events = [json.loads(line) for line in (now, pinned, unpinned)]
    assert [event["event"] for event in events] == ["now", "pinned", "unpinned"]
    assert [event["pinned"] for event in events] == [None, pin, None]
    assert events[2]["reason"] == "admin"
    assert all(event["consumer"] == group.consumer for event in events)
