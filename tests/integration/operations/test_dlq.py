"""`parti dlq`: dead letters listed, shown, sent back exactly once and in order, removed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.operations.operators import Operator
from tests.integration.processes import command, environment
from tests.pace import unhindered_s

import parti
from parti.errors import NotFound
from parti.jetstream.scan import scan
from parti.model.letter_mark import marks_stream


async def bury(kit: Kit, each: dict[str, int], reason: str = "broken", *, large: int = 0) -> None:
    """Have a worker reject so many messages of each partition."""
    before = await _letters(kit)
    wanted = before + sum(each.values())

    async def refuse(message: parti.Message) -> None:
        raise parti.Reject(f"{reason}: {message.data[:20].decode()}")

    for partition, number in each.items():
        for n in range(number):
            data = f"{partition}/{n}".encode() + b"." * large
            await kit.api.publish(kit.subject(partition), data, headers={"Trace": f"t{n}"})

    async def all_buried() -> bool:
        return await _letters(kit) >= wanted

    async with kit.app(refuse).running():
        await eventually(all_buried, 20)
    there = await _letters(kit)
    assert there == wanted, f"{before} letters, then {there}, not {wanted}"


async def _letters(kit: Kit) -> int:
    try:
        return (await kit.api.stream_info(f"d{kit.root}")).messages
    except NotFound:
        return 0


async def sent_back(kit: Kit) -> dict[str, list[str]]:
    """What was sent back, by subject, in the order of the stream."""
    found: dict[str, list[str]] = defaultdict(list)
    async for message in scan(kit.connection, kit.api, kit.stream, payload=True):
        if "Parti-Replay-Of" in message.headers:
            found[message.subject].append(message.data.rstrip(b".").decode())
    return dict(found)


@pytest.fixture
async def letters(kit: Kit, operator: Operator) -> Any:
    yield f"d{kit.root}"
    try:
        await kit.delete_stream(marks_stream(f"d{kit.root}"))
    except NotFound:
        pass


# ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_letters_are_listed_and_counted_by_partition_and_reason(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await bury(kit, {"a": 2, "b": 1}, "no such order")
    await bury(kit, {"a": 4}, "too old")
    found = await operator.ask("dlq", "ls", "--nats", kit.url)
    assert (found["total"], found["by_partition"]) == (4 + 3, {"a": 6, "b": 1})
    assert found["by_reason"] == {"too old": 4, "no such order": 3}
    first = found["letters"][0]
    assert (first["seq"], first["attempts"], first["worker"], first["replay"]) == (1, 1, "one", None)
    assert (first["stream"], first["subject"]) == (kit.stream, kit.subject(first["partition"]))
    code, text = await operator.type("dlq", "ls", "--nats", kit.url, "--limit", "2")
    assert code == 0
    assert "… and 5 older letters (--limit)" in text
    assert "reasons: too old 4, no such order 3" in text
    old = await operator.ask("dlq", "ls", "--nats", kit.url, "--reason", "NO SUCH", "--partition", "a")
    assert [letter["error"] for letter in old["letters"]] == ["no such order: a/0", "no such order: a/1"]
    assert (await operator.ask("dlq", "ls", "--nats", kit.url, "--older-than", "1h"))["total"] == 0
    assert (await operator.ask("dlq", "ls", "--nats", kit.url, "--newer-than", "1h"))["total"] == 7


async def test_a_letter_is_shown_with_headers_and_payload_as_text_or_bytes(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await bury(kit, {"a": 1})
    code, text = await operator.type("dlq", "show", "1", "--nats", kit.url)
    assert code == 0
    for part in (f"message 1 of stream {kit.stream}", "broken: a/0", "Trace: t0", "payload, 3 bytes:\na/0"):
        assert part in text
    cut = await operator.ask("dlq", "show", "1", "--nats", kit.url, "--bytes", "2")
    assert (cut["payload_text"], cut["payload_bytes"], cut["payload_cut"]) == ("a/", 3, True)
    await kit.api.publish(f"d{kit.root}.x", bytes(range(40)), headers={"Parti-Error": "binary"})
    raw = await operator.ask("dlq", "show", "2", "--nats", kit.url)
    assert (raw["payload_text"], raw["payload_hex"]) == (None, bytes(range(40)).hex())
    _, text = await operator.type("dlq", "show", "2", "--nats", kit.url)
    assert "00000010  10 11 12" in text


# ── sending back ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_letters_are_sent_back_in_order_with_their_headers_and_removed(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await bury(kit, {"a": 3, "b": 2})
    answer = await operator.ask("dlq", "replay", "--partition", "a", "--yes", "--nats", kit.url)
    assert (answer["ok"], len(answer["sent"]), answer["failed"]) == (True, 3, [])
    assert await sent_back(kit) == {kit.subject("a"): ["a/0", "a/1", "a/2"]}
    left = await operator.ask("dlq", "ls", "--nats", kit.url)
    assert left["by_partition"] == {"b": 2}
    messages = [m async for m in scan(kit.connection, kit.api, kit.stream, start=6)]
    assert [m.headers["Trace"] for m in messages] == ["t0", "t1", "t2"]
    assert not any(name.startswith("Parti-") for m in messages for name in m.headers if name != "Parti-Replay-Of")
    code, text = await operator.type("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert (code, text) == (0, "Sent 2 dead letters.\n")
    assert (await operator.type("dlq", "ls", "--nats", kit.url))[1].startswith("No dead letters")


async def test_letters_that_are_kept_are_marked_and_not_sent_twice(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await bury(kit, {"a": 2})
    first = await operator.ask("dlq", "replay", "1", "2", "--keep", "--yes", "--nats", kit.url)
    assert [each["sent_as"] for each in first["sent"]] == [3, 4]
    again = await operator.ask("dlq", "replay", "--all", "--keep", "--yes", "--nats", kit.url)
    assert (again["sent"], again["sent_before"]) == (first["sent"], 2)
    assert await sent_back(kit) == {kit.subject("a"): ["a/0", "a/1"]}
    _, text = await operator.type("dlq", "ls", "--nats", kit.url)
    assert "(sent again as 3) broken: a/0" in text
    on_purpose = await operator.ask("dlq", "replay", "1", "--again", "--yes", "--nats", kit.url)
    assert on_purpose["sent"] == [{"letter": 1, "sent_as": 5}]
    assert await sent_back(kit) == {kit.subject("a"): ["a/0", "a/1", "a/0"]}


async def test_a_run_that_is_killed_again_and_again_loses_nothing_and_sends_nothing_twice(
    kit: Kit, operator: Operator, letters: str, tmp_path: Path
) -> None:
    each = dict.fromkeys("abcdef", 30)
    await bury(kit, each)
    config = await kit.api.stream_config(kit.stream)
    # The stream itself recognises no repetition: what keeps letters from being sent twice is parti alone.
    await kit.api.call(f"STREAM.UPDATE.{kit.stream}", {**config, "duplicate_window": 100_000_000})
    total, kills = sum(each.values()), 0
    arguments = command("dlq", "replay", "--all", "--yes", "--nats", kit.url, "--stream", letters)
    while (await kit.api.stream_info(letters)).messages:
        before = (await kit.api.stream_info(kit.stream)).last_seq
        process = started(arguments, tmp_path)
        try:
            # A little further each time: at different points of the work.
            await further(kit, process, before + 23 + 9 * kills)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)
    assert kills >= 3
    assert await sent_back(kit) == {
        kit.subject(partition): [f"{partition}/{n}" for n in range(number)] for partition, number in each.items()
    }
    assert (await kit.api.stream_info(kit.stream)).last_seq == 2 * total


def started(arguments: list[str], directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(arguments, cwd=directory, env=environment(), stdout=subprocess.DEVNULL)


async def further(kit: Kit, process: subprocess.Popen[bytes], seq: int) -> None:
    """Wait until the stream has got so far, or the process has ended."""

    async def is_further() -> bool:
        return process.poll() is not None or (await kit.api.stream_info(kit.stream)).last_seq >= seq

    await eventually(is_further, 20)


async def test_what_cannot_be_sent_stays_and_is_named(kit: Kit, operator: Operator, letters: str) -> None:
    await bury(kit, {"a": 1})
    await kit.api.publish(f"d{kit.root}.gone.x", b"lost", headers={"Parti-Stream": "GONE", "Parti-Partition": "x"})
    code, text = await operator.type("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert code == 1
    assert "Sent 1 dead letter." in text
    assert "letter 2 was not sent: its stream 'GONE' is gone" in text
    assert (await operator.ask("dlq", "ls", "--nats", kit.url))["total"] == 1


async def test_letters_of_a_mapped_stream_go_where_they_came_from(kit: Kit, operator: Operator, letters: str) -> None:
    await kit.delete_stream()
    destination = f"{kit.root}.{{{{wildcard(1)}}}}.{{{{partition(4,1)}}}}"
    transform = {"src": f"{kit.root}.*", "dest": destination}
    await kit.create_stream(subjects=[f"{kit.root}.*"], subject_transform=transform)
    await kit.api.publish(kit.subject("ada"), b"one")
    stored = await kit.api.next_on_subject(kit.stream, ">", 1)
    assert stored is not None
    headers = {"Parti-Stream": kit.stream, "Parti-Subject": stored.subject, "Parti-Sequence": "1"}
    await kit.api.ensure_stream({"name": letters, "subjects": [f"{letters}.>"]})
    await kit.api.publish(f"{letters}.{kit.stream}.{stored.subject}", b"one", headers=headers)
    assert (await operator.ask("dlq", "replay", "1", "--yes", "--nats", kit.url))["ok"]
    assert await sent_back(kit) == {stored.subject: ["one"]}


# ── removing, and refusals ────────────────────────────────────────────────────────────────────────────────────────


async def test_letters_are_removed_by_choice(kit: Kit, operator: Operator, letters: str) -> None:
    await bury(kit, {"a": 3, "b": 2})
    assert await operator.ask("dlq", "purge", "--partition", "b", "--yes", "--nats", kit.url) == {"removed": 2}
    assert await operator.ask("dlq", "purge", "--older-than", "1h", "--yes", "--nats", kit.url) == {"removed": 0}
    assert (await operator.ask("dlq", "ls", "--nats", kit.url))["by_partition"] == {"a": 3}
    code, text = await operator.type("dlq", "purge", "--all", "--yes", "--nats", kit.url)
    assert (code, text) == (0, "Removed 3 dead letters.\n")


async def test_nothing_is_changed_without_a_choice_or_a_confirmation(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await bury(kit, {"a": 2})
    before = (await kit.api.stream_info(letters)).messages
    for verb in ("replay", "purge"):
        for arguments, reason in (
            ((), "say which dead letters"),
            (("1", "--all"), "exclude each other"),
            (("--all",), "nobody is here to confirm it; use --yes"),
            (("77", "--yes"), "there is no letter 77 in stream"),
            (("1", "77", "78", "--yes"), "there are no letters 77, 78"),
            (("--partition", "zz", "--yes"), "no dead letters of partition 'zz'; there are some of a"),
            (("--older-than", "soon", "--yes"), "'soon' is no age"),
            (("--all", "--yes", "--stream", "nowhere"), "there is no dead-letter stream 'nowhere' here"),
        ):
            code, text = await operator.type("dlq", verb, *arguments, "--nats", kit.url)
            assert (code, reason in text) == (2, True), text
    assert (await kit.api.stream_info(letters)).messages == before
    assert await sent_back(kit) == {}


async def test_nobody_is_asked_about_no_letters(kit: Kit, operator: Operator, letters: str) -> None:
    await bury(kit, {"a": 1})
    for verb, done in (("replay", "Sent 0 dead letters.\n"), ("purge", "Removed 0 dead letters.\n")):
        assert await operator.type("dlq", verb, "--older-than", "1h", "--nats", kit.url) == (0, done)
    assert (await kit.api.stream_info(letters)).messages == 1


async def test_somebody_at_a_terminal_is_asked(kit: Kit, operator: Operator, letters: str) -> None:
    from tests.integration.terminal import Terminal  # noqa: PLC0415 - needs a terminal only here

    await bury(kit, {"a": 1})
    for answer, code, left in (("n", 1, 1), ("y", 0, 0)):
        terminal = Terminal("dlq", "purge", "1", "--nats", kit.url, "--stream", letters)
        await eventually(lambda t=terminal: "Remove 1 dead letter for good?" in t.text)  # type: ignore[misc]
        terminal.type(f"{answer}\n")
        assert await terminal.ends() == code, terminal.text
        assert (await kit.api.stream_info(letters)).messages == left


@pytest.mark.parametrize("typed", ["", "y", "half an answer\x04"], ids=["nothing", "no Enter", "Ctrl-D"])
@pytest.mark.parametrize("verb", ["purge", "replay"])
async def test_ctrl_c_at_the_question_ends_it_at_once_and_changes_nothing(
    kit: Kit, operator: Operator, letters: str, verb: str, typed: str
) -> None:
    from tests.integration.terminal import Terminal  # noqa: PLC0415 - needs a terminal only here

    await bury(kit, {"a": 1})
    terminal = Terminal("dlq", verb, "1", "--nats", kit.url, "--stream", letters)
    await eventually(lambda: "[y/N]: " in terminal.text)
    terminal.type(typed)
    await eventually(lambda: terminal.text.replace("^D\b\b", "").endswith(typed.rstrip("\x04")))
    began_s = unhindered_s()
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.ends() == 130
    assert unhindered_s() - began_s < 2.0
    _, _, after = terminal.text.partition("[y/N]: ")
    assert after.split("\r\n")[1:] in ([], [""]), terminal.text  # the last line may not have been read yet
    assert (await kit.api.stream_info(letters)).messages == 1


@pytest.mark.parametrize("stdin", ["<&-", "</dev/null", "<<E\ny\nE"], ids=["closed", "empty", "pipe"])
async def test_without_a_terminal_the_question_is_refused_in_a_line(
    kit: Kit, operator: Operator, letters: str, stdin: str
) -> None:
    await bury(kit, {"a": 1})
    asking = command("dlq", "purge", "1", "--nats", kit.url, "--stream", letters)
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'exec "$@" {stdin}\n', "sh", *asking),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    out, said = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, out) == (2, b"")
    assert said.count(b"\n") == 1
    assert b"nobody is here to confirm it; use --yes" in said


async def test_the_json_of_a_listing_is_locked(kit: Kit, operator: Operator, letters: str) -> None:
    await bury(kit, {"a": 1})
    _, text = await operator.type("dlq", "ls", "--json", "--nats", kit.url)
    answer = json.loads(text)
    assert set(answer) == {"stream", "at", "total", "by_reason", "by_partition", "letters"}
    assert set(answer["letters"][0]) == {
        *(
            "seq",
            "stored_at",
            "partition",
            "stream",
            "origin_seq",
            "subject",
            "error",
            "attempts",
            "worker",
            "cut",
            "replay",
        ),
    }
