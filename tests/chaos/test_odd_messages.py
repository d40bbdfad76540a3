"""Odd messages are as odd as they are meant to be, the server stores them, and handlers refuse all but one kind."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from chaos.notes import Notes
from chaos.odd_messages import KINDS, ODD_TEMPLATE, PLAIN, make_odd, refuse
from chaos.odd_publisher import OddPublisher, publish_line

from parti.config import Settings
from parti.embedded import Server
from parti.jetstream.api import JetStreamApi
from parti.jetstream.connection import Connection


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unknown"])
def test_a_handler_refuses_odd_messages(kind: str) -> None:
    odd = make_odd(kind, random.Random(1))
    subject = f"chaos.p0.{odd.token.decode(errors='surrogateescape')}"
    with pytest.raises(ValueError, match=r"no such|too many|no route|odd source|decode"):
        refuse(subject, {"X-Source": "x"}, odd.payload)


@pytest.mark.parametrize("subject", ["chaos.p0", f"chaos.p0.{PLAIN}", "chaos.p0.unknown"])
def test_a_handler_takes_all_others(subject: str) -> None:
    refuse(subject, {}, b"%064d" % 1)


def test_odd_messages_are_odd() -> None:
    chance = random.Random(1)
    assert {len(make_odd("headers", chance).header) for _ in range(20)} == {64_000, 65_530}
    assert {len(make_odd("subject", chance).token) for _ in range(20)} == {3_988, 4_058}
    for kind in ("text", "bytes"):
        odd = make_odd(kind, chance)
        with pytest.raises(UnicodeDecodeError):
            (odd.payload if kind == "text" else odd.token).decode()
    with pytest.raises(UnicodeEncodeError):
        json.loads(make_odd("surrogate", chance).payload)["customer"].encode()


def test_lines_count_their_bytes() -> None:
    odd = make_odd("control", random.Random(1))
    sizes = f"{len(odd.header)} {len(odd.header) + 2}".encode()
    assert publish_line("p1", odd, "r").startswith(b"HPUB chaos.p1.control r " + sizes + b"\r\nNATS/1.0\r\n")
    assert publish_line("p1", make_odd("surrogate", random.Random(1)), "r").startswith(b"PUB chaos.p1.surrogate r ")


@pytest.mark.timeout(60)
async def test_the_server_stores_every_kind_and_what_it_stored_is_noted(tmp_path: Path) -> None:
    async with Server() as server:
        connection = await Connection.open(Settings(nats=(server.url,)), name="odd")
        try:
            subjects = [ODD_TEMPLATE.replace("{p}", "*").replace("{kind}", "*")]
            api = JetStreamApi(connection)
            await api.call("STREAM.CREATE.ODD", {"name": "ODD", "subjects": subjects})
            publisher = OddPublisher(server.port, tmp_path, ["p0", "p1"], rate=200, seed=1)
            async with asyncio.timeout(30):
                while len(publisher.stored) < len(KINDS):  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0.01)
            await publisher.stop()
            stored = (await api.stream_info("ODD")).messages
        finally:
            await connection.close()
    assert publisher.stored.keys() == KINDS.keys()
    assert not publisher.refused
    notes = Notes(tmp_path)
    notes.poll(everything=True)
    notes.close()
    assert notes.acknowledged == stored == publisher.stored.total()
