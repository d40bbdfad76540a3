"""Subjects and headers that the server takes and clients stumble over: they stop neither a worker nor a watch."""

from __future__ import annotations

import asyncio

import pytest
from fuzz.raw import Raw, RawClient
from tests.integration.conftest import Kit, Record, eventually

from parti.jetstream.kv import Bucket, Entry
from parti.jetstream.scan import scan
from parti.jetstream.watch import Watch

SHORT = (b"x", b"NATS/1.", b"NATS/1.0", b"\r\n")
"""Header blocks without a whole first line."""
ODD = (b"a\x0bb", b"a\x0cb", b"\xff\xfe", b"\x1b[2J", b"\x00", b"\x0b1\x0b2")


async def publish(kit: Kit, *messages: Raw) -> list[int]:
    with RawClient(kit.url) as client:
        return await asyncio.to_thread(client.publish, messages)


@pytest.mark.parametrize("token", ODD)
async def test_a_message_under_an_odd_subject_is_handled_and_the_connection_stays(
    kit: Kit, record: Record, token: bytes
) -> None:
    await kit.create_stream()
    app = kit.app(record.handle, ["p.*"], subject=f"{kit.root}.{{p}}.{{k}}")
    async with app.running():
        (odd,) = await publish(kit, Raw(f"{kit.root}.p.".encode() + token, b"odd"))
        (plain,) = await publish(kit, Raw(f"{kit.root}.p.plain".encode(), b"plain"))
        await record.reaches(2)
        await eventually(kit.all_acked)
    assert record.of("p.*") == [odd, plain]


@pytest.mark.parametrize("token", [b"\xff\xfe", b"\xc3"])
async def test_a_key_that_is_not_utf_8_leaves_a_watch_and_its_connection_alone(kit: Kit, token: bytes) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    seen: dict[str, Entry] = {}
    watch = Watch(kit.connection, kit.api, bucket.name, ("claims.>",), seen.__setitem__)
    await watch.start()
    try:
        await publish(kit, Raw(f"$KV.{bucket.name}.claims.".encode() + token, b"x"))
        await bucket.put("claims.p", b"y", revision=0)
        await eventually(lambda: "claims.p" in seen)
        assert len(seen) == 2
        assert watch.healthy
    finally:
        await watch.stop()


@pytest.mark.parametrize("block", SHORT)
async def test_a_record_with_a_header_block_that_is_none_leaves_a_watch_and_its_connection_alone(
    kit: Kit, block: bytes
) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    seen: dict[str, Entry] = {}
    watch = Watch(kit.connection, kit.api, bucket.name, ("claims.>",), seen.__setitem__)
    await watch.start()
    try:
        await publish(kit, Raw(f"$KV.{bucket.name}.claims.odd".encode(), b"x", block))
        await bucket.put("claims.p", b"y", revision=0)
        await eventually(lambda: "claims.p" in seen)
        assert seen["claims.odd"].value == b"x"
        assert watch.healthy
        assert not watch.last_error
    finally:
        await watch.stop()


@pytest.mark.parametrize("block", SHORT)
async def test_a_stream_with_a_header_block_that_is_none_can_be_read_without_payloads(kit: Kit, block: bytes) -> None:
    await kit.create_stream()
    odd = Raw(f"{kit.root}.odd".encode(), b"odd", block)
    sent = await publish(kit, odd, Raw(f"{kit.root}.plain".encode(), b"plain"))
    found = [each async for each in scan(kit.connection, kit.api, kit.stream)]
    assert [each.seq for each in found] == sent
    assert not any(each.data for each in found)


@pytest.mark.parametrize("token", ODD)
async def test_a_stream_with_an_odd_subject_can_be_read_to_its_end(kit: Kit, token: bytes) -> None:
    await kit.create_stream()
    sent = await publish(
        kit, Raw(f"{kit.root}.".encode() + token, b"odd"), Raw(f"{kit.root}.plain".encode(), b"plain")
    )
    assert [found.seq async for found in scan(kit.connection, kit.api, kit.stream)] == sent
