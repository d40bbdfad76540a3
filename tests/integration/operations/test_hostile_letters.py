"""Dead letters and records with anything in them: shown without harm, sent back as they were, or refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.integration.conftest import Kit, eventually
from tests.integration.hostile import ESCAPES, raw_publisher
from tests.integration.operations.operators import FLEET, Operator
from tests.integration.terminal import Terminal

import parti
from parti.core.dead_letter import ORIGINALS
from parti.errors import NotFound
from parti.jetstream.kv import Bucket
from parti.jetstream.letters import Letters
from parti.model.fleet import HealthRecord, MemberRecord, encode, key_of
from parti.model.headers import parse_all_headers, parse_headers
from parti.model.letter_mark import marks_stream

SHOWN = "\\x1b[2J\\x1b]0;owned\\x07\\x9b31m\\u202e"
MARKUP = "[bold red]no markup[/]"


@pytest.fixture
async def letters(kit: Kit, operator: Operator) -> Any:
    yield f"d{kit.root}"
    try:
        await kit.delete_stream(marks_stream(f"d{kit.root}"))
    except NotFound:
        pass


def is_harmless(text: str) -> bool:
    """Whether nothing of the escapes has reached a terminal; colours of our own may have."""
    return not any(piece in text for piece in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"))


async def refuse(message: parti.Message) -> None:
    raise parti.Reject("broken")


async def bury(kit: Kit, number: int = 1) -> None:
    """Have a worker reject all that is in the stream."""
    async with kit.app(refuse).running() as worker:
        await eventually(lambda: worker.metrics.dead_letters.value == number, 10)
        await eventually(kit.all_acked)


async def remade(kit: Kit, retention: str, **config: Any) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention, **config)


# ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_escapes_in_subject_headers_error_and_payload_are_shown_as_text(
    kit: Kit, operator: Operator, letters: str
) -> None:
    async def handle(message: parti.Message) -> None:
        raise ValueError(f"{ESCAPES}{MARKUP}")

    odd = ESCAPES.encode()
    async with raw_publisher(kit.url) as publisher:
        await publisher.hpub(f"{kit.root}.".encode() + odd, [(b"Trace", odd + MARKUP.encode())], odd)
        async with kit.app(handle, attempts=1).running() as worker:
            await eventually(lambda: worker.metrics.dead_letters.value == 1, 10)
        # One that no worker has written.
        names = (b"Parti-Error", b"Parti-Stream", b"Parti-Subject", b"Parti-Partition", b"Parti-Worker", b"Parti-Cut")
        await publisher.hpub(f"{letters}.x".encode(), [(name, odd) for name in names], odd)
    for arguments, parts in (
        (("ls",), (f"ValueError: {SHOWN}{MARKUP}",)),
        (("show", "1"), (f"{kit.root}.{SHOWN}", f"Trace: {SHOWN}{MARKUP}", f"ValueError: {SHOWN}{MARKUP}")),
        (("show", "2"), (f"subject {SHOWN}", f"stream {SHOWN}", f"by {SHOWN}")),
        (("replay", "2", "--yes"), (SHOWN,)),
    ):
        _, text = await operator.type("dlq", *arguments, "--nats", kit.url)
        assert is_harmless(text), text
        assert text.isascii() or "…" in text
        for part in parts:
            assert part in text
    terminal = Terminal("dlq", "show", "1", "--nats", kit.url, "--stream", letters)
    assert await terminal.ends() == 0
    assert is_harmless(terminal.text), terminal.text
    assert "\\x1b[2J" in terminal.text
    terminal = Terminal("dlq", "replay", "2", "--nats", kit.url, "--stream", letters)
    await eventually(lambda: "back to" in terminal.text)
    terminal.type("n\n")
    await terminal.ends()
    assert is_harmless(terminal.text), terminal.text


async def test_escapes_in_records_are_shown_as_text_by_status_top_and_workers(kit: Kit, operator: Operator) -> None:
    async def handle(message: parti.Message) -> None:
        pass

    text = f"{ESCAPES}{MARKUP}"
    now = datetime.now(UTC)
    async with kit.app(handle, ["a"], **FLEET).running():
        bucket = Bucket(kit.api, f"b{kit.root}")
        member = MemberRecord(
            token="t", incarnation=1, host=text, identity=text, version=text, started_at=now, ttl_seconds=60
        )
        health = HealthRecord(
            incarnation=1, state=text, problems=(text,), failing={text: text}, parked=(text,), at=now
        )
        await bucket.put(key_of("ids", "evil"), encode(member), revision=0, ttl_s=60)
        await bucket.put(key_of("health", "evil"), encode(health), revision=0)
        for arguments, parts in (
            (("status",), (f"evil: {SHOWN}{MARKUP}",)),
            (("top", "--once"), (f"{SHOWN}{MARKUP} fails: {SHOWN}{MARKUP}",)),
            (("workers",), (SHOWN,)),
            (("workers", "evil"), (SHOWN,)),
        ):
            _, shown = await operator.type(*arguments, *operator.place)
            assert is_harmless(shown), shown
            for part in parts:
                assert part in shown
        terminal = Terminal("status", *operator.place)
        assert await terminal.ends() == 1
        assert is_harmless(terminal.text), terminal.text
        assert "\\x1b[2J" in terminal.text


async def test_an_error_of_the_command_line_is_one_harmless_line(kit: Kit, operator: Operator) -> None:
    code, text = await operator.type("worker", f"{ESCAPES}nowhere:app")
    assert code == 2
    assert is_harmless(text)
    assert SHOWN in text


# ── sending back what is not in the letter ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_letter_without_all_headers_is_sent_back_with_them(
    kit: Kit, operator: Operator, letters: str, retention: str
) -> None:
    await remade(kit, retention)
    big = "v" * 64_000
    seq = await kit.api.publish(kit.subject("a"), b"body", headers={"Big": big, "Trace": "t", "Nats-Msg-Id": "mine"})
    await bury(kit)
    listed = await operator.ask("dlq", "ls", "--nats", kit.url)
    assert [(each["origin_seq"], each["cut"]) for each in listed["letters"]] == [(seq, ["headers"])]
    _, text = await operator.type("dlq", "show", str(listed["letters"][0]["seq"]), "--nats", kit.url)
    assert "headers (see " in text
    answer = await operator.ask("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert answer["failed"] == []
    again = await kit.api.next_on_subject(kit.stream, kit.subject("a"), seq + 1)
    assert again is not None
    assert again.header is not None
    headers = parse_headers(again.header)
    assert (again.data, headers["Big"], headers["Trace"]) == (b"body", big, "t")
    assert headers["Nats-Msg-Id"] != "mine"
    # Nothing is left of it here, what was stored beside it included.
    assert (await kit.api.stream_info(letters)).messages == 0


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_letter_without_its_payload_is_shown_and_sent_back_with_it(
    kit: Kit, operator: Operator, letters: str, retention: str
) -> None:
    await remade(kit, retention)
    data = b"begin" + b"." * (kit.connection.max_payload - 700) + b"end"
    seq = await kit.api.publish(kit.subject("a"), data)
    await bury(kit)
    (letter,) = (await operator.ask("dlq", "ls", "--nats", kit.url))["letters"]
    shown = await operator.ask("dlq", "show", str(letter["seq"]), "--bytes", "5", "--nats", kit.url)
    assert (shown["payload_bytes"], shown["payload_text"]) == (len(data), "begin")
    answer = await operator.ask("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert answer["failed"] == []
    again = await kit.api.next_on_subject(kit.stream, kit.subject("a"), seq + 1)
    assert again is not None
    assert again.data == data
    assert (await kit.api.stream_info(letters)).messages == 0


async def test_a_letter_whose_original_is_gone_is_refused_in_one_line(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await kit.api.publish(kit.subject("a"), b"x", headers={"Big": "v" * 64_000})
    await kit.api.publish(kit.subject("b"), b"y" * (kit.connection.max_payload - 300))
    await bury(kit, 2)
    # Made anew, with other messages under the same sequences.
    await remade(kit, "limits")
    await kit.publish(["a", "b"])
    code, text = await operator.type("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert code == 1
    for part in ("headers", "payload"):
        assert f"was not sent: its {part} was left in stream {kit.stream!r} and is gone there" in text
    assert (await kit.api.stream_info(letters)).messages == 2


async def test_what_lies_beside_a_letter_goes_with_it(kit: Kit, operator: Operator, letters: str) -> None:
    await remade(kit, "workqueue")
    await kit.api.publish(kit.subject("a"), b"x", headers={"Big": "v" * 64_000})
    await bury(kit)
    found = await Letters.open(kit.connection, kit.api, letters)
    (letter,) = [each async for each in found.all()]
    assert letter.original is not None
    assert await found.get(letter.original[1][0]) is None
    assert await operator.ask("dlq", "purge", "--all", "--yes", "--nats", kit.url) == {"removed": 1}
    assert (await kit.api.stream_info(letters)).messages == 0


async def test_a_letter_that_names_another_letter_as_its_original_takes_nothing_with_it(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await kit.publish(["a"])
    await bury(kit)
    await kit.api.publish(f"{letters}.x", b"", headers={"Parti-Original": "0 in 1", "Parti-Cut": "payload"})
    assert await operator.ask("dlq", "purge", "2", "--yes", "--nats", kit.url) == {"removed": 1}
    assert (await operator.ask("dlq", "ls", "--nats", kit.url))["total"] == 1


async def test_a_letter_that_somebody_else_wrote_steers_no_server_when_it_is_sent(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await remade(kit, "limits", allow_rollup_hdrs=True)
    sent = await kit.publish(["a"])
    await bury(kit)
    story = [
        (b"Parti-Stream", kit.stream.encode()),
        (b"Parti-Subject", kit.subject("a").encode()),
        # No white space for a parser of headers, but for a client that sends them.
        ("\u00a0Nats-Rollup".encode(), b"all"),
        (b"\x1cNats-Rollup", b"all"),
    ]
    async with raw_publisher(kit.url) as publisher:
        await publisher.hpub(f"{letters}.x".encode(), story, b"forged")
    answer = await operator.ask("dlq", "replay", "2", "--yes", "--nats", kit.url)
    assert answer["failed"] == []
    assert (await kit.api.stream_info(kit.stream)).first_seq == sent["a"][0]
    again = await kit.api.next_on_subject(kit.stream, ">", answer["sent"][0]["sent_as"])
    assert again is not None
    assert again.header is not None
    assert b"Rollup" not in again.header


async def test_a_letter_that_somebody_else_wrote_is_not_sent_into_a_bucket(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await kit.publish(["a"])
    await bury(kit)
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    story = {"Parti-Stream": bucket.stream, "Parti-Subject": f"$KV.{bucket.name}.orders"}
    await kit.api.publish(f"{letters}.x", b"{}", headers=story)
    code, text = await operator.type("dlq", "replay", "2", "--yes", "--nats", kit.url)
    assert code == 1
    assert "is a subject of the server or of a bucket" in text
    assert await bucket.get("orders") is None


@pytest.mark.parametrize("where", ["1", "2 2"], ids=["a letter", "twice"])
async def test_a_letter_is_sent_with_no_original_but_its_own(
    kit: Kit, operator: Operator, letters: str, where: str
) -> None:
    await kit.publish(["a"])
    await bury(kit)
    await kit.api.publish(f"{letters}.{kit.stream}.{ORIGINALS}.9", b"part")
    story = {
        "Parti-Stream": kit.stream,
        "Parti-Subject": kit.subject("a"),
        "Parti-Cut": "payload",
        "Parti-Original": f"0 in {where}",
    }
    await kit.api.publish(f"{letters}.x", b"", headers=story)
    code, text = await operator.type("dlq", "replay", "3", "--yes", "--nats", kit.url)
    assert code == 1
    assert "its payload was left beside it in the dead-letter stream and is gone there" in text


@pytest.mark.parametrize("tokens", [f"{ORIGINALS}.9", "!>.9", ">a.9", "a*b.*9"])
async def test_no_subject_hides_the_dead_letter_of_its_message(
    kit: Kit, operator: Operator, letters: str, tokens: str
) -> None:
    subject = f"{kit.root}.{tokens}"
    async with raw_publisher(kit.url) as publisher:
        await publisher.pub(subject.encode(), b"{}")
    async with kit.app(refuse, subject=f"{kit.root}.{{word}}.{{number}}").running() as worker:
        await eventually(lambda: worker.metrics.dead_letters.value == 1, 10)
    (letter,) = (await operator.ask("dlq", "ls", "--nats", kit.url))["letters"]
    assert letter["subject"] == subject
    code, _ = await operator.type("dlq", "show", "1", "--nats", kit.url)
    assert code == 0


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_header_that_is_repeated_is_not_lost_without_a_word(
    kit: Kit, operator: Operator, letters: str, retention: str
) -> None:
    await remade(kit, retention)
    async with raw_publisher(kit.url) as publisher:
        await publisher.hpub(kit.subject("a").encode(), [(b"Trace", b"1"), (b"Trace", b"2"), (b"Other", b"3")])
        await bury(kit)
    (letter,) = (await operator.ask("dlq", "ls", "--nats", kit.url))["letters"]
    assert letter["cut"] == ["headers"]
    found = await Letters.open(kit.connection, kit.api, letters)
    stored = await found.get(letter["seq"])
    assert stored is not None
    assert stored[0].own_headers == {"Trace": "1", "Other": "3"}
    original = await found.original(stored[0])
    assert original is not None
    assert parse_all_headers(original.header or b"")["Trace"] == ["1", "2"]
    code, text = await operator.type("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert code == 1
    assert "a header of it cannot be sent again as it was" in text


async def test_subjects_that_cannot_be_sent_again_are_refused_and_the_others_go_back(
    kit: Kit, operator: Operator, letters: str
) -> None:
    async with raw_publisher(kit.url) as publisher:
        await publisher.pub(f"{kit.root}.".encode() + b"\xff", b"no text")
        await publisher.pub(f"{kit.root}.".encode() + b"x" * 4_050, b"long")
        await publisher.pub(f"{kit.root}.".encode() + ESCAPES.encode(), b"escapes")
    await kit.publish(["good"])
    await bury(kit, 4)
    code, text = await operator.type("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert code == 1
    assert "Sent 2 dead letters." in text
    assert f"letter 1 was not sent: its subject, '{kit.root}.\\\\xff', is no UTF-8 text" in text
    assert "letter 2 was not sent: a subject of 4,0" in text
    assert "is too long for the server's control line" in text
    again = await kit.api.next_on_subject(kit.stream, f"{kit.root}.{ESCAPES}", 5)
    assert again is not None
    assert again.data == b"escapes"


async def test_what_others_plant_beside_letters_keeps_nobody_from_reading_and_sending_these(
    kit: Kit, operator: Operator, letters: str
) -> None:
    await kit.publish(["good"])
    await bury(kit)
    async with raw_publisher(kit.url) as publisher:
        await publisher.pub(f"{letters}.".encode() + b"\xff", b"no text")
        await publisher.hpub(f"{letters}.x".encode(), [(b"Parti-Error", b"\xff"), (b"\xff", b"\xff")])
        for stream in (b"a b", b"*", b"..", ESCAPES.encode()):
            story = [(b"Parti-Stream", stream), (b"Parti-Cut", b"payload"), (b"Parti-Sequence", b"9" * 5_000)]
            await publisher.hpub(f"{letters}.x".encode(), [*story, (b"Parti-Attempts", "٣".encode())])
    listed = await operator.ask("dlq", "ls", "--nats", kit.url)
    assert listed["total"] == 7
    for letter in listed["letters"]:
        code, _ = await operator.type("dlq", "show", str(letter["seq"]), "--nats", kit.url)
        assert code == 0
    answer = await operator.ask("dlq", "replay", "--all", "--yes", "--nats", kit.url)
    assert [each["letter"] for each in answer["sent"]] == [1]
    assert len(answer["failed"]) == 6
