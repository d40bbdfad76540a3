"""Messages that used to stop a worker or a partition for good, on a real server.

Each of them is dead-lettered with one line in the log, its partition goes on within ten seconds, the others are not
disturbed, and the worker stays healthy on the same connection.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
import structlog
from tests.integration.conftest import Kit, Record, eventually
from tests.integration.handling import headers_of
from tests.integration.hostile import ESCAPES, RawPublisher, raw_publisher
from tests.integration.operations.operators import FLEET

import parti
from parti.app.worker import Worker
from parti.coordination.control_plane import read_keys
from parti.coordination.records import KEYS, Records
from parti.core.dead_letter import Letter
from parti.jetstream.letters import Letters, Original

SOON_S = 10.0
Lines: TypeAlias = list[MutableMapping[str, Any]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Every line that is logged."""
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.fixture
async def publisher(kit: Kit) -> AsyncIterator[RawPublisher]:
    async with raw_publisher(kit.url) as made:
        yield made


def said(lines: Lines, event: str) -> Lines:
    return [line for line in lines if line["event"] == event]


class Poisoned:
    """A handler that fails for what is not called good, with a text of its own choice."""

    def __init__(self, record: Record, text: str = "cannot handle this") -> None:
        self.record = record
        self.text = text

    async def handle(self, message: parti.Message) -> None:
        self.record.note(message)
        if message.data != b"good":
            raise ValueError(self.text)


@asynccontextmanager
async def undisturbed(worker: Worker, kit: Kit, record: Record, partition: str = "good") -> AsyncIterator[None]:
    """Check that what is good is handled soon, in this partition, that the worker is well and was never cut off."""
    connections = await _connections(kit)
    yield
    before = len(record.of(partition))
    await kit.publish(["good"], data=b"good")
    await eventually(lambda: len(record.of(partition)) == before + 1, SOON_S)
    assert worker.health.healthy, dict(worker.health.reasons)
    assert await _connections(kit) == connections


async def _connections(kit: Kit) -> set[str]:
    """What identifies the connections of workers: a lost one comes back as another."""
    entries = await read_keys(kit.connection, kit.api, f"b{kit.root}", KEYS)
    return {member.client for member in Records.of(entries).members.values()}


async def letter_of(kit: Kit, number: int = 0) -> tuple[Letter, dict[str, Any]]:
    letters = await Letters.open(kit.connection, kit.api, f"d{kit.root}")
    found = [each async for each in letters.all()]
    stored = await kit.api.call(f"STREAM.MSG.GET.{letters.name}", {"seq": found[number].seq})
    return found[number], stored["message"]


async def original_of(kit: Kit, letter: Letter) -> Original | None:
    return await (await Letters.open(kit.connection, kit.api, f"d{kit.root}")).original(letter)


# ── the four that were seen ───────────────────────────────────────────────────────────────────────────────────────


async def test_an_exception_text_with_a_lone_surrogate_fails_no_heartbeat(
    kit: Kit, record: Record, lines: Lines
) -> None:
    customer = json.loads('{"customer":"\\ud800"}')["customer"]
    poisoned = Poisoned(record, f"no such customer: {customer}")
    app = kit.app(poisoned.handle, ["bad", "good"], **{**FLEET, "attempts": 2, "backoff_s": (2.5,)})
    async with app.running() as worker, undisturbed(worker, kit, record):
        await kit.publish(["bad"])
        await eventually(lambda: bool(said(lines, "handler failed, will retry")), SOON_S)

        async def told() -> bool:
            entries = await read_keys(kit.connection, kit.api, f"b{kit.root}", KEYS)
            health = Records.of(entries).health
            return any("\\ud800" in each.failing.get("bad", "") for each in health.values())

        await eventually(told, SOON_S)
        await kit.publish(["bad"], data=b"good")
        await eventually(lambda: len(record.of("bad")) == 3, SOON_S)
    assert len(said(lines, "message dead-lettered")) == 1
    assert not said(lines, "heartbeat failed")
    letter, _ = await letter_of(kit)
    assert letter.error == "ValueError: no such customer: \\ud800"


@pytest.mark.parametrize("fleet", [True, False], ids=["fleet", "solo"])
async def test_a_subject_that_fills_the_control_line_becomes_a_dead_letter_and_cuts_no_connection(
    kit: Kit, record: Record, publisher: RawPublisher, lines: Lines, fleet: bool
) -> None:
    subject = f"{kit.root}.{'x' * (4_070 - len(kit.root) - 1)}"
    settings = FLEET if fleet else {}
    # One partition for all subjects, or one for each.
    app = kit.app(Poisoned(record).handle, ["*"] if fleet else None, **{**settings, "attempts": 1})
    async with app.running() as worker:
        partition = "*" if fleet else "good"
        async with undisturbed(worker, kit, record, partition):
            await publisher.pub(subject.encode(), b"long")
            await eventually(lambda: worker.metrics.dead_letters.value == 1, SOON_S)
    assert len(said(lines, "message dead-lettered")) == 1
    assert not said(lines, "dead letter not stored, will try again")
    assert not said(lines, "connection suspended")
    letter, stored = await letter_of(kit)
    assert letter.subject == subject
    assert not letter.cut
    assert base64.b64decode(stored["data"]) == b"long"
    assert stored["subject"].startswith(f"d{kit.root}.{kit.stream}.{kit.root}.sha256-")


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_headers_up_to_the_limit_become_a_dead_letter_and_can_be_read_again(
    kit: Kit, record: Record, publisher: RawPublisher, lines: Lines, retention: str
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    given = [(b"Big", b"v" * 65_400), (b"Trace", b"t1")]
    async with kit.app(Poisoned(record).handle, ["bad", "good"], attempts=1).running() as worker:
        async with undisturbed(worker, kit, record):
            await publisher.hpub(kit.subject("bad").encode(), given, b"body")
            await kit.publish(["bad"], data=b"good")
            await eventually(lambda: len(record.of("bad")) == 2, SOON_S)
        await eventually(kit.all_acked)
    assert len(said(lines, "message dead-lettered")) == 1
    assert not said(lines, "dead letter not stored, will try again")
    letter, stored = await letter_of(kit)
    assert letter.cut == {"headers"}
    assert letter.own_headers == {"Trace": "t1"}
    assert base64.b64decode(stored["data"]) == b"body"
    original = await original_of(kit, letter)
    assert original is not None
    assert original.header is not None
    assert b"Big: " + b"v" * 65_400 in original.header
    assert original.data == b"body"


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_payload_as_large_as_the_server_takes_becomes_a_dead_letter(
    kit: Kit, record: Record, publisher: RawPublisher, lines: Lines, retention: str
) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention=retention)
    data = bytes(range(256)) * (kit.connection.max_payload // 256)
    async with kit.app(Poisoned(record).handle, ["bad", "good"], attempts=1).running() as worker:
        async with undisturbed(worker, kit, record):
            await publisher.pub(kit.subject("bad").encode(), data)
            await kit.publish(["bad"], data=b"good")
            await eventually(lambda: len(record.of("bad")) == 2, SOON_S)
        await eventually(kit.all_acked)
    assert len(said(lines, "message dead-lettered")) == 1
    letter, stored = await letter_of(kit)
    assert letter.cut == {"payload"}
    assert not stored.get("data")
    original = await original_of(kit, letter)
    assert original is not None
    assert original.data == data


# ── bytes of any kind ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "token",
    [b"\xff\xfe", b"a\xc3", ESCAPES.encode(), b"\x1f", "\u2028".encode(), "a\u00a0".encode(), b"\x01\x02", b"a\\b"],
    ids=["no-text", "cut-in-two", "escapes", "unit", "separator", "blank", "control", "backslash"],
)
async def test_a_subject_of_any_bytes_is_handled_and_dead_lettered(
    kit: Kit, record: Record, publisher: RawPublisher, lines: Lines, token: bytes
) -> None:
    subject = f"{kit.root}.".encode() + token
    async with kit.app(Poisoned(record).handle, attempts=1).running() as worker:
        async with undisturbed(worker, kit, record):
            await publisher.pub(subject, b"odd")
            await publisher.pub(subject, b"odd again")
            await eventually(lambda: worker.metrics.dead_letters.value == 2, SOON_S)
        await eventually(kit.all_acked)
    assert len(said(lines, "message dead-lettered")) == 2
    for number in (0, 1):
        letter, stored = await letter_of(kit, number)
        try:
            assert letter.subject == subject.decode()
            assert not letter.cut
        except UnicodeDecodeError:
            assert letter.cut == {"subject"}
        assert stored["subject"].isprintable()
        assert letter.headers["Parti-Subject"].isprintable()


async def test_headers_of_any_bytes_are_dead_lettered_as_far_as_they_can_be_sent(
    kit: Kit, record: Record, publisher: RawPublisher
) -> None:
    given = [
        (b"Good", b"1"),
        (b"Bytes", b"\xff\xfe"),
        (b"Name \xff", b"2"),
        (b"Parti-Payload", b"forged"),
        (b"parti-original", b"0 in 1"),
        (b"Escapes", ESCAPES.encode()),
    ]
    app = kit.app(Poisoned(record).handle, ["bad", "good"], attempts=1)
    async with app.running() as worker, undisturbed(worker, kit, record):
        await publisher.hpub(kit.subject("bad").encode(), given)
        await eventually(lambda: worker.metrics.dead_letters.value == 1, SOON_S)
    letter, stored = await letter_of(kit)
    assert letter.cut == {"headers"}
    assert letter.original is None
    assert letter.own_headers == {"Good": "1", "Escapes": ESCAPES}
    assert base64.b64decode(stored["data"]) == b"x"


async def test_a_password_in_an_exception_text_does_not_reach_the_dead_letter(
    kit: Kit, record: Record, lines: Lines
) -> None:
    poisoned = Poisoned(record, "cannot reach postgresql://me:hunter2@db/x, nats://hunter2@host or me:hunter2@db")
    async with kit.app(poisoned.handle, ["bad"], attempts=2).running():
        await kit.publish(["bad"])
        await eventually(lambda: bool(said(lines, "message dead-lettered")), SOON_S)
    _, stored = await letter_of(kit)
    assert "hunter2" not in str(headers_of(stored))
    assert "postgresql://db/x" in headers_of(stored)["Parti-Error"]
    assert "hunter2" not in str(lines)


async def test_a_traceback_names_file_and_line_in_the_log_and_in_the_letter(
    kit: Kit, record: Record, lines: Lines
) -> None:
    async def handle(message: parti.Message) -> None:
        try:
            raise KeyError("inner\ud800")
        except KeyError as error:
            raise ValueError("outer" * 10_000) from error

    async with kit.app(handle, ["bad"], attempts=1).running():
        await kit.publish(["bad"])
        await eventually(lambda: bool(said(lines, "message dead-lettered")), SOON_S)
    letter, _ = await letter_of(kit)
    (line,) = said(lines, "message dead-lettered")
    for trace in (letter.traceback, line["exception"]):
        assert trace.count("test_hostile_messages.py") == 2
        assert "in handle\n" in trace
        assert "KeyError: 'inner\\ud800'" in trace
        assert "ValueError: outerouter" in trace
        assert len(trace) <= 4_000


async def test_a_rejection_has_no_traceback(kit: Kit, record: Record, lines: Lines) -> None:
    async def handle(message: parti.Message) -> None:
        raise parti.Reject("not for us")

    async with kit.app(handle, ["bad"]).running():
        await kit.publish(["bad"])
        await eventually(lambda: bool(said(lines, "message dead-lettered")), SOON_S)
    letter, _ = await letter_of(kit)
    assert letter.traceback == ""
    assert "exception" not in said(lines, "message dead-lettered")[0]


async def test_subjects_that_cannot_be_partitions_do_not_stop_a_fleet_that_looks_for_new_ones(
    kit: Kit, record: Record, publisher: RawPublisher
) -> None:
    for token in (b"\xff", b"\x1f", "\u2028".encode(), b"x" * 4_000, ESCAPES.encode()):
        await publisher.pub(f"{kit.root}.".encode() + token, b"good")
    async with kit.app(record.handle, **FLEET).running() as worker:
        async with undisturbed(worker, kit, record):
            await kit.publish(["good"], data=b"good")
            await eventually(lambda: len(record.of("good")) == 1, SOON_S)
        assert record.of(ESCAPES)
