"""Partition sources on a real server: what they find, what they remember, and how little they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.integration.conftest import Kit

from parti.config import Settings
from parti.coordination.sources import Discovered, FromKey, Mapped, PartitionSource, SourceContext, SourceReader
from parti.core.progress import encode_progress, summarise
from parti.errors import ConfigError, NotFound, SourceFailed
from parti.jetstream.api import JetStreamApi, Requester
from parti.jetstream.kv import Bucket
from parti.jetstream.streams import ensure_mapped_stream
from parti.model.mapping import SubjectMapping
from parti.model.partition import Template
from parti.model.records import MOST


class CountingApi(JetStreamApi):
    """The API, with a count of how often subjects were listed."""

    def __init__(self, connection: Requester) -> None:
        super().__init__(connection)
        self.listings = 0

    async def call(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self.listings += "subjects_filter" in (body or {})
        return await super().call(verb, body)


class Found:
    """A source under test, read like the leader reads it."""

    def __init__(self, kit: Kit, source: PartitionSource, template: str | None = None) -> None:
        self.api = CountingApi(kit.connection)
        bucket = Bucket(kit.api, f"b{kit.root}")
        context = SourceContext(self.api, bucket, kit.stream, Template(template or kit.template))
        self.reader = SourceReader(source, context)

    async def ids(self) -> list[str]:
        return [p.id for p in await self.reader.read()]

    async def listings_for(self, expected: Iterable[str]) -> int:
        """How often the subjects were listed in order to find these partitions."""
        before = self.api.listings
        assert await self.ids() == list(expected)
        return self.api.listings - before


async def purge(kit: Kit, partition: str) -> None:
    await kit.api.call(f"STREAM.PURGE.{kit.stream}", {"filter": kit.subject(partition)})


# ── discovery ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_subjects_that_fit_the_template_are_found_as_they_appear(kit: Kit) -> None:
    found = Found(kit, Discovered())
    assert await found.ids() == []
    await kit.publish(["p10", "p9", "deeper.p1"])
    assert await found.ids() == ["p9", "p10"]
    assert found.reader.changed
    await kit.publish(["p11"])
    assert await found.ids() == ["p9", "p10", "p11"]


async def test_subjects_are_listed_only_when_there_may_be_a_new_one(kit: Kit) -> None:
    found = Found(kit, Discovered())
    await kit.publish(["a", "b"], each=3)
    assert await found.listings_for(["a", "b"]) == 1
    assert await found.listings_for(["a", "b"]) == 0
    await kit.publish(["a", "b"], each=3)
    assert await found.listings_for(["a", "b"]) == 0
    await purge(kit, "a")
    assert await found.listings_for(["a", "b"]) == 0
    await kit.publish(["c"])
    assert await found.listings_for(["a", "b", "c"]) == 1
    assert await found.listings_for(["a", "b", "c"]) == 0


async def test_a_new_subject_is_found_although_the_number_of_subjects_stays(kit: Kit) -> None:
    found = Found(kit, Discovered())
    await kit.publish(["a", "b"])
    assert await found.ids() == ["a", "b"]
    await purge(kit, "a")
    await kit.publish(["c"])
    assert (await kit.api.stream_info(kit.stream)).num_subjects == 2
    assert await found.ids() == ["a", "b", "c"]


async def test_a_partition_whose_messages_are_gone_stays_known(kit: Kit) -> None:
    found = Found(kit, Discovered())
    await kit.publish(["a", "b"])
    assert await found.ids() == ["a", "b"]
    await purge(kit, "*")
    assert (await kit.api.stream_info(kit.stream)).messages == 0
    assert await found.ids() == ["a", "b"]
    await kit.publish(["c"])
    assert await found.ids() == ["a", "b", "c"]
    assert await Found(kit, Discovered()).ids() == ["c"]


async def test_a_stream_that_was_made_anew_is_looked_at_anew(kit: Kit) -> None:
    found = Found(kit, Discovered())
    await kit.publish(["a", "b"])
    assert await found.ids() == ["a", "b"]
    await kit.delete_stream()
    assert await found.ids() == ["a", "b"]
    assert "stream not found" in str(found.reader.last_error)
    await kit.create_stream()
    # The same number of messages and subjects as before, and yet not the same ones.
    await kit.publish(["a", "c"])
    assert await found.ids() == ["a", "c"]
    assert found.reader.last_error is None


async def test_a_missing_stream_is_an_error_at_first(kit: Kit) -> None:
    await kit.delete_stream()
    with pytest.raises(NotFound):
        await Found(kit, Discovered()).ids()


async def test_discovery_is_refused_where_the_server_drops_what_nobody_reads_yet(kit: Kit) -> None:
    await kit.delete_stream()
    await kit.create_stream(retention="interest")
    config = {"name": "a", "durable_name": "a", "ack_policy": "explicit", "filter_subjects": [kit.subject("a")]}
    await kit.api.put_consumer(kit.stream, config, action="create")
    await kit.publish(["a", "b"])
    assert (await kit.api.stream_info(kit.stream)).num_subjects == 1
    with pytest.raises(ConfigError, match="retention 'interest'"):
        await Found(kit, Discovered()).ids()


async def test_subjects_that_cannot_be_partitions_are_ignored_and_named_once(kit: Kit) -> None:
    found = Found(kit, Discovered())
    await kit.publish(["a"])
    # The server stores a message on a wildcard, and one on a subject that is no text.
    await kit.connection.publish(kit.subject("*"), b"x")
    raw: Any = kit.connection.client
    raw._transport.write(b"PUB %b.\xff 1\r\nx\r\n" % kit.root.encode())
    await kit.publish(["b"])
    assert (await kit.api.stream_info(kit.stream)).num_subjects == 4
    with capture_logs() as logs:
        assert await found.ids() == ["a", "b"]
        await kit.publish(["c"])
        assert await found.ids() == ["a", "b", "c"]
    assert [line["count"] for line in logs if line["log_level"] == "warning"] == [2]


@pytest.mark.parametrize("character", ["x", "\u00fc", "\u5de5", '"', "\x01"])
async def test_progress_with_the_longest_subjects_that_are_found_fits_into_one_message(
    kit: Kit, character: str
) -> None:
    found = Found(kit, Discovered(), template=f"{kit.root}.{{name}}")
    names = [character * number for number in range(50, 1_000, 25) if number * len(character.encode()) < 1_900]
    with capture_logs() as logs:
        await kit.publish(names)
        *_, longest = sorted(await found.reader.read(), key=lambda partition: len(partition.id))
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "subjects that cannot be partitions are ignored"
    ]
    # As many as a worker takes by default, all of them ahead, failed and about to be tried at once.
    ids = [f"{number:03}{longest.id[3:]}" for number in range(Settings().max_subjects)]
    positions = dict.fromkeys(ids, MOST)
    record = summarise(
        stream=kit.stream,
        stream_created="2026-11-16T07:25:40.906732825Z",
        floor=1,
        covered=[f"{kit.root}.{each}" for each in ids],
        positions=positions.items(),
        behind={},
        trying=positions,
        failed=dict.fromkeys(ids, (MOST, 1_000)),
        writer="w" * 32,
    )
    assert len(encode_progress(record)) < kit.connection.max_payload


async def test_a_template_without_keys_is_one_partition_with_or_without_messages(kit: Kit) -> None:
    found = Found(kit, Discovered(), template=kit.subject("only"))
    assert await found.ids() == [kit.subject("only")]


async def test_mapped_subjects_are_discovered_as_they_are_stored(kit: Kit) -> None:
    await kit.delete_stream()
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(4,1)}}}}")
    await ensure_mapped_stream(kit.api, kit.stream, mapping, replicas=1)
    await kit.publish(["a", "b"])
    slots = [mapping.partition_of(kit.subject(key)) for key in ("a", "b")]
    assert await Found(kit, Discovered(), template=mapping.template).ids() == [f"a.{slots[0]}", f"b.{slots[1]}"]


# ── a key of the control bucket ───────────────────────────────────────────────────────────────────────────────────


async def put(kit: Kit, value: bytes) -> None:
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    entry = await bucket.get("partitions.dc")
    await bucket.put("partitions.dc", value, revision=entry.revision if entry else 0)


async def test_a_key_lists_the_partitions_in_any_form(kit: Kit) -> None:
    found = Found(kit, FromKey("partitions.dc"), template=f"{kit.root}.{{tool}}.{{chamber}}")
    entries = ["e2.c1", ["e1", 2], {"tool": "e1", "chamber": "c10"}, "e2.c1"]
    await put(kit, json.dumps(entries).encode())
    assert await found.ids() == ["e1.2", "e1.c10", "e2.c1"]
    await put(kit, b"[]")
    assert await found.ids() == []
    assert found.reader.changed


async def test_numbers_are_ids_too(kit: Kit) -> None:
    await put(kit, b"[10, 9]")
    assert await Found(kit, FromKey("partitions.dc")).ids() == ["9", "10"]


async def test_a_key_that_is_absent_is_an_error(kit: Kit) -> None:
    found = Found(kit, FromKey("partitions.dc"))
    bucket = await Bucket.open(kit.api, f"b{kit.root}", replicas=1)
    with pytest.raises(SourceFailed, match=rf"key 'partitions\.dc' of bucket 'b{kit.root}' does not exist"):
        await found.ids()
    await put(kit, b'["a"]')
    assert await found.ids() == ["a"]
    entry = await bucket.get("partitions.dc")
    assert entry
    await bucket.delete("partitions.dc", revision=entry.revision)
    assert await found.ids() == ["a"]
    assert "does not exist" in str(found.reader.last_error)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"a, b", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b'{"a": 1}', "holds the dict, expected a JSON list"),
        (b'"a"', "holds the str, expected a JSON list"),
        (b'["a", null]', "entry 1 is null"),
        (b'["a", true]', "entry 1 is true"),
        (b'[["a", 1.5]]', r'entry 0 is ["a", 1.5]'),
        (b'[{"p": {"x": 1}}]', "entry 0 is"),
        (b'["a", "b.c"]', "'b.c' has 2 values"),
    ],
)
async def test_a_key_with_anything_else_in_it_keeps_the_last_list(kit: Kit, value: bytes, problem: str) -> None:
    await put(kit, b'["good"]')
    found = Found(kit, FromKey("partitions.dc"))
    assert await found.ids() == ["good"]
    await put(kit, value)
    assert await found.ids() == ["good"]
    assert problem in str(found.reader.last_error)
    assert "\n" not in str(found.reader.last_error)


# ── the slots of a mapping ────────────────────────────────────────────────────────────────────────────────────────


async def test_the_slots_of_a_mapped_stream_are_its_partitions(kit: Kit) -> None:
    await kit.delete_stream()
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(12,1)}}}}")
    await ensure_mapped_stream(kit.api, kit.stream, mapping, replicas=1)
    found = Found(kit, Mapped(mapping), template=f"{kit.root}.{{customer}}.{{slot}}")
    assert await found.ids() == [f"*.{slot}" for slot in range(12)]
    assert found.reader.source.refresh_s == 30.0


async def test_a_stream_without_the_mapping_is_refused(kit: Kit) -> None:
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(12,1)}}}}")
    with pytest.raises(ConfigError, match="has no subject transform"):
        await Found(kit, Mapped(mapping), template=mapping.template).ids()


async def test_somebody_who_changes_the_streams_mapping_is_noticed(kit: Kit) -> None:
    await kit.delete_stream()
    mapping = SubjectMapping(f"{kit.root}.*", f"{kit.root}.$1.{{{{partition(2,1)}}}}")
    await ensure_mapped_stream(kit.api, kit.stream, mapping, replicas=1)
    found = Found(kit, Mapped(mapping), template=mapping.template)
    assert await found.ids() == ["*.0", "*.1"]
    config = await kit.api.stream_config(kit.stream)
    config["subject_transform"]["dest"] = f"{kit.root}.$1.{{{{partition(3,1)}}}}"
    await kit.api.call(f"STREAM.UPDATE.{kit.stream}", config)
    assert await found.ids() == ["*.0", "*.1"]
    assert "{{partition(3,1)}}" in str(found.reader.last_error)
